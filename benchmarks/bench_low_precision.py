"""What Linear and feed-forward blocks take under each recipe on a GPU, forward and backward.

    python benchmarks/bench_low_precision.py            # there; writes `gpu_low_precision.json`, or the file `--out`
    python benchmarks/bench_low_precision.py --tiny     # anywhere, to see that it runs
    python benchmarks/bench_low_precision.py --train    # on a CPU; examples/low_precision.py, into `trained.json`

Beside bfloat16 in eager torch stand modules that a user writes by hand with torch's 8-bit GEMM under current scaling,
eager and compiled; and the GEMMs alone, of operands that are there already, which no recipe can be faster than.
Each contender is compared with bfloat16 before it is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import plain
import torch
from gpu.clock import OnDevice, OnHost, interleaved
from gpu.sizes import MAIN, MODELS, Model
from record import RESULTS, ROOT, about, lines, write
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops, recipes

Call = Callable[[], Any]
Row = tuple[dict[str, Call], dict[str, Any]]
RECIPES: dict[str, recipes.Recipe] = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.Float8DelayedScaling(history=16),
    "row": recipes.Float8RowScaling(),
    "block": recipes.Float8BlockScaling(),
    "MX": recipes.MXFP8(),
}
FAR = 0.2  # of bfloat16, relative: what 8 bits may be, twice over
TINY = (Model("gpt", 32, 64, 2, 2, 16, 50, False), Model("llama", 32, 48, 2, 2, 16, 50, True))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, help="the file of results")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--budget", type=float, default=55.0, help="seconds, after which no further row begins")
    parser.add_argument("--seconds", type=float, default=0.15, help="of samples, for each contender of a row")
    parser.add_argument("--train", action="store_true", help="train a small model under each recipe instead")
    arguments = parser.parse_args()
    if arguments.train:
        sys.path.append(str(ROOT / "examples"))
        import low_precision

        losses = {name: [round(loss, 4) for loss in found] for name, found in low_precision.main([]).items()}
        print(write("trained", {"losses": losses}))
        return
    out = arguments.out or Path(os.environ.get("OUT") or RESULTS) / "gpu_low_precision.json"
    device = torch.device("cpu" if arguments.tiny else "cuda")
    clock = OnHost(device) if arguments.tiny else OnDevice()
    begun, rows = time.time(), dict[str, Any]()
    models = TINY if arguments.tiny else tuple(m for m in MODELS if m.name in MAIN)
    for name, make in jobs(models, 32 if arguments.tiny else 8192, device):
        if time.time() - begun > arguments.budget:
            print(f"no time for {name}", flush=True)
            continue
        calls, notes = make()
        times = interleaved({key: [call] for key, call in calls.items()}, clock, seconds=arguments.seconds, least=3,
                            most=21)  # fmt: skip
        rows[name] = {"times": {key: dataclasses.asdict(t) for key, t in times.items()}, **notes}
        print(name, ", ".join(f"{key} {t.median:.0f}" for key, t in times.items()), notes, flush=True)
        out.write_text(lines({"about": about(), "rows": rows}))
        del calls
        gc.collect()
        if not arguments.tiny:
            torch.cuda.empty_cache()


def jobs(models: tuple[Model, ...], tokens: int, device: torch.device) -> Iterator[tuple[str, Callable[[], Row]]]:
    """By name, what makes the calls of a row, microseconds of which are told."""
    for model in reversed(models):
        yield f"Linear {tokens} x {model.H} -> {model.F}", functools.partial(_linear, tokens, model, device)
        yield f"{model.name} feed-forward block, {tokens}", functools.partial(_block, tokens, model, device)
    for model in reversed(models):
        compiled = functools.partial(_block, tokens, model, device, by_compiler=True)
        yield f"{model.name} feed-forward block, {tokens}, compiled by hand", compiled


def _linear(tokens: int, model: Model, device: torch.device) -> Row:
    """A Linear without a bias, and its three GEMMs."""
    x, dy, weight = (_drawn(device, *s) for s in ((tokens, model.H), (tokens, model.F), (model.F, model.H)))
    weight, made = nn.Parameter(weight * model.H**-0.5), {"device": device, "dtype": x.dtype}
    linear, hand = (kind(model.H, model.F, False, **made) for kind in (nn.Linear, ByHand))
    modules = {
        "bfloat16": linear,
        "by hand": hand,
        **_ours(lambda: ops.Linear(model.H, model.F, False, **made), device),
    }
    calls: dict[str, Call] = {}
    for name, module in modules.items():
        next(m for m in module.modules() if isinstance(m, nn.Linear | ops.Linear)).weight = weight
        calls[name] = _step(module, x, dy)
    off = _compared(calls)
    one = torch.ones((), device=device)
    a, b, c = (
        (torch.randn(s, device=device) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        for s in ((tokens, model.H), (model.F, model.H), (tokens, model.F))
    )
    at, bt, ct = (t.t().contiguous() for t in (a, b, c))

    def gemms(fast: bool) -> Call:
        run: Any = functools.partial(torch._scaled_mm, out_dtype=torch.bfloat16, use_fast_accum=fast)
        return lambda: [run(p, q.t(), one, one) for p, q in ((a, b), (c, bt), (ct, at))]

    calls |= {"GEMMs alone": gemms(False), "GEMMs alone, fast": gemms(True)}
    return calls, {"off": off, "flops": 6.0 * tokens * model.H * model.F}


def _block(tokens: int, model: Model, device: torch.device, by_compiler: bool = False) -> Row:
    """A feed-forward block with its norm and residual, without dropout."""
    spec = plain.Spec(model.H, model.F, model.heads, model.kv_heads, model.head_dim, model.llama)
    made: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    torch.manual_seed(0)
    theirs, hand = (plain.build("feedforward", spec, **made) for _ in range(2))
    x, dy = (_drawn(device, tokens // 8, 8, model.H) for _ in range(2))
    for block in hand.modules():
        for name, module in list(block.named_children()):
            if isinstance(module, nn.Linear):
                setattr(block, name, ByHand(module.in_features, module.out_features, module.bias is not None, **made))
    hand.load_state_dict(theirs.state_dict(), assign=True)
    hand.requires_grad_()

    def ours() -> Any:
        fused = plain.fused("feedforward", spec, device="meta", dtype=torch.bfloat16)
        fused.load_state_dict(theirs.state_dict(), assign=True)
        return fused.requires_grad_()

    modules: dict[str, Any] = {"bfloat16": theirs}
    if by_compiler:
        torch._dynamo.reset()
        modules["by hand, compiled"] = torch.compile(hand, dynamic=False)
        modules["bfloat16, compiled"] = torch.compile(theirs, dynamic=False)
    else:
        modules |= {"by hand": hand, **_ours(ours, device)}
    calls = {name: _step(module, x, dy) for name, module in modules.items()}
    return calls, {"off": _compared(calls)}


def _ours(make: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """A sequence without a recipe and under each that has kernels here."""
    found = {"seqfuse": sf.Sequential(make())}
    for name, recipe in RECIPES.items():
        model = sf.Sequential(make(), recipe=recipe)
        try:
            model.plan(env=sf.Env.of(device, dtype=torch.bfloat16))
        except sf.InputError as error:
            if error.code != "SF108":
                raise
            continue
        found[name] = model
    return found


def _step(module: Any, x: Tensor, dy: Tensor) -> Call:
    """Result and all gradients."""
    leaf, parameters = x.detach().requires_grad_(), list(module.parameters())

    def call() -> Any:
        y = module(leaf)
        return y, *torch.autograd.grad(y, [leaf, *parameters], dy)

    if getattr(getattr(module, "recipe", None), "keeps_state", False):  # of which the first step has scales of 1
        call()
        sf.update_scales(module)
    return call


def _compared(calls: dict[str, Call]) -> dict[str, float]:
    """How far each is from bfloat16, at worst of its results; one that is farther than 8 bits can be is left out."""
    wanted = calls["bfloat16"]()
    off: dict[str, float] = {}
    for name, call in list(calls.items()):
        pairs = zip(call(), wanted, strict=True)
        off[name] = max(float((a - b).detach().float().norm() / b.detach().float().norm()) for a, b in pairs)
        if not off[name] < FAR:
            print(f"{name} is off by {off[name]:.2g} and is not timed", flush=True)
            del calls[name]
    return off


def _drawn(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


class ByHand(nn.Linear):
    """A Linear of 8-bit GEMMs under current scaling, as one writes it with torch alone."""

    def forward(self, input: Tensor) -> Tensor:
        y: Any = _ByHand.apply(input.reshape(-1, self.in_features), self.weight)
        y = y if self.bias is None else y + self.bias
        return y.view(*input.shape[:-1], self.out_features)


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (qx, sx), (qw, sw) = (_by_hand(t, torch.float8_e4m3fn) for t in (x, weight))
        ctx.save_for_backward(qx, sx, qw, sw)
        return torch._scaled_mm(qx, qw.t(), sx, sw, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        (dy,) = douts
        qx, sx, qw, sw = ctx.saved_tensors
        qd, sd = _by_hand(dy, torch.float8_e5m2)
        dx = torch._scaled_mm(qd, qw.t().contiguous().t(), sd, sw, out_dtype=dy.dtype)
        dweight = torch._scaled_mm(qd.t().contiguous(), qx.t().contiguous().t(), sd, sx, out_dtype=dy.dtype)
        return dx, dweight


def _by_hand(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = torch.finfo(dtype).max
    scale = largest / x.abs().max().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-largest, largest).to(dtype), scale.reciprocal()


if __name__ == "__main__":
    main()

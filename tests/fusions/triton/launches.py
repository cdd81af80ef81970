"""Kernels launched by a forward and a backward pass, counted on tensors without data, for the table of docs/kernels.md.

A Triton kernel counts where it would be launched, an ATen call where it is no view and not mere allocation. Rewrite the
table with  TRITON_INTERPRET=1 .venv/bin/python -m tests.fusions.triton.launches
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import seqfuse as sf
from seqfuse import env, ops
from seqfuse.fuser.fake import faking
from seqfuse.inference import KVCache
from seqfuse.nn import TransformerLayer
from seqfuse.ops import _attention, rmsnorm
from tests.fusions.triton.eager import Eager

UNMEASURED = tuple(fusion for fusion in sf.fusions.default if fusion.needs_measurement)
"""What a GPU does not use before it was measured there."""
PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"
TABLE = re.compile(r"(?<=<!-- drawn by tests/fusions/triton/launches.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
LAYER_TABLE = re.compile(
    r"(?<=<!-- layers drawn by tests/fusions/triton/launches.py -->\n).*?(?=<!-- end of layers -->)", re.DOTALL
)
# Views, allocations, questions of dtypes; and conversions: with bfloat16 parameters a GPU makes none, where a CPU keeps
# the norms' float32 statistics by them.
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias", "_unsafe_view"}
_FREE |= {"squeeze_", "promote_types", "_to_copy"}


class Counted(TorchDispatchMode):
    """Counts while it is on."""

    launches = 0
    paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        room, _, name = func._schema.name.partition("::")
        # Torch makes a norm's dx by one kernel and its sums over rows by another.
        kernels = 2 if name == "native_layer_norm_backward" else 1
        counts = not self.paused and room == "aten" and not func.is_view and name not in _FREE
        self.launches += kernels if counts else 0
        return func(*args, **(kwargs or {}))

    def as_one(self, function: Any, launches: int) -> Any:
        """What a GPU makes by so many launches, where a CPU makes many calls of it."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = False
                self.launches += launches

        return run

    def launch(self, kernel: Any, grid: int, *rest: Any, **options: Any) -> None:
        self.launches += grid > 0


@contextlib.contextmanager
def counting() -> Iterator[Counted]:
    """Counts the launches of Triton kernels as well, none of which is made."""
    from seqfuse.kernels import _columns, _norm, attention, decode, gemm, pointwise, rope

    with contextlib.ExitStack() as stack:
        counted = Counted()
        for module in (gemm, pointwise, _norm, _columns, rope, attention, decode):
            if hasattr(module, "launch"):
                stack.enter_context(mock.patch.object(module, "launch", counted.launch))
            if hasattr(module, "traced"):  # what has no memory would else call operators
                stack.enter_context(mock.patch.object(module, "traced", return_value=False))
        # Of a norm as of `native_layer_norm`; angles of one position are made once for each device.
        for module, name, count in (
            (rmsnorm, "fused_rms_norm", 1), (ops.RMSNorm, "bwd", 2), (rope, "_frequencies", 0),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(module, name, counted.as_one(getattr(module, name), count)))
        stack.enter_context(counted)
        yield counted


def launches(model: sf.Sequential, x: torch.Tensor) -> tuple[int, int]:
    """Launches of the forward and of the backward pass."""
    fuser = model._fuser  # which fake tensors pass by otherwise, as all that is not plain does
    with faking() as mode:
        leaf = mode.from_tensor(x).requires_grad_()
        dy = torch.empty_like(leaf)
        with counting() as ahead:
            y = fuser.run(fuser.op_list(), leaf, {})
        with counting() as back:
            torch.autograd.grad(y, [leaf, *model.parameters()], dy)
    return ahead.launches, back.launches


def eager_launches(run: Callable[[Eager, torch.Tensor], torch.Tensor], x: torch.Tensor, **how: Any) -> tuple[int, int]:
    """Launches of the forward and of the backward pass of what is written in torch."""
    ahead, back = Counted(), Counted()
    own = Eager(ahead.as_one, back.as_one, **how)
    with faking() as mode:
        leaf = mode.from_tensor(x).requires_grad_()
        run(own, leaf)  # makes the parameters
        ahead.launches = 0
        with ahead:
            y = run(own, leaf)
        with back:
            torch.autograd.grad(y, [leaf, *own.parameters.values()], torch.empty_like(y))
    return ahead.launches, back.launches


def block(act: type[sf.UnfusedOperation]) -> ops.Residual:
    factor = 2 if issubclass(act, sf.Gated) else 1
    return ops.Residual(ops.LayerNorm(1024), ops.Linear(1024, 4096 * factor), act(), ops.Linear(4096, 1024))


def stacked(own: Eager, x: torch.Tensor, blocks: int) -> torch.Tensor:
    for index in range(blocks):
        x = own.feedforward(str(index), x)
    return x


def rows() -> Iterator[tuple[str, tuple[int, int], tuple[int, int], tuple[int, int]]]:
    """Description of a list, launches fused, unfused and of eager torch, with the costs of an sm_90."""
    x = torch.empty(8192, 1024, dtype=torch.bfloat16)
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    with mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]), sf.fusing(exclude=UNMEASURED):
        for act in (ops.SwiGLU, ops.GeLU):
            for blocks in (1, 2, 12):
                with torch.device("meta"):
                    planned = sf.Sequential(*(block(act) for _ in range(blocks))).bfloat16()
                model = sf.Sequential(*(block(act) for _ in range(blocks))).bfloat16()
                here, wanted = (
                    [(s.name, s.covers) for s in (*plan.forward, *plan.backward)]
                    for plan in (
                        model.plan(x.requires_grad_()),
                        planned.plan(x.to("meta").requires_grad_(), env=there),
                    )
                )
                assert here == wanted, (here, wanted)
                fused = launches(model, x)
                with sf.fusing(False):
                    unfused = launches(model, x)
                how = {"width": 1024, "hidden": 4096, "gated": issubclass(act, sf.Gated)}
                plain = eager_launches(lambda own, t, n=blocks: stacked(own, t, n), x, **how)
                name = f"`LayerNorm, Linear, {act.__name__}, Linear`, residual"
                yield f"{name}{f', {blocks} times' if blocks > 1 else ''}", fused, unfused, plain


LLAMA: dict[str, Any] = {
    "kv_heads": 4, "norm": ops.RMSNorm, "activation": ops.SwiGLU, "bias": False, "hidden_dim": 2816,
    "rotary": functools.partial(ops.RotaryEmbedding, style="half"),
}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "GPT": {"activation": functools.partial(ops.GeLU, "tanh")},
    "Llama": LLAMA,
    "GPT, dropout of weights": {"activation": functools.partial(ops.GeLU, "tanh"), "attention_dropout": 0.1},
}


def layer(name: str, width: int = 1024) -> sf.Sequential:
    how = {**LAYERS[name], **({"hidden_dim": 4 * width} if width != 1024 else {})}
    return sf.Sequential(TransformerLayer(width, 16, causal=True, **how)).bfloat16()


def step(name: str) -> int:
    """Launches of a step of decoding; kernels are not run, so what is in the cache is of no matter."""
    model, cache = layer(name, 128).eval(), KVCache(2, 64)
    x = torch.randn(2, 1, 128, dtype=torch.bfloat16)
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # the first makes the cache
            counted = stack.enter_context(counting())
            cache.feed(model, x)
    return counted.launches


def eager_of(name: str, width: int) -> dict[str, Any]:
    """The same layer for `Eager`."""
    llama = name == "Llama"
    hidden = LLAMA["hidden_dim"] if llama and width == 1024 else 4 * width
    return {
        "width": width,
        "hidden": hidden,
        "heads": 16,
        "kv_heads": 4 if llama else 16,
        "gated": llama,
        "llama": llama,
    }


def eager_step(name: str) -> int:
    """Launches of a step of decoding in torch, over a cache made before."""
    counted = Counted()
    own = Eager(counted.as_one, counted.as_one, **eager_of(name, 128))
    x = torch.empty(2, 1, 128, dtype=torch.bfloat16)
    cache = [torch.empty(2, 64, own.kv_heads, own.size, dtype=torch.bfloat16) for _ in "kv"]
    with torch.no_grad():
        own.layer(x, cache)
        counted.launches = 0
        with counted:
            own.layer(x, cache)
    return counted.launches


def layer_rows() -> Iterator[tuple[str, list[int]]]:
    """Launches of a layer forward, backward, and of a step of decoding, each fused, unfused and of eager torch."""
    x = torch.empty(8, 1024, 1024, dtype=torch.bfloat16)
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    with mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]), sf.fusing(exclude=UNMEASURED):
        for name in LAYERS:
            with torch.device("meta"):
                planned = layer(name)
            model = layer(name)
            here, wanted = (
                [(s.name, s.covers) for s in (*plan.forward, *plan.backward)]
                for plan in (model.plan(x.requires_grad_()), planned.plan(x.to("meta").requires_grad_(), env=there))
            )
            assert here == wanted, (here, wanted)
            with mock.patch.object(_attention, "interpreting", "dropout" in name):
                fused = launches(model, x)
                with sf.fusing(False):
                    unfused = launches(model, x)
            with mock.patch.object(_attention, "interpreting", True):
                decoded = step(name)
                with sf.fusing(False):
                    plain = step(name)
            theirs = eager_launches(Eager.layer, x, **eager_of(name, 1024))
            passes = [n for three in zip(fused, unfused, theirs, strict=True) for n in three]
            yield name, [*passes, decoded, plain, eager_step(name)]


def layer_table() -> str:
    """The table of layers as Markdown."""
    names = ["layer"]
    names += [name for first in ("forward", "backward", "step of decoding") for name in (first, "unfused", "eager")]
    lines = [f"| {' | '.join(names)} |", f"| {' | '.join(['---'] * len(names))} |"]
    lines += [f"| {name} | {' | '.join(map(str, numbers))} |" for name, numbers in layer_rows()]
    return "\n".join(lines) + "\n"


def table() -> str:
    """The table as Markdown."""
    lines = ["| list | forward | unfused | eager | backward | unfused | eager |", f"|{' --- |' * 7}"]
    for name, *sides in rows():
        lines.append(f"| {name} | {' | '.join(str(side[way]) for way in (0, 1) for side in sides)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    for pattern, drawn in ((TABLE, table()), (LAYER_TABLE, layer_table())):
        PAGE.write_text(pattern.sub(lambda _, drawn=drawn: drawn, PAGE.read_text()))
        print(drawn)

"""`make test-models`: converts models of other people's packages; their outputs and gradients, and what is in chains.

`python -m tests.foreign --reasons timm "litgpt: phi-2"` takes those with one of these words in the package or name.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import statistics
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

import seqfuse as sf
from seqfuse.convert import capture
from seqfuse.convert.graph import example, spelled
from seqfuse.convert.raising import CHEAP
from seqfuse.convert.reasons import _kind
from seqfuse.testing import assert_fused_close

from . import zoo

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from gpu.clock import paired
from record import write

KINDS = ("GEMM", "norm", "activation")


@dataclasses.dataclass
class Row:
    """The result for one model."""

    package: str
    name: str
    state: str = "right"
    inside: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    outside: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    kept: dict[str, float] = dataclasses.field(default_factory=dict)
    time: float | None = None
    graphs: int = 0
    seconds: float = 0.0
    reasons: list[str] = dataclasses.field(default_factory=list)


class Counted:
    """Counts the calls of captured graphs that are in chains, and those left eager."""

    def __init__(self, row: Row) -> None:
        self.row, self.rewrite = row, capture.rewrite

    def __call__(self, gm: GraphModule, options: Any, name: str = "graph") -> Any:
        reports = self.rewrite(gm, options, name)
        self.row.graphs += len(reports)
        for report in reports:
            for region in report.regions:
                for node in {n for r in region.order.members for n in r.took}:
                    kind = _inside_kind(node)
                    if kind is not None:
                        self.row.inside[kind] += 1
            for left in report.left:
                self.row.reasons.append(f"{left.kind} {left.call} {left.module}: {left.reason}")
        for graph in (gm, *(m for m in gm.modules() if isinstance(m, GraphModule) and m is not gm)):
            for node in graph.graph.nodes:
                if (kind := _outside_kind(node)) is not None:
                    self.row.outside[kind] += 1
        return reports

    def __enter__(self) -> None:
        capture.rewrite = self

    def __exit__(self, *_: object) -> None:
        capture.rewrite = self.rewrite


def _inside_kind(node: Node) -> str | None:
    """The kind of a call in a chain; a norm by hand is known by its root, an activation by hand by its function."""
    name = spelled(node) or ""
    if name in ("sqrt", "rsqrt", "norm", "linalg_vector_norm") or (name == "pow" and node.args[1] in (0.5, -0.5)):
        return "norm"
    if name == "erf":
        return "activation"
    kind = _kind(node, False)
    return kind if kind in KINDS else None


def _outside_kind(node: Node) -> str | None:
    """The kind of a call left eager: norms of images are not counted, nor activations next to no GEMM."""
    name = spelled(node) or ""
    kind = "GEMM" if name == "multi_head_attention_forward" else _kind(node, False)
    if kind is None and name == "sqrt" and any(spelled(u) == "truediv" for u in node.users):
        kind = "norm" if any(spelled(n) == "add" for n in node.all_input_nodes) else None
    if kind not in KINDS or (kind == "norm" and _of_images(node)):
        return None
    if kind == "activation" and not any(map(_counts, (*_makers(node), *_readers(node)))):
        return None
    return kind


def _of_images(node: Node) -> bool:
    e = example(node)
    return spelled(node) == "batch_norm" and e is not None and e.ndim > 3


def _counts(node: Node) -> bool:
    """Whether a call is a GEMM, a norm of tokens, or a chain."""
    if node.op == "call_module":
        return True
    kind = _kind(node, False)
    return kind == "GEMM" or (kind == "norm" and not _of_images(node))


def _is_view(node: Node) -> bool:
    return spelled(node) in CHEAP or spelled(node) == "dropout"


def _makers(node: Node) -> Iterator[Node]:
    for maker in node.all_input_nodes[:1]:
        yield from _makers(maker) if _is_view(maker) else (maker,)


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        yield from _readers(user) if _is_view(user) else (user,)


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _leaf(value: Any, dtype: torch.dtype) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().clone().to(dtype).requires_grad_()


class _Float64(TorchFunctionMode):
    """Casts to float32 become float64: otherwise models that cast norms or softmax would have a float32 reference."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda v: torch.float64 if v is torch.float32 else v, (args, kwargs or {}))
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def passes(model: nn.Module, args: Any, kwargs: Any, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | None]:
    """The outputs of a model and the gradients of its parameters and inputs, by name."""
    model.zero_grad()
    args, kwargs = tree_map(lambda value: _leaf(value, dtype), (args, kwargs))
    given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor) and t.requires_grad]
    with _Float64() if dtype is torch.float64 else contextlib.nullcontext():
        made = model(*args, **kwargs)
    outputs = [t for t in _tensors(made) if t.is_floating_point()]
    weights = torch.Generator().manual_seed(7)
    loss: Any = sum(
        (t * torch.randn(t.shape, generator=weights, dtype=torch.float32).to(t.dtype)).sum()
        for t in outputs
        if t.requires_grad
    )
    loss.backward()
    found: dict[str, Tensor | None] = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    found |= {f"gradient of input {i}": t.grad for i, t in enumerate(given)}
    return found | {f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def _tensors(made: Any) -> Iterator[Tensor]:
    if isinstance(made, Tensor):
        yield made
    elif isinstance(made, dict) or hasattr(made, "values"):
        for value in made.values():
            yield from _tensors(value)
    elif isinstance(made, list | tuple):
        for value in made:
            yield from _tensors(value)


def time_beside_eager(foreign: zoo.Foreign) -> float:
    """CPU time of a training step of the converted model, relative to eager torch, paired."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, args, kwargs = foreign.make()
    converted = copy.deepcopy(model.float().train())
    sf.convert(converted)

    def step_of(side: nn.Module) -> Callable[[], None]:
        given, named = tree_map(lambda value: _leaf(value, torch.float32), (args, kwargs))
        own = list(side.parameters())

        def step() -> None:
            outputs = [t for t in _tensors(side(*given, **named)) if t.requires_grad]
            torch.autograd.backward([t.sum() for t in outputs])
            for p in own:
                p.grad = None

        return step

    sides = {"eager": step_of(model), "converted": step_of(converted)}
    return paired(sides, rounds=7, seconds=0.02, warm=3)["converted"]["ratio"]


def kept(model: nn.Module, args: Any, kwargs: Any) -> int:
    """Activation memory of a call, without parameters and buffers."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
            held.append(t)  # so that their memory is not reused
        return t

    args, kwargs = tree_map(lambda value: _leaf(value, torch.float32), (args, kwargs))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        made = model(*args, **kwargs)
    del made
    return sum(found.values())


def _randomized(model: nn.Module) -> nn.Module:
    """Parameters that start as zeros or ones would hide errors."""
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(torch.randn_like(p), alpha=0.05)
    return model


@dataclasses.dataclass
class Missed:
    """A tensor that misses the error bound: how, and what was compared, if that was a matter of the bound."""

    how: str
    draw: tuple[Tensor, ...] = ()


def examined(foreign: zoo.Foreign) -> Row:
    """One model, converted and compared.

    The bound holds a thousand numbers of each model, one of which may miss it by chance. A model is wrong if one tensor
    misses it with each of three seeds, so an error that shows with some numbers alone, as of a rare branch, is not
    found here. Errors of few elements are no estimate: a tensor of at most 64 is wrong if its three draws, judged as
    one tensor, miss the bound as well.
    """
    row, missed = _examined(foreign, 0)
    draws = {name: [one] for name, one in missed.items()}
    for seed in (1, 2):
        if not draws:
            break
        torch._dynamo.reset()
        again = _examined(foreign, seed)[1]
        draws = {name: [*before, again[name]] for name, before in draws.items() if name in again}
    for name, several in draws.items():
        how = several[0].how
        if all(one.draw and one.draw[0].numel() <= 64 for one in several):
            how = _missed(name, *map(torch.stack, zip(*(one.draw for one in several), strict=True)))
        if how and row.state == "right":
            row.state = f"WRONG ({name}): {how}"
    return row


def _examined(foreign: zoo.Foreign, seed: int) -> tuple[Row, dict[str, Missed]]:
    row = Row(foreign.package, foreign.name)
    torch.manual_seed(seed)
    model, args, kwargs = foreign.make()
    model = _randomized(_without_dropout(model.float().train()))
    torch.set_default_dtype(torch.float64)
    try:
        exact = passes(_in_float64(model), args, kwargs, torch.float64)
    finally:
        torch.set_default_dtype(torch.float32)
    eager = passes(copy.deepcopy(model), args, kwargs)
    others = [passes(_nudged(copy.deepcopy(model)), args, kwargs) for _ in range(3)]
    bytes_eager = kept(copy.deepcopy(model), args, kwargs)
    converted, lean = copy.deepcopy(model), copy.deepcopy(model)
    conversion = sf.convert(converted)
    started = time.process_time()
    with Counted(row):
        first = passes(converted, args, kwargs)
    row.seconds = time.process_time() - started
    converted.load_state_dict(model.state_dict())
    second = passes(converted, args, kwargs)
    _ = str(conversion)
    for missed, count in conversion._backend.missed.items():
        row.reasons.append(f"calls: {count} {missed}")
        if not row.graphs:
            row.state = f"CRASH in the capture: {missed}"
    for left in conversion.left:
        if left.kind in KINDS and "BatchNorm2d" not in left.call:
            row.outside[left.kind] += 1
        row.reasons.append(f"{left.kind} {left.call} {left.module}: {left.reason}")
    row.kept["balanced"] = kept(converted, args, kwargs) / max(bytes_eager, 1)
    conversion.undo()
    converted.load_state_dict(model.state_dict())
    undone = passes(converted, args, kwargs)
    torch._dynamo.reset()
    sf.convert(lean, memory="lean")
    leanly = passes(lean, args, kwargs)
    row.kept["lean"] = kept(lean, args, kwargs) / max(bytes_eager, 1)
    missed: dict[str, Missed] = {}
    for what, found in (("first", first), ("second", second), ("undone", undone), ("lean", leanly)):
        missed |= {f"{what} call, {name}": one for name, one in compare(found, eager, others, exact).items()}
    return row, missed


def _in_float64(model: nn.Module) -> nn.Module:
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if hasattr(config := getattr(module, "config", None), "_experts_implementation"):
            config._experts_implementation = "eager"  # those that run grouped have no float64
    return exact


def _nudged(model: nn.Module) -> nn.Module:
    """Half of the parameters are the next larger number.

    The bound counts what these change as errors of eager torch, so an error of that size is not found here.
    """
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.copy_(torch.where(torch.rand_like(p) < 0.5, torch.nextafter(p, p + 1), p))
    return model


def compare(found: Any, eager: Any, others: Any, exact: Any) -> dict[str, Missed]:
    """What misses the error bound of `assert_fused_close`, with the errors of `others`, each tensor but for two kinds.

    Tensors of less than 16 elements are compared as one, each divided by its largest element: an error of one of them
    must exceed the errors of all. A gradient below a millionth of the largest, as that of the bias of keys, must only
    be below a hundred-thousandth of it: a wrong one of that size is not found here.
    """
    few: list[list[Tensor]] = []
    missed: dict[str, Missed] = {}
    largest = max((float(t.abs().max()) for n, t in exact.items() if "gradient" in n and t is not None), default=0.0)

    def judge(name: str, *given: Tensor) -> None:
        if how := _missed(name, *given):
            missed[name] = Missed(how, given)

    for name in eager:
        if (found[name] is None) != (eager[name] is None):
            missed[name] = Missed("a gradient in one of them alone")
            continue
        if eager[name] is None:
            continue
        given = [t[name].float() for t in (found, eager, *others)] + [exact[name].double()]
        scale = float(given[-1].abs().max()) if given[-1].numel() else 0.0
        if "gradient" in name and scale < 1e-6 * largest:
            if not float(given[0].abs().max()) <= 1e-5 * largest:
                missed[name] = Missed(f"no gradient, and {given[0].abs().max()}")
        elif given[0].numel() < 16:
            few.append([t.flatten() / (scale or 1.0) for t in given])
        else:
            judge(name, *given)
    if few:
        judge("tensors of few elements", *(torch.cat(tensors) for tensors in zip(*few, strict=True)))
    return missed


def _missed(name: str, f: Tensor, u: Tensor, *others: Tensor) -> str:
    """How a tensor misses the bound; nothing where it does not."""
    *others, r = others
    try:
        assert_fused_close({name: f}, {name: u}, {name: r}, others=[{name: other} for other in others])
    except AssertionError as error:
        return str(error)
    return ""


def main() -> int:
    """Examines the selected models, prints a table, and fails if a model is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.foreign")
    parser.add_argument("words", nargs="*", help="of packages or names")
    parser.add_argument("--reasons", action="store_true", help="print why calls are left")
    parser.add_argument("--write", action="store_true", help="write what is counted to benchmarks/results/foreign.json")
    parser.add_argument("--time", action="store_true", help="also time steps beside eager torch; needs a quiet machine")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    for name in ("nms", "qnms"):  # torchvision needs it, though its compiled library is of another torch
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    rows: list[Row] = []
    print(_line("model", "state", "GEMMs", "norms", "activ.", "bal.", "lean", "time", "graphs", "s"))
    for foreign in zoo.chosen(asked.words):
        torch._dynamo.reset()
        try:
            row = examined(foreign)
            row.time = time_beside_eager(foreign) if asked.time else None
        except Exception as error:
            row = Row(foreign.package, foreign.name, f"CRASH {type(error).__name__}: {str(error)[:300]}")
            if asked.reasons:
                traceback.print_exc()
        rows.append(row)
        _show(row, asked.reasons)
    _sum_up(rows)
    if asked.write:
        kept = ("package", "name", "state", "inside", "outside", "kept", "time")
        write("foreign", {"rows": [{name: getattr(row, name) for name in kept} for row in rows]})
    return any(row.state != "right" for row in rows)


def _line(label: str, state: str, *columns: str) -> str:
    widths = (8, 7, 7, 5, 5, 5, 6, 5)
    return f"{label:52} {state:9} " + " ".join(f"{text:>{w}}" for text, w in zip(columns, widths, strict=True))


def _show(row: Row, reasons: bool) -> None:
    shares = [f"{row.inside[k]}/{row.inside[k] + row.outside[k]}" for k in KINDS]
    kept = [f"{row.kept.get(name, float('nan')):.2f}" for name in ("balanced", "lean")]
    first = row.state.split()[0].rstrip(":")
    label = f"{row.package}: {row.name}"
    time = "" if row.time is None else f"{row.time:.2f}"
    print(_line(label, first, *shares, *kept, time, str(row.graphs), f"{row.seconds:.1f}"), flush=True)
    if first != "right":
        print(f"    {row.state[:400]}")
    if reasons:
        for reason, count in Counter(row.reasons).most_common():
            print(f"    {count} {reason}")


def _sum_up(rows: list[Row]) -> None:
    done = [row for row in rows if row.kept]
    states = Counter(row.state.split()[0].rstrip(":") for row in rows)
    packages = len({row.package for row in rows})
    print(f"{len(rows)} models of {packages} packages: " + ", ".join(f"{n} {state}" for state, n in states.items()))
    for kind in KINDS:
        inside, outside = sum(r.inside[kind] for r in done), sum(r.outside[kind] for r in done)
        print(f"{kind}s in chains: {inside} of {inside + outside} ({inside / max(inside + outside, 1):.0%})")
    for name in ("balanced", "lean"):
        if done:
            median = statistics.median(row.kept[name] for row in done)
            print(f"bytes kept with {name}: {median:.2f} of eager's in the median")
    if times := [row.time for row in rows if row.time is not None]:
        print(f"CPU time of a step: {statistics.median(times):.2f} of eager's in the median")
    if done:
        print(f"capture: {statistics.median(r.seconds for r in done):.1f} s of CPU time in the median")


if __name__ == "__main__":
    sys.exit(main())

"""What the fusions that need no Triton cost beside the operations they replace, on this CPU.

Each row is one list run by the engine with one fusion and with none, paired and interleaved: the median of the ratios
of the pairs, and their quartiles. Only ratios are kept; no time is compared across runs. A list whose results do not
agree by the numeric rule reports nothing. Writes `results/aten.json`.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from record import write
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import assert_fused_close, seeded_randn

# Rows, in, out: host cost alone, a small layer, a layer of a small model, the same with a leading dimension.
SIZES: tuple[tuple[tuple[int, ...], int, int], ...] = (
    ((4,), 16, 64),
    ((64,), 256, 1024),
    ((512,), 256, 1024),
    ((4, 128), 256, 256),
)


@dataclass(frozen=True)
class Case:
    """A list that one fusion takes over, and the passes in which it does."""

    fusion: type[sf.FusedOperation]
    label: str
    make: Callable[[int, int], list[sf.FusableOperation]]
    passes: str = "forward"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    square: bool = False  # the list keeps its last dimension


CASES = (
    Case(fusions.LinearBias, "Linear, Bias", lambda i, o: [ops.Linear(i, o)]),
    Case(fusions.LinearBiasBackward, "Linear, Bias", lambda i, o: [ops.Linear(i, o)], "forward+backward"),
    *(
        Case(fusions.LinearBiasAct, f"Linear, Bias, {act.__name__}", lambda i, o, act=act: [ops.Linear(i, o), act()])
        for act in (ops.ReLU, ops.Sigmoid, ops.Tanh)
    ),
    Case(fusions.LinearBiasAdd, "Linear, Bias, Add", lambda i, o: [ops.Linear(i, o), ops.Add("other")]),
    Case(
        fusions.ForwardLinearScaleAdd,
        "Linear, Scale, Add",
        lambda i, o: [ops.Linear(i, o, bias=False), ops.Scale(0.5), ops.Add("other")],
    ),
    Case(
        fusions.BackwardLinearScale,
        "Linear, Scale",
        lambda i, o: [ops.Linear(i, o, bias=False), ops.Scale(0.5)],
        "forward+backward",
    ),
    Case(
        fusions.BackwardLinearAdd,
        "Fork, Linear, Bias, Add",
        lambda i, o: [ops.Residual(ops.Linear(i, o))],
        "forward+backward",
        square=True,
    ),
    Case(fusions.ScaleAdd, "Scale, Add", lambda i, o: [ops.Scale(0.5), ops.Add("other")], square=True),
    Case(fusions.LinearBiasGeLU, "Linear, Bias, GeLU", lambda i, o: [ops.Linear(i, o), ops.GeLU()], "no grad"),
    *(
        Case(
            fusions.LinearBiasActOneDNN,
            f"Linear, Bias, {act!r}",
            lambda i, o, act=act: [ops.Linear(i, o), copy.deepcopy(act)],
            "no grad",
            (torch.bfloat16,),
        )
        for act in (ops.GeLU("tanh"), ops.SiLU(), ops.Sigmoid(), ops.Tanh())
    ),
)


def step(model: sf.Sequential, passes: str, x: Tensor, dy: Tensor, channels: dict[str, Tensor]) -> list[Tensor]:
    """One call; the gradients of x and of the parameters where there is a backward."""
    if passes == "no grad":
        with torch.no_grad():
            return [model(x, **channels)]
    y = model(x, **channels)
    if passes == "forward":
        return [y]
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], dy)]


def ratios(fused: Callable[[], Any], unfused: Callable[[], Any], fusion: type, seconds: float) -> list[float]:
    """Times of one over the other, in pairs that alternate which comes first."""

    def batch(run: Callable[[], Any], count: int, used: bool) -> float:
        with sf.fusing(only=[fusion]) if used else sf.fusing(False):
            run()  # finds its plan
            start = time.perf_counter()
            for _ in range(count):
                run()
            return time.perf_counter() - start

    # Batches shorter than a slice of the scheduler: on a busy machine most pairs are then undisturbed.
    count = max(1, int(0.0005 / max(batch(unfused, 3, False) / 3, 1e-7)))
    found: list[float] = []
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop or len(found) < 15:
        first = len(found) % 2 == 0
        one = batch(fused if first else unfused, count, first)
        other = batch(unfused if first else fused, count, not first)
        found.append(one / other if first else other / one)
    return found


def measure(case: Case, size: tuple[tuple[int, ...], int, int], dtype: torch.dtype, seconds: float) -> dict[str, Any]:
    """One row, or the reason for which the fusion is not used there."""
    rows, inner, outer = size
    outer = inner if case.square else outer
    torch.manual_seed(0)
    model = sf.Sequential(*case.make(inner, outer)).to(dtype)
    x = seeded_randn((*rows, inner), 0, dtype=dtype).requires_grad_(case.passes != "no grad")
    dy = seeded_randn((*rows, outer), 1, dtype=dtype)
    named = any(isinstance(op, ops.Add) for op in model)
    channels = {"other": seeded_randn((*rows, outer), 2, dtype=dtype)} if named else {}
    row = {
        "fusion": case.fusion.__name__,
        "list": case.label,
        "passes": case.passes,
        "dtype": str(dtype).removeprefix("torch."),
        "x": list(x.shape),
        "out": outer,
    }
    with torch.set_grad_enabled(case.passes != "no grad"), sf.fusing(only=[case.fusion]):
        plan = model.plan(x, **channels)
    if not plan.count(case.fusion.__name__):
        return {**row, "refused": plan.refused[0].reason}

    def run() -> list[Tensor]:
        return step(model, case.passes, x, dy, channels)

    results: list[list[Tensor]] = []
    for used in (True, False):
        with sf.fusing(only=[case.fusion]) if used else sf.fusing(False):
            results.append([t.detach() for t in run()])
    exact, leaf = copy.deepcopy(model).double(), x.detach().double().requires_grad_(x.requires_grad)
    with sf.fusing(False):
        reference = step(exact, case.passes, leaf, dy.double(), {n: t.double() for n, t in channels.items()})
    assert_fused_close(*results, [t.detach() for t in reference])

    quartiles = statistics.quantiles(ratios(run, run, case.fusion, seconds), n=4)
    return {**row, **dict(zip(("lower", "ratio", "upper"), quartiles, strict=True))}


def main() -> None:
    """Measure every case at every size, print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each row")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        for dtype in case.dtypes:
            for size in SIZES:
                row = measure(case, size, dtype, arguments.seconds)
                rows.append(row)
                what = row.get("refused") or f"{row['ratio']:.3f} ({row['lower']:.3f} to {row['upper']:.3f})"
                shape = "x".join(map(str, row["x"]))
                print(f"{row['fusion']:20} {row['list']:34} {row['dtype']:9} {shape:10} {what}", flush=True)
    print(write("aten", {"threads": arguments.threads, "rows": rows}))


if __name__ == "__main__":
    main()

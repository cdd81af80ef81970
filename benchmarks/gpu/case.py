"""A row: its computation, inputs, contenders, minimum bytes, and the check of its results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from seqfuse.testing.judge import judge

Inputs = dict[str, Tensor]
Outputs = Sequence[Tensor | None]
Run = Callable[[], Outputs]

# Norm of the difference over the norm, in pieces of the rows: correct results differ by a few roundings.
NEAR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-10}
PIECES = 64


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute a row."""

    prepare: Callable[[Inputs], Run]  # prepares a set of inputs, untimed, and returns the timed call
    own: Callable[[], Sequence[Tensor]] = tuple  # parameters, which are not counted as saved
    checked: bool = True  # whether its results can be compared; not with its own dropout
    near: float | None = None  # relative distance allowed if it rounds more than the others


@dataclasses.dataclass(frozen=True)
class Case:
    """A row, with everything needed to measure it."""

    group: str  # rows of one kind, which targets refer to
    name: str  # includes the shape; unique in its group
    dtype: torch.dtype
    make: Callable[[int, int], Inputs]  # draws inputs with this many rows from a seed
    rows: int  # number of rows of the timed inputs
    contenders: Mapping[str, Contender]  # by name; `seqfuse`, `eager` and maybe peers
    checked_rows: int = 512  # rows for the error bound, against float64
    exact: Contender | None = None  # the computation in float64; by default eager's
    unfused: Contender | None = None  # the unfused side of the error bound; by default eager
    judged: Callable[[Outputs], Outputs] = lambda outputs: outputs  # results for the error bound; all are compared
    flops: float = 0.0  # of one call
    fewest: int | None = None  # minimum bytes of one call; by default inputs and results of `seqfuse`
    priority: int = 5  # rows with low numbers are measured first
    as_called: bool = False  # whether to measure the time with CPU overhead, too
    anywhere: bool = False  # whether eager and unfused also run on a CPU
    shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # numbers for tables
    notes: Callable[[Inputs], Mapping[str, Any]] = lambda _: {}  # further data for the file

    @property
    def key(self) -> str:
        """The unique key of a row."""
        return f"{self.group}: {self.name}"


def generator(device: torch.device, seed: int) -> torch.Generator:
    """A random generator with a seed."""
    return torch.Generator(device).manual_seed(seed)


def normal(
    shapes: Mapping[str, tuple[int, ...]], seed: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Tensors of normal values; 1-D tensors, such as weights, are near one."""
    draw = generator(device, seed)
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        t = torch.empty(shape, device=device, dtype=dtype).normal_(generator=draw)
        found[name] = t.mul_(0.1).add_(1) if len(shape) == 1 else t
    return found


def run(contender: Contender, inputs: Inputs) -> list[Tensor | None]:
    """Results of one call, from a fixed seed of torch's generators."""
    call = contender.prepare(inputs)
    torch.manual_seed(0)
    return [None if t is None else t.detach() for t in call()]


def copied(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """Copies of the inputs, floating-point ones in another dtype if given."""
    return {n: t.detach().clone().to(dtype if t.is_floating_point() else None) for n, t in inputs.items()}


def by_the_rule(case: Case) -> None:
    """Raises unless the results of `seqfuse` are within the error bound, on some of the rows.

    If it fails on a GPU, errors of eager torch widen the bound, and in float32 those of a CPU, if the row can run
    there, since libraries sum in different orders.
    """
    eager, rows = case.contenders["eager"], min(case.rows, case.checked_rows)
    unfused = case.unfused or eager

    def measure(seed: int) -> tuple[Outputs, ...]:
        inputs = case.make(rows, seed)
        found = [run(c, copied(inputs)) for c in (case.contenders["seqfuse"], unfused)]
        return *map(case.judged, found), case.judged(run(case.exact or eager, copied(inputs, torch.float64)))

    def others(seed: int) -> list[Outputs]:
        inputs = case.make(rows, seed)
        if not any(t.is_cuda for t in inputs.values()):
            return []
        found = [run(eager, copied(inputs))] if unfused is not eager and eager.checked else []
        if case.anywhere and case.dtype is torch.float32:
            found.append(run(unfused, {name: t.cpu() for name, t in inputs.items()}))
        return [case.judged(outputs) for outputs in found]

    judge(measure, 0, others=others)


def distance(one: Outputs, other: Outputs) -> float:
    """The largest relative distance of any piece of any result; infinite if one is missing or not finite."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if a is None:
            continue  # the peer does not return it
        if b is None or a.shape != b.shape:
            return math.inf
        a, b = (t.detach().reshape(-1, t.shape[-1] if t.ndim else 1) for t in (a, b))
        whole = b.float().norm() / max(1, b.numel()) ** 0.5
        # A single row may consist of a few values that nearly cancel. There are fewer pieces only if a result has less
        # than 512 rows, all or most of which `by_the_rule` judges, too.
        pieces = max(1, min(PIECES, len(b) // 8))
        for left, right in zip(a.tensor_split(pieces), b.tensor_split(pieces), strict=True):
            difference = (left.float() - right.float()).norm()
            # A piece of small values may be as far off as the rest: sums over rows may have any magnitude.
            size = torch.maximum(right.float().norm(), whole * right.numel() ** 0.5)
            found = float(difference / size.clamp_min(1e-30))
            worst = max(worst, found if math.isfinite(found) else math.inf)
    return worst


def reds(case: Case, inputs: Inputs) -> dict[str, str]:
    """By contender, why its results on all rows are wrong: too far from the unfused ones, or an error."""
    wrong: dict[str, str] = {}
    right = case.unfused or case.contenders["eager"]
    wanted = run(right, copied(inputs))
    for name, contender in case.contenders.items():
        if contender is right:
            continue
        try:
            found = run(contender, copied(inputs))
            off = distance(found, wanted) if contender.checked else 0.0
        except torch.AcceleratorError:
            raise
        except Exception as error:
            wrong[name] = f"raised {said(error)}"
            continue
        # Seqfuse rounds no more often than the unfused operations; others may round elsewhere.
        if off > (contender.near or NEAR[case.dtype] * (1 if name.startswith("seqfuse") else 3)):
            wrong[name] = f"results are {off:.2g} from what they should be"
    return wrong


def said(error: BaseException) -> str:
    """An error in one line."""
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0]}"[:300]


def fewest_bytes(case: Case, inputs: Inputs, outputs: Outputs) -> int:
    """The bytes of each input read once and each result written once."""
    if case.fewest is not None:
        return case.fewest
    return sum(t.nbytes for t in (*inputs.values(), *outputs) if t is not None)


def counted(step: Callable[[], Any], own: Sequence[Tensor]) -> int:
    """Bytes of all storages that a forward pass saves for backward, each once, without its parameters."""
    # By storage, since fake storages have no address.
    mine = {t.untyped_storage()._cdata for t in own}
    found: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage()._cdata] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = step()
    total = sum(t.untyped_storage().nbytes() for place, t in found.items() if place not in mine)
    del y
    return total

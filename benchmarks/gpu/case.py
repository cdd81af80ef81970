"""A row: what is computed, of which random numbers, by whom; the fewest bytes it takes; whether results are right."""

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

# Norm of the difference over the norm, in pieces of the rows: two right results differ by a few roundings.
NEAR = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-10}
PIECES = 64


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute a row."""

    prepare: Callable[[Inputs], Run]  # for one set of inputs, what is timed; what it does itself is not
    own: Callable[[], Sequence[Tensor]] = tuple  # parameters, which are not counted
    checked: bool = True  # whether its results can be compared with the others'; own dropout cannot
    near: float | None = None  # how far they may be, as a part of them, where it rounds more than the others


@dataclasses.dataclass(frozen=True)
class Case:
    """A row, and everything that is needed to measure it."""

    group: str  # rows of one kind, which a target speaks of
    name: str  # with its shape; unique in its group
    dtype: torch.dtype
    make: Callable[[int, int], Inputs]  # inputs of that many rows, drawn from a seed, on a device
    rows: int  # of the timed inputs
    contenders: Mapping[str, Contender]  # by name; `seqfuse` and `eager` are among them, others may be peers
    checked_rows: int = 512  # on which the numeric rule is asked, against float64
    exact: Contender | None = None  # the same in float64; what eager does, if left out
    unfused: Contender | None = None  # what the rule compares with; eager, if left out
    judged: Callable[[Outputs], Outputs] = lambda outputs: outputs  # of these the rule is asked; all are compared
    flops: float = 0.0  # of one call
    fewest: int | None = None  # bytes that one call has to move; if left out, inputs and results of `seqfuse` once each
    priority: int = 5  # rows of low numbers are measured first
    as_called: bool = False  # whether the time with the host in it is taken as well
    anywhere: bool = False  # whether eager and unfused are functions of the inputs alone, which a CPU can compute, too
    shape: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # numbers for tables
    notes: Callable[[Inputs], Mapping[str, Any]] = lambda _: {}  # what else is to be written down

    @property
    def key(self) -> str:
        """What a row is found by."""
        return f"{self.group}: {self.name}"


def generator(device: torch.device, seed: int) -> torch.Generator:
    """What numbers are drawn from."""
    return torch.Generator(device).manual_seed(seed)


def normal(
    shapes: Mapping[str, tuple[int, ...]], seed: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Tensors of normal numbers; rows alone, such as weights, are near one."""
    draw = generator(device, seed)
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        t = torch.empty(shape, device=device, dtype=dtype).normal_(generator=draw)
        found[name] = t.mul_(0.1).add_(1) if len(shape) == 1 else t
    return found


def run(contender: Contender, inputs: Inputs) -> list[Tensor | None]:
    """Its results, once, from a fixed seed of torch's generators."""
    call = contender.prepare(inputs)
    torch.manual_seed(0)
    return [None if t is None else t.detach() for t in call()]


def copied(inputs: Inputs, dtype: torch.dtype | None = None) -> Inputs:
    """The same numbers in tensors of their own, floating-point ones in another dtype if one is given."""
    return {n: t.detach().clone().to(dtype if t.is_floating_point() else None) for n, t in inputs.items()}


def by_the_rule(case: Case) -> None:
    """Raises unless the results of `seqfuse` are right by the numeric rule, on some of the rows.

    Where it alarms on a GPU, errors of eager torch count as well as those of what is unfused, and in float32 those of a
    CPU where a row can be had there: libraries add up in other orders.
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
    """The largest relative distance of any piece of any result; infinite where one is not finite or missing."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if a is None:
            continue  # a peer that does not give it
        if b is None or a.shape != b.shape:
            return math.inf
        a, b = (t.detach().reshape(-1, t.shape[-1] if t.ndim else 1) for t in (a, b))
        whole = b.float().norm() / max(1, b.numel()) ** 0.5
        # A row alone may be of a few numbers that nearly cancel. Pieces are fewer only for results of less than 512
        # rows, all or most of which `by_the_rule` judges as well.
        pieces = max(1, min(PIECES, len(b) // 8))
        for left, right in zip(a.tensor_split(pieces), b.tensor_split(pieces), strict=True):
            difference = (left.float() - right.float()).norm()
            # A piece of small numbers is as far off as the rest: rows are added up to sums of any size.
            size = torch.maximum(right.float().norm(), whole * right.numel() ** 0.5)
            found = float(difference / size.clamp_min(1e-30))
            worst = max(worst, found if math.isfinite(found) else math.inf)
    return worst


def reds(case: Case, inputs: Inputs) -> dict[str, str]:
    """Why contenders cannot be trusted on all rows: far from what is unfused, or an error. Others are not named."""
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
        # Ours rounds no more often than what is unfused; others may round elsewhere.
        if off > (contender.near or NEAR[case.dtype] * (1 if name.startswith("seqfuse") else 3)):
            wrong[name] = f"results are {off:.2g} from what they should be"
    return wrong


def said(error: BaseException) -> str:
    """An error in one line."""
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0]}"[:300]


def fewest_bytes(case: Case, inputs: Inputs, outputs: Outputs) -> int:
    """Each input read once, each result written once."""
    if case.fewest is not None:
        return case.fewest
    return sum(t.nbytes for t in (*inputs.values(), *outputs) if t is not None)


def counted(step: Callable[[], Any], own: Sequence[Tensor]) -> int:
    """Bytes of all storages that a forward pass keeps for a backward, each once, but those of its own parameters."""
    # By the storage itself: a fake one has no address.
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

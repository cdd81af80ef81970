"""Runs of two to nine point-wise operations, each way in one pass over memory by a Triton kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from .. import saved as context
from ..env import Env
from ..fusion import BackwardFusion, ForwardFusion, JointFusion, Requirements
from ..operation import Grads
from ..ops import Bias, Dropout, Scale
from ..pointwise import Pointwise
from ._chain import (
    Forward,
    Gradient,
    Part,
    Place,
    chain_takes,
    forward_of,
    gradient_of,
    has_numbers,
    joined,
    numbers_in,
    numbers_of,
    record_of,
    slots_of,
)
from ._functions import Run, own_records


class PointwiseChain(ForwardFusion):
    """y = f_n(... f_1(x)) in one pass: activations, constant factors, biases and dropouts in any order.

    What an activation keeps is stored on the way, rounded; all else stays in float32 from x to y. The mask of each
    dropout is the one that the operation makes of its seed; none is stored. x, y: [*, H]. Saves what the operations
    save.
    """

    first: Pointwise | Scale | Bias | Dropout
    rest: tuple[Pointwise | Scale | Bias | Dropout, ...]

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        return chain_takes((self.first, *self.rest), env)

    def fwd(self, x: Tensor, *, seeds: tuple[Tensor | None, ...], needs: frozenset[str]) -> Any:
        forward, parts = self.decided(bool(needs), self._forward, bool(needs))
        y, kept = forward(x, seeds)
        if not needs:
            return y
        first, *rest = map(record_of, parts, kept)
        return y, {"first": first, "rest": tuple(rest)}

    def _forward(self, keep: bool) -> tuple[Forward, tuple[Part, ...]]:
        parts = (self.first, *self.rest)
        return forward_of(parts, parts, keep), parts


class PointwiseChainBackward(BackwardFusion):
    """dx = f_1'(t_1) ... f_n'(t_n) dy in one pass, t what each activation keeps, and biases' gradients on the way.

    Each of these is the sum over all rows of what the chain holds there, of float32 numbers and in a fixed order; what
    was dropped is decided again from the seeds. dy, dx, t: [*, H].
    """

    first: Pointwise | Scale | Bias | Dropout
    rest: tuple[Pointwise | Scale | Bias | Dropout, ...]

    kernels = ("triton", "c")
    layout = "any"  # its kernel is handed copies of what does not fit

    def requires(self, env: Env) -> Requirements:
        return chain_takes((self.first, *self.rest), env)

    def bwd(
        self, dy: Tensor, *, first: Any, rest: tuple[Any, ...], needs: frozenset[str]
    ) -> tuple[Tensor | None, Grads]:
        records = (first, *rest)
        gradient = self.decided(needs, self._without_numbers, needs)
        if gradient is None:
            numbers = tuple(map(numbers_in, (self.first, *self.rest), records))
            gradient = self.decided((needs, numbers), self._gradient, records, needs)
        return gradient(dy, records)

    def _without_numbers(self, needs: frozenset[str]) -> Gradient | None:
        return None if any(map(has_numbers, (self.first, *self.rest))) else self._gradient((), needs)

    def _gradient(self, records: Sequence[Any], needs: frozenset[str]) -> Gradient:
        places: list[Place] = []
        for i, (slot, part) in enumerate(zip(slots_of(self.rest), (self.first, *self.rest), strict=True)):
            number = numbers_in(part, records[i])[0] if isinstance(part, Scale | Dropout) else 0.0
            drops = isinstance(part, Dropout) and records[i].seed is not None
            kept = ("x" if part.reads == "input" else "y") if isinstance(part, Pointwise) else "seed"
            places.append(Place(slot, part, f"kept[{i}].{kept}", number, drops))
        return gradient_of(places, needs)


class PointwiseChainJoint(JointFusion):
    """y = f_n(... f_1(x)) and all gradients, each way in one pass, of which less is kept.

    Where several activations and constant factors stand together only what the first of them takes is kept; the
    backward pass makes the rest again from it, in registers: with y = f_2(f_1(t)), dt = f_1'(t) f_2'(f_1(t)) dy. All
    else is as in `PointwiseChain` and `PointwiseChainBackward`.

    x, y, t: [*, H].
    """

    first: Pointwise | Scale | Bias | Dropout
    rest: tuple[Pointwise | Scale | Bias | Dropout, ...]

    kernels = ("triton", "c")

    class Saved(context.Saved):
        held: tuple[Tensor | None, ...]  # [*, H] for each activation that stands alone, and each run of several
        seeds: tuple[Tensor | None, ...]  # [] int64 for each dropout that drops
        numbers: tuple[float, ...]  # factors, and p of dropouts; 0 in other places

    def requires(self, env: Env) -> Requirements:
        yield env.grad, "where nothing needs a gradient nothing is kept"
        parts = (self.first, *self.rest)
        yield from chain_takes(parts, env)
        yield len(joined(parts, numbers_of(parts))) < len(parts), "no two activations stand side by side"

    def saved_at(self) -> Iterator[int]:
        parts, at = (self.first, *self.rest), 0
        for part in joined(parts, numbers_of(parts)):
            if isinstance(part, Pointwise | Run):
                yield at + (part.reads == "output")
            at += len(part.parts) if isinstance(part, Run) else 1

    def fwd(self, x: Tensor, *, seeds: tuple[Tensor | None, ...]) -> tuple[Tensor, Saved]:
        forward, numbers = self.decided("forward", self._forward)
        y, held = forward(x, seeds)
        return y, self.Saved(held=held, seeds=seeds, numbers=numbers)

    def _forward(self) -> tuple[Forward, tuple[float, ...]]:
        parts = (self.first, *self.rest)
        numbers = numbers_of(parts)
        return forward_of(joined(parts, numbers), parts), numbers

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        drops = tuple(seed is not None for seed in saved.seeds)
        of = tuple(part.P for part in (self.first, *self.rest) if isinstance(part, Pointwise))
        key = needs, saved.numbers, drops, of
        return self.decided(key, self._gradient, saved.numbers, drops, needs)(dy, (saved.held, saved.seeds))

    def _gradient(self, numbers: Sequence[float], drops: Sequence[bool], needs: frozenset[str]) -> Gradient:
        return gradient_of(self._places(numbers, drops), needs)

    def unfused(self, saved: Saved) -> dict[str, Any]:
        """What the operations themselves would have saved."""
        records: list[context.Saved] = []
        places = self._places(saved.numbers, [seed is not None for seed in saved.seeds])
        at = 0
        for place, kept in zip(places, saved.held, strict=True):
            if isinstance(place.part, Run):
                assert kept is not None
                records += own_records(place.part.parts, kept, place.part.factors)
                at += len(place.part.parts)
            else:
                records.append(_record(place, kept, saved.seeds[at]))
                at += 1
        return {"first": records[0], "rest": tuple(records[1:])}

    def _places(self, numbers: Sequence[float], drops: Sequence[bool]) -> list[Place]:
        """The parts, activations side by side as one; what they read is held, or a seed."""
        parts = (self.first, *self.rest)
        slots, at = slots_of(self.rest), 0
        found: list[Place] = []
        for i, part in enumerate(joined(parts, numbers)):
            kept = f"kept[1][{at}]" if drops[at] else f"kept[0][{i}]"
            found.append(Place(slots[at], part, kept, numbers[at], drops[at]))
            at += len(part.parts) if isinstance(part, Run) else 1
        return found


def _record(place: Place, kept: Any, seed: Tensor | None) -> Any:
    """What the operation itself would have saved."""
    if isinstance(place.part, Dropout):
        return Dropout.Saved(seed=seed, p=place.number)
    if isinstance(place.part, Scale):
        return Scale.Saved(factor=place.number)
    return place.part.record(kept, kept) if isinstance(place.part, Pointwise) else None

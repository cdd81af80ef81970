"""Runs of two to nine point-wise operations, each way in one pass over memory by a Triton kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from .. import saved as context
from ..env import Env
from ..fusion import BackwardFusion, ForwardFusion, InferenceFusion, JointFusion, Requirements
from ..operation import Grads
from ..ops import Bias, Dropout, Scale
from ..pointwise import Pointwise
from ._chain import (
    Gradient,
    Place,
    chain_fwd,
    chain_takes,
    forward_steps,
    gradient_of,
    joined,
    made,
    numbers_in,
    numbers_of,
    operands_of,
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

    triton = True

    def requires(self, env: Env) -> Requirements:
        return chain_takes((self.first, *self.rest), env)

    def fwd(self, x: Tensor, *, seeds: tuple[Tensor | None, ...]) -> tuple[Tensor, dict[str, Any]]:
        parts = (self.first, *self.rest)
        y, kept = chain_fwd(x, parts, parts, seeds)
        rows = zip(parts, kept, seeds, numbers_of(parts), strict=True)
        records = [record_of(*row) for row in rows]
        return y, {"first": records[0], "rest": tuple(records[1:])}


class PointwiseChainInference(InferenceFusion):
    """y = f_n(... f_1(x)) in one pass, where nothing needs a gradient: nothing is written beside y.

    x, y: [*, H].
    """

    first: Pointwise | Scale | Bias | Dropout
    rest: tuple[Pointwise | Scale | Bias | Dropout, ...]

    triton = True

    def requires(self, env: Env) -> Requirements:
        return chain_takes((self.first, *self.rest), env)

    def fwd(self, x: Tensor, *, seeds: tuple[Tensor | None, ...]) -> Any:
        from ..kernels.pointwise import pointwise

        parts = (self.first, *self.rest)
        return pointwise(x, made(forward_steps(parts, False)[0]), operands_of(parts, seeds))[0]


class PointwiseChainBackward(BackwardFusion):
    """dx = f_1'(t_1) ... f_n'(t_n) dy in one pass, t what each activation keeps, and biases' gradients on the way.

    Each of these is the sum over all rows of what the chain holds there, of float32 numbers and in a fixed order; what
    was dropped is decided again from the seeds. dy, dx, t: [*, H].
    """

    first: Pointwise | Scale | Bias | Dropout
    rest: tuple[Pointwise | Scale | Bias | Dropout, ...]

    triton = True
    layout = "any"  # its kernel is handed copies of what does not fit

    def requires(self, env: Env) -> Requirements:
        return chain_takes((self.first, *self.rest), env)

    def bwd(
        self, dy: Tensor, *, first: Any, rest: tuple[Any, ...], needs: frozenset[str]
    ) -> tuple[Tensor | None, Grads]:
        records = (first, *rest)
        numbers = tuple(map(numbers_in, (self.first, *self.rest), records))
        gradient, fields = self.decided((needs, numbers), self._gradient, numbers, needs)
        return gradient(dy, [getattr(records[i], field) for i, field in fields])

    def _gradient(
        self, numbers: Sequence[tuple[float, ...]], needs: frozenset[str]
    ) -> tuple[Gradient, list[tuple[int, str]]]:
        """The gradient, and where in which records that is which it reads."""
        places: list[Place] = []
        fields: list[str] = []
        for slot, part, of in zip(slots_of(self.rest), (self.first, *self.rest), numbers, strict=True):
            drops = isinstance(part, Dropout) and bool(of[1])
            number = 0.0 if isinstance(part, Pointwise | Bias) else of[0]
            places.append(Place(slot, part, number, drops))
            fields.append("seed" if drops else "x" if isinstance(part, Pointwise) and part.reads == "input" else "y")
        gradient = gradient_of(places, needs)
        return gradient, [(i, fields[i]) for i in gradient.reads]


class PointwiseChainJoint(JointFusion):
    """y = f_n(... f_1(x)) and all gradients, each way in one pass, of which less is kept.

    Where several activations and constant factors stand together only what the first of them takes is kept; the
    backward pass makes the rest again from it, in registers: with y = f_2(f_1(t)), dt = f_1'(t) f_2'(f_1(t)) dy. All
    else is as in `PointwiseChain` and `PointwiseChainBackward`.

    x, y, t: [*, H].
    """

    first: Pointwise | Scale | Bias | Dropout
    rest: tuple[Pointwise | Scale | Bias | Dropout, ...]

    triton = True

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
        parts = (self.first, *self.rest)
        numbers = numbers_of(parts)
        y, held = chain_fwd(x, joined(parts, numbers), parts, seeds)
        return y, self.Saved(held=tuple(held), seeds=seeds, numbers=numbers)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        drops = tuple(seed is not None for seed in saved.seeds)
        of = tuple(part.P for part in (self.first, *self.rest) if isinstance(part, Pointwise))
        key = needs, saved.numbers, drops, of
        gradient, at = self.decided(key, self._gradient, saved.numbers, drops, needs)
        kept = [saved.seeds[at[i]] if drops[at[i]] else saved.held[i] for i in gradient.reads]
        return gradient(dy, kept)

    def _gradient(
        self, numbers: Sequence[float], drops: Sequence[bool], needs: frozenset[str]
    ) -> tuple[Gradient, Sequence[int]]:
        places, at = self._places(numbers, drops)
        return gradient_of(places, needs), at

    def unfused(self, saved: Saved) -> dict[str, Any]:
        """What the operations themselves would have saved."""
        records: list[context.Saved] = []
        places, at = self._places(saved.numbers, [seed is not None for seed in saved.seeds])
        for place, kept, i in zip(places, saved.held, at, strict=True):
            if isinstance(place.part, Run):
                assert kept is not None
                records += own_records(place.part.parts, kept, place.part.factors)
            else:
                records.append(record_of(place.part, kept, saved.seeds[i], place.number))
        return {"first": records[0], "rest": tuple(records[1:])}

    def _places(self, numbers: Sequence[float], drops: Sequence[bool]) -> tuple[list[Place], list[int]]:
        """The parts, activations side by side as one, and the first operation of each."""
        parts = (self.first, *self.rest)
        slots, at = slots_of(self.rest), [0]
        found: list[Place] = []
        for part in joined(parts, numbers):
            found.append(Place(slots[at[-1]], part, numbers[at[-1]], drops[at[-1]]))
            at.append(at[-1] + (len(part.parts) if isinstance(part, Run) else 1))
        return found, at[:-1]

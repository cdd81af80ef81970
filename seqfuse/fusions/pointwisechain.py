"""Runs of two to nine point-wise operations, each way in one pass over memory by a Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, InferenceFusion, Requirements
from ..operation import Grads
from ..ops import Bias, Scale
from ..pointwise import Pointwise
from ._kernels import device, kernel_takes_act, kernels_run, rows_of

if TYPE_CHECKING:
    from ..kernels.pointwise import Chain

Part = Pointwise | Scale | Bias

_X, _Y = -1, -2
_chains: dict[Any, Chain] = {}


class PointwiseChain(ForwardFusion):
    """y = f_n(... f_1(x)) in one pass: activations, constant factors and biases in any order.

    What an activation keeps is stored on the way, rounded; all else stays in float32 from x to y. x, y: [*, H]. Saves
    what the operations save.
    """

    first: Pointwise | Scale | Bias
    rest: tuple[Pointwise | Scale | Bias, ...]

    triton = True

    def requires(self, env: Env) -> Requirements:
        return _requirements((self.first, *self.rest), env)

    def saves(self, env: Env) -> Savings:
        parts = (self.first, *self.rest)
        return _worth(parts, env, 2 * len(self.rest) - len(_ahead(parts, True)[2]))

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        from ..kernels.pointwise import pointwise

        parts = (self.first, *self.rest)
        steps, places, _ = _ahead(parts, True)
        y, *stored = pointwise(x, _chain(steps), [part.read() for part in parts if isinstance(part, Bias)])
        records = [_record(part, place, x, y, stored) for part, place in zip(parts, places, strict=True)]
        assert y is not None
        return y, {"first": records[0], "rest": tuple(records[1:])}


class PointwiseChainInference(InferenceFusion):
    """y = f_n(... f_1(x)) in one pass, where nothing needs a gradient: nothing is written beside y.

    x, y: [*, H].
    """

    first: Pointwise | Scale | Bias
    rest: tuple[Pointwise | Scale | Bias, ...]

    triton = True

    def requires(self, env: Env) -> Requirements:
        return _requirements((self.first, *self.rest), env)

    def saves(self, env: Env) -> Savings:
        return _worth((self.first, *self.rest), env, 2 * len(self.rest))

    def fwd(self, x: Tensor) -> Any:
        from ..kernels.pointwise import pointwise

        parts = (self.first, *self.rest)
        biases = [part.read() for part in parts if isinstance(part, Bias)]
        return pointwise(x, _chain(_ahead(parts, False)[0]), biases)[0]


class PointwiseChainBackward(BackwardFusion):
    """dx = f_1'(t_1) ... f_n'(t_n) dy in one pass, t what each activation keeps, and biases' gradients on the way.

    Each of these is the sum over all rows of what the chain holds there, of float32 numbers and in a fixed order.
    dy, dx, t: [*, H].
    """

    first: Pointwise | Scale | Bias
    rest: tuple[Pointwise | Scale | Bias, ...]

    triton = True

    def requires(self, env: Env) -> Requirements:
        return _requirements((self.first, *self.rest), env)

    def saves(self, env: Env) -> Savings:
        parts = (self.first, *self.rest)
        # A bias reads its gradient and hands it on; the others read and write one.
        return _worth(parts, env, 2 * len(self.rest) - sum(isinstance(part, Bias) for part in parts))

    def bwd(
        self, dy: Tensor, *, first: Any, rest: tuple[Any, ...], needs: frozenset[str]
    ) -> tuple[Tensor | None, Grads]:
        from ..kernels.pointwise import pointwise

        slots = ("first", *(f"rest.{i}" for i in range(len(self.rest))))
        steps: list[Any] = []
        operands: list[Tensor] = []
        summed: list[tuple[str, Bias]] = []
        for part, record, slot in reversed([*zip((self.first, *self.rest), (first, *rest), slots, strict=True)]):
            if isinstance(part, Pointwise):
                steps.append(("dact", device(part)))
                operands.append(record.x if part.reads == "input" else record.y)
            elif isinstance(part, Scale):
                steps.append(("scale", record.factor))
            elif f"{slot}.bias" in needs:
                steps.append(("column_sum", None))
                summed.append((f"{slot}.bias", part))
        dtypes = [bias.read().dtype for _, bias in summed]
        dx, *sums = pointwise(dy, _chain(tuple(steps)), operands, dtypes=dtypes, result="x" in needs)
        return dx, {name: total for (name, _), total in zip(summed, sums, strict=True)}


def _requirements(parts: Sequence[Part], env: Env) -> Requirements:
    yield from kernels_run(env)
    for part in parts:
        if isinstance(part, Pointwise):
            yield from kernel_takes_act(part)
        elif isinstance(part, Bias):
            yield part.bias.dtype == env.dtype, "input and bias must have one dtype"


def _worth(parts: Sequence[Part], env: Env, tensors: int) -> Savings:
    # Only a bias says how wide the rows are.
    width = max([0, *(part.size for part in parts if isinstance(part, Bias))])
    return Savings(launches=len(parts) - 1, bytes=float(tensors * rows_of(env) * width * env.dtype.itemsize))


def _ahead(parts: Sequence[Part], keep: bool) -> tuple[tuple[Any, ...], list[int | None], range]:
    """Steps of the forward chain, where what each part keeps is (`_X`, `_Y` or among the stored), and the stored."""
    steps: list[Any] = []
    places: list[int | None] = []
    here: int | None = _X
    stored = 0
    for i, part in enumerate(parts):
        place: int | None = None
        if isinstance(part, Pointwise):
            if keep and part.reads == "input":
                if here is None:
                    steps.append(("store", None))
                    here, stored = stored, stored + 1
                place = here
            steps.append(("act", device(part)))
            here = None
            if keep and part.reads == "output":
                if i == len(parts) - 1:
                    here = _Y
                else:
                    steps.append(("store", None))
                    here, stored = stored, stored + 1
                place = here
        else:
            steps.append(("scale", part.factor) if isinstance(part, Scale) else ("bias", None))
            here = None
        places.append(place)
    return tuple(steps), places, range(stored)


def _record(part: Part, place: int | None, x: Tensor, y: Tensor | None, stored: Sequence[Any]) -> context.Saved:
    if isinstance(part, Scale):
        return Scale.Saved(factor=part.factor)
    if isinstance(part, Bias) or place is None:
        return Bias.NOTHING
    t: Any = x if place == _X else y if place == _Y else stored[place]
    return part.record(t, t)


def _chain(steps: tuple[Any, ...]) -> Chain:
    """A chain by the names of its steps and what they are made with, each once made."""
    key = tuple((name, _identity(of)) for name, of in steps)
    found = _chains.get(key)
    if found is None:
        from ..kernels import pointwise

        made = [getattr(pointwise, name)() if of is None else getattr(pointwise, name)(of) for name, of in steps]
        found = _chains[key] = pointwise.Chain(*made)
    return found


def _identity(of: Any) -> Any:
    """What a step is made with; of functions their identity, whose hash is that of their source."""
    return (id(of.value), id(of.derivative), of.reads, of.P) if hasattr(of, "value") else of

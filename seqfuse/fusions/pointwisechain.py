"""Runs of two to nine point-wise operations, each way in one pass over memory by a Triton kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, InferenceFusion, Requirements
from ..operation import Grads
from ..ops import Bias, Dropout, Scale
from ..pointwise import Pointwise
from ._kernels import device, kernel_takes_act, kernels_run, rows_of

if TYPE_CHECKING:
    from ..kernels.pointwise import Chain

Part = Pointwise | Scale | Bias | Dropout
Steps = tuple[tuple[str, tuple[Any, ...]], ...]

_X, _Y = -1, -2
_chains: dict[Any, Chain] = {}


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
        return _requirements((self.first, *self.rest), env)

    def saves(self, env: Env) -> Savings:
        parts = (self.first, *self.rest)
        return _worth(parts, env, -_ahead(parts, True)[2])

    def fwd(self, x: Tensor, *, seeds: tuple[Tensor | None, ...]) -> tuple[Tensor, dict[str, Any]]:
        from ..kernels.pointwise import pointwise

        parts = (self.first, *self.rest)
        steps, places, _ = _ahead(parts, True)
        y, *stored = pointwise(x, _chain(steps), _operands(parts, seeds))
        assert y is not None
        kept = [x if i == _X else y if i == _Y else None if i is None else stored[i] for i in places]
        records = [_record(part, t, seed) for part, t, seed in zip(parts, kept, seeds, strict=True)]
        return y, {"first": records[0], "rest": tuple(records[1:])}


class PointwiseChainInference(InferenceFusion):
    """y = f_n(... f_1(x)) in one pass, where nothing needs a gradient: nothing is written beside y.

    x, y: [*, H].
    """

    first: Pointwise | Scale | Bias | Dropout
    rest: tuple[Pointwise | Scale | Bias | Dropout, ...]

    triton = True

    def requires(self, env: Env) -> Requirements:
        return _requirements((self.first, *self.rest), env)

    def saves(self, env: Env) -> Savings:
        return _worth((self.first, *self.rest), env)

    def fwd(self, x: Tensor, *, seeds: tuple[Tensor | None, ...]) -> Any:
        from ..kernels.pointwise import pointwise

        parts = (self.first, *self.rest)
        return pointwise(x, _chain(_ahead(parts, False)[0]), _operands(parts, seeds))[0]


class PointwiseChainBackward(BackwardFusion):
    """dx = f_1'(t_1) ... f_n'(t_n) dy in one pass, t what each activation keeps, and biases' gradients on the way.

    Each of these is the sum over all rows of what the chain holds there, of float32 numbers and in a fixed order; what
    was dropped is decided again from the seeds. dy, dx, t: [*, H].
    """

    first: Pointwise | Scale | Bias | Dropout
    rest: tuple[Pointwise | Scale | Bias | Dropout, ...]

    triton = True

    def requires(self, env: Env) -> Requirements:
        return _requirements((self.first, *self.rest), env)

    def saves(self, env: Env) -> Savings:
        parts = (self.first, *self.rest)
        # A bias reads its gradient and hands it on; the others read and write one.
        return _worth(parts, env, -sum(isinstance(part, Bias) for part in parts))

    def bwd(
        self, dy: Tensor, *, first: Any, rest: tuple[Any, ...], needs: frozenset[str]
    ) -> tuple[Tensor | None, Grads]:
        from ..kernels.pointwise import pointwise

        slots = ("first", *(f"rest.{i}" for i in range(len(self.rest))))
        steps: list[tuple[str, tuple[Any, ...]]] = []
        operands: list[Tensor] = []
        summed: list[tuple[str, Bias]] = []
        for part, record, slot in reversed([*zip((self.first, *self.rest), (first, *rest), slots, strict=True)]):
            if isinstance(part, Pointwise):
                steps.append(("dact", (part,)))
                operands.append(record.x if part.reads == "input" else record.y)
            elif isinstance(part, Scale):
                steps.append(("scale", (record.factor,)))
            elif isinstance(part, Dropout):
                steps += _dropout(part, record.p, record.seed is not None)
                operands += () if record.seed is None else (record.seed,)
            elif f"{slot}.bias" in needs:
                steps.append(("column_sum", ()))
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
    yield len(_active(parts)) > 1, "only a Dropout that drops nothing here is with it"


def _active(parts: Sequence[Part]) -> list[Part]:
    """Without the dropouts that hand on what they get."""
    return [part for part in parts if not isinstance(part, Dropout) or _dropout(part, part.p, part.random)]


def _worth(parts: Sequence[Part], env: Env, tensors: int = 0) -> Savings:
    """One launch and two passes for each operation but one, and so many more `tensors`."""
    # Only a bias says how wide the rows are. Torch makes a mask in several launches, but other fusions save those too.
    width = max([0, *(part.size for part in parts if isinstance(part, Bias))])
    joined = len(_active(parts)) - 1
    dropped = sum(isinstance(part, Dropout) and part.random for part in parts)
    size = float((2 * joined + tensors) * rows_of(env) * width * env.dtype.itemsize)
    return Savings(launches=joined + 0.5 * dropped, bytes=size)


def _ahead(parts: Sequence[Part], keep: bool) -> tuple[Steps, list[int | None], int]:
    """Steps of the forward chain, where what each part keeps is (`_X`, `_Y` or among the stored), and how many are."""
    steps: list[tuple[str, tuple[Any, ...]]] = []
    places: list[int | None] = []
    here: int | None = _X
    stored = 0
    for i, part in enumerate(parts):
        place: int | None = None
        if isinstance(part, Pointwise):
            if keep and part.reads == "input":
                if here is None:
                    steps.append(("store", ()))
                    here, stored = stored, stored + 1
                place = here
            steps.append(("act", (part,)))
            here = None
            if keep and part.reads == "output":
                if not _active(parts[i + 1 :]):
                    here = _Y
                else:
                    steps.append(("store", ()))
                    here, stored = stored, stored + 1
                place = here
        else:
            made = _dropout(part, part.p, part.random) if isinstance(part, Dropout) else _linear(part)
            steps += made
            here = None if made else here
        places.append(place)
    return tuple(steps), places, stored


def _linear(part: Scale | Bias) -> Steps:
    return (("scale", (part.factor,)),) if isinstance(part, Scale) else (("bias", ()),)


def _dropout(part: Dropout, p: float, random: bool) -> Steps:
    """A dropout, and its own gradient, as it is now or was; nothing where it hands on what it gets."""
    upscale = part.mode == "upscale_in_train"
    if random:
        return (("dropout", (p, upscale)),)
    return () if upscale or p == 0 else (("scale", (1 - p,)),)


def _operands(parts: Sequence[Part], seeds: Sequence[Tensor | None]) -> list[Tensor]:
    """What the steps of the forward chain take, in order."""
    taken = (part.read() if isinstance(part, Bias) else seed for part, seed in zip(parts, seeds, strict=True))
    return [t for t in taken if t is not None]


def _record(part: Part, t: Any, seed: Tensor | None) -> context.Saved:
    if isinstance(part, Scale):
        return Scale.Saved(factor=part.factor)
    if isinstance(part, Dropout):
        return Dropout.Saved(seed=seed, p=part.p)
    return Bias.NOTHING if isinstance(part, Bias) else part.record(t, t)


def _chain(steps: Steps) -> Chain:
    """A chain by the names of its steps and what they are made with, each once made."""
    made = [(name, [device(o) if isinstance(o, Pointwise) else o for o in of]) for name, of in steps]
    key = tuple((name, *map(_identity, of)) for name, of in made)
    found = _chains.get(key)
    if found is None:
        from ..kernels import pointwise

        found = _chains[key] = pointwise.Chain(*(getattr(pointwise, name)(*of) for name, of in made))
    return found


def _identity(of: Any) -> Any:
    """What a step is made with; of functions their identity, whose hash is that of their source."""
    return (id(of.value), id(of.derivative), of.reads, of.P) if hasattr(of, "value") else of

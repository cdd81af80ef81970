"""Parts of a point-wise chain and its passes: activations, constant factors, biases and dropouts in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from .. import saved as context
from ..env import Env
from ..fusion import Requirements
from ..generated import Source
from ..operation import Grads
from ..ops import Bias, Dropout, Scale
from ..pointwise import Pointwise
from ._functions import Run, composed
from ._kernels import bias_fits, device, kernel_takes_act, kernels_run
from ._pointwise import chain_of, pointwise_of

if TYPE_CHECKING:
    from ..kernels.chains import Chain

Part = Pointwise | Scale | Bias | Dropout
Steps = tuple[tuple[str, tuple[Any, ...]], ...]

_X, _Y = -1, -2


class Place(NamedTuple):
    """A part of a chain as its gradient needs it."""

    slot: str
    part: Part | Run
    kept: str  # where in `kept` that is which it reads, as an expression
    number: float  # a factor, or p of a dropout, as it was in the forward pass
    drops: bool


def slots_of(rest: Sequence[Part]) -> list[str]:
    """Places of the parts: of the slot `first`, and of each in the slot `rest`."""
    return ["first", *(f"rest.{i}" for i in range(len(rest)))]


def numbers_of(parts: Sequence[Part]) -> tuple[float, ...]:
    """The factor of each, or p of a dropout, as it is now; 0 of others."""
    return tuple(
        part.factor if isinstance(part, Scale) else part.p if isinstance(part, Dropout) else 0.0 for part in parts
    )


def joined(parts: Sequence[Part], numbers: Sequence[float]) -> list[Part | Run]:
    """The parts with each run of functions in which two or more activations stand as one part."""
    found: list[Part | Run] = []
    pairs = zip(parts, numbers, strict=True)
    for functions, group in itertools.groupby(pairs, lambda pair: isinstance(pair[0], Pointwise | Scale)):
        run = list(group)
        if functions and sum(isinstance(part, Pointwise) for part, _ in run) > 1:
            factors = tuple(number for part, number in run if isinstance(part, Scale))
            found.append(Run(tuple(part for part, _ in run if isinstance(part, Pointwise | Scale)), factors))
        else:
            found += [part for part, _ in run]
    return found


Forward = Callable[[Tensor, Sequence[Tensor | None]], tuple[Tensor, tuple[Tensor | None, ...]]]
"""Of x and the seeds, the result y and what the parts keep, in one pass."""


def forward_of(kept_of: Sequence[Part | Run], parts: Sequence[Part], keep: bool = True) -> Forward:
    """That of these parts as they are now; `kept_of` are the same or joined, of which each keeps what it does."""
    steps, places, _ = forward_steps(kept_of, keep)

    def with_numbers(*given: Tensor) -> tuple[Tensor | None, ...]:  # of activations, which may change unannounced
        return pointwise_of()(made(steps))(*given)

    source = Source("forward", "x, seeds")
    numbered = any(isinstance(part, Pointwise) and has_numbers(part) for part in parts)
    source.constants["kernel"] = with_numbers if numbered else pointwise_of()(made(steps))
    operands = [
        f"{source.put(part.read)}()" if isinstance(part, Bias) else f"seeds[{i}]"
        for i, part in enumerate(parts)
        if isinstance(part, Bias) or (isinstance(part, Dropout) and part.random)
    ]
    kept = ["None" if i is None else "x" if i == _X else f"out[{0 if i == _Y else i + 1}]" for i in places]
    source.add(f"out = kernel({', '.join(['x', *operands])})", f"return out[0], ({''.join(f'{k}, ' for k in kept)})")
    return source.define()


Gradient = Callable[[Tensor, Sequence[Any]], tuple[Tensor | None, Grads]]
"""Of dy and what the parts keep, dx and the gradients of biases, in one pass."""


def gradient_of(places: Sequence[Place], needs: frozenset[str]) -> Gradient:
    """That of these parts: dx and the sums as far as they are needed, of what stands in the places of the kept."""
    steps: list[tuple[str, tuple[Any, ...]]] = []
    operands: list[str] = []
    summed: list[tuple[str, Bias]] = []
    for slot, part, kept, number, drops in reversed(places):
        if isinstance(part, Pointwise | Run):
            steps.append(("dact", (part,)))
            operands.append(kept)
        elif isinstance(part, Scale):
            steps.append(("scale", (number,)))
        elif isinstance(part, Dropout):
            steps += _dropout(part, number, drops)
            operands += [kept] * drops
        elif f"{slot}.bias" in needs:
            steps.append(("column_sum", ()))
            summed.append((f"{slot}.bias", part))
    source = Source("gradient", "dy, kept")
    source.constants["kernel"] = pointwise_of()(made(steps), None, [bias.dtype for _, bias in summed], "x" in needs)
    sums = [f"{source.put(name)}: out[{i}]" for i, (name, _) in enumerate(summed, 1)]
    source.add(f"out = kernel({', '.join(['dy', *operands])})", f"return out[0], {{{', '.join(sums)}}}")
    return source.define()


def chain_takes(parts: Sequence[Part], env: Env) -> Requirements:
    """What the kernel asks of the parts of a chain."""
    yield from kernels_run(env)
    yield all(dtype is env.dtype for dtype in env.along), "an operation in it gives another dtype"
    for part in parts:
        if isinstance(part, Pointwise):
            yield from kernel_takes_act(part, env)
        elif isinstance(part, Bias):
            yield bias_fits(part, env), "input and bias must have one dtype"
    yield len(_active(parts)) > 1, "only a Dropout that drops nothing here is with it"


def _active(parts: Sequence[Part | Run]) -> list[Part | Run]:
    """Without the dropouts that hand on what they get."""
    return [part for part in parts if not isinstance(part, Dropout) or _dropout(part, part.p, part.random)]


def forward_steps(parts: Sequence[Part | Run], keep: bool) -> tuple[Steps, list[int | None], int]:
    """Steps of the forward chain, where what each part keeps is (`_X`, `_Y` or among the stored), and how many are."""
    steps: list[tuple[str, tuple[Any, ...]]] = []
    places: list[int | None] = []
    here: int | None = _X
    stored = 0
    for i, part in enumerate(parts):
        place: int | None = None
        if isinstance(part, Pointwise | Run):
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


def record_of(part: Part, kept: Any) -> context.Saved | None:
    """What an activation saves, of what it keeps; the engine makes the records of other parts."""
    return part.record(kept, kept) if isinstance(part, Pointwise) else None


def numbers_in(part: Part, record: Any) -> tuple[float, ...]:
    """What a gradient is compiled with: configuration, or from a part's own `Saved` a number and whether it drops."""
    if isinstance(part, Pointwise):
        return part.P
    if isinstance(part, Dropout):
        return record.p, record.seed is not None
    return (record.factor,) if isinstance(part, Scale) else ()


def has_numbers(part: Part) -> bool:
    """Whether a gradient is compiled with any for it."""
    return type(part).P is not Pointwise.P if isinstance(part, Pointwise) else not isinstance(part, Bias)


def made(steps: Sequence[tuple[str, tuple[Any, ...]]]) -> Chain:
    """The chain of steps that are made with parts or numbers."""
    return chain_of([(name, tuple(map(_function, of))) for name, of in steps])


def _function(of: Any) -> Any:
    # Not before a kernel is to run: planning does without Triton.
    if isinstance(of, Run):
        return composed(of.parts, of.factors)
    return device(of) if isinstance(of, Pointwise) else of

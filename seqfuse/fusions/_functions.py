"""Runs of activations and constant factors: what kernels take as one activation, and the operations' own records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .. import saved as context
from ..env import Env
from ..fusion import Requirements
from ..ops import Scale
from ..pointwise import Pointwise
from ._kernels import device, kernel_takes_act

Function = Pointwise | Scale


class Run(NamedTuple):
    """Several of them as one function that reads its input, with the factors as they were in the forward pass."""

    parts: tuple[Function, ...]
    factors: tuple[float, ...]

    reads = "input"


def kernel_takes_functions(parts: Sequence[Function], env: Env) -> Requirements:
    """What every kernel asks of them."""
    for part in parts:
        if isinstance(part, Pointwise):
            yield from kernel_takes_act(part, env)


def factors_of(parts: Sequence[Function]) -> tuple[float, ...]:
    """The constant factors as they are now, in order, for the backward pass."""
    return tuple(part.factor for part in parts if isinstance(part, Scale))


def composed(parts: Sequence[Function], factors: Sequence[float]) -> Any:
    """f_n(... f_1(x)) as kernels take an activation, with these factors."""
    from ..kernels import activations

    left = iter(factors)
    made = [device(part) if isinstance(part, Pointwise) else activations.scale(next(left)) for part in parts]
    return activations.composed(*made)


def own_records(parts: Sequence[Function], x: Tensor, factors: Sequence[float]) -> tuple[context.Saved, ...]:
    """The records of the operations from what the first of them took, each step rounded as they round."""
    records: list[context.Saved] = []
    left = iter(factors)
    for part in parts:
        if isinstance(part, Scale):
            factor = next(left)
            records.append(Scale.Saved(factor=factor))
            x = x * factor
        else:
            y = part.reference(x)
            records.append(part.record(x, y))
            x = y
    return tuple(records)

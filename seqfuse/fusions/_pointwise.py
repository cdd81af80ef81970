"""What fusions made of point-wise chains share: the chains, and what their kernel takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..env import Env
from ..fusion import Requirements
from ..ops import Bias
from ..pointwise import Pointwise
from ._kernels import bias_fits, device, kernels_run

if TYPE_CHECKING:
    from ..kernels.chains import Chain

_OF_ACTIVATION = frozenset({"gated", "dgated"})
_chains: dict[Any, Chain] = {}

Steps = Sequence[tuple[str, tuple[Any, ...]]]


@functools.cache
def pointwise_of():  # its type is that of what it returns
    """`kernels.pointwise.pointwise_of`, which nothing imports before a kernel is to run."""
    from ..kernels.pointwise import pointwise_of

    return pointwise_of


def chain_of(steps: Steps) -> Chain:
    """A chain by the names of its steps and what they are made with, each once made; it keeps the functions in it."""
    key = tuple((name, *map(_identity, of)) for name, of in steps)
    found = _chains.get(key)
    if found is None:
        from ..kernels import chains

        found = _chains[key] = chains.Chain(*(getattr(chains, name)(*of) for name, of in steps))
    return found


def chain(act: Pointwise, *steps: str) -> Chain:
    """A chain by the names of its steps, which share one activation."""
    value, derivative, reads, numbers = of = device(act)
    key = (id(value), id(derivative), reads, numbers, steps)
    found = _chains.get(key)
    if found is None:
        found = _chains[key] = chain_of([(step, (of,) if step in _OF_ACTIVATION else ()) for step in steps])
    return found


def _identity(of: Any) -> Any:
    """What a step is made with; of functions their identity, whose hash is that of their source."""
    if isinstance(of, tuple):
        return tuple(map(_identity, of))  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return id(of) if callable(of) else of


def kernel_takes_chain(bias: Bias | None, env: Env) -> Requirements:
    """What the kernel asks of what enters a chain."""
    yield from kernels_run(env)
    yield bias_fits(bias, env), "input and bias must have one dtype"

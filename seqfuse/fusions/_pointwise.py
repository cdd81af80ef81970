"""What fusions made of point-wise chains share: the chains, and what their kernel takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..env import Env, Savings
from ..fusion import Requirements
from ..ops import Bias
from ..pointwise import Pointwise
from ._kernels import device, kernels_run, rows_of

if TYPE_CHECKING:
    from ..kernels.pointwise import Chain

_OF_ACTIVATION = frozenset({"act", "dact", "gated", "dgated"})
_chains: dict[Any, Chain] = {}


def chain(act: Pointwise, *steps: str) -> Chain:
    """A chain by the names of its steps, each once made; a chain keeps the functions that it is looked up by."""
    value, derivative, reads, numbers = of = device(act)
    key = (id(value), id(derivative), reads, numbers, steps)
    found = _chains.get(key)
    if found is None:
        from ..kernels import pointwise

        make = [getattr(pointwise, step) for step in steps]
        made = [step(of) if name in _OF_ACTIVATION else step() for name, step in zip(steps, make, strict=True)]
        found = _chains[key] = pointwise.Chain(*made)
    return found


def kernel_takes_chain(bias: Bias | None, env: Env) -> Requirements:
    """What the kernel asks of what enters a chain."""
    yield from kernels_run(env)
    yield bias is None or bias.bias.dtype == env.dtype, "input and bias must have one dtype"


def passes(bias: Bias, env: Env, launches: float, count: float, parts: int = 1) -> Savings:
    """Launches and passes not made, over tensors of the bias's size divided by `parts`."""
    return Savings(launches=launches, bytes=float(count * rows_of(env) * bias.size // parts * env.dtype.itemsize))

"""What all fusions made of Triton kernels share: where the kernels run, and what they ask of an activation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..env import Env
from ..errors import InputError
from ..fusion import Requirements
from ..ops import Bias
from ..pointwise import Gated, Pointwise
from ..saved import Saved, maker

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def kernels_run(env: Env) -> Requirements:
    """What every kernel asks of the environment, beside that it runs there."""
    yield env.dtype in _DTYPES, "its kernel is for float32, float16 and bfloat16"


def kernels_read(name: str, of: torch.dtype | None, env: Env) -> Requirements:
    """What C kernels ask of a parameter of a dtype; Triton kernels read any."""
    if env.kernels == "c":
        yield of is None or of in _DTYPES, f"C kernels read no {name} in {str(of).removeprefix('torch.')}"


def bias_fits(bias: Bias | None, env: Env) -> bool:
    """Whether x + bias has the dtype of x: else torch promotes it, but under autocast."""
    return bias is None or env.autocast is not None or bias.dtype == env.dtype


def sum_dtype(*summed: Tensor) -> torch.dtype:
    """The dtype that torch promotes a sum to.

    Raises:
        InputError: for float64, since kernels of a narrower input sum in float32; the operations then run unfused.
    """
    dtype = functools.reduce(torch.promote_types, [t.dtype for t in summed])
    if dtype is torch.float64:
        raise InputError("its kernel sums in float32, not in float64", code="SF102", operation="Add")
    return dtype


def kernel_takes_act(act: Pointwise, env: Env) -> Requirements:
    """What every kernel asks of an activation."""
    kind = type(act)
    yield kind.value is not None and kind.derivative is not None, f"{kind.__name__} has no device functions"
    yield not act.parameter_slots(), f"{kind.__name__} has parameters, which device functions do not see"
    fields = ("x",) if act.reads == "input" else ("y",)
    yield kind.Saved.fields == fields, f"{kind.__name__} keeps a record of its own making"
    if env.kernels == "c":
        reason = _in_c()(device(act))
        yield reason is None, reason or ""


def kernel_takes_gated(gated: Gated, env: Env) -> Requirements:
    """What every kernel asks of a gated unit."""
    kind = type(gated)
    yield kind.reference is Gated.reference, f"{kind.__name__} states a gated unit of its own"
    yield kind.Saved.fields == ("x",), f"{kind.__name__} keeps a record of its own making"
    yield from kernel_takes_act(gated.activation, env)


def device(act: Pointwise) -> Any:
    """The activation as kernels take it; they keep what they were given, and should not keep the operation."""
    return _activation()(act.value, act.derivative, act.reads, act.P)


def recorder(act: Pointwise) -> Callable[[Tensor, Tensor], Saved]:
    """`act.record`, without its keywords where it is the one that activations share."""
    if type(act).record is not Pointwise.record:
        return act.record
    save = maker(act.Saved)
    return (lambda x, y: save(x)) if act.reads == "input" else (lambda x, y: save(y))


@functools.cache
def _in_c() -> Callable[[Any], str | None]:
    from ..kernels.c.trace import why_not

    return why_not


@functools.cache
def _activation() -> Any:
    from ..kernels.activations import Activation

    return Activation

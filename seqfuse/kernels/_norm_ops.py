# pyright: basic
# Schemas are text, and what is registered under them has no types of its own.
"""The norms as operators, `torch.ops.seqfuse.layernorm`, `layernorm_backward` and those of RMSNorm: what traces see.

Arguments are those of the functions, but an activation is a text (`activations.text_of`). Results come as a list: y,
then the stream where there is a prologue, the mean of LayerNorm, and rstd; backward, what was asked for of dx, dweight,
dbias, dbranch and dpre_bias. Importing the kernels registers them; eager code calls the functions, which call the
operators where they are recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._operators import register as _register
from .activations import activation_of, text_of

_FORWARD = (
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, *, bool zero_centered=False, Tensor? pre_bias=None, "
    "Tensor? seed=None, float p=0.0, Tensor? residual=None, str? act=None, ScalarType? dtype=None, "
    "ScalarType? stream_dtype=None) -> Tensor[]"
)
_BACKWARD = (
    "(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, *, bool zero_centered=False, "
    "Tensor? dstream=None, Tensor? seed=None, float p=0.0, str? act=None, bool dx=True, ScalarType? dweight=None, "
    "ScalarType? dbias=None, bool dbranch=False, ScalarType? dpre_bias=None, ScalarType? branch_dtype=None) -> Tensor[]"
)


class Forward(NamedTuple):
    """Results of a forward pass; `stream` is what was normalized, where a prologue made it."""

    y: Tensor  # [*, N]
    stream: Tensor | None  # [*, N]
    mean: Tensor | None  # [*] float32
    rstd: Tensor  # [*] float32


class Backward(NamedTuple):
    """Results of a backward pass; `None` for what was not asked for.

    `dx` is the gradient of what was normalized, and so of the residual; `dbranch` that of what dropout took.
    """

    dx: Tensor | None  # [*, N]
    dweight: Tensor | None  # [N]
    dbias: Tensor | None  # [N]
    dbranch: Tensor | None  # [*, N]
    dpre_bias: Tensor | None  # [N]


def _activation(name: str | None) -> Any:
    return None if name is None else activation_of(name)


def _forward(forward: Callable[..., Forward], centered: bool) -> Any:
    def run(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, act: str | None = None, **rest: Any
    ) -> list[Tensor]:
        return [t for t in forward(centered, x, weight, bias, eps, act=_activation(act), **rest) if t is not None]

    return run


def _fake_forward(centered: bool) -> Any:
    def fake(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        *,
        pre_bias: Tensor | None = None,
        seed: Tensor | None = None,
        residual: Tensor | None = None,
        dtype: torch.dtype | None = None,
        stream_dtype: torch.dtype | None = None,
        **_: Any,
    ) -> list[Tensor]:
        prologue = pre_bias is not None or seed is not None or residual is not None
        stats = torch.float64 if x.dtype is torch.float64 else torch.float32
        dtypes = [dtype or x.dtype] + [stream_dtype or x.dtype] * prologue
        results = [x.new_empty(x.shape, dtype=of) for of in dtypes]
        return results + [x.new_empty(x.shape[:-1], dtype=stats) for _ in range(1 + centered)]

    return fake


def _backward(backward: Callable[..., Backward], centered: bool) -> Any:
    def run(
        dy: Tensor,
        x: Tensor,
        mean: Tensor | None,
        rstd: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        *,
        act: str | None = None,
        **rest: Any,
    ) -> list[Tensor]:
        results = backward(centered, dy, x, mean, rstd, weight, bias, act=_activation(act), **rest)
        return [t for t in results if t is not None]

    return run


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    *_: Any,
    dx: bool = True,
    dweight: torch.dtype | None = None,
    dbias: torch.dtype | None = None,
    dbranch: bool = False,
    dpre_bias: torch.dtype | None = None,
    branch_dtype: torch.dtype | None = None,
    **__: Any,
) -> list[Tensor]:
    branch, row = branch_dtype or x.dtype, x.shape[-1:]
    made = ((dx, x.shape, x.dtype), (dweight, row, dweight), (dbias, row, dbias), (dbranch, x.shape, branch))
    return [
        x.new_empty(shape, dtype=of)
        for want, shape, of in (*made, (dpre_bias, row, dpre_bias))
        if want not in (None, False)
    ]


def register(forward: Callable[..., Forward], backward: Callable[..., Backward]) -> None:
    """Register operators that call these functions of `_norm`."""
    for name, centered in (("layernorm", True), ("rmsnorm", False)):
        _register(name + _FORWARD, _forward(forward, centered), _fake_forward(centered))
        _register(f"{name}_backward{_BACKWARD}", _backward(backward, centered), _fake_backward)


def recorded_forward(centered: bool, x: Tensor, weight: Any, bias: Any, eps: float, act: Any, **rest: Any) -> Forward:
    """`forward` by its operator."""
    operator = torch.ops.seqfuse.layernorm if centered else torch.ops.seqfuse.rmsnorm
    y, *others = operator(x, weight, bias, eps, act=None if act is None else text_of(act), **rest)
    rstd = others.pop()
    mean = others.pop() if centered else None
    return Forward(y, others[0] if others else None, mean, rstd)


def recorded_backward(
    centered: bool,
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    act: Any,
    **rest: Any,
) -> Backward:
    """`backward` by its operator."""
    operator = torch.ops.seqfuse.layernorm_backward if centered else torch.ops.seqfuse.rmsnorm_backward
    made = iter(operator(dy, x, mean, rstd, weight, bias, act=None if act is None else text_of(act), **rest))
    return Backward(*(next(made) if rest[name] not in (None, False) else None for name in Backward._fields))

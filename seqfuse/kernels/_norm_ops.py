# pyright: basic
# Schemas are text, and what is registered under them has no types of its own.
"""The norms as operators, `torch.ops.seqfuse.layernorm`, `layernorm_backward` and those of RMSNorm: what traces see.

Arguments are those of the functions, but an activation is a text (`activations.text_of`). Results come as a list: y,
then the stream where there is a prologue, the mean of LayerNorm, and rstd; backward, what was asked for of dx, dweight,
dbias, dbranch and dpre_bias. Importing this module registers them; eager code calls the functions, which call the
operators where they are recorded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._norm import Backward, Forward, backward, forward
from .activations import activation_of, text_of

_library = torch.library.Library("seqfuse", "FRAGMENT")
_FORWARD = (
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, *, bool zero_centered=False, Tensor? pre_bias=None, "
    "Tensor? seed=None, float p=0.0, Tensor? residual=None, str? act=None, ScalarType? dtype=None) -> Tensor[]"
)
_BACKWARD = (
    "(Tensor dy, Tensor x, Tensor? mean, Tensor rstd, Tensor? weight, Tensor? bias, *, bool zero_centered=False, "
    "Tensor? dstream=None, Tensor? seed=None, float p=0.0, str? act=None, bool dx=True, ScalarType? dweight=None, "
    "ScalarType? dbias=None, bool dbranch=False, ScalarType? dpre_bias=None) -> Tensor[]"
)


def _activation(name: str | None) -> Any:
    return None if name is None else activation_of(name)


def _forward(centered: bool) -> Any:
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
        **_: Any,
    ) -> list[Tensor]:
        prologue = pre_bias is not None or seed is not None or residual is not None
        stats = torch.float64 if x.dtype is torch.float64 else torch.float32
        dtypes = [dtype or x.dtype] + [x.dtype] * prologue
        results = [x.new_empty(x.shape, dtype=of) for of in dtypes]
        return results + [x.new_empty(x.shape[:-1], dtype=stats) for _ in range(1 + centered)]

    return fake


def _backward(centered: bool) -> Any:
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
    **__: Any,
) -> list[Tensor]:
    wanted = (dx, dweight, dbias, dbranch, dpre_bias)
    row = x.shape[-1:]
    return [
        x.new_empty(x.shape) if want is True else x.new_empty(row, dtype=want)
        for want in wanted
        if want is not None and want is not False
    ]


for _name, _centered in (("layernorm", True), ("rmsnorm", False)):
    for _operator, _schema, _run, _fake in (
        (_name, _FORWARD, _forward(_centered), _fake_forward(_centered)),
        (f"{_name}_backward", _BACKWARD, _backward(_centered), _fake_backward),
    ):
        _library.define(_operator + _schema)
        _library.impl(_operator, _run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"seqfuse::{_operator}", _fake, lib=_library)


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

# pyright: basic
# Schemas are text, and what is registered under them has no types of its own.
"""Bias, norm of heads and rotation as operators, `torch.ops.seqfuse.rope`, `rope_backward`, `rope_write`: for traces.

Arguments are those of the functions, but a rotation is its fields, with no style where there is none. Results come as
a list: y, then what was asked for of z and rstd; backward, of dx, dbias, dq_weight and dk_weight. The third gives the
queries alone, and writes its caches and scales in place. Importing the kernels registers them; eager code calls the
functions, which call the operators where they are recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ._operators import register as _register

_FIELDS = "str? style=None, int dim=0, float base=10000.0"
_ROTATION = f"{_FIELDS}, Tensor? positions=None, Tensor? cos=None, Tensor? sin=None"
_FORWARD = (
    f"rope(Tensor x, int heads, int kv_heads, *, {_ROTATION}, Tensor? bias=None, float? norm_eps=None, "
    "Tensor? q_weight=None, Tensor? k_weight=None, bool zero_centered=False, bool store=False) -> Tensor[]"
)
_BACKWARD = (
    f"rope_backward(Tensor dy, int heads, int kv_heads, *, {_ROTATION}, Tensor? x=None, Tensor? rstd=None, "
    "Tensor? q_weight=None, Tensor? k_weight=None, bool zero_centered=False, bool dx=True, ScalarType? dbias=None, "
    "ScalarType? dq_weight=None, ScalarType? dk_weight=None) -> Tensor[]"
)
_WRITE = (
    "rope_write(Tensor x, int heads, int kv_heads, Tensor(a!) k, Tensor(b!) v, Tensor lengths, *, "
    f"{_FIELDS}, Tensor? bias=None, float? norm_eps=None, Tensor? q_weight=None, Tensor? k_weight=None, "
    "bool zero_centered=False, Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None) -> Tensor"
)


class Forward(NamedTuple):
    """Results of the forward pass."""

    y: Tensor  # [*, S, (H + 2 Hkv) D]
    z: Tensor | None  # the same, x + bias, where it was to be stored
    rstd: Tensor | None  # [*, S, H + Hkv] float32


class Backward(NamedTuple):
    """Results of the backward pass; `None` for what was not asked for."""

    dx: Tensor | None  # [*, S, (H + 2 Hkv) D]
    dbias: Tensor | None  # [(H + 2 Hkv) D]
    dq_weight: Tensor | None  # [D]
    dk_weight: Tensor | None  # [D]


@dataclasses.dataclass(frozen=True)
class Rotation:
    """RoPE: pairs of `dim` elements of each head are rotated by angles position base^(-2 i / dim)."""

    style: Literal["half", "interleaved"]
    dim: int
    base: float = 10000.0


def _run(function: Any) -> Any:
    def run(
        first: Tensor,
        heads: int,
        kv_heads: int,
        *tensors: Tensor,
        style: Any = None,
        dim: int = 0,
        base: float = 10000.0,
        **rest: Any,
    ) -> Tensor | list[Tensor]:
        rotation = None if style is None else Rotation(style, dim, base)
        made = function(first, heads, kv_heads, rotation, *tensors, **rest)
        return made if isinstance(made, Tensor) else [t for t in made if t is not None]

    return run


def _fake(
    x: Tensor, heads: int, kv_heads: int, *, norm_eps: float | None = None, store: bool = False, **_: Any
) -> list[Tensor]:
    results = [x.new_empty(x.shape) for _ in range(1 + store)]
    if norm_eps is not None:
        results.append(x.new_empty((*x.shape[:-1], heads + kv_heads), dtype=torch.float32))
    return results


def _fake_backward(
    dy: Tensor,
    heads: int,
    kv_heads: int,
    *,
    dx: bool = True,
    dbias: torch.dtype | None = None,
    dq_weight: torch.dtype | None = None,
    dk_weight: torch.dtype | None = None,
    **_: Any,
) -> list[Tensor]:
    width = dy.shape[-1]
    size = width // (heads + 2 * kv_heads)
    rows = ((width, dbias), (size, dq_weight), (size, dk_weight))
    return [dy.new_empty(dy.shape)] * dx + [dy.new_empty((n,), dtype=of) for n, of in rows if of is not None]


def _fake_write(x: Tensor, heads: int, kv_heads: int, *_: Any, **__: Any) -> Tensor:
    return x.new_empty((x.shape[0], heads, x.shape[1] // (heads + 2 * kv_heads)))


def register(
    rope_fwd: Callable[..., Forward], rope_bwd: Callable[..., Backward], rope_write: Callable[..., Tensor]
) -> None:
    """Register operators that call these functions of `rope`."""
    _register(_FORWARD, _run(rope_fwd), _fake)
    _register(_BACKWARD, _run(rope_bwd), _fake_backward)
    _register(_WRITE, _run(rope_write), _fake_write)


def _fields(rotation: Rotation | None) -> dict[str, Any]:
    return {} if rotation is None else {"style": rotation.style, "dim": rotation.dim, "base": float(rotation.base)}


def forward(x: Tensor, heads: int, kv_heads: int, rotation: Rotation | None, **rest: Any) -> Forward:
    """`rope.rope_fwd` by its operator."""
    y, *others = torch.ops.seqfuse.rope(x, heads, kv_heads, **_fields(rotation), **rest)
    return Forward(y, others.pop(0) if rest["store"] else None, others[0] if others else None)


def backward(dy: Tensor, heads: int, kv_heads: int, rotation: Rotation | None, **rest: Any) -> Backward:
    """`rope.rope_bwd` by its operator."""
    made = iter(torch.ops.seqfuse.rope_backward(dy, heads, kv_heads, **_fields(rotation), **rest))
    return Backward(*(next(made) if rest[name] not in (None, False) else None for name in Backward._fields))


def write(x: Tensor, heads: int, kv_heads: int, rotation: Rotation | None, *caches: Tensor, **rest: Any) -> Tensor:
    """`rope.rope_write` by its operator."""
    return torch.ops.seqfuse.rope_write(x, heads, kv_heads, *caches, **_fields(rotation), **rest)

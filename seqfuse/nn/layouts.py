"""Layouts of a weight that queries, keys and values share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import torch
from torch import Tensor

QKVLayout = Literal["packed", "separate", "3hde", "e3hd", "eh3d"]
_HINT = (
    """packed [(H + 2 Hkv) D, E], separate (q, k, v), 3hde [3, H, D, E], e3hd [E, (H + 2 Hkv) D], eh3d [E, H, 3, D]"""
)


def pack_qkv(weight: Tensor | Sequence[Tensor], layout: QKVLayout, heads: int, kv_heads: int | None = None) -> Tensor:
    """Convert a weight or bias of another layout to that of `MultiHeadAttention.qkv`: [(H + 2 Hkv) D, E], or [(H + 2
    Hkv) D].

    Values are only moved, bit for bit.

    Args:
        weight: the tensor, or three tensors for `"separate"`. A bias has no dimension E.
        layout: `"packed"`, as in `torch.nn.MultiheadAttention`: [(H + 2 Hkv) D, E]; `"separate"`: the weights of three
            `Linear`s; `"3hde"`: [3, H, D, E]; `"e3hd"`: [E, (H + 2 Hkv) D]; `"eh3d"`: [E, H, 3, D].
        heads: H.
        kv_heads: Hkv; default H. `"3hde"` and `"eh3d"` need Hkv = H.

    Raises:
        ValueError: for an unknown layout, or a shape that does not fit it.
    """
    shared = _shared(layout, heads, kv_heads)
    if layout == "separate":
        parts = tuple(cast(Sequence[Tensor], weight))
        if len(parts) != 3 or parts[0].shape[0] % heads:
            raise ValueError(f"expects weights of queries, keys and values for {heads} heads")
        rows = parts[0].shape[0] // heads * shared
        if any(part.shape != (rows, *parts[0].shape[1:]) for part in parts[1:]):
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(f"expects keys and values of {rows} rows, got {shapes}")
        return torch.cat(parts)
    one = cast(Tensor, weight)
    dims = 3 if layout in ("3hde", "eh3d") else 1  # of a bias
    if one.ndim not in (dims, dims + 1):
        raise ValueError(f"layout {layout!r} has {dims + 1} dimensions, {dims} for a bias, got {one.ndim}")
    first = one.movedim(0, -1) if layout.startswith("e") and one.ndim > dims else one  # with E last
    first = first.transpose(0, 1) if layout == "eh3d" else first
    if first.shape[:2] != (3, heads) if dims == 3 else first.shape[0] % (heads + 2 * shared):
        raise ValueError(f"layout {layout!r} does not fit shape {tuple(one.shape)}; layouts are {_HINT}")
    return first.flatten(0, 2) if dims == 3 else first.contiguous() if layout == "e3hd" else first


def unpack_qkv(
    weight: Tensor, layout: QKVLayout, heads: int, kv_heads: int | None = None
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """The inverse of `pack_qkv`.

    Raises:
        ValueError: for an unknown layout, or a weight with other heads.
    """
    shared = _shared(layout, heads, kv_heads)
    parts = heads + 2 * shared
    if weight.ndim not in (1, 2) or weight.shape[0] % parts:
        raise ValueError(f"expects [{parts} D, E], or [{parts} D], got {tuple(weight.shape)}")
    size = weight.shape[0] // parts
    if layout == "separate":
        q, k, v = weight.split([heads * size, shared * size, shared * size])  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return q, k, v  # pyright: ignore[reportUnknownVariableType]
    if layout in ("3hde", "eh3d"):
        weight = weight.reshape(3, heads, size, *weight.shape[1:])
    if layout == "eh3d":
        weight = weight.transpose(0, 1)
    with_e = layout.startswith("e") and weight.ndim > (3 if layout == "eh3d" else 1)
    weight = weight.movedim(-1, 0) if with_e else weight
    return weight.contiguous() if layout.startswith("e") else weight


def _shared(layout: str, heads: int, kv_heads: int | None) -> int:
    if layout not in ("packed", "separate", "3hde", "e3hd", "eh3d"):
        raise ValueError(f"layout must be one of {_HINT}; got {layout!r}")
    shared = heads if kv_heads is None else kv_heads
    if layout in ("3hde", "eh3d") and shared != heads:
        raise ValueError(f"layout {layout!r} has as many key heads as query heads, got {shared} and {heads}")
    return shared

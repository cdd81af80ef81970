"""Checks of shapes, and angles, for the Triton and C kernels of heads and RoPE."""

from __future__ import annotations

import contextlib
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from ._launch import MAX_GRID, is_faking
from ._operators import inner_contiguous

MAX_HEAD = 1024
"""The widest head."""


class Rotation(NamedTuple):
    """RoPE: pairs of `dim` elements of each head are rotated by angles position base^(-2 i / dim)."""

    style: Literal["half", "interleaved"]
    dim: int
    base: float = 10000.0


def head_sizes(
    x: Tensor, heads: int, kv_heads: int, rotation: Rotation | None, *, bias: Tensor | None = None
) -> tuple[int, int]:
    """The size of a head, and of its part with RoPE."""
    parts = heads + 2 * kv_heads
    if x.ndim < 1 + (rotation is not None) or not x.shape[-1] or x.shape[-1] % parts:
        raise ValueError(f"x must be [*, S, {parts} D], got shape {tuple(x.shape)}")
    size = x.shape[-1] // parts
    rotary = 0 if rotation is None else rotation.dim
    if size > MAX_HEAD:
        raise ValueError(f"heads of {size}: at most {MAX_HEAD} can have RoPE or a norm")
    if x.numel() // x.shape[-1] > MAX_GRID:
        raise ValueError(f"at most {MAX_GRID} rows can have RoPE or a norm")
    if x.dtype is torch.float64:
        raise ValueError("the kernels compute in float32, so x must not be float64")
    if rotary % 2 or rotary > size or (rotation is not None and rotary < 2):
        raise ValueError(f"an even number of at most {size} elements of a head can have RoPE, got {rotary}")
    if bias is not None and tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(f"bias must have shape ({x.shape[-1]},), got {tuple(bias.shape)}")
    if bias is not None:
        inner_contiguous("bias", bias)
    return size, rotary


def check_weights(size: int, *weights: Tensor | None) -> None:
    """Raise `ValueError` unless the weights of queries and keys are given together, each [size]."""
    if len({weight is None for weight in weights}) > 1:
        raise ValueError("q_weight and k_weight are given together")
    for weight in weights:
        if weight is not None and tuple(weight.shape) != (size,):
            raise ValueError(f"weights must have shape ({size},), got {tuple(weight.shape)}")
        if weight is not None:
            inner_contiguous("weight", weight)


def check_scales(k: Tensor, k_scale: Tensor | None, v_scale: Tensor | None) -> None:
    """Raise `ValueError` unless an int8 cache with these keys, and no other, has float32 scales in one layout."""
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scales is not None) != (k.dtype is torch.int8):
            raise ValueError(f"{name} is given with an int8 cache, and only then")
        if scales is not None and (tuple(scales.shape) != tuple(k.shape[:3]) or scales.dtype is not torch.float32):
            got = f"{scales.dtype} {tuple(scales.shape)}"
            raise ValueError(f"{name} must be float32 {tuple(k.shape[:3])}, got {got}")
    if k_scale is not None and v_scale is not None:
        inner_contiguous("k_scale", k_scale)
        if k_scale.stride() != v_scale.stride():
            raise ValueError(f"k_scale and v_scale must have one layout, got {k_scale.stride()}, {v_scale.stride()}")


def check_normed(dy: Tensor, x: Tensor | None, rstd: Tensor | None) -> None:
    """Check the tensors that the forward pass of a norm of heads saved, for the gradient `dy` of its output."""
    if (x is None) != (rstd is None) or (x is not None and x.shape != dy.shape):
        raise ValueError("x and rstd are those of the norm's forward, and x has the shape of dy")


def rows_of_angles(
    x: Tensor, rotation: Rotation | None, positions: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> torch.Size:
    """The leading shape of the angles, that of x or of one of its sequences; raises `ValueError` if they do not fit."""
    lead = x.shape[:-1]
    if rotation is None:
        return torch.Size()
    given, last = (positions, 0) if cos is None or sin is None else (cos, 1)
    if given is None:
        return lead[-1:]
    rows = given.shape[: given.ndim - last]
    fits = len(rows) <= len(lead) and all(a in (1, b) for a, b in zip(rows[::-1], lead[::-1], strict=False))
    if cos is None or sin is None:
        if not fits:
            raise ValueError(f"positions must broadcast to {tuple(lead)}, got shape {tuple(given.shape)}")
    elif not fits or sin.shape != cos.shape or cos.shape[-1] not in (rotation.dim, rotation.dim // 2):
        wanted = f"{(*lead, rotation.dim)} or {(*lead, rotation.dim // 2)}"
        raise ValueError(f"cos and sin must broadcast to {wanted}, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    return lead if rows[:-1].numel() > 1 else lead[-1:]


def spread(t: Tensor, rows: torch.Size, width: int | None = None) -> Tensor:
    """Positions, or cosines or sines of some `width`, expanded to these rows and contiguous."""
    shape = rows if width is None else (*rows, width)
    return t.reshape(t.shape[-len(shape) :]).expand(shape).contiguous()


_known: dict[tuple[float, int, torch.device], Tensor] = {}
_MOST = 256  # since the base may follow the length of a sequence


def frequencies_of(rotation: Rotation | None, device: torch.device) -> Tensor | None:
    """The angle per position of each pair, float32 [dim / 2]; cached per device."""
    if rotation is None:
        return None
    key = (rotation.base, rotation.dim, device)
    found = _known.get(key)
    if found is None:
        # Creating this cached tensor is not part of a call that is recorded, replayed or counted.
        with contextlib.nullcontext() if is_faking() and device.type != "cpu" else _disable_current_modes():
            powers = torch.arange(0, rotation.dim, 2, dtype=torch.float64, device=device) / -rotation.dim
            found = (rotation.base**powers).float()
        on_gpu = device.type == "cuda"
        # A graph under capture owns the memory of its tensors, and fake tensors have none: neither is cached.
        if type(found) is Tensor and not (on_gpu and torch.cuda.is_current_stream_capturing()):
            if on_gpu:  # the next call may be on another stream, which does not wait for this one
                torch.cuda.current_stream(device).synchronize()
            if len(_known) >= _MOST:
                _known.clear()
            _known[key] = found
    return found

# pyright: basic
# Triton has no type annotations.
"""Packed [q; k; v] before attention, in one pass forward and backward: bias, norm of each head, RoPE.

A tile is some rows by some heads. An angle is computed once for all heads of a tile: multiplied in float32, with the
rounding of the operation, and reduced in float64, so that angles of far positions lose no more digits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._device import column_sums
from ._heads import (
    Rotation,
    check_normed,
    check_scales,
    check_weights,
    frequencies_of,
    head_sizes,
    rows_of_angles,
    spread,
)
from ._launch import architecture, cdiv, launch, next_power_of_2, processors, programs_of, stops
from ._operators import inner_contiguous, operator, viewed_as_rows
from ._rope_kernel import _rope_bwd_kernel, _rope_codes_bwd_kernel, _rope_fwd_kernel, _rope_write_kernel
from .c import rope as c_rope
from .quantize import TRITON_KINDS, As, Codes


@dataclasses.dataclass(frozen=True)
class HeadTile:
    """Rows, heads, pairs and other elements of a head per tile; warps."""

    m: int
    h: int
    pairs: int
    rest: int
    num_warps: int


def head_tile(heads: int, size: int, rotary: int, most: int, amd: bool) -> HeadTile:
    """At most `most` elements, of four heads if they fit; of one if masks cut a head, which costs registers.

    On NVIDIA masks need few registers, on AMD pairs of scalars for each address.
    """
    pairs = next_power_of_2(rotary // 2) if rotary else 1
    rest = next_power_of_2(size - rotary) if rotary < size else 1
    width = next_power_of_2(2 * pairs * (rotary > 0) + rest * (rotary < size))
    cut = width != size or 0 < rotary < size
    most = most // 4 if width != size and not amd else most
    h = 1 if cut else min(4, next_power_of_2(heads), max(1, most // width))
    return HeadTile(max(1, most // (width * h)), h, pairs, rest, 4)


def _amd(device: torch.device) -> bool:
    return architecture(device).startswith("gfx")


# The backward kernel has two tensors and four sums in registers.
_FORWARD, _BACKWARD = 1024, 1024


class Roped(NamedTuple):
    """Results of the forward pass."""

    y: Tensor  # [*, S, (H + 2 Hkv) D]
    z: Tensor | None  # x + bias of the same shape, if it was stored
    rstd: Tensor | None  # [*, S, H + Hkv] float32


class RopeGradients(NamedTuple):
    """Results of the backward pass; `None` for results that were not requested."""

    dx: Tensor | None  # [*, S, (H + 2 Hkv) D]
    dbias: Tensor | None  # [(H + 2 Hkv) D]
    dq_weight: Tensor | None  # [D]
    dk_weight: Tensor | None  # [D]


def _angles_of(
    x: Tensor, rotation: Rotation | None, positions: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> tuple[tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None], int, bool]:
    """Tensors of the angles, computed or given; the number of rows after which they repeat; whether by pair."""
    rows = rows_of_angles(x, rotation, positions, cos, sin)
    period = max(1, rows.numel())
    if rotation is None or cos is None or sin is None:
        at = None if rotation is None or positions is None else spread(positions, rows)
        return (frequencies_of(rotation, x.device), at, None, None), period, False
    width = cos.shape[-1]
    return (None, None, spread(cos, rows, width), spread(sin, rows, width)), period, width < rotation.dim


@operator("rope", in_c=c_rope.decide_rope)
def rope_fwd(
    x: Tensor,
    heads: int,
    kv_heads: int,
    rotation: Rotation | None = None,
    *,
    bias: Tensor | None = None,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    norm_eps: float | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    zero_centered: bool = False,
    store: bool = False,
) -> Roped:
    """Bias, norm and RoPE of packed heads: y = rope(norm(x + bias)) for query and key heads, x + bias for
    values, as far as these are given.

    Norm: z rstd weight with rstd = (E[z^2] + eps)^-1/2 over a head. All in float32, rounded once.
    x, y: [*, S, (H + 2 Hkv) D]; bias: [(H + 2 Hkv) D]; weights: [D].
    Source: Su et al. 2021, arXiv:2104.09864; Henry et al. 2020, arXiv:2010.04245.

    Args:
        x: packed [q; k; v].
        heads: H.
        kv_heads: Hkv.
        rotation: RoPE of the heads, if any.
        bias: added first.
        positions: broadcast to [*, S]; 0..S-1 by default.
        cos: cosines, with `sin` and without positions: [*, S, R] by element or [*, S, R / 2] by pair, or broadcast to
            that, for heads with RoPE on R elements.
        sin: sines.
        norm_eps: added to the mean square; `None` for no norm.
        q_weight: gain of queries, with the norm; given with `k_weight` or not at all.
        k_weight: gain of keys.
        zero_centered: whether the gain is 1 + weight.
        store: whether x + bias is written, rounded, as the backward pass of a norm reads it.

    Raises:
        ValueError: for shapes that do not fit, float64, or heads of more than 1,024.
    """
    size, rotary = head_sizes(x, heads, kv_heads, rotation, bias=bias)
    check_weights(size, q_weight, k_weight)
    norm, known = norm_eps is not None, heads + kv_heads
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device) if store else None
    rstd = torch.empty((*x.shape[:-1], known), dtype=torch.float32, device=x.device) if norm else None
    if stops():
        return Roped(y, z, rstd)
    source = viewed_as_rows("x", x, x.shape[-1])
    M = source.shape[0]
    around, period, by_pair = _angles_of(x, rotation, positions, cos, sin)
    tile = head_tile(heads + 2 * kv_heads, size, rotary, _FORWARD, _amd(x.device))
    launch(
        _rope_fwd_kernel,
        cdiv(M, tile.m) * cdiv(heads + 2 * kv_heads, tile.h),
        (
            source, bias, q_weight if norm else None, k_weight if norm else None, *around, y, z, rstd,
            source.stride(0), M, heads, kv_heads, period,
        ),
        {"EPS": float(norm_eps or 0.0), **_constexprs(tile, norm, size, rotation, zero_centered), "BY_PAIR": by_pair},
        tile.num_warps,
    )  # fmt: skip
    return Roped(y, z, rstd)


@operator("rope_backward", in_c=c_rope.decide_rope_backward)
def rope_bwd(
    dy: Tensor,
    heads: int,
    kv_heads: int,
    rotation: Rotation | None = None,
    *,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    x: Tensor | None = None,
    rstd: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    zero_centered: bool = False,
    dx: bool = True,
    dbias: torch.dtype | None = None,
    dq_weight: torch.dtype | None = None,
    dk_weight: torch.dtype | None = None,
) -> RopeGradients:
    """Gradients of `rope_fwd`, in one pass over dy, and over x if there was a norm.

    RoPE is undone on dy, then dx = rstd (g - xhat E[g xhat]) with g = dy weight; the gradients of bias and weights are
    sums over rows in float32, in a fixed order, rounded once. Other arguments are those of the forward pass.

    Args:
        dy: gradient of y.
        x: the norm's input, if there was a norm: x + bias of the forward pass.
        rstd: as returned by the forward pass.
        q_weight: gain of queries, for dx.
        k_weight: gain of keys, for dx.
        dx: whether dx is needed.
        dbias: dtype of the bias gradient, `None` if it is not needed.
        dq_weight: the same for q_weight.
        dk_weight: the same for k_weight.

    Raises:
        ValueError: for shapes that do not fit, float64, or heads of more than 1,024.
    """
    size, rotary = head_sizes(dy, heads, kv_heads, rotation)
    check_normed(dy, x, rstd)
    check_weights(size, q_weight, k_weight)
    width, parts, known, device = dy.shape[-1], heads + 2 * kv_heads, heads + kv_heads, dy.device
    out = torch.empty(dy.shape, dtype=dy.dtype, device=device) if dx else None
    totals = [
        None if kind is None else torch.empty(n, dtype=kind, device=device)
        for kind, n in ((dbias, width), (dq_weight, size), (dk_weight, size))
    ]
    results = RopeGradients(out, *totals)
    if stops() or not any(t is not None for t in results):
        return results
    gradient = viewed_as_rows("dy", dy, width)
    source = None if x is None else viewed_as_rows("x", x, width)
    M = gradient.shape[0]
    if M == 0:
        for total in totals:
            if total is not None:
                total.zero_()
        return results
    tile = head_tile(parts, size, rotary, _BACKWARD, _amd(device))
    across = cdiv(parts, tile.h)
    programs, steps = programs_of(cdiv(M, tile.m), 8 * processors(device) // across)
    biases = gains = None
    if dbias is not None:
        biases = torch.empty((programs, width), dtype=torch.float32, device=device)
    if dq_weight is not None or dk_weight is not None:
        gains = torch.empty((known * programs, size), dtype=torch.float32, device=device)
    around, period, by_pair = _angles_of(dy, rotation, positions, cos, sin)
    launch(
        _rope_bwd_kernel,
        programs * across,
        (
            gradient, source, rstd, q_weight, k_weight, *around, out, biases, gains, gradient.stride(0),
            0 if source is None else source.stride(0), M, heads, kv_heads, period, steps,
        ),
        _constexprs(tile, x is not None, size, rotation, zero_centered) | {"BY_PAIR": by_pair},
        tile.num_warps,
    )  # fmt: skip
    if results.dbias is not None and biases is not None:
        column_sums(biases, width, results.dbias)
    if gains is not None:
        if results.dq_weight is not None:
            column_sums(gains[: heads * programs], size, results.dq_weight)
        if results.dk_weight is not None:
            column_sums(gains[heads * programs :], size, results.dk_weight)
    return results


class RopeCodes(NamedTuple):
    """The fields of `Codes` for the gradient, and the gradient of the bias."""

    rows: Tensor | None
    rows_inverse: Tensor | None
    columns: Tensor | None
    columns_inverse: Tensor | None
    dbias: Tensor | None  # [(H + 2 Hkv) D]

    @property
    def codes(self) -> Codes:
        """The gradient."""
        return Codes(*self[:4])


@operator("rope_backward_codes", written=("largest",))
def rope_codes_backward(
    dy: Tensor,
    heads: int,
    kv_heads: int,
    rotation: Rotation,
    to: As,
    *,
    largest: Tensor | None = None,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    dbias: torch.dtype | None = None,
) -> RopeCodes:
    """`rope_bwd` for RoPE on whole heads without a norm, with dx only in 8 bits.

    Args:
        dy: gradient of y, bfloat16 or float16.
        to: how dx is quantized.
        largest: float32 of one number, with a given scale: becomes max |dx| if that is larger, or NaN.
        dbias: dtype of the bias gradient, `None` if it is not needed; not supported for interleaved pairs.

    Raises:
        ValueError: as `rope_bwd`, and for heads of other than 32, 64 or 128, or another dtype.
    """
    size, rotary = head_sizes(dy, heads, kv_heads, rotation)
    if size not in (32, 64, 128) or rotary != size or dy.dtype not in TRITON_KINDS or not dy.numel():
        raise ValueError(f"quantized are gradients of 16 bits of heads of 32, 64 or 128, not {dy.dtype} of {size}")
    if dbias is not None and rotation.style == "interleaved":
        # Triton 3.7 aborts when it compiles that for sm_100.
        raise ValueError("no sums for a bias are made of interleaved pairs")
    width, device, M = dy.shape[-1], dy.device, dy.numel() // dy.shape[-1]
    codes = to.made(M, width, device)
    results = RopeCodes(*codes, None if dbias is None else torch.empty(width, dtype=dbias, device=device))
    if stops():
        return results
    gradient = viewed_as_rows("dy", dy, width)
    around, period, by_pair = _angles_of(dy, rotation, positions, cos, sin)
    tile = to.tile(1)
    down = cdiv(M, tile.m)
    biases = None if dbias is None else torch.empty((down, width), dtype=torch.float32, device=device)
    launch(
        _rope_codes_bwd_kernel,
        down * cdiv(width, tile.n),
        (
            gradient, *around, biases, tuple(codes), to.given_scale,
            None if largest is None else largest.view(torch.int32), gradient.stride(0), M, heads, kv_heads, period,
        ),
        {
            "D": size, "INTERLEAVED": rotation.style == "interleaved", "BLOCK_M": tile.m, "BLOCK_H": tile.n // size,
            "BY_PAIR": by_pair, "KIND": TRITON_KINDS[dy.dtype], **to.constexprs(dy.device),
        },
        tile.num_warps,
    )  # fmt: skip
    if results.dbias is not None and biases is not None:
        column_sums(biases, width, results.dbias)
    return results


@operator("rope_write", written=("k", "v", "k_scale", "v_scale"))
def rope_write(
    x: Tensor,
    heads: int,
    kv_heads: int,
    rotation: Rotation | None,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    bias: Tensor | None = None,
    norm_eps: float | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    zero_centered: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """`rope_fwd` of a new token per sequence, at the position that is its length; keys and values go into a cache.

    x: packed [B, (H + 2 Hkv) D]; k, v: [B, Hkv, max, D] of its dtype, or int8 with float32 scales [B, Hkv, max];
    lengths: [B] int64, before the new token. Written if there is room. Returns the queries, [B, H, D]. Other arguments
    are those of `rope_fwd`.

    Args:
        x: packed [q; k; v] of the new tokens.
        k: cache of keys.
        v: cache of values.
        lengths: number of filled rows of each sequence.
        k_scale: cache of the scales of int8 keys.
        v_scale: cache of the scales of int8 values.

    Raises:
        ValueError: for shapes that do not fit, float64, or heads of more than 1,024.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be [B, C], one row of each sequence, got {tuple(x.shape)}")
    size, rotary = head_sizes(x.unsqueeze(1), heads, kv_heads, rotation, bias=bias)
    check_weights(size, q_weight, k_weight)
    batch, rows = x.shape[0], k.shape[2] if k.ndim == 4 else 0
    q = torch.empty((batch, heads, size), dtype=x.dtype, device=x.device)
    if stops():
        return q
    if tuple(k.shape) != (batch, kv_heads, rows, size) or v.shape != k.shape or k.dtype is not v.dtype:
        shapes = f"{tuple(k.shape)} and {tuple(v.shape)}"
        raise ValueError(f"caches must both be {(batch, kv_heads, 'max', size)} of one dtype, got {shapes}")
    if tuple(lengths.shape) != (batch,) or lengths.dtype is not torch.int64:
        raise ValueError(f"lengths must be int64 ({batch},), got {lengths.dtype} {tuple(lengths.shape)}")
    inner_contiguous("lengths", lengths)
    check_scales(k, k_scale, v_scale)
    for name, tensor in (("x", x), ("k", k), ("v", v)):
        inner_contiguous(name, tensor)
    norm = norm_eps is not None
    fixed = _constexprs(head_tile(1, size, rotary, 1, amd=False), norm, size, rotation, zero_centered)
    del fixed["BLOCK_M"], fixed["BLOCK_H"]
    launch(
        _rope_write_kernel,
        batch * (heads + 2 * kv_heads),
        (
            x, bias, q_weight if norm else None, k_weight if norm else None,
            frequencies_of(rotation, x.device), lengths, q, k, v, k_scale, v_scale,
            x.stride(0), *k.stride()[:3], *v.stride()[:3],
            *((0, 0) if k_scale is None else k_scale.stride()[:2]), batch, heads, kv_heads, rows,
        ),
        {"EPS": float(norm_eps or 0.0), **fixed},
        1,
    )  # fmt: skip
    return q


def _constexprs(
    tile: HeadTile, norm: bool, size: int, rotation: Rotation | None, zero_centered: bool = False
) -> dict[str, Any]:
    """Compile-time arguments, in the order of the kernels."""
    return {
        "NORM": norm,
        "ZERO_CENTERED": zero_centered,
        "D": size,
        "ROTARY": 0 if rotation is None else rotation.dim,
        "INTERLEAVED": rotation is not None and rotation.style == "interleaved",
        "BLOCK_M": tile.m,
        "BLOCK_H": tile.h,
        "BLOCK_R": tile.pairs,
        "BLOCK_P": tile.rest,
    }

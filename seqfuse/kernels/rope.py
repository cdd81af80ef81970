# pyright: basic, reportGeneralTypeIssues=false, reportUnboundVariable=false
# Device functions are Triton's language: it has no types, and what a constexpr decides is not seen.
"""What is done to packed [q; k; v] before attention, in one pass each way: bias, norm of each head, rotation.

A tile is some rows by some heads. An angle is made once for all heads of a tile: its product in float32, as the
operation rounds it, reduced in float64, so that far positions keep what digits they have. Not yet run on a GPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._columns import column_sums
from ._heads import Rotation, check_normed, check_weights, checked, frequencies_of, rows_of_angles, spread
from ._launch import architecture, as_rows, cdiv, inner_contiguous, launch, next_power_of_2, processors, stops
from ._operators import operator
from ._rstd import rstd_of
from .c import rope as c_rope


@triton.jit
def _sine_cosine(angle):
    """Of float32 angles of any size: reduced to a quarter turn in float64, then polynomials of Cephes' `sinf`.

    libdevice has a path for large angles through local memory, of which every thread would get some.
    """
    wide = angle.to(tl.float64)
    quarters = tl.floor(wide * 0.6366197723675814 + 0.5)
    r = (wide - quarters * 1.5707963267948966).to(tl.float32)
    quadrant = quarters.to(tl.int64)
    z = r * r
    sine = r + r * z * ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1)
    cosine = 1.0 - 0.5 * z + z * z * ((2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2)
    odd = (quadrant & 1) != 0
    s = tl.where(odd, cosine, sine)
    c = tl.where(odd, sine, cosine)
    return tl.where((quadrant & 2) != 0, -s, s), tl.where(((quadrant + 1) & 2) != 0, -c, c)


@triton.jit
def _turn(frequencies, positions, rows, M, period, ROTARY: tl.constexpr, BLOCK_R: tl.constexpr):
    """Sine and cosine of each row and pair, [BLOCK_M, 1, BLOCK_R]."""
    pairs = tl.arange(0, BLOCK_R)
    frequency = tl.load(frequencies + pairs, mask=pairs < ROTARY // 2, other=0.0)
    # A 64-bit remainder is a call of many instructions; the host refuses more rows than 32 bits count.
    position = rows.to(tl.int32) % period
    if positions is not None:
        position = tl.load(positions + position, mask=rows < M, other=0)
    sine, cosine = _sine_cosine(position.to(tl.float32)[:, None] * frequency[None, :])
    return tl.expand_dims(sine, 1), tl.expand_dims(cosine, 1)


@triton.jit
def _angles(
    frequencies, positions, cos, sin, rows, M, period,
    ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, BY_PAIR: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Sines of the first and second members of each row's pairs, then cosines, [BLOCK_M, 1, BLOCK_R]: made or given."""
    if cos is None:
        sine, cosine = _turn(frequencies, positions, rows, M, period, ROTARY, BLOCK_R)
        return sine, sine, cosine, cosine
    else:
        mask = (rows < M)[:, None, None]
        place = (rows.to(tl.int32) % period).to(tl.int64)[:, None, None]
        if BY_PAIR:
            pairs = tl.arange(0, BLOCK_R)[None, None, :]
            inside = mask & (pairs < ROTARY // 2)
            at = place * (ROTARY // 2) + pairs
            sine = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32)
            cosine = tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
            return sine, sine, cosine, cosine
        else:
            s1, s2 = _load_pair(sin + place * ROTARY, mask, ROTARY, INTERLEAVED, BLOCK_R)
            c1, c2 = _load_pair(cos + place * ROTARY, mask, ROTARY, INTERLEAVED, BLOCK_R)
            return s1, s2, c1, c2


@triton.jit
def _load_pair(at, mask, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr):
    """First and second members of the pairs of heads that begin `at`, float32 [*, *, BLOCK_R] each."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        both = tl.load(at + cols, mask=mask & (cols < ROTARY), other=0.0).to(tl.float32)
        one, two = tl.split(tl.reshape(both, (both.shape[0], both.shape[1], BLOCK_R, 2)))
    else:
        cols = tl.arange(0, BLOCK_R)[None, None, :]
        inside = mask & (cols < ROTARY // 2)
        one = tl.load(at + cols, mask=inside, other=0.0).to(tl.float32)
        two = tl.load(at + ROTARY // 2 + cols, mask=inside, other=0.0).to(tl.float32)
    return one, two


@triton.jit
def _store_pair(at, one, two, mask, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr):
    kind = at.dtype.element_ty
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_R)[None, None, :]
        both = tl.reshape(tl.join(one.to(kind), two.to(kind)), (one.shape[0], one.shape[1], 2 * BLOCK_R))
        tl.store(at + cols, both, mask=mask & (cols < ROTARY))
    else:
        cols = tl.arange(0, BLOCK_R)[None, None, :]
        inside = mask & (cols < ROTARY // 2)
        tl.store(at + cols, one.to(kind), mask=inside)
        tl.store(at + ROTARY // 2 + cols, two.to(kind), mask=inside)


@triton.jit
def _load_rest(at, mask, ROTARY: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr):
    cols = tl.arange(0, BLOCK_P)[None, None, :]
    return tl.load(at + ROTARY + cols, mask=mask & (cols < D - ROTARY), other=0.0).to(tl.float32)


@triton.jit
def _store_rest(at, rest, mask, ROTARY: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr):
    cols = tl.arange(0, BLOCK_P)[None, None, :]
    tl.store(at + ROTARY + cols, rest.to(at.dtype.element_ty), mask=mask & (cols < D - ROTARY))


@triton.jit
def _pair_gain(
    q_weight, k_weight, heads, Q, KNOWN,
    ZERO_CENTERED: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """The gain of pairs of each head: that of queries, of keys, and 0 for values."""
    none = heads * 0
    q1, q2 = _load_pair(q_weight + none, heads < Q, ROTARY, INTERLEAVED, BLOCK_R)
    k1, k2 = _load_pair(k_weight + none, (heads >= Q) & (heads < KNOWN), ROTARY, INTERLEAVED, BLOCK_R)
    if ZERO_CENTERED:
        return q1 + k1 + 1.0, q2 + k2 + 1.0
    else:
        return q1 + k1, q2 + k2


@triton.jit
def _rest_gain(
    q_weight, k_weight, heads, Q, KNOWN,
    ZERO_CENTERED: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    none = heads * 0
    q = _load_rest(q_weight + none, heads < Q, ROTARY, D, BLOCK_P)
    gain = q + _load_rest(k_weight + none, (heads >= Q) & (heads < KNOWN), ROTARY, D, BLOCK_P)
    return gain + 1.0 if ZERO_CENTERED else gain


@triton.jit
def _rope_fwd_kernel(
    x, bias, q_weight, k_weight, frequencies, positions, cos, sin, y, stored, rstd_out, x_stride, M, Q, K, period,
    EPS: tl.constexpr, NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BY_PAIR: tl.constexpr,
):  # fmt: skip
    parts = tl.cast(Q, tl.int64) + K + K
    across = tl.cdiv(Q + K + K, BLOCK_H)
    pid = tl.program_id(0)
    rows = (pid // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    heads = ((pid % across).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :, None]
    known = heads < Q + K
    mask = (rows < M)[:, None, None] & (heads < parts)
    place = heads * D
    source = x + rows[:, None, None] * x_stride + place
    target = rows[:, None, None] * (parts * D) + place
    squares = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
    if ROTARY > 0:
        one, two = _load_pair(source, mask, ROTARY, INTERLEAVED, BLOCK_R)
        if bias is not None:
            b1, b2 = _load_pair(bias + place, heads < parts, ROTARY, INTERLEAVED, BLOCK_R)
            one += b1
            two += b2
        if stored is not None:
            # The backward pass reads the sum as it is stored, so the statistics are those of the stored one.
            one = one.to(stored.dtype.element_ty).to(tl.float32)
            two = two.to(stored.dtype.element_ty).to(tl.float32)
            _store_pair(stored + target, one, two, mask, ROTARY, INTERLEAVED, BLOCK_R)
        squares += tl.sum(one * one + two * two, 2)
    if ROTARY < D:
        rest = _load_rest(source, mask, ROTARY, D, BLOCK_P)
        if bias is not None:
            rest += _load_rest(bias + place, heads < parts, ROTARY, D, BLOCK_P)
        if stored is not None:
            rest = rest.to(stored.dtype.element_ty).to(tl.float32)
            _store_rest(stored + target, rest, mask, ROTARY, D, BLOCK_P)
        squares += tl.sum(rest * rest, 2)
    if NORM:
        rstd = tl.expand_dims(rstd_of(squares, tl.cast(D, tl.float32), EPS), 2)
        tl.store(rstd_out + rows[:, None, None] * (parts - K) + heads, rstd, mask=mask & known)
    if ROTARY > 0:
        if NORM:
            n1, n2 = one * rstd, two * rstd
            if q_weight is not None:
                g1, g2 = _pair_gain(q_weight, k_weight, heads, Q, Q + K, ZERO_CENTERED, ROTARY, INTERLEAVED, BLOCK_R)
                n1 *= g1
                n2 *= g2
        else:
            n1, n2 = one, two
        s1, s2, c1, c2 = _angles(
            frequencies, positions, cos, sin, rows, M, period, ROTARY, INTERLEAVED, BY_PAIR, BLOCK_R
        )
        one = tl.where(known, n1 * c1 - n2 * s1, one)
        two = tl.where(known, n2 * c2 + n1 * s2, two)
        _store_pair(y + target, one, two, mask, ROTARY, INTERLEAVED, BLOCK_R)
    if ROTARY < D:
        if NORM:
            n = rest * rstd
            if q_weight is not None:
                n *= _rest_gain(q_weight, k_weight, heads, Q, Q + K, ZERO_CENTERED, ROTARY, D, BLOCK_P)
            rest = tl.where(known, n, rest)
        _store_rest(y + target, rest, mask, ROTARY, D, BLOCK_P)


@triton.jit
def _rope_bwd_kernel(
    dy, x, rstd, q_weight, k_weight, frequencies, positions, cos, sin, dx, biases, gains, dy_stride, x_stride, M, Q, K,
    period, steps,
    NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BY_PAIR: tl.constexpr,
):  # fmt: skip
    """Rows of one program, one tile after the other, for the same heads: sums over rows stay in registers.

    biases: [programs, (Q + 2 K) D], gains: [Q + K, programs, D], float32.
    """
    parts = tl.cast(Q, tl.int64) + K + K
    across = tl.cdiv(Q + K + K, BLOCK_H)
    pid = tl.program_id(0)
    down = (pid // across).to(tl.int64)
    heads = ((pid % across).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H))[None, :, None]
    known = heads < Q + K
    place = heads * D
    if ROTARY > 0:
        b1 = tl.zeros((BLOCK_M, BLOCK_H, BLOCK_R), tl.float32)
        b2, w1, w2 = b1, b1, b1
    if ROTARY < D:
        b3 = tl.zeros((BLOCK_M, BLOCK_H, BLOCK_P), tl.float32)
        w3 = b3
    for step in tl.range(0, steps, num_stages=1):
        rows = (down * steps + tl.cast(step, tl.int64)) * BLOCK_M + tl.arange(0, BLOCK_M)
        mask = (rows < M)[:, None, None] & (heads < parts)
        gradient = dy + rows[:, None, None] * dy_stride + place
        target = rows[:, None, None] * (parts * D) + place
        along = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        if NORM:
            source = x + rows[:, None, None] * x_stride + place
            r = tl.load(rstd + rows[:, None, None] * (parts - K) + heads, mask=mask & known, other=0.0)
        if ROTARY > 0:
            d1, d2 = _load_pair(gradient, mask, ROTARY, INTERLEAVED, BLOCK_R)
            s1, s2, c1, c2 = _angles(
                frequencies, positions, cos, sin, rows, M, period, ROTARY, INTERLEAVED, BY_PAIR, BLOCK_R
            )
            g1 = tl.where(known, d1 * c1 + d2 * s2, d1)
            g2 = tl.where(known, d2 * c2 - d1 * s1, d2)
            if NORM:
                x1, x2 = _load_pair(source, mask & known, ROTARY, INTERLEAVED, BLOCK_R)
                x1 *= r
                x2 *= r
                if gains is not None:
                    w1 += g1 * x1
                    w2 += g2 * x2
                if q_weight is not None:
                    a1, a2 = _pair_gain(
                        q_weight, k_weight, heads, Q, Q + K, ZERO_CENTERED, ROTARY, INTERLEAVED, BLOCK_R
                    )
                    g1 = tl.where(known, g1 * a1, g1)
                    g2 = tl.where(known, g2 * a2, g2)
                along += tl.sum(g1 * x1 + g2 * x2, 2)
        if ROTARY < D:
            g3 = _load_rest(gradient, mask, ROTARY, D, BLOCK_P)
            if NORM:
                x3 = _load_rest(source, mask & known, ROTARY, D, BLOCK_P) * r
                if gains is not None:
                    w3 += g3 * x3
                if q_weight is not None:
                    a3 = _rest_gain(q_weight, k_weight, heads, Q, Q + K, ZERO_CENTERED, ROTARY, D, BLOCK_P)
                    g3 = tl.where(known, g3 * a3, g3)
                along += tl.sum(g3 * x3, 2)
        if NORM:
            mean = tl.expand_dims(along / D, 2)
        if ROTARY > 0:
            if NORM:
                g1 = tl.where(known, (g1 - x1 * mean) * r, g1)
                g2 = tl.where(known, (g2 - x2 * mean) * r, g2)
            if dx is not None:
                _store_pair(dx + target, g1, g2, mask, ROTARY, INTERLEAVED, BLOCK_R)
            if biases is not None:
                b1 += g1
                b2 += g2
        if ROTARY < D:
            if NORM:
                g3 = tl.where(known, (g3 - x3 * mean) * r, g3)
            if dx is not None:
                _store_rest(dx + target, g3, mask, ROTARY, D, BLOCK_P)
            if biases is not None:
                b3 += g3
    if biases is not None:
        to = biases + down * (parts * D) + place
        if ROTARY > 0:
            _store_pair(
                to, tl.sum(b1, 0, keep_dims=True), tl.sum(b2, 0, keep_dims=True), heads < parts,
                ROTARY, INTERLEAVED, BLOCK_R,
            )  # fmt: skip
        if ROTARY < D:
            _store_rest(to, tl.sum(b3, 0, keep_dims=True), heads < parts, ROTARY, D, BLOCK_P)
    if gains is not None:
        programs = tl.num_programs(0) // across
        to = gains + (heads * programs + down) * D
        if ROTARY > 0:
            _store_pair(
                to, tl.sum(w1, 0, keep_dims=True), tl.sum(w2, 0, keep_dims=True), known, ROTARY, INTERLEAVED, BLOCK_R
            )
        if ROTARY < D:
            _store_rest(to, tl.sum(w3, 0, keep_dims=True), known, ROTARY, D, BLOCK_P)


@triton.jit
def _rope_write_kernel(
    x, bias, q_weight, k_weight, frequencies, lengths, q, k, v, k_scale, v_scale,
    x_stride, k_batch, k_head, k_row, v_batch, v_head, v_row, scale_batch, scale_head, B, Q, K, rows,
    EPS: tl.constexpr, NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One head of a sequence's new token: a query is written apart, key and value into the cache, where they fit."""
    parts = Q + K + K
    pid = tl.program_id(0)
    head = (pid % parts).to(tl.int64)
    batch = (pid // parts).to(tl.int64)
    length = tl.load(lengths + batch).to(tl.int64)
    heads = tl.zeros((1, 1, 1), tl.int64) + head
    known = heads < Q + K
    every = heads >= 0
    source = x + batch * x_stride + heads * D
    squares = tl.zeros((1, 1), tl.float32)
    if ROTARY > 0:
        one, two = _load_pair(source, every, ROTARY, INTERLEAVED, BLOCK_R)
        if bias is not None:
            b1, b2 = _load_pair(bias + heads * D, every, ROTARY, INTERLEAVED, BLOCK_R)
            one += b1
            two += b2
        squares += tl.sum(one * one + two * two, 2)
    if ROTARY < D:
        rest = _load_rest(source, every, ROTARY, D, BLOCK_P)
        if bias is not None:
            rest += _load_rest(bias + heads * D, every, ROTARY, D, BLOCK_P)
        squares += tl.sum(rest * rest, axis=2)
    if NORM:
        rstd = tl.where(known, tl.expand_dims(rstd_of(squares, tl.cast(D, tl.float32), EPS), 2), 1.0)
    if ROTARY > 0:
        if NORM:
            one *= rstd
            two *= rstd
            if q_weight is not None:
                g1, g2 = _pair_gain(q_weight, k_weight, heads, Q, Q + K, ZERO_CENTERED, ROTARY, INTERLEAVED, BLOCK_R)
                one *= tl.where(known, g1, 1.0)
                two *= tl.where(known, g2, 1.0)
        # The place of the new token is its position, and rows are those of the batch.
        sine, cosine = _turn(frequencies, lengths, batch + tl.arange(0, 1), B, B, ROTARY, BLOCK_R)
        one, two = tl.where(known, one * cosine - two * sine, one), tl.where(known, two * cosine + one * sine, two)
    if ROTARY < D and NORM:
        rest *= rstd
        if q_weight is not None:
            gain = _rest_gain(q_weight, k_weight, heads, Q, Q + K, ZERO_CENTERED, ROTARY, D, BLOCK_P)
            rest *= tl.where(known, gain, 1.0)
    fits = (heads >= 0) & (length >= 0) & (length < rows)
    if k_scale is not None:
        most = tl.zeros((1, 1), tl.float32)
        if ROTARY > 0:
            most = tl.maximum(most, tl.max(tl.maximum(tl.abs(one), tl.abs(two)), 2))
        if ROTARY < D:
            most = tl.maximum(most, tl.max(tl.abs(rest), 2))
        scale = tl.expand_dims(most / 127.0, 2)
        place = batch * scale_batch + length
        tl.store(k_scale + place + (heads - Q) * scale_head, scale, mask=fits & known & (heads >= Q))
        tl.store(v_scale + place + (heads - Q - K) * scale_head, scale, mask=fits & ~known)
        scale = tl.where(scale == 0.0, 1.0, scale)
        if ROTARY > 0:
            one = tl.where(heads < Q, one, _rounded(one / scale))
            two = tl.where(heads < Q, two, _rounded(two / scale))
        if ROTARY < D:
            rest = tl.where(heads < Q, rest, _rounded(rest / scale))
    if head < Q:
        to_query = q + (batch * Q + heads) * D
        if ROTARY > 0:
            _store_pair(to_query, one, two, every, ROTARY, INTERLEAVED, BLOCK_R)
        if ROTARY < D:
            _store_rest(to_query, rest, every, ROTARY, D, BLOCK_P)
    elif head < Q + K:
        to_key = k + batch * k_batch + (heads - Q) * k_head + length * k_row
        if ROTARY > 0:
            _store_pair(to_key, one, two, fits, ROTARY, INTERLEAVED, BLOCK_R)
        if ROTARY < D:
            _store_rest(to_key, rest, fits, ROTARY, D, BLOCK_P)
    else:
        to_value = v + batch * v_batch + (heads - Q - K) * v_head + length * v_row
        if ROTARY > 0:
            _store_pair(to_value, one, two, fits, ROTARY, INTERLEAVED, BLOCK_R)
        if ROTARY < D:
            _store_rest(to_value, rest, fits, ROTARY, D, BLOCK_P)


@triton.jit
def _rounded(t):
    """To the nearest whole number within an int8, a half away from zero; what stores it cuts off what is left."""
    t = tl.minimum(tl.maximum(t, -127.0), 127.0)
    return tl.where(t < 0.0, t - 0.5, t + 0.5)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Rows, heads, pairs and other elements of a head at a time; warps."""

    m: int
    h: int
    pairs: int
    rest: int
    num_warps: int


def tile_of(heads: int, size: int, rotary: int, most: int, amd: bool) -> Tile:
    """At most `most` elements, of four heads where they fit; of one where masks cut a head, which costs registers.

    On NVIDIA masks are few registers of their own, on AMD pairs of scalars for each address.
    """
    pairs = next_power_of_2(rotary // 2) if rotary else 1
    rest = next_power_of_2(size - rotary) if rotary < size else 1
    width = next_power_of_2(2 * pairs * (rotary > 0) + rest * (rotary < size))
    cut = width != size or 0 < rotary < size
    most = most // 4 if width != size and not amd else most
    h = 1 if cut else min(4, next_power_of_2(heads), max(1, most // width))
    return Tile(max(1, most // (width * h)), h, pairs, rest, 4)


def _amd(device: torch.device) -> bool:
    return architecture(device).startswith("gfx")


# Backward has two tensors and four sums in registers.
_FORWARD, _BACKWARD = 1024, 1024


class Roped(NamedTuple):
    """Results of the forward pass."""

    y: Tensor  # [*, S, (H + 2 Hkv) D]
    z: Tensor | None  # the same, x + bias, where it was to be stored
    rstd: Tensor | None  # [*, S, H + Hkv] float32


class RopeGradients(NamedTuple):
    """Results of the backward pass; `None` for what was not asked for."""

    dx: Tensor | None  # [*, S, (H + 2 Hkv) D]
    dbias: Tensor | None  # [(H + 2 Hkv) D]
    dq_weight: Tensor | None  # [D]
    dk_weight: Tensor | None  # [D]


def _angles_of(
    x: Tensor, rotation: Rotation | None, positions: Tensor | None, cos: Tensor | None, sin: Tensor | None
) -> tuple[tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None], int, bool]:
    """What the kernels make angles of, or the angles; after how many rows they begin again; whether by pair."""
    rows = rows_of_angles(x, rotation, positions, cos, sin)
    period = max(1, rows.numel())
    if rotation is None or cos is None or sin is None:
        at = None if rotation is None or positions is None else spread(positions, rows)
        return (frequencies_of(rotation, x.device), at, None, None), period, False
    width = cos.shape[-1]
    return (None, None, spread(cos, rows, width), spread(sin, rows, width)), period, width < rotation.dim


@operator("rope", in_c=c_rope.decide_forward)
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
        cos: cosines, given with `sin` in place of positions: [*, S, R] by element or [*, S, R / 2] by pair, or
            broadcast to that, R elements of a head having RoPE.
        sin: sines.
        norm_eps: added to the mean square; `None` for no norm.
        q_weight: gain of queries, with the norm; given with `k_weight` or not at all.
        k_weight: gain of keys.
        zero_centered: whether the gain is one more than these.
        store: whether x + bias is to be written, rounded, as the backward of a norm reads it.

    Raises:
        ValueError: for shapes that do not fit, float64, or heads of more than 1,024.
    """
    size, rotary = checked(x, heads, kv_heads, rotation, bias=bias)
    check_weights(size, q_weight, k_weight)
    norm, known = norm_eps is not None, heads + kv_heads
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device) if store else None
    rstd = torch.empty((*x.shape[:-1], known), dtype=torch.float32, device=x.device) if norm else None
    if stops():
        return Roped(y, z, rstd)
    source = as_rows("x", x, x.shape[-1])
    M = source.shape[0]
    around, period, by_pair = _angles_of(x, rotation, positions, cos, sin)
    tile = tile_of(heads + 2 * kv_heads, size, rotary, _FORWARD, _amd(x.device))
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


@operator("rope_backward", in_c=c_rope.decide_backward)
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
    """Gradients of `rope_fwd`, in one pass over dy, and over x where there was a norm.

    RoPE is undone on dy, then dx = rstd (g - xhat E[g xhat]) with g = dy weight; the gradients of bias and weights are
    sums over rows in float32, in a fixed order, rounded once.

    Args:
        dy: gradient of y.
        heads: H.
        kv_heads: Hkv.
        rotation: as in the forward.
        positions: as in the forward.
        cos: as in the forward.
        sin: as in the forward.
        x: what was normalized, where there was a norm: x + bias of the forward.
        rstd: as the forward gave it.
        q_weight: gain of queries, for dx.
        k_weight: gain of keys, for dx.
        zero_centered: as in the forward.
        dx: whether dx is wanted.
        dbias: dtype of the bias gradient, `None` where it is not wanted.
        dq_weight: dtype of the gradient of q_weight, as well.
        dk_weight: dtype of the gradient of k_weight, as well.

    Raises:
        ValueError: for shapes that do not fit, float64, or heads of more than 1,024.
    """
    size, rotary = checked(dy, heads, kv_heads, rotation)
    check_normed(dy, x, rstd)
    check_weights(size, q_weight, k_weight)
    width, parts, known, device = dy.shape[-1], heads + 2 * kv_heads, heads + kv_heads, dy.device
    out = torch.empty(dy.shape, dtype=dy.dtype, device=device) if dx else None
    totals = [
        None if kind is None else torch.empty(n, dtype=kind, device=device)
        for kind, n in ((dbias, width), (dq_weight, size), (dk_weight, size))
    ]
    results = RopeGradients(out, *totals)
    if stops():
        return results
    gradient = as_rows("dy", dy, width)
    source = None if x is None else as_rows("x", x, width)
    M = gradient.shape[0]
    if M == 0:
        for total in totals:
            if total is not None:
                total.zero_()
        return results
    tile = tile_of(parts, size, rotary, _BACKWARD, _amd(device))
    across = cdiv(parts, tile.h)
    programs = min(cdiv(M, tile.m), max(1, 8 * processors(device) // across))
    steps = cdiv(cdiv(M, tile.m), programs)
    programs = cdiv(cdiv(M, tile.m), steps)
    biases = gains = None
    if dbias is not None:
        biases = torch.empty(programs * width, dtype=torch.float32, device=device)
    if dq_weight is not None or dk_weight is not None:
        gains = torch.empty(programs * known * size, dtype=torch.float32, device=device)
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
        column_sums(biases[: programs * width].view(programs, width), width, results.dbias)
    if gains is not None:
        table = gains[: known * programs * size].view(known * programs, size)
        if results.dq_weight is not None:
            column_sums(table[: heads * programs], size, results.dq_weight)
        if results.dk_weight is not None:
            column_sums(table[heads * programs :], size, results.dk_weight)
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
    """`rope_fwd` of a new token of each sequence, at the position that is its length: keys and values go into a cache.

    x: packed [B, (H + 2 Hkv) D]; k, v: [B, Hkv, max, D] of its dtype, or int8 with float32 scales [B, Hkv, max];
    lengths: [B] int64, before the new token. Written where there is room. Returns the queries, [B, H, D].

    Args:
        x: packed [q; k; v] of the new tokens.
        heads: H.
        kv_heads: Hkv.
        rotation: RoPE of the heads, if any.
        k: cache of keys.
        v: cache of values.
        lengths: rows that each sequence has.
        bias: as in `rope_fwd`, and so are norm_eps and weights.
        norm_eps: as there.
        q_weight: as there.
        k_weight: as there.
        zero_centered: as there.
        k_scale: where the scales of int8 keys go.
        v_scale: where those of values go.

    Raises:
        ValueError: for shapes that do not fit, float64, or heads of more than 1,024.
    """
    if x.ndim != 2:
        raise ValueError(f"x must be [B, C], one row of each sequence, got {tuple(x.shape)}")
    size, rotary = checked(x.unsqueeze(1), heads, kv_heads, rotation, bias=bias)
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
    for name, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (scales is not None) != (k.dtype is torch.int8):
            raise ValueError(f"{name} is given with an int8 cache, and only then")
        if scales is not None and (scales.shape != k.shape[:3] or scales.dtype is not torch.float32):
            raise ValueError(f"{name} must be float32 {tuple(k.shape[:3])}, got {scales.dtype} {tuple(scales.shape)}")
    if k_scale is not None and v_scale is not None and (k_scale.stride() != v_scale.stride() or k_scale.stride(2) != 1):
        raise ValueError(f"k_scale and v_scale must have one layout, got {k_scale.stride()}, {v_scale.stride()}")
    for name, tensor in (("x", x), ("k", k), ("v", v)):
        inner_contiguous(name, tensor)
    norm = norm_eps is not None
    fixed = _constexprs(tile_of(1, size, rotary, 1, amd=False), norm, size, rotation, zero_centered)
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
    tile: Tile, norm: bool, size: int, rotation: Rotation | None, zero_centered: bool = False
) -> dict[str, Any]:
    """In the order of the kernels."""
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

# pyright: basic, reportGeneralTypeIssues=false, reportUnboundVariable=false
# Device functions are in Triton's language, which has no types; pyright does not evaluate constexpr branches.
"""The kernels of packed heads: bias, norm and RoPE, forward and backward, and for a new token into a KV cache."""

from __future__ import annotations

import triton
import triton.language as tl

from ._device import rstd_of
from ._quantize_kernel import magnitude, quantize_tile


@triton.jit
def _sine_cosine(angle):
    """Sine and cosine of float32 angles: reduced to a quarter turn in float64, then polynomials of Cephes' `sinf`.

    libdevice reduces large angles in local memory, which would be allocated for every thread.
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
    # A 64-bit remainder takes many instructions; the host function rejects more rows than 32 bits can count.
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
    """Sines of the first and second elements of each row's pairs, then cosines, [BLOCK_M, 1, BLOCK_R]."""
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
    """First and second elements of the pairs of heads that begin at `at`, float32 [*, *, BLOCK_R] each."""
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
    """The gain of the pairs of each head: of queries, of keys, and 0 for values."""
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
            # The backward pass reads the stored sum, so the statistics are computed from it as well.
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
    """A program's rows, tile by tile, for the same heads: sums over rows stay in registers.

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
def _rope_codes_bwd_kernel(
    dy, frequencies, positions, cos, sin, biases, codes, scale, largest, dy_stride, M, Q, K, period,
    D: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BY_PAIR: tl.constexpr,
    KIND: tl.constexpr, SCALING: tl.constexpr, EXPONENT: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ROUNDED: tl.constexpr,
):  # fmt: skip
    """A tile of heads with RoPE on all their elements, and without a norm: their gradient in 8 bits.

    biases: [blocks of rows, (Q + 2 K) D] float32.
    """
    R: tl.constexpr = D // 2
    parts = tl.cast(Q, tl.int64) + K + K
    across = tl.cdiv(parts, BLOCK_H)
    pid = tl.program_id(0).to(tl.int64)
    row = pid // across * BLOCK_M
    head = pid % across * BLOCK_H
    rows = row + tl.arange(0, BLOCK_M)
    heads = (head + tl.arange(0, BLOCK_H))[None, :, None]
    known = heads < Q + K
    inside = heads < parts
    d1, d2 = _load_pair(
        dy + rows[:, None, None] * dy_stride + heads * D, (rows < M)[:, None, None] & inside, D, INTERLEAVED, R
    )
    s1, s2, c1, c2 = _angles(frequencies, positions, cos, sin, rows, M, period, D, INTERLEAVED, BY_PAIR, R)
    g1 = tl.where(known, d1 * c1 + d2 * s2, d1)
    g2 = tl.where(known, d2 * c2 - d1 * s1, d2)
    if biases is not None:
        to = biases + pid // across * (parts * D) + heads * D
        _store_pair(to, tl.sum(g1, 0, keep_dims=True), tl.sum(g2, 0, keep_dims=True), inside, D, False, R)
    both = tl.join(g1.to(KIND), g2.to(KIND))
    if not INTERLEAVED:
        both = tl.permute(both, (0, 1, 3, 2))
    quantize_tile(
        tl.reshape(both, (BLOCK_M, BLOCK_H * D)), scale, largest, None, None, codes[0], codes[1], codes[2], codes[3],
        row, head * D, M, parts * D, SCALING, EXPONENT, POWER_OF_TWO, ROUNDED, BLOCK_M, BLOCK_H * D,
    )  # fmt: skip


@triton.jit
def _rope_write_kernel(
    x, bias, q_weight, k_weight, frequencies, lengths, q, k, v, k_scale, v_scale,
    x_stride, k_batch, k_head, k_row, v_batch, v_head, v_row, scale_batch, scale_head, B, Q, K, rows,
    EPS: tl.constexpr, NORM: tl.constexpr, ZERO_CENTERED: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One head of a sequence's new token: a query is written to `q`, key and value into the cache, if they fit."""
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
        # The new token's position is its index in the cache, and the rows are those of the batch.
        sine, cosine = _turn(frequencies, lengths, batch + tl.arange(0, 1), B, B, ROTARY, BLOCK_R)
        one, two = tl.where(known, one * cosine - two * sine, one), tl.where(known, two * cosine + one * sine, two)
    if ROTARY < D and NORM:
        rest *= rstd
        if q_weight is not None:
            gain = _rest_gain(q_weight, k_weight, heads, Q, Q + K, ZERO_CENTERED, ROTARY, D, BLOCK_P)
            rest *= tl.where(known, gain, 1.0)
    fits = (heads >= 0) & (length >= 0) & (length < rows)
    if k_scale is not None:
        most = tl.zeros((1, 1), tl.int32)  # of bits, in which a NaN is largest
        if ROTARY > 0:
            most = tl.maximum(most, tl.max(tl.maximum(magnitude(one), magnitude(two)), 2))
        if ROTARY < D:
            most = tl.maximum(most, tl.max(magnitude(rest), 2))
        scale = tl.expand_dims(most.to(tl.float32, bitcast=True) / 127.0, 2)
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
    """Round to the nearest whole number in int8, half away from zero; the cast to int8 then truncates."""
    t = tl.minimum(tl.maximum(t, -127.0), 127.0)
    return tl.where(t < 0.0, t - 0.5, t + 0.5)

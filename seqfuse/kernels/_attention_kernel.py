# pyright: basic, reportGeneralTypeIssues=false, reportUnboundVariable=false
# Device functions are in Triton's language, which has no types; pyright does not evaluate constexpr branches.
"""The kernels of attention, and their tile sizes."""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl

from ._device import bend, keep_mask, mask_tile
from ._launch import family, next_power_of_2
from .activations import exponential, is_half, power, tanh_derivative

_LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, INTERPRET: tl.constexpr):
    if INTERPRET:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if acc is None:
        return tl.dot(a, b, input_precision=PRECISION)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _load(at, block, stride, limit, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """A block of rows of one head, [BLOCK, BLOCK_D], zeros beyond `limit` rows and D elements."""
    rows = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < limit)[:, None] & (cols < D)[None, :]
    return tl.load(at + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _store(at, value, block, stride, limit, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    rows = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_D)
    mask = (rows < limit)[:, None] & (cols < D)[None, :]
    tl.store(at + rows[:, None] * stride + cols[None, :], value.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _range(
    block, own, others, window, ends, sequences, steps,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each of a block of rows (keys), the first key (row) that it sees, and the end of its range.

    BEFORE: it sees nothing before its own position; AFTER: nothing after it.
    """
    # Rows beyond the last one get the range of the last one, so that they do not limit the block.
    place = tl.minimum(tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK), own - 1).to(tl.int32)
    first = tl.zeros_like(place)
    last = first + others
    if BEFORE:
        first = place
    if AFTER:
        last = tl.minimum(last, place + 1)
    if WINDOW:
        first = tl.maximum(first, place - window + 1)
        last = tl.minimum(last, place + window)
    if ends is not None:
        # The number of ends at or before each row, by binary search.
        low = tl.zeros_like(place)
        high = low + sequences
        for _ in range(steps):
            middle = (low + high) // 2
            open_ = low < high
            passed = open_ & (tl.load(ends + middle, mask=open_, other=0).to(tl.int32) <= place)
            high = tl.where(open_ & ~passed, middle, high)
            low = tl.where(passed, middle + 1, low)
        first = tl.maximum(first, tl.load(ends + low - 1, mask=low > 0, other=0).to(tl.int32))
        last = tl.minimum(last, tl.load(ends + low, mask=low < sequences, other=others).to(tl.int32))
    return first, last


@triton.jit
def _split(first, last, BLOCK: tl.constexpr):
    """The range `begin..end` of blocks that any row sees, and within it the range `full..rest` that all rows see."""
    begin = tl.min(first, 0) // BLOCK
    end = tl.maximum(tl.cdiv(tl.max(last, 0), BLOCK), begin)
    return begin, end, tl.cdiv(tl.max(first, 0), BLOCK), tl.min(last, 0) // BLOCK


@triton.jit
def _scores(
    a, b, factor, softcap, mask, own_stride, other_stride, own_block, other_block, owns, others, first, last, full,
    rest,
    SOFTCAP: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Scores as exponents of e or 2, [OWN, OTHER], -inf where hidden; with a soft-cap also tanh(score / softcap).

    A mask is only added to exponents of e.
    """
    scores = _dot(a, tl.trans(b), None, PRECISION, INTERPRET) * factor
    bent = scores
    if SOFTCAP:
        bent = bend(scores, a.dtype == tl.float32)
        scores = bent * softcap
    if mask is not None:
        own = tl.cast(own_block, tl.int64) * OWN + tl.arange(0, OWN)
        other = tl.cast(other_block, tl.int64) * OTHER + tl.arange(0, OTHER)
        inside = (own < owns)[:, None] & (other < others)[None, :]
        seen = tl.load(mask + own[:, None] * own_stride + other[None, :] * other_stride, mask=inside, other=0)
        if seen.dtype.is_floating():
            scores += seen.to(tl.float32)
        else:
            scores = tl.where(seen != 0, scores, float("-inf"))
    if (other_block < full) | (other_block >= rest):
        place = other_block * OTHER + tl.arange(0, OTHER)[None, :]
        scores = tl.where((place >= first[:, None]) & (place < last[:, None]), scores, float("-inf"))
    return scores, bent


@triton.jit
def _keep(
    seed, head, row_block, key_block, rows, keys, P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GROUPED: tl.constexpr,
):  # fmt: skip
    """Which weights dropout keeps, [BLOCK_M, BLOCK_N]: elements of one mask over contiguous [B, H, S, S]."""
    row = head * rows + tl.cast(row_block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    return keep_mask(seed, row, tl.cast(key_block, tl.int64) * BLOCK_N, keys, P[0], BLOCK_N, GROUPED)


@triton.jit
def _weights(scores, sums, ADDED: tl.constexpr, HALF: tl.constexpr):
    """Recompute weights from the log-sum-exp, as natural exponents: near it their difference loses no digits.

    With an additive mask, weights add up to one only after division by their sum: if all keys of a row have one large
    mask, the log-sum-exp has no digits left for the logarithm of the sum.
    """
    t = scores - sums
    if ADDED:
        # Summed in another order, a score may exceed the greatest one.
        t = tl.where(t > 0.0, 0.0, t)  # a NaN stays, which tl.minimum would lose
    return exponential(t, HALF)


@triton.jit
def _attention_fwd_kernel(
    q, k, v, mask, ends, seed, y, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_head, mask_row, mask_col,
    heads, rows, keys, window, sequences, steps, factor, softcap,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, P: tl.constexpr,
    GROUPED: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, BASE_2: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head per program."""
    HALF: tl.constexpr = is_half(q.dtype.element_ty)  # pyright: ignore[reportAssignmentType]
    blocks = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    # With a causal mask, late rows see the most keys, and the longest programs start first.
    block = blocks - 1 - pid % blocks
    batch = (pid // blocks // heads).to(tl.int64)
    member = (pid // blocks % heads).to(tl.int64)
    head = batch * heads + member
    k += batch * k_batch + member // GROUP * k_head
    v += batch * v_batch + member // GROUP * v_head
    if mask is not None:
        mask += batch * mask_batch + member * mask_head
    query = _load(q + batch * q_batch + member * q_head, block, q_row, rows, D, BLOCK_M, BLOCK_D)
    first, last = _range(block, rows, keys, window, ends, sequences, steps, False, CAUSAL, WINDOW, BLOCK_M)
    begin, end, full, rest = _split(first, last, BLOCK_N)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    # From 0, because Triton's address analysis cannot use a loaded lower bound in the loop.
    for i in tl.range(0, end - begin):
        at = begin + i
        key = _load(k, at, k_row, keys, D, BLOCK_N, BLOCK_D)
        scores, _ = _scores(
            query, key, factor, softcap, mask, mask_row, mask_col, block, at, rows, keys, first, last, full, rest,
            SOFTCAP, BLOCK_M, BLOCK_N, PRECISION, INTERPRET,
        )  # fmt: skip
        larger = tl.maximum(most, tl.max(scores, 1))
        # A row that has seen no key yet has weights of zero, not NaN.
        origin = tl.where(larger == float("-inf"), 0.0, larger)
        weights = power(scores - origin[:, None], BASE_2, HALF)
        shrink = power(most - origin, BASE_2, HALF)
        total = total * shrink + tl.sum(weights, 1)
        acc *= shrink[:, None]
        if P is not None:
            weights = mask_tile(weights, _keep(seed, head, block, at, rows, keys, P, BLOCK_M, BLOCK_N, GROUPED), P)
        value = _load(v, at, v_row, keys, D, BLOCK_N, BLOCK_D)
        acc = _dot(weights.to(value.dtype), value, acc, PRECISION, INTERPRET)
        most = larger
    blind = total == 0.0
    whole = acc / tl.where(blind, 1.0, total)[:, None]
    stride = tl.cast(heads, tl.int64) * D
    _store(y + (batch * rows * heads + member) * D, whole, block, stride, rows, D, BLOCK_M, BLOCK_D)
    place = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    if BASE_2:
        sums = (most + tl.log2(total)) * _LN_2
    else:
        sums = most + tl.log(total)
    # Infinite for an infinite score, so that the backward pass makes only the weight of its key NaN.
    sums = tl.where(most == float("inf"), most, sums)
    tl.store(lse + head * rows + place, tl.where(blind, 0.0, sums), mask=place < rows)


@triton.jit
def _attention_dq_kernel(
    dy, q, k, v, y, lse, mask, ends, seed, dq, deltas, parts,
    dy_batch, dy_head, dy_row, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dq_batch, dq_head, dq_row, mask_batch, mask_head, mask_row, mask_col,
    heads, rows, keys, window, sequences, steps, scale, factor, softcap,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, P: tl.constexpr,
    GROUPED: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """A block of rows of one head: dq, and delta = dy . y, which the kernel of dk and dv reads.

    With an additive mask that kernel also reads the factors with which the weights add up to one.
    """
    HALF: tl.constexpr = is_half(q.dtype.element_ty)  # pyright: ignore[reportAssignmentType]
    blocks = tl.cdiv(rows, BLOCK_M)
    pid = tl.program_id(0)
    block = blocks - 1 - pid % blocks
    batch = (pid // blocks // heads).to(tl.int64)
    member = (pid // blocks % heads).to(tl.int64)
    head = batch * heads + member
    k += batch * k_batch + member // GROUP * k_head
    v += batch * v_batch + member // GROUP * v_head
    if mask is not None:
        mask += batch * mask_batch + member * mask_head
    grad = _load(dy + batch * dy_batch + member * dy_head, block, dy_row, rows, D, BLOCK_M, BLOCK_D)
    stride = tl.cast(heads, tl.int64) * D
    result = _load(y + (batch * rows * heads + member) * D, block, stride, rows, D, BLOCK_M, BLOCK_D)
    delta = tl.sum(grad.to(tl.float32) * result.to(tl.float32), 1)
    place = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(deltas + head * rows + place, delta, mask=place < rows)
    sums = tl.load(lse + head * rows + place, mask=place < rows, other=0.0)
    query = _load(q + batch * q_batch + member * q_head, block, q_row, rows, D, BLOCK_M, BLOCK_D)
    first, last = _range(block, rows, keys, window, ends, sequences, steps, False, CAUSAL, WINDOW, BLOCK_M)
    begin, end, full, rest = _split(first, last, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    # From 0, because Triton's address analysis cannot use a loaded lower bound in the loop.
    for i in tl.range(0, end - begin):
        at = begin + i
        key = _load(k, at, k_row, keys, D, BLOCK_N, BLOCK_D)
        value = _load(v, at, v_row, keys, D, BLOCK_N, BLOCK_D)
        scores, bent = _scores(
            query, key, factor, softcap, mask, mask_row, mask_col, block, at, rows, keys, first, last, full, rest,
            SOFTCAP, BLOCK_M, BLOCK_N, PRECISION, INTERPRET,
        )  # fmt: skip
        weights = _weights(scores, sums[:, None], ADDED, HALF)
        if ADDED:
            total += tl.sum(weights, 1)
        dweights = _dot(grad, tl.trans(value), None, PRECISION, INTERPRET)
        if P is not None:
            dweights = mask_tile(dweights, _keep(seed, head, block, at, rows, keys, P, BLOCK_M, BLOCK_N, GROUPED), P)
        dscores = weights * (dweights - delta[:, None])
        if SOFTCAP:
            dscores *= tanh_derivative(bent)
        acc = _dot(dscores.to(key.dtype), key, acc, PRECISION, INTERPRET)
    if ADDED:
        part = 1.0 / tl.where(total == 0.0, 1.0, total)
        tl.store(parts + head * rows + place, part, mask=place < rows)
        acc *= part[:, None]
    _store(dq + batch * dq_batch + member * dq_head, acc * scale, block, dq_row, rows, D, BLOCK_M, BLOCK_D)


@triton.jit
def _attention_dkv_kernel(
    dy, q, k, v, lse, deltas, parts, mask, ends, seed, dk, dv,
    dy_batch, dy_head, dy_row, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, mask_batch, mask_head, mask_row, mask_col,
    heads, rows, keys, window, sequences, steps, scale, factor, softcap,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, P: tl.constexpr,
    GROUPED: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """A block of keys of one key head: sums the gradients from all query heads that share it, one after the other."""
    HALF: tl.constexpr = is_half(q.dtype.element_ty)  # pyright: ignore[reportAssignmentType]
    blocks = tl.cdiv(keys, BLOCK_N)
    kv_heads = heads // GROUP
    pid = tl.program_id(0)
    block = pid % blocks
    batch = (pid // blocks // kv_heads).to(tl.int64)
    shared = (pid // blocks % kv_heads).to(tl.int64)
    key = _load(k + batch * k_batch + shared * k_head, block, k_row, keys, D, BLOCK_N, BLOCK_D)
    value = _load(v + batch * v_batch + shared * v_head, block, v_row, keys, D, BLOCK_N, BLOCK_D)
    first, last = _range(block, keys, rows, window, ends, sequences, steps, CAUSAL, False, WINDOW, BLOCK_N)
    begin, end, full, rest = _split(first, last, BLOCK_M)
    sum_k = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    sum_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for i in range(GROUP):
        member = shared * GROUP + i
        head = batch * heads + member
        own_k = sum_k
        own_v = sum_v
        # A sum per head, if registers suffice: one sum over the rows of four heads has errors twice as large.
        if not HALF and GROUP > 1 and BLOCK_D > 64:
            own_k = tl.zeros_like(sum_k)
            own_v = tl.zeros_like(sum_v)
        queries = q + batch * q_batch + member * q_head
        grads = dy + batch * dy_batch + member * dy_head
        of_head = mask
        if mask is not None:
            of_head = mask + batch * mask_batch + member * mask_head
        for j in tl.range(0, end - begin):
            at = begin + j
            query = _load(queries, at, q_row, rows, D, BLOCK_M, BLOCK_D)
            grad = _load(grads, at, dy_row, rows, D, BLOCK_M, BLOCK_D)
            place = tl.cast(at, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            sums = tl.load(lse + head * rows + place, mask=place < rows, other=0.0)
            scores, bent = _scores(
                key, query, factor, softcap, of_head, mask_col, mask_row, block, at, keys, rows, first, last, full,
                rest, SOFTCAP, BLOCK_N, BLOCK_M, PRECISION, INTERPRET,
            )  # fmt: skip
            weights = _weights(scores, sums[None, :], ADDED, HALF)
            if ADDED:
                weights *= tl.load(parts + head * rows + place, mask=place < rows, other=1.0)[None, :]
            dweights = _dot(value, tl.trans(grad), None, PRECISION, INTERPRET)
            kept = weights
            if P is not None:
                keep = tl.trans(_keep(seed, head, at, block, rows, keys, P, BLOCK_M, BLOCK_N, GROUPED))
                dweights = mask_tile(dweights, keep, P)
                kept = mask_tile(weights, keep, P)
            own_v = _dot(kept.to(grad.dtype), grad, own_v, PRECISION, INTERPRET)
            delta = tl.load(deltas + head * rows + place, mask=place < rows, other=0.0)
            dscores = weights * (dweights - delta[None, :])
            if SOFTCAP:
                dscores *= tanh_derivative(bent)
            own_k = _dot(dscores.to(query.dtype), query, own_k, PRECISION, INTERPRET)
        if not HALF and GROUP > 1 and BLOCK_D > 64:
            own_k += sum_k
            own_v += sum_v
        sum_k = own_k
        sum_v = own_v
    _store(dk + batch * dk_batch + shared * dk_head, sum_k * scale, block, dk_row, keys, D, BLOCK_N, BLOCK_D)
    _store(dv + batch * dv_batch + shared * dv_head, sum_v, block, dv_row, keys, D, BLOCK_N, BLOCK_D)


@dataclasses.dataclass(frozen=True)
class ScoreTile:
    """Rows and keys per tile, warps, and pipeline stages."""

    m: int
    n: int
    num_warps: int = 4
    num_stages: int = 2


_Row = tuple[tuple[int, int, int, int], ...]
# Tiles by kernel and head width: for plain scores, soft-cap or packed sequences, dropout, and a mask. None spills on
# NVIDIA; on sm_90, tiles of at least 64 rows (keys, for dkv) use `wgmma`.
_HOPPER: dict[str, dict[int, _Row]] = {
    "fwd": {
        64: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2)),
        128: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 2)),
        256: ((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (64, 16, 8, 2)),
    },
    "dq": {
        64: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2)),
        128: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        256: ((64, 32, 8, 2), (64, 16, 8, 2), (64, 32, 8, 2), (64, 16, 8, 1)),
    },
    "dkv": {
        64: ((32, 128, 8, 2), (32, 128, 8, 2), (32, 128, 8, 2), (16, 64, 8, 2)),
        128: ((16, 128, 8, 2), (16, 128, 8, 2), (16, 128, 8, 2), (16, 64, 8, 1)),
        256: ((16, 64, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
    },
}
_BLACKWELL: dict[str, dict[int, _Row]] = {
    "fwd": {
        64: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (128, 32, 8, 2)),
        128: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 16, 8, 1)),
        256: ((64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 1)),
    },
    "dq": {
        64: ((64, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 1)),
        128: ((64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 1), (64, 32, 8, 1)),
        256: ((64, 32, 8, 2), (64, 32, 8, 1), (64, 32, 8, 2), (64, 16, 8, 1)),
    },
    "dkv": {
        64: ((16, 128, 8, 2), (32, 64, 4, 1), (32, 64, 8, 1), (32, 32, 4, 1)),
        128: ((32, 64, 4, 1), (32, 64, 4, 1), (32, 64, 4, 1), (16, 32, 4, 1)),
        256: ((16, 32, 8, 1), (16, 32, 8, 1), (16, 32, 8, 1), (16, 16, 8, 1)),
    },
}
_AMPERE: dict[str, dict[int, _Row]] = {
    "fwd": {
        64: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2)),
        128: ((128, 64, 8, 2), (128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 8, 1)),
        256: ((64, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (32, 32, 4, 2)),
    },
    "dq": {
        64: ((128, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2), (64, 32, 8, 2)),
        128: ((64, 64, 8, 2), (64, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2)),
        256: ((32, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2), (32, 32, 8, 2)),
    },
    "dkv": {
        64: ((64, 32, 8, 2), (16, 64, 8, 2), (16, 64, 8, 2), (16, 32, 4, 2)),
        128: ((32, 64, 8, 2), (16, 64, 8, 2), (16, 64, 8, 2), (16, 32, 8, 2)),
        256: ((16, 32, 8, 2), (16, 32, 8, 2), (16, 32, 8, 2), (16, 32, 8, 2)),
    },
}
_AMD: dict[str, dict[int, _Row]] = {
    "fwd": {
        64: ((128, 64, 8, 1), (64, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1)),
        128: ((128, 64, 8, 1), (64, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1)),
        256: ((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
    },
    "dq": {
        64: ((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        128: ((64, 32, 4, 1), (64, 32, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
        256: ((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 4, 1), (16, 32, 4, 1)),
    },
    "dkv": {
        64: ((32, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
        128: ((32, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1)),
        256: ((16, 32, 4, 1), (16, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)),
    },
}
_TILES = {"sm_90": _HOPPER, "sm_100": _BLACKWELL, "gfx942": _AMD}


def score_tile(kernel: str, size: int, dtype: torch.dtype, arch: str, load: int = 0) -> ScoreTile:
    """The tile of a kernel, `"fwd"`, `"dq"` or `"dkv"`; `load` is the column of the tables."""
    width = max(64, next_power_of_2(size))
    if dtype is torch.float32:
        # Matmuls in float32 are FMAs in registers. Gradients of keys spill with the common tiles.
        of = family(arch) if kernel == "dkv" else ""
        if width == 64 and load < 2:
            return ScoreTile(32, 32, 4 if of == "sm_90" and load == 0 else 8, 1)
        if width == 128 and of == "sm_100":
            return ScoreTile(16, 32, 8, 2)
        warps = 4 if (kernel, width, load) == ("dkv", 64, 2) else 8
        return ScoreTile(16, 32 if kernel == "fwd" else 16, warps, 2 if of == "sm_90" and load < 2 else 1)
    return ScoreTile(*_TILES.get(family(arch), _AMPERE)[kernel][width][load])

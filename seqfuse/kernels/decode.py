# pyright: basic, reportGeneralTypeIssues=false, reportUnboundVariable=false
# Device functions are in Triton's language, which has no types; pyright does not evaluate constexpr branches.
"""Attention of one new token per sequence over a KV cache, as in each step of decoding.

A key head's cache is split among programs, each of which computes all query heads that share it, so it is read once.
Splits have equal sizes by the length of the sequence, which only the device knows; a second kernel merges them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import bend
from ._heads import check_scales
from ._launch import INTERPRETED, architecture, cdiv, family, launch, next_power_of_2, processors, register_limit, stops
from ._operators import inner_contiguous, operator
from .activations import power

MAX_HEAD = 256
"""The widest head."""
MAX_SPLITS = 32
_LOG2_E = 1.4426950408889634
_LONG = 128  # rows of a block, with which one program keeps a processor of an H200 busy


@triton.jit
def _decode_kernel(
    q, k, v, k_scale, v_scale, lengths, y, partials, sums,
    q_batch, q_head, k_batch, k_head, k_row, v_batch, v_head, v_row, scale_batch, scale_head,
    heads, kv_heads, rows, splits, scale, softcap, window,
    GROUP: tl.constexpr, D: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr, INTERPRET: tl.constexpr,
    BASE_2: tl.constexpr,
):  # fmt: skip
    """One split of a key head of a sequence: y, and the log-sum-exp unless it is the only split."""
    pid = tl.program_id(0)
    split = pid % splits
    # A large group is processed in several parts.
    PARTS: tl.constexpr = (GROUP + BLOCK_G - 1) // BLOCK_G
    part = pid // splits % PARTS
    head = (pid // splits // PARTS % kv_heads).to(tl.int64)
    batch = (pid // splits // PARTS // kv_heads).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lengths + batch), 0), rows).to(tl.int32)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0)
    chunk = tl.cdiv(tl.cdiv(length - first, splits), BLOCK_N) * BLOCK_N
    start = first + split * chunk
    stop = tl.minimum(start + chunk, length)

    members = tl.cast(part, tl.int64) * BLOCK_G + tl.arange(0, BLOCK_G)
    cols = tl.arange(0, BLOCK_D)
    inside = cols < D
    taken = (members < GROUP)[:, None] & inside[None, :]
    queries = head * GROUP + members
    query = tl.load(q + batch * q_batch + queries[:, None] * q_head + cols[None, :], mask=taken, other=0.0)
    keys = k + batch * k_batch + head * k_head
    values = v + batch * v_batch + head * v_head
    if k_scale is not None:
        key_scales = k_scale + batch * scale_batch + head * scale_head
        value_scales = v_scale + batch * scale_batch + head * scale_head
    most = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    acc = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    unit = tl.full((), 0.0, tl.float32)
    for at in tl.range(start, stop, BLOCK_N):
        row = tl.cast(at, tl.int64) + tl.arange(0, BLOCK_N)
        seen = row < stop
        both = seen[:, None] & inside[None, :]
        key = tl.load(keys + row[:, None] * k_row + cols[None, :], mask=both, other=0.0).to(query.dtype)
        value = tl.load(values + row[:, None] * v_row + cols[None, :], mask=both, other=0.0).to(query.dtype)
        if INTERPRET:
            scores = tl.dot(query.to(tl.float32), tl.trans(key.to(tl.float32)))
        else:
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        if k_scale is not None:
            scores *= tl.load(key_scales + row, mask=seen, other=0.0)[None, :]
        scores *= scale
        if SOFTCAP:
            # softcap tanh(score / softcap); here scores are 2 log2(e) score / softcap.
            scores = softcap * bend(scores, query.dtype == tl.float32)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        larger = tl.maximum(most, tl.max(scores, 1))
        # If all scores of a row are -inf, as after overflow, its weights are zero, not NaN.
        origin = tl.where(larger == float("-inf"), 0.0, larger)
        weights = power(scores - origin[:, None], BASE_2, False)
        shrink = power(most - origin, BASE_2, False)
        total = total * shrink + tl.sum(weights, 1)
        if v_scale is not None:
            # In units of the greatest scale so far: the product of a weight and a small scale has few digits in
            # float16, or none. Units are small enough to use the range of float16.
            scales = tl.load(value_scales + row, mask=seen, other=0.0)
            before = unit
            unit = tl.maximum(unit, tl.max(scales, 0) * 2.0**-14)
            one = tl.where(unit == 0.0, 1.0, unit)
            weights *= (scales / one)[None, :]
            shrink *= before / one
        acc *= shrink[:, None]
        weights = weights.to(query.dtype)
        if INTERPRET:
            acc += tl.dot(weights.to(tl.float32), value.to(tl.float32))
        else:
            acc = tl.dot(weights, value, acc, input_precision=PRECISION)
        most = larger
    whole = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        whole *= unit
    out = batch * heads + queries
    if partials is None:
        tl.store(y + out[:, None] * D + cols[None, :], whole.to(y.dtype.element_ty), mask=taken)
    else:
        place = out * splits + split
        tl.store(partials + place[:, None] * D + cols[None, :], whole, mask=taken)
        logs = tl.log2(total) if BASE_2 else tl.log(total)
        tl.store(sums + place, most + logs, mask=members < GROUP)


@triton.jit
def _merge_kernel(
    partials, sums, y, splits, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BASE_2: tl.constexpr
):  # fmt: skip
    """One head of a sequence: merges its splits, weighted by their fraction of the sum of weights, in a fixed order."""
    out = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    cols = tl.arange(0, BLOCK_D)
    there = split < splits
    place = out * splits + split
    logs = tl.load(sums + place, mask=there, other=float("-inf"))
    most = tl.max(logs, 0)
    shares = power(logs - tl.where(most == float("-inf"), 0.0, most), BASE_2, False)
    total = tl.sum(shares, 0)
    mask = there[:, None] & (cols < D)[None, :]
    part = tl.load(partials + place[:, None] * D + cols[None, :], mask=mask, other=0.0)
    # A split that saw no key has a weight of zero.
    part = tl.where((logs == float("-inf"))[:, None], 0.0, part * shares[:, None])
    whole = tl.sum(part, 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(y + out * D + cols, whole.to(y.dtype.element_ty), mask=cols < D)


def _flops(q: Tensor, k: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of the two GEMMs over the whole cache, because only the device knows how much of it is filled."""
    return 4 * q.numel() * k.shape[2]


@operator("decode_attention", flops=_flops)
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    scale: float | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attention over the first `lengths` rows of each cache, y = softmax(scale q k^T) v; zeros if there are none.

    q, y: [B, H, D]; k, v: [B, Hkv, max, D], of q's dtype, or int8 with a float32 scale for each row, [B, Hkv, max];
    lengths: [B] int32 or int64 on the device, which the host does not read. Each key head serves H / Hkv query heads
    (GQA). The query is at the last of these rows. Scores and sums are float32.
    Source: Dao et al. 2023, Flash-Decoding.

    Args:
        q: the new token's queries.
        k: cache of keys, including the new token's.
        v: cache of values.
        lengths: number of filled rows of each cache.
        scale: D^-1/2 by default.
        window: number of rows that are seen, the last ones; all by default.
        softcap: scores become softcap tanh(score / softcap), if given; in 16 bits within 6e-8 softcap.
        k_scale: factors of int8 keys.
        v_scale: factors of int8 values.

    Raises:
        ValueError: for shapes or dtypes that do not fit, or heads of more than 256, or of 128 for float32 queries of an
            int8 cache, which do not fit in registers.
    """
    batch, heads, size, kv_heads, rows = _checked(q, k, v, lengths, k_scale, v_scale)
    if (window is not None and window < 1) or (softcap is not None and not softcap > 0):
        raise ValueError(f"window and softcap must be positive, got {window} and {softcap}")
    if k_scale is not None and q.dtype is torch.float32 and size > 128:
        raise ValueError(f"an int8 cache takes float32 queries of at most 128 elements, got {size}")
    y = torch.empty((batch, heads, size), dtype=q.dtype, device=q.device)
    if stops():
        return y
    if rows == 0:
        return y.zero_()
    group, wide, int8 = heads // kv_heads, q.dtype is torch.float32, k_scale is not None
    block_n = _block_n(size, q.dtype, int8, family(architecture(q.device)))
    seen = rows if window is None else min(rows, window)
    # As many programs as fit on the processors.
    splits = splits_of(batch * kv_heads, seen, block_n, processors(q.device) * (1 if block_n == _LONG else 2))
    partials = sums = None
    if splits > 1:
        partials = torch.empty(batch * heads * splits * size, dtype=torch.float32, device=q.device)
        sums = torch.empty(batch * heads * splits, dtype=torch.float32, device=q.device)
    factor = size**-0.5 if scale is None else scale
    # Scores in base 2, except in float32, where the rounding of log2(e) shows; a soft-cap needs twice score / softcap.
    base_2, unit = not wide, 1.0 if wide else _LOG2_E
    factor *= unit if softcap is None else 2 * _LOG2_E / softcap
    strides = (0, 0) if k_scale is None else (k_scale.stride(0), k_scale.stride(1))
    launch(
        _decode_kernel,
        batch * kv_heads * cdiv(group, _block_g(group, q.dtype)) * splits,
        (
            q, k, v, k_scale, v_scale, lengths, y, partials, sums, q.stride(0), q.stride(1), *k.stride()[:3],
            *v.stride()[:3], *strides, heads, kv_heads, rows, splits, float(factor),
            float((softcap or 0.0) * unit), window or 0,
        ),
        _constexprs(group, size, softcap is not None, window is not None, block_n, q.dtype) | {"BASE_2": base_2},
        8 if wide else 4,
        2 if wide or int8 else 3,  # stages: 64 KiB of shared memory hold two of a float32 or int8 cache
        # The registers of two programs per processor; converted int8 numbers need more.
        **register_limit(128 if wide and not int8 else None, architecture(q.device)),
    )  # fmt: skip
    if partials is not None:
        launch(
            _merge_kernel,
            batch * heads,
            (partials, sums, y, splits),
            {"D": size, "BLOCK_S": next_power_of_2(splits), "BLOCK_D": next_power_of_2(size), "BASE_2": base_2},
            4,
        )
    return y


def splits_of(key_heads: int, rows: int, block_n: int, programs: int) -> int:
    """Programs per key head: `programs` for all of them together, at least one block each, and at most 32.

    A second kernel merges splits, which takes 2 to 4 us on an H200.
    """
    return max(1, min(MAX_SPLITS, cdiv(rows, block_n), programs // max(1, key_heads)))


def _block_n(size: int, dtype: torch.dtype, int8: bool, of: str) -> int:
    # int8 numbers are converted in registers, and matmuls in float32 run in registers only.
    if dtype is torch.float32:
        return 16
    if next_power_of_2(size) > 128 or int8:
        return 32
    return _LONG if of == "sm_90" else 64


def _block_g(group: int, dtype: torch.dtype) -> int:
    return min(16 if dtype is torch.float32 else 32, max(16, next_power_of_2(group)))


def _checked(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, k_scale: Tensor | None, v_scale: Tensor | None
) -> tuple[int, int, int, int, int]:
    """B, H, D, Hkv and the rows of the cache."""
    if q.ndim != 3 or k.ndim != 4 or k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[2]:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ValueError(f"expects [B, H, D] and caches [B, Hkv, max, D], got {shapes}")
    batch, heads, size = q.shape
    kv_heads, rows = k.shape[1:3]
    if not kv_heads or heads % kv_heads or not 0 < size <= MAX_HEAD:
        raise ValueError(f"{kv_heads} key heads must divide {heads} heads, of 1 to {MAX_HEAD} elements, got {size}")
    if tuple(lengths.shape) != (batch,) or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths must be int32 or int64 ({batch},), got {lengths.dtype} {tuple(lengths.shape)}")
    inner_contiguous("lengths", lengths)
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"the kernels are for float32, float16 and bfloat16, not {q.dtype}")
    quantized = k.dtype is torch.int8
    if k.dtype is not v.dtype or (not quantized and k.dtype is not q.dtype):
        raise ValueError(f"caches must be {q.dtype} or int8, got {k.dtype} and {v.dtype}")
    check_scales(k, k_scale, v_scale)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        inner_contiguous(name, tensor)
    return batch, heads, size, kv_heads, rows


def _constexprs(group: int, size: int, softcap: bool, window: bool, block_n: int, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments, in the order of the kernel."""
    return {
        "GROUP": group,
        "D": size,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "BLOCK_G": _block_g(group, dtype),
        "BLOCK_N": block_n,
        "BLOCK_D": max(16, next_power_of_2(size)),
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        "INTERPRET": INTERPRETED,
    }

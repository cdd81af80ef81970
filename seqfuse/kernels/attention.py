# pyright: basic
# Triton has no type annotations.
"""Attention over heads without the scores in memory: an online softmax forward, recomputed weights backward.

Limits (causal, sliding window, packed sequences) are one range of keys for each row, and one range of rows for each
key. Blocks that all rows of a tile see are not masked, blocks that some of them see are, and all other blocks are
skipped.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ._attention_kernel import ScoreTile, _attention_dkv_kernel, _attention_dq_kernel, _attention_fwd_kernel, score_tile
from ._device import threshold_and_scale
from ._launch import INTERPRETED, architecture, cdiv, launch, next_power_of_2, stops
from ._operators import inner_contiguous, operator

MAX_HEAD = 256
"""The widest head."""


def _load_of(softcap: float | None, mask: Any, ends: Any, p: float) -> int:
    return 3 if mask is not None else 2 if p else int(softcap is not None or ends is not None)


def _flops(q: Tensor, k: Tensor, *_: Any, cu_seqlens: Tensor | None = None, **__: Any) -> int:
    """FLOPs of the two GEMMs over all keys; like torch's formula, it ignores masks."""
    batch, heads, rows, size = q.shape
    if cu_seqlens is None:
        pairs = batch * rows * k.shape[2]
    elif isinstance(cu_seqlens, FakeTensor) or cu_seqlens.is_meta:
        pairs = rows * rows // max(1, cu_seqlens.numel() - 1)  # as if all sequences had one length
    else:
        pairs = int(cu_seqlens.diff().square().sum())
    return 4 * heads * size * pairs


def _backward_flops(dy: Tensor, q: Tensor, k: Tensor, *_: Any, **rest: Any) -> int:
    """FLOPs of the five GEMMs, one of which recomputes the scores."""
    return 5 * _flops(q, k, **rest) // 2


@operator("attention", flops=_flops)
def attention_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of rows over keys, y = dropout(softmax(scale q k^T)) v, and the log-sum-exp of the scores of each row.

    q: [B, H, S, D]; k, v: [B, Hkv, N, D]; y: [B, S, H, D]; lse: [B, H, S] float32, natural, 0 for a row that sees no
    key, whose y is zero. Strides may be any, except that the last is 1. Each key head serves H / Hkv query heads (GQA).
    Scores and sums are float32, so scores beyond 65,504 are possible in float16; weights are rounded to the dtype of v
    before the second GEMM. Source: Dao 2023, arXiv:2307.08691.

    Args:
        q: queries.
        k: keys.
        v: values.
        scale: D^-1/2 by default.
        causal: whether row i sees only keys 0..i.
        window: how many keys a row sees on each side, including the key at its own position; all by default.
        softcap: scores become softcap tanh(score / softcap), if given; in 16 bits within 6e-8 softcap.
        mask: broadcast to [B, H, S, N]; bool or int: nonzero keys are seen; float: added to the scores.
        cu_seqlens: ends of sequences packed along S, int [n + 1]; no row sees another sequence. S = N.
        seed: int64 of one element, if weights are dropped.
        p: probability of dropping a weight, as elements of one mask over contiguous [B, H, S, N].

    Raises:
        ValueError: for shapes or dtypes that do not fit, float64, or heads of more than 256, or of 128 in float32.
    """
    batch, heads, rows, size, keys = _checked(q, k, v, window, softcap, mask, cu_seqlens, seed, p)
    y = torch.empty((batch, rows, heads, size), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)
    if stops():
        return y, lse
    if keys == 0:
        return y.zero_(), lse.zero_()
    window = _seen(window, rows, keys)
    tile = score_tile("fwd", size, q.dtype, architecture(q.device), _load_of(softcap, mask, cu_seqlens, p))
    # Exponents of 2 save a multiplication per score, but cost digits in float32, or with a mask that is added.
    base_2 = q.dtype is not torch.float32 and not _added(mask)
    _, factor, cap, limits = _numbers(size, scale, window, softcap, cu_seqlens, base_2)
    launch(
        _attention_fwd_kernel,
        batch * heads * cdiv(rows, tile.m),
        (
            q, k, v, mask, cu_seqlens, seed if p else None, y, lse, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *_mask_strides(mask, (batch, heads, rows, keys)), heads, rows, keys, *limits, factor, cap,
        ),
        _constexprs(tile, heads // k.shape[1], causal, window, softcap, p, keys, size, q.dtype) | {"BASE_2": base_2},
        tile.num_warps,
        tile.num_stages,
    )  # fmt: skip
    return y, lse


@operator("attention_backward", out="out", flops=_backward_flops)
def attention_bwd(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    out: tuple[Tensor, Tensor, Tensor] | None,
    scale: float | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, written into `out`, in two launches without atomics: the same bits each time.

    With w = exp(s - lse), dw = keep (dy . v) / (1 - p) and delta = dy . y: ds = w (dw - delta), dq = scale ds k,
    dk = scale ds^T q, dv = (keep w / (1 - p))^T dy. There is no gradient of a mask. Other arguments are those of
    `attention_fwd`.

    Args:
        dy: gradient of y, [B, S, H, D], any strides except that the last is 1.
        y: the result of `attention_fwd`, contiguous.
        lse: its log-sum-exp.
        out: tensors for the gradients, shaped as q, k and v, with the last stride 1; allocated if `None`.

    Raises:
        ValueError: as in `attention_fwd`.
    """
    batch, heads, rows, size, keys = _checked(q, k, v, window, softcap, mask, cu_seqlens, seed, p)
    for name, tensor, shape in (("dy", dy, (batch, rows, heads, size)), ("y", y, (batch, rows, heads, size))):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    if not y.is_contiguous() or not lse.is_contiguous() or tuple(lse.shape) != (batch, heads, rows):
        raise ValueError(f"y and lse are those of the forward, contiguous, got {tuple(lse.shape)}")
    if out is None:
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    else:
        dq, dk, dv = out
    for name, grad, of in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if inner_contiguous(name, grad).shape != of.shape:
            raise ValueError(f"{name} must have shape {tuple(of.shape)}, got {tuple(grad.shape)}")
    inner_contiguous("dy", dy)
    if stops():
        return dq, dk, dv
    window = _seen(window, rows, keys)
    deltas = torch.empty((batch, heads, rows), dtype=torch.float32, device=q.device)
    scale, factor, cap, limits = _numbers(size, scale, window, softcap, cu_seqlens, False)
    group, arch, load = heads // k.shape[1], architecture(q.device), _load_of(softcap, mask, cu_seqlens, p)
    grad = dy.transpose(1, 2)
    read = (*grad.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    mask_strides = _mask_strides(mask, (batch, heads, rows, keys))
    counts = (*mask_strides, heads, rows, keys, *limits, scale, factor, cap)
    seed, added = seed if p else None, {"ADDED": _added(mask)}
    parts = torch.empty(deltas.shape, dtype=torch.float32, device=q.device) if _added(mask) else None
    tile = score_tile("dq", size, q.dtype, arch, load)
    launch(
        _attention_dq_kernel,
        batch * heads * cdiv(rows, tile.m),
        (dy, q, k, v, y, lse, mask, cu_seqlens, seed, dq, deltas, parts, *read, *dq.stride()[:3], *counts),
        _constexprs(tile, group, causal, window, softcap, p, keys, size, q.dtype) | added,
        tile.num_warps,
        tile.num_stages,
    )
    tile = score_tile("dkv", size, q.dtype, arch, load)
    launch(
        _attention_dkv_kernel,
        batch * k.shape[1] * cdiv(keys, tile.n),
        (
            dy, q, k, v, lse, deltas, parts, mask, cu_seqlens, seed, dk, dv, *read, *dk.stride()[:3], *dv.stride()[:3],
            *counts,
        ),
        _constexprs(tile, group, causal, window, softcap, p, keys, size, q.dtype) | added,
        tile.num_warps,
        tile.num_stages,
    )  # fmt: skip
    return dq, dk, dv


def _seen(window: int | None, rows: int, keys: int) -> int | None:
    """The window, limited to the number of rows or keys, so that adding it to a row does not overflow 32 bits."""
    return None if window is None else min(window, max(rows, keys))


def _added(mask: Tensor | None) -> bool:
    """Whether a mask is added to the scores."""
    return mask is not None and mask.is_floating_point()


def takes_heads(dtype: torch.dtype, size: int) -> bool:
    """Whether there are kernels for heads of this dtype and size."""
    return 0 < size <= (MAX_HEAD if dtype in _HALF else 128 if dtype is torch.float32 else 0)


_HALF = (torch.float16, torch.bfloat16)


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    softcap: float | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    seed: Tensor | None,
    p: float,
) -> tuple[int, int, int, int, int]:
    """B, H, S, D and N."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or k.shape[::3] != q.shape[::3]:
        shapes = f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        raise ValueError(f"expects q [B, H, S, D] and k, v [B, Hkv, N, D], got {shapes}")
    (batch, heads, rows, size), (kv_heads, keys) = q.shape, k.shape[1:3]
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"{kv_heads} key heads must divide {heads} heads")
    if not takes_heads(q.dtype, size) or k.dtype is not q.dtype or v.dtype is not q.dtype:
        got = f"{q.dtype}, {k.dtype} and {v.dtype} of {size}"
        raise ValueError(f"the kernels are for heads of 1 to 256 in float16 or bfloat16, 128 in float32, not {got}")
    if (window is not None and window < 1) or (softcap is not None and not softcap > 0):
        raise ValueError(f"window and softcap must be positive, got {window} and {softcap}")
    if mask is not None:
        whole = (batch, heads, rows, keys)
        if mask.ndim != 4 or any(a not in (1, b) for a, b in zip(mask.shape, whole, strict=True)):
            raise ValueError(f"the mask must broadcast to {whole} from 4 dimensions, got {tuple(mask.shape)}")
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or rows != keys):
        got = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)} for {rows} rows and {keys} keys"
        raise ValueError(f"cu_seqlens must be integers [n + 1] of as many rows as keys, got {got}")
    if p and seed is None:
        raise ValueError("a seed is needed where weights are dropped")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        inner_contiguous(name, tensor)
    if cu_seqlens is not None:
        inner_contiguous("cu_seqlens", cu_seqlens)
    return batch, heads, rows, size, keys


def _numbers(
    size: int, scale: float | None, window: int | None, softcap: float | None, cu_seqlens: Tensor | None, base_2: bool
) -> tuple[float, float, float, tuple[int, int, int]]:
    """The scale; the factor of scores and the soft-cap; the window, the number of ends, and the steps of their search.

    With a soft-cap, the factor gives twice score / softcap as an exponent of 2, see `bend`.
    """
    scale = float(size**-0.5 if scale is None else scale)
    log2_e = math.log2(math.e)
    unit = log2_e if base_2 else 1.0
    factor = scale * unit if softcap is None else 2 * scale * log2_e / softcap
    ends = 0 if cu_seqlens is None else cu_seqlens.shape[0]
    return scale, factor, float((softcap or 0.0) * unit), (window or 0, ends, ends.bit_length())


def _mask_strides(mask: Tensor | None, whole: tuple[int, ...]) -> tuple[int, ...]:
    return (0, 0, 0, 0) if mask is None else mask.expand(whole).stride()


def _constexprs(
    tile: ScoreTile,
    group: int,
    causal: bool,
    window: int | None,
    softcap: float | None,
    p: float,
    keys: int,
    size: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Compile-time arguments, in the order of the kernels."""
    return {
        "GROUP": group,
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "SOFTCAP": softcap is not None,
        "P": threshold_and_scale(p) if p else None,
        "GROUPED": keys % 4 == 0,
        "D": size,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_D": max(16, next_power_of_2(size)),
        "PRECISION": "ieee" if dtype is torch.float32 else "tf32",
        "INTERPRET": INTERPRETED,
    }

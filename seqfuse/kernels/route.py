# pyright: basic, reportGeneralTypeIssues=false
# Device functions are in Triton's language, which has no types.
"""Factors of the chosen experts, from the logits of a router, and the gradients of these logits.

A row of logits is read once; its scores stay in registers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import cdiv, launch, next_power_of_2, stops
from ._operators import operator
from .activations import exponential, sigmoid, sigmoid_and_slope
from .c import route as c_route

_ELEMENTS = 1024  # that a program holds at a time


@triton.jit
def _of_row(logits, at, there, inside, COMPUTE: tl.constexpr, SOFTMAX: tl.constexpr):
    """The greatest logit of each row, and the sum of exponentials relative to it; a sigmoid needs neither."""
    if SOFTMAX:
        all = tl.load(logits + at, mask=inside, other=0.0).to(COMPUTE)
        all = tl.where(inside | ~there[:, None], all, -float("inf"))  # absent rows are zeros
        top = tl.max(all, 1)
        return top, tl.sum(exponential(all - top[:, None], False), 1)
    else:
        none = tl.zeros((at.shape[0],), COMPUTE)
        return none, none


@triton.jit
def _score(logit, top, total, SOFTMAX: tl.constexpr):
    if SOFTMAX:
        return exponential(logit - top, False) / total
    else:
        return sigmoid(logit)


@triton.jit
def _chosen(
    logits, experts, row, there, top, total, E,
    K: tl.constexpr, BLOCK_K: tl.constexpr, COMPUTE: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """The experts of each row, their scores, their offsets in memory, and the mask of a block."""
    j = tl.arange(0, BLOCK_K)[None, :]
    at, known = row[:, None] * K + j, there[:, None] & (j < K)
    expert = tl.load(experts + at, mask=known, other=0)
    logit = tl.load(logits + row[:, None] * E + expert, mask=known, other=0.0).to(COMPUTE)
    return expert, tl.where(known, _score(logit, top[:, None], total[:, None], SOFTMAX), 0.0), at, known


@triton.jit
def _tile(rows, E, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_E)[None, :]
    there = row < rows
    return row, column, there, row[:, None] * E + column, there[:, None] & (column < E)


@triton.jit
def _factors_kernel(
    logits, experts, probs, rows, E, SCALE: tl.constexpr, TINY: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    row, _, there, at, inside = _tile(rows, E, BLOCK_M, BLOCK_E)
    top, total = _of_row(logits, at, there, inside, COMPUTE, SOFTMAX)
    _, score, place, known = _chosen(logits, experts, row, there, top, total, E, K, BLOCK_K, COMPUTE, SOFTMAX)
    if NORMALIZE:
        score = score / tl.where(there, tl.sum(score, 1) + TINY, 1.0)[:, None]
    tl.store(probs + place, (score * SCALE).to(probs.dtype.element_ty), mask=known)


@triton.jit
def _gradients_kernel(
    d_probs, logits, experts, out, rows, E, SCALE: tl.constexpr, TINY: tl.constexpr, K: tl.constexpr,
    BLOCK_K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    row, column, there, at, inside = _tile(rows, E, BLOCK_M, BLOCK_E)
    top, total = _of_row(logits, at, there, inside, COMPUTE, SOFTMAX)
    expert, score, place, known = _chosen(logits, experts, row, there, top, total, E, K, BLOCK_K, COMPUTE, SOFTMAX)
    d = tl.load(d_probs + place, mask=known, other=0.0).to(COMPUTE) * SCALE
    if NORMALIZE:
        # d_j - sum of d_i s_i / sum of s_i, by differences: numbers near their mean would lose most of their digits.
        sum = tl.where(there, tl.sum(score, 1) + TINY, 1.0)[:, None]
        d = (tl.sum(score[:, None, :] * (d[:, :, None] - d[:, None, :]), 2) + d * TINY) / sum / sum
        d = tl.where(known, d, 0.0)
    rest = tl.sum(d * score, 1)
    dscores = tl.zeros((BLOCK_M, BLOCK_E), COMPUTE)
    for j in tl.static_range(K):
        mine = tl.arange(0, BLOCK_K)[None, :] == j
        own = tl.sum(tl.where(mine, expert, 0), 1)[:, None]
        dscores += tl.where(column == own, tl.sum(tl.where(mine, d, 0.0), 1)[:, None], 0.0)
    all = tl.load(logits + at, mask=inside, other=0.0).to(COMPUTE)
    if SOFTMAX:
        dlogits = _score(all, top[:, None], total[:, None], SOFTMAX) * (dscores - rest[:, None])
    else:
        _, slope = sigmoid_and_slope(all, False)
        dlogits = dscores * slope
    tl.store(out + at, dlogits.to(out.dtype.element_ty), mask=inside)


def _check(logits: Tensor, experts: Tensor, d_probs: Tensor | None = None) -> None:
    """Raise ValueError unless these are contiguous matrices with as many rows."""
    whole = all(t.ndim == 2 and t.is_contiguous() for t in (logits, experts))
    if not whole or len(logits) != len(experts) or experts.dtype is not torch.int64:
        message = f"expects contiguous logits [T, E] and experts [T, top_k] int64, got {logits.shape}, {experts.shape}"
        raise ValueError(message)
    if d_probs is not None and (d_probs.shape != experts.shape or not d_probs.is_contiguous()):
        raise ValueError(f"expects contiguous gradients {tuple(experts.shape)}, got {tuple(d_probs.shape)}")


def _run(kernel: Any, tensors: tuple[Tensor, ...], softmax: bool, normalize: bool, scale: float) -> None:
    logits, experts, _ = tensors[-3:]
    block, wide = next_power_of_2(logits.shape[1]), logits.dtype is torch.float64
    options = {
        "SCALE": float(scale), "TINY": 0.0 if softmax else c_route.TINY, "K": experts.shape[1],
        "BLOCK_K": next_power_of_2(experts.shape[1]), "SOFTMAX": softmax,
        "NORMALIZE": normalize, "BLOCK_M": max(1, _ELEMENTS // block // (4 if wide else 1)), "BLOCK_E": block,
        "COMPUTE": tl.float64 if wide else tl.float32,
    }  # fmt: skip
    launch(kernel, cdiv(len(logits), options["BLOCK_M"]), (*tensors, *logits.shape), options)


@operator("route_factors", in_c=c_route.decide_route)
def route_factors(
    logits: Tensor, experts: Tensor, *, softmax: bool = True, normalize: bool = True, scale: float = 1.0
) -> Tensor:
    """Return scale scores[experts], with a softmax or a sigmoid of logits, divided by their sum with `normalize`.

    logits: [T, E], experts: [T, top_k] int64, distinct in a row; the result is [T, top_k] float32, float64 for float64.

    Args:
        logits: logits of a router.
        experts: the experts of each token.
        softmax: whether scores are a softmax over all experts, or a sigmoid of each.
        normalize: whether the factors of a token are divided by their sum.
        scale: factor of all results.

    Raises:
        ValueError: for tensors that are not contiguous, or of other shapes.
    """
    _check(logits, experts)
    probs = torch.empty(experts.shape, dtype=_stats(logits), device=logits.device)
    if stops():
        return probs
    _run(_factors_kernel, (logits, experts, probs), softmax, normalize, scale)
    return probs


@operator("route_gradients", in_c=c_route.decide_route)
def route_gradients(
    d_probs: Tensor,
    logits: Tensor,
    experts: Tensor,
    *,
    softmax: bool = True,
    normalize: bool = True,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the gradient of logits, from the gradient of the factors of `route_factors`: [T, E], float32 by default.

    d_probs: [T, top_k]. Other arguments are those of `route_factors`.

    Args:
        d_probs: gradient of the factors.
        dtype: dtype of the result.

    Raises:
        ValueError: for tensors that are not contiguous, or of other shapes.
    """
    _check(logits, experts, d_probs)
    out = torch.empty(logits.shape, dtype=dtype or _stats(logits), device=logits.device)
    if stops():
        return out
    _run(_gradients_kernel, (d_probs, logits, experts, out), softmax, normalize, scale)
    return out


def _stats(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype is torch.float64 else torch.float32

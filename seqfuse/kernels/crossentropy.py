# pyright: basic, reportGeneralTypeIssues=false, reportUnboundVariable=false
# Device functions are in Triton's language, which has no types; pyright does not evaluate constexpr branches.
"""Cross-entropy of rows of logits, with a gradient that overwrites them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import architecture, launch, next_power_of_2, register_limit, stops
from ._operators import inner_contiguous, operator
from .activations import exponential, is_half, tanh
from .c import crossentropy as c_crossentropy

MAX_CLASSES = 2**30
"""The most classes."""

_WIDEST = 8192  # bytes
# Rows of more bytes than this use programs of 32 warps, one per processor: 132 rows of 128k classes in bfloat16 stay
# in the 50 MB of L2 until they are read again, but the rows of four programs per processor would not.
_LONG = 65536


@triton.jit
def _capped(logits, first, classes, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr):
    """A block of a row of logits after the soft-cap, -inf beyond its end; the argument of tanh; columns; the mask.

    Each thread has a line of neighbors, which it reduces by itself.
    """
    NEIGHBOURS: tl.constexpr = _neighbours(BLOCK_N, logits.dtype.element_ty)
    lines = tl.arange(0, BLOCK_N // NEIGHBOURS) << _shift(NEIGHBOURS)
    cols = first + lines[:, None] + tl.arange(0, NEIGHBOURS)[None, :]
    inside = cols < classes
    z = tl.load(logits + cols, mask=inside, other=0.0).to(COMPUTE)
    u = z
    if SOFTCAP is not None:
        u = z / SOFTCAP
        z = tanh(u, is_half(logits.dtype.element_ty)) * SOFTCAP
    return tl.where(inside, z, float("-inf")), u, cols, inside


@triton.constexpr_function
def _neighbours(block, dtype):
    """The number of elements in 16 bytes."""
    return min(block, 128 // dtype.primitive_bitwidth)


@triton.constexpr_function
def _shift(count):
    return count.bit_length() - 1


@triton.jit
def _finite(top):
    """The number subtracted from logits: 0 as long as all of them are -inf, when there is nothing to rescale."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _cross_entropy_kernel(
    logits, targets, scale, given, loss, made, stride, softmax_stride, ignore, classes,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK_N: tl.constexpr, COMPUTE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One row: an online softmax in one pass, then its gradient in place."""
    HALF: tl.constexpr = is_half(logits.dtype.element_ty)  # pyright: ignore[reportAssignmentType]
    classes = tl.cast(classes, tl.int32)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    counted = target != ignore
    if given is None:
        # Each thread reads it, and the reductions below synchronize all threads before the second pass writes.
        known = counted & (target >= 0) & (target < classes)
        picked = tl.load(logits + target, mask=known, other=0.0).to(COMPUTE)
        # Each thread has its own greatest logit and sum; they are merged once, at the end.
        lines: tl.constexpr = BLOCK_N // _neighbours(BLOCK_N, logits.dtype.element_ty)
        tops = tl.full((lines,), float("-inf"), COMPUTE)
        totals = tl.zeros((lines,), COMPUTE)
        plains = tl.zeros((lines,), COMPUTE)
        for first in tl.range(0, classes, BLOCK_N, num_stages=STAGES):
            z, _, _, inside = _capped(logits, first, classes, SOFTCAP, BLOCK_N, COMPUTE)
            higher = tl.maximum(tops, tl.max(z, 1))
            shift = _finite(higher)
            totals = totals * exponential(tops - shift, HALF) + tl.sum(exponential(z - shift[:, None], HALF), 1)
            tops = higher
            if SMOOTHING > 0.0:
                plains += tl.sum(tl.where(inside, z, 0.0), 1)
        top = tl.max(tops, 0)
        total = tl.sum(totals * exponential(tops - _finite(top), HALF), 0)
        if SMOOTHING > 0.0:
            plain = tl.sum(plains, 0)
        if SOFTCAP is not None:
            picked = tanh(picked / SOFTCAP, HALF) * SOFTCAP
        log_total = tl.log(total)
        value = log_total - (1.0 - SMOOTHING) * (picked - top)
        if SMOOTHING > 0.0:
            value -= SMOOTHING * (plain / classes.to(COMPUTE) - top)
        if Z_LOSS != 0.0:
            value += Z_LOSS * (top + log_total) * (top + log_total)
        tl.store(loss + row, tl.where(counted, value, 0.0))
        tl.store(made + row, top)
        tl.store(made + softmax_stride + row, total)
    else:
        top = tl.load(given + row).to(COMPUTE)
        total = tl.load(given + softmax_stride + row).to(COMPUTE)
    if GRADIENT:
        g = tl.full((), 1.0, COMPUTE)
        if scale is not None:
            g = tl.load(scale + row).to(COMPUTE)
        g = tl.where(counted, g, 0.0)
        by_softmax = g / total
        if Z_LOSS != 0.0:
            of_lse = 2.0 * Z_LOSS * (top + tl.log(total))
        spread = SMOOTHING / classes.to(COMPUTE)
        away = g * spread
        at_target = g * (1.0 - SMOOTHING + spread)
        for first in tl.range(0, classes, BLOCK_N, num_stages=STAGES):
            z, u, cols, inside = _capped(logits, first, classes, SOFTCAP, BLOCK_N, COMPUTE)
            # Multiplied, not selected: as in torch, a row that does not count propagates NaN.
            p = exponential(z - top, HALF) * by_softmax
            d = p - tl.where(cols == target, at_target, away)
            if Z_LOSS != 0.0:
                # Added last: with p near one, the loss's own term would absorb the digits of this one.
                d += p * of_lse
            if SOFTCAP is not None:
                # 1 - tanh^2 without cancellation near the cap.
                q = exponential(-2.0 * tl.abs(u), HALF)
                d *= 4.0 * q / ((1.0 + q) * (1.0 + q))
            tl.store(logits + cols, d.to(logits.dtype.element_ty), mask=inside)


@operator("cross_entropy", written=("logits",), in_c=c_crossentropy.decide_cross_entropy)
def cross_entropy_(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    scale: Tensor | None = None,
    softmax: Tensor | None = None,
    gradient: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Cross-entropy and softmax of each row of logits, which its gradient overwrites.

    z = softcap tanh(logits / softcap), or the logits;  lse = log sum exp z;  with s the label smoothing,
    loss = lse - (1 - s) z[target] - s mean z + z_loss lse^2, and 0 where the target is `ignore_index`.
    Gradient: scale (softmax(z) (1 + 2 z_loss lse) - (1 - s) onehot - s / V) (1 - (z / softcap)^2).

    logits: [R, V], any row stride, changed in place; targets: [R] int64; loss, scale: [R] float32, float64 for float64,
    and computed in that dtype; softmax: [2, R] of it, the greatest z of a row and the sum of exp z relative to it. The
    caller must check targets: one that is neither a class nor `ignore_index` reads nothing and counts as a logit of 0.
    Source: Milakov and Gimelshein 2018, arXiv:1805.02867; z-loss: Chowdhery et al. 2022, arXiv:2204.02311; soft-cap:
    Gemma 2, arXiv:2408.00118.

    Args:
        logits: the logits; overwritten by their gradient, if `gradient`.
        targets: a class per row.
        ignore_index: the target of rows that do not count.
        label_smoothing: fraction of the target that is spread over all classes.
        z_loss: factor of lse^2.
        softcap: bound on the logits.
        scale: gradient of each row's loss, one by default.
        softmax: as returned by an earlier call; then nothing is returned, and only the gradient is written.
        gradient: whether to write the gradient.

    Raises:
        ValueError: for shapes that differ, no or more than 2^30 classes, or classes that are not contiguous.
    """
    _check(logits, targets, scale, softmax)
    R, V = logits.shape
    compute, triton_compute = (
        (torch.float64, tl.float64) if logits.dtype is torch.float64 else (torch.float32, tl.float32)
    )
    loss = torch.empty(R, dtype=compute, device=logits.device) if softmax is None else None
    made = torch.empty((2, R), dtype=compute, device=logits.device) if softmax is None else None
    if stops():
        return loss, made
    arch = architecture(logits.device)
    amd = arch.startswith("gfx")
    warps = num_warps(V, logits.element_size(), amd)
    launch(
        _cross_entropy_kernel,
        R,
        (
            logits, targets, scale, softmax, loss, made, logits.stride(0), R if softmax is None else softmax.stride(0),
            ignore_index, V,
        ),
        {
            "SMOOTHING": float(label_smoothing),
            "Z_LOSS": float(z_loss),
            "SOFTCAP": None if softcap is None else float(softcap),
            "GRADIENT": gradient,
            "BLOCK_N": block(V, logits.element_size(), amd),
            "COMPUTE": triton_compute,
            "STAGES": 3,
        },
        warps,
        **register_limit(_registers(warps, logits.element_size()), arch),
    )  # fmt: skip
    return loss, made


def _check(logits: Tensor, targets: Tensor, scale: Tensor | None, softmax: Tensor | None) -> None:
    """Raise `ValueError` for arguments that the kernel does not support."""
    if logits.ndim != 2 or not 0 < logits.shape[1] <= MAX_CLASSES:
        raise ValueError(f"logits must be [R, V], 0 < V <= {MAX_CLASSES}, got {tuple(logits.shape)}")
    R = logits.shape[0]
    for name, row in (("targets", targets), ("scale", scale)):
        if row is not None and (tuple(row.shape) != (R,) or (R > 1 and row.stride(0) != 1)):
            raise ValueError(f"{name} must be contiguous, of shape ({R},), got {tuple(row.shape)}, {row.stride()}")
    inner_contiguous("logits", logits)
    if softmax is not None and tuple(inner_contiguous("softmax", softmax).shape) != (2, R):
        raise ValueError(f"softmax must have shape (2, {R}), got {tuple(softmax.shape)}")


def block(classes: int, itemsize: int, amd: bool = False) -> int:
    """The number of logits per block."""
    # With 32 warps, a thread has too few registers for float64 and for unaligned float32; AMD launches at most 16
    # warps.
    fits = itemsize < 4 or (itemsize == 4 and classes % 4 == 0)
    long = classes * itemsize > _LONG and fits and not amd
    return min((2 if long else 1) * _WIDEST // itemsize, next_power_of_2(classes))


def num_warps(classes: int, itemsize: int, amd: bool = False) -> int:
    """Warps for 16 bytes per thread: in unaligned rows each number has its own address, and more do not fit."""
    return max(4, block(classes, itemsize, amd) * itemsize // 512)


def _registers(warps: int, itemsize: int) -> int | None:
    """The register limit per thread: 64 with 32 warps, or the compiler makes room for a second program, and spills.

    The same holds for wider numbers with 16 warps, whose threads may have 128, and need 64 for float32.
    """
    return 64 if warps == 32 or (warps == 16 and itemsize == 4) else 128 if itemsize == 8 else None

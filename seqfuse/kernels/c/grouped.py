# pyright: basic
"""GEMMs of groups of rows in float32 as C: one call that calls BLAS for each group.

torch's grouped GEMM makes three slices and calls its own GEMM for each group, which calls the same function.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .call import CKernel, allocator, written

MOST = 2**31 - 1
"""The greatest size and stride that BLAS takes, whose integers have 32 bits."""

_SGEMM = (
    "typedef void (*Sgemm)(const char *, const char *, const int *, const int *, const int *, const float *,\n"
    "  const float *, const int *, const float *, const int *, const float *, float *, const int *);\n"
    "/* c = op(a) op(b) + beta c by columns, op(a) [m, k], op(b) [k, n]; strides are those from column to column. */\n"
    "INLINE void gemm(I call, char ta, char tb, I m, I n, I k, const float *a, I sa, const float *b, I sb,\n"
    "  float beta, float *c, I sc) {\n"
    "  const int m_ = m, n_ = n, k_ = k, sa_ = sa, sb_ = sb, sc_ = sc;\n"
    "  const float one = 1.f;\n"
    "  ((Sgemm)(uintptr_t)call)(&ta, &tb, &m_, &n_, &k_, &one, a, &sa_, b, &sb_, &beta, c, &sc_);\n"
    "}\n"
)
_EACH = (
    "I start = 0;\nfor (I g = 0; g < G; g++) {\n"
    "const I given = wide ? ((const int64_t *)ends)[g] : ((const int32_t *)ends)[g];\n"
    "const I bounded = given < R ? given : R, end = bounded > start ? bounded : start, rows = end - start;\n"
)


@functools.cache
def sgemm() -> int:
    """The address of the function that torch itself calls for a GEMM of float32 on a CPU, 0 where there is none."""
    try:
        found = ctypes.CDLL(torch._C.__file__).sgemm_  # of the libraries that torch is linked with
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


@functools.cache
def linear_kernel() -> CKernel:
    """Gives y = x weight_g^T + bias_g for the rows of each group; zeros behind them."""
    body = (
        f"(void)threads;\n{_EACH}float *to = y + start * N;\n"
        "if (bias) for (I r = 0; r < rows; r++) memcpy(to + r * N, bias + g * N, 4 * N);\n"
        "if (rows) gemm(call, turned ? 'N' : 'T', 'N', N, rows, K, weight + g * sg, sw, x + start * sx, sx,\n"
        "  bias ? 1.f : 0.f, to, N);\nstart = end;\n}\nmemset(y + start * N, 0, 4 * (R - start) * N);\n"
    )
    pointers = [*(f"const float *{name}" for name in ("x", "weight", "bias")), "const void *ends"]
    integers = ["R", "N", "K", "G", "sx", "sg", "sw", "turned", "wide", "call"]
    return written([*pointers, "float *y"], integers, [], body, before=_SGEMM)


@functools.cache
def outer_kernel() -> CKernel:
    """Gives dweight_g = dy_g^T x_g; zeros for a group without rows."""
    body = (
        f"(void)threads;\n{_EACH}float *to = out + g * N * K;\n"
        "if (rows) gemm(call, 'N', 'T', K, N, rows, x + start * sx, sx, dy + start * sy, sy, 0.f, to, K);\n"
        "else memset(to, 0, 4 * N * K);\nstart = end;\n}\n"
    )
    pointers = ["const float *dy", "const float *x", "const void *ends", "float *out"]
    return written(pointers, ["R", "N", "K", "G", "sy", "sx", "wide", "call"], [], body, before=_SGEMM)


def _with_rows(t: Tensor) -> tuple[Tensor, int]:
    """The same numbers with contiguous rows, and the stride from row to row, at least their length."""
    t = t.resolve_neg() if t.is_neg() else t
    (rows, columns), (down, along) = t.shape, t.stride()
    if (along == 1 or columns == 1) and (down >= columns or rows == 1):
        return t, max(down, columns)
    return t.clone(memory_format=torch.contiguous_format), columns


def _of_weights(t: Tensor) -> tuple[Tensor, int, bool]:
    """The same, of which each matrix has contiguous rows or columns, the stride between these, and whether columns."""
    t = t.resolve_neg() if t.is_neg() else t
    (_, rows, columns), (_, down, along) = t.shape, t.stride()
    if along == 1 and down >= columns:
        return t, down, False
    if down == 1 and along >= rows:
        return t, along, True
    return t.clone(memory_format=torch.contiguous_format), columns, False


def linear_of_groups(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Return y [R, N] of rows x [R, K], weights [G, N, K] and biases [G, N], all float32.

    `offsets`, int32 or int64, are read here. No size is 0.
    """
    x, sx = _with_rows(x)
    weight, sw, turned = _of_weights(weight)
    offsets = offsets.contiguous()
    bias = None if bias is None else bias.contiguous().resolve_neg()
    groups, columns, depth = weight.shape
    rows = x.shape[0]
    y = allocator()((rows, columns), (columns, 1), torch.float32)
    linear_kernel().function()(
        x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), offsets.data_ptr(), y.data_ptr(),
        rows, columns, depth, groups, sx, weight.stride(0), sw, turned, offsets.dtype is torch.int64, sgemm(), 1,
    )  # fmt: skip
    return y


def outer_of_groups(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return dy_g^T x_g, [G, N, K], of rows dy [R, N] and x [R, K], both float32.

    `offsets`, int32 or int64, are read here. No size is 0.
    """
    dy, sy = _with_rows(dy)
    x, sx = _with_rows(x)
    offsets = offsets.contiguous()
    (rows, columns), depth, groups = dy.shape, x.shape[1], offsets.shape[0]
    out = allocator()((groups, columns, depth), (columns * depth, depth, 1), torch.float32)
    outer_kernel().function()(
        dy.data_ptr(), x.data_ptr(), offsets.data_ptr(), out.data_ptr(),
        rows, columns, depth, groups, sy, sx, offsets.dtype is torch.int64, sgemm(), 1,
    )  # fmt: skip
    return out

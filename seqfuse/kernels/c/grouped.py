# pyright: basic
"""GEMMs of groups of rows in float32 as C: one call that calls BLAS for each group.

torch's grouped GEMM makes three slices and calls its own GEMM for each group, which calls the same function.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .call import CKernel, Decided, copies, decided_once, row_stride, written

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
def linear_kernel(biased: bool) -> CKernel:
    """Gives y = x weight_g^T + bias_g for the rows of each group; zeros behind them."""
    bias = "for (I r = 0; r < rows; r++) memcpy(to + r * N, bias + g * N, 4 * N);\n" * biased
    body = (
        f"(void)threads;\n{_EACH}float *to = y + start * N;\n{bias}"
        "if (rows) gemm(call, turned ? 'N' : 'T', 'N', N, rows, K, weight + g * sg, sw, x + start * sx, sx,\n"
        f"  {float(biased)}f, to, N);\nstart = end;\n}}\nmemset(y + start * N, 0, 4 * (R - start) * N);\n"
    )
    pointers = ["const float *x", "const float *weight", "const void *ends", *["const float *bias"] * biased]
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


def _rows_of(t: Tensor) -> tuple[int, bool]:
    """The stride from row to row, at least their length, and whether the tensor has to be copied to have one."""
    columns = t.shape[1]
    stride, copy = row_stride(t, columns)
    return (columns, True) if stride < columns else (stride, copy)


def _weights_of(t: Tensor) -> tuple[int, int, bool, bool]:
    """Strides from matrix to matrix and from row to row, or column to column; whether that; whether it is copied."""
    (_, rows, columns), (each, down, along) = t.shape, t.stride()
    if along == 1 and down >= columns:
        return each, down, False, False
    if down == 1 and along >= rows:
        return each, along, True, False
    return rows * columns, columns, False, True


def _decide_linear(x: Tensor, weight: Tensor, offsets: Tensor, *bias: Tensor) -> Decided:
    (rows, depth), (groups, columns, _) = x.shape, weight.shape
    (sx, copy), (sg, sw, turned, copied) = _rows_of(x), _weights_of(weight)
    copied = [0] * copy + [1] * copied + [i for i, t in enumerate((offsets, *bias), 2) if not t.is_contiguous()]
    numbers = rows, columns, depth, groups, sx, sg, sw, turned, offsets.dtype is torch.int64, sgemm()
    return Decided(linear_kernel(bool(bias)), [((rows, columns), torch.float32)], numbers, 0, None, copies(copied))


def _decide_outer(dy: Tensor, x: Tensor, offsets: Tensor) -> Decided:
    (rows, columns), depth, groups = dy.shape, x.shape[1], offsets.shape[0]
    (sy, copy), (sx, copy_x) = _rows_of(dy), _rows_of(x)
    copied = [0] * copy + [1] * copy_x + [2] * (not offsets.is_contiguous())
    numbers = rows, columns, depth, groups, sy, sx, offsets.dtype is torch.int64, sgemm()
    return Decided(outer_kernel(), [((groups, columns, depth), torch.float32)], numbers, 0, None, copies(copied))


_linear, _outer = decided_once(_decide_linear), decided_once(_decide_outer)


def linear_of_groups(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Return y [R, N] of rows x [R, K], weights [G, N, K] and biases [G, N], all float32.

    `offsets`, int32 or int64, are read here. No size is 0.
    """
    return _linear(x, weight, offsets) if bias is None else _linear(x, weight, offsets, bias)


def outer_of_groups(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Return dy_g^T x_g, [G, N, K], of rows dy [R, N] and x [R, K], both float32.

    `offsets`, int32 or int64, are read here. No size is 0.
    """
    return _outer(dy, x, offsets)

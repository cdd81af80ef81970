# pyright: basic
"""GEMMs of groups of rows in float32 in C: one call, which calls BLAS for each group.

For each group, torch's grouped GEMM creates three slices and calls torch's GEMM, which calls the same function.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from .call import CKernel, Decided, copies, decided_once, row_stride, written

MOST = 2**31 - 1
"""The greatest size and stride for BLAS, which uses 32-bit integers."""

_FEW, _WEIGHT = 64, 2**16
"""For groups of at most `_FEW` rows, and weights of at least `_WEIGHT` numbers, C computes the weight gradients, and
the outputs of half as many rows: MKL on an AMD processor packs a weight, and writes its gradient twice. Time relative
to MKL, for 1,024 x 256 numbers: outputs 0.75 with 16 rows, 0.85 with 32; gradients 0.64 with 16, 0.86 with 64."""

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
_BY_THREADS = "#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)\n"
_OUTER = (
    "/* out = dy^T x: BLAS writes zeros first. */\n"
    "static void outer(I N, I K, I rows, const float *dy, I sy, const float *x, I sx, float *out, int threads) {\n"
    f"{_BY_THREADS}for (I n = 0; n < N; n += TILE) {{\n"
    f"float side[TILE * {_FEW}];\nconst I m = N - n < TILE ? N - n : TILE;\n"
    "for (I r = 0; r < rows; r++) for (I i = 0; i < m; i++) side[r * TILE + i] = dy[r * sy + n + i];\n"
    "if (m == TILE) product(TILE, K, rows, side, 1, TILE, x, sx, out + n * K, K, 0);\n"
    "else product(m, K, rows, side, 1, TILE, x, sx, out + n * K, K, 0);\n}\n}\n"
)
_LINEAR = (
    "#define FILLED(rows) (((rows) + WIDTH - 1) / WIDTH * WIDTH)\n"
    "/* y = x w^T + bias; w is read where it is: BLAS packs it. */\n"
    "static void linear(I N, I K, I rows, const float *x, I sx, const float *w, I sw, const float *bias, float *y,\n"
    "  int threads) {\n"
    "float *side = calloc(FILLED(rows) * K, 4);\n"
    "for (I r = 0; r < rows; r++)\n"
    "  for (I k = 0; k < K; k++) side[r / WIDTH * K * WIDTH + k * WIDTH + r % WIDTH] = x[r * sx + k];\n"
    f"{_BY_THREADS}for (I n = 0; n < N; n += TILE) {{\n"
    "float to[TILE * WIDTH];\nconst float *from = w + n * sw;\nconst I m = N - n < TILE ? N - n : TILE;\n"
    "for (I r0 = 0; r0 < rows; r0 += WIDTH) {\nconst float *of = side + r0 * K;\n"
    "if (m == TILE) tile(TILE, VECTORS, K, from, sw, 1, of, WIDTH, to, WIDTH, 0);\n"
    "else for (I i = 0; i < m; i++) tile(1, VECTORS, K, from + i * sw, sw, 1, of, WIDTH, to + i * WIDTH, WIDTH, 0);\n"
    "for (I r = r0; r < rows && r < r0 + WIDTH; r++) for (I i = 0; i < m; i++)\n"
    "  y[r * N + n + i] = to[i * WIDTH + r - r0] + (bias ? bias[n + i] : 0.f);\n}\n}\nfree(side);\n}\n"
)
_EACH = (
    "I start = 0;\nfor (I g = 0; g < G; g++) {\n"
    "const I given = wide ? ((const int64_t *)ends)[g] : ((const int32_t *)ends)[g];\n"
    "const I bounded = given < R ? given : R, end = bounded > start ? bounded : start, rows = end - start;\n"
)


@functools.cache
def sgemm() -> int:
    """The address of the function that torch calls for a float32 GEMM on a CPU, 0 if there is none."""
    try:
        found = ctypes.CDLL(torch._C.__file__).sgemm_  # from the libraries that torch is linked with
    except (AttributeError, OSError):
        return 0
    return ctypes.cast(found, ctypes.c_void_p).value or 0


@functools.cache
def linear_kernel(biased: bool) -> CKernel:
    """The kernel of y = x weight_g^T + bias_g for the rows of each group, and zeros after them."""
    row = "for (I r = 0; r < rows; r++) memcpy(to + r * N, bias + g * N, 4 * N);\n" * biased
    own = "bias + g * N" if biased else "0"
    body = (
        f"{_EACH}float *to = y + start * N;\n"
        "if (rows && 2 * rows <= few && !turned && 3 * FILLED(rows) <= 4 * rows)\n"
        f"linear(N, K, rows, x + start * sx, sx, weight + g * sg, sw, {own}, to, threads);\nelse if (rows) {{\n{row}"
        "gemm(call, turned ? 'N' : 'T', 'N', N, rows, K, weight + g * sg, sw, x + start * sx, sx,\n"
        f"  {float(biased)}f, to, N);\n}}\nstart = end;\n}}\nmemset(y + start * N, 0, 4 * (R - start) * N);\n"
    )
    pointers = ["const float *x", "const float *weight", "const void *ends", *["const float *bias"] * biased]
    integers = ["R", "N", "K", "G", "sx", "sg", "sw", "turned", "wide", "few", "call"]
    return written([*pointers, "float *y"], integers, [], body, "tile.h", before=_SGEMM + _LINEAR)


@functools.cache
def outer_kernel() -> CKernel:
    """The kernel of dweight_g = dy_g^T x_g, and zeros for a group without rows."""
    body = (
        f"{_EACH}float *to = out + g * N * K;\n"
        "if (rows && rows <= few && K % LANES == 0)\n"
        "outer(N, K, rows, dy + start * sy, sy, x + start * sx, sx, to, threads);\n"
        "else if (rows) gemm(call, 'N', 'T', K, N, rows, x + start * sx, sx, dy + start * sy, sy, 0.f, to, K);\n"
        "else memset(to, 0, 4 * N * K);\nstart = end;\n}\n"
    )
    pointers = ["const float *dy", "const float *x", "const void *ends", "float *out"]
    return written(
        pointers, ["R", "N", "K", "G", "sy", "sx", "wide", "few", "call"], [], body, "tile.h", before=_SGEMM + _OUTER
    )


def _rows_of(t: Tensor) -> tuple[int, bool]:
    """The row stride, at least the length of a row, and whether the tensor must be copied to have one."""
    columns = t.shape[1]
    stride, copy = row_stride(t, columns)
    return (columns, True) if stride < columns else (stride, copy)


def _weights_of(t: Tensor) -> tuple[int, int, bool, bool]:
    """The stride of matrices; that of rows or of columns; whether it is of columns; whether a copy is needed."""
    (_, rows, columns), (each, down, along) = t.shape, t.stride()
    if along == 1 and down >= columns:
        return each, down, False, False
    if down == 1 and along >= rows:
        return each, along, True, False
    return rows * columns, columns, False, True


def _decide_linear(here: bool, x: Tensor, weight: Tensor, offsets: Tensor, *bias: Tensor) -> Decided:
    (rows, depth), (groups, columns, _) = x.shape, weight.shape
    (sx, copy), (sg, sw, turned, copied) = _rows_of(x), _weights_of(weight)
    copied = [0] * copy + [1] * copied + [i for i, t in enumerate((offsets, *bias), 2) if not t.is_contiguous()]
    few = _FEW if here and columns * depth >= _WEIGHT else 0
    numbers = rows, columns, depth, groups, sx, sg, sw, turned, offsets.dtype is torch.int64, few, sgemm()
    work, made = rows * columns * depth, [((rows, columns), torch.float32)]
    return Decided(linear_kernel(bool(bias)), made, numbers, work, None, copies(copied))


def _decide_outer(here: bool, dy: Tensor, x: Tensor, offsets: Tensor) -> Decided:
    (rows, columns), depth, groups = dy.shape, x.shape[1], offsets.shape[0]
    (sy, copy), (sx, copy_x) = _rows_of(dy), _rows_of(x)
    copied = [0] * copy + [1] * copy_x + [2] * (not offsets.is_contiguous())
    few = _FEW if here and columns * depth >= _WEIGHT else 0
    numbers = rows, columns, depth, groups, sy, sx, offsets.dtype is torch.int64, few, sgemm()
    work, made = rows * columns * depth, [((groups, columns, depth), torch.float32)]
    return Decided(outer_kernel(), made, numbers, work, None, copies(copied))


_linear, _outer = (
    {here: decided_once(functools.partial(decide, here)) for here in (False, True)}
    for decide in (_decide_linear, _decide_outer)
)


def linear_of_groups(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None, here: bool = False) -> Tensor:
    """Return y [R, N] of rows x [R, K], weights [G, N, K] and biases [G, N], all float32.

    `offsets`, int32 or int64, are read here. No size is 0. BLAS multiplies, except groups of few rows with `here`.
    """
    return _linear[here](x, weight, offsets) if bias is None else _linear[here](x, weight, offsets, bias)


def outer_of_groups(dy: Tensor, x: Tensor, offsets: Tensor, here: bool = False) -> Tensor:
    """Return dy_g^T x_g, [G, N, K], of rows dy [R, N] and x [R, K], both float32; otherwise as `linear_of_groups`."""
    return _outer[here](dy, x, offsets)

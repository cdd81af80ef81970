# pyright: basic, reportOptionalSubscript=false, reportOptionalCall=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Device functions are Triton's language: it has no types, and what is None in it was decided when it was compiled.
"""Matrix products with an epilogue: C = epilogue(A B), one persistent kernel for forward, dgrad and wgrad.

A program walks over tiles of C. An epilogue is fixed at compile time: what is `None` is not there, and activations are
device functions, so a new one needs no new kernel. In this order, in float32 (float64 for float64):

| step | in forms |
| --- | --- |
| add a bias | all |
| store the pre-activation | plain, gated |
| `value(z)`, or `value(gate) up` from two accumulators | plain, gated |
| dropout | all |
| multiply by `derivative(t)`, give `value(t)` again; or make [dgate; dup] of a packed t | dact; dgated |
| add a residual, or what C holds | plain, gated, dact |
| partial sums over the tile's rows | plain, dact, dgated |

Beside it the rows of A may be summed, by the programs that work on the first column of tiles: with A = dy^T that is a
bias's gradient, made of the tiles that the product reads.

`linear` and `linear_gated` are forward, `linear_dgrad`, `linear_dgrad_gated` and `linear_wgrad_bias` backward. On
Hopper and later, descriptors (TMA) move tiles of factors, and separately those of everything else, where addresses and
strides are multiples of 16 bytes. Not yet run on a GPU.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._columns import column_sums
from ._gemm_tiles import DESCRIBED, Number, Tile, choose, family, weight_of
from ._launch import (
    address,
    allow_scratch,
    architecture,
    cdiv,
    inner_contiguous,
    interpreted,
    launch,
    processors,
    stops,
)
from ._operators import operator
from ._philox import dropped, threshold_and_scale
from .activations import Activation, apply, gradient, is_half, name_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@triton.jit
def _place(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a tile: groups of `GROUP` rows of tiles, so that programs side by side share operands in L2."""
    width = GROUP * tiles_n
    first = tile // width * GROUP
    size = tl.minimum(tiles_m - first, GROUP)
    return first + (tile % width) % size, (tile % width) // size


@triton.jit
def _halves(acc):
    rows: tl.constexpr = acc.shape[0]
    columns: tl.constexpr = acc.shape[1]
    return tl.split(tl.permute(tl.reshape(acc, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def _parts(acc, SPLIT: tl.constexpr):
    """The accumulator as a tuple of 1, 2 or 4 equal runs of columns."""
    if SPLIT == 1:
        return (acc,)
    elif SPLIT == 2:
        return _halves(acc)
    else:
        left, right = _halves(acc)
        first, second = _halves(left)
        third, fourth = _halves(right)
        return (first, second, third, fourth)


@triton.jit
def _load_tile(ptr, desc, ld, rows, cols, inside, row, col, ACC: tl.constexpr):
    if desc is not None:
        return desc.load([row.to(tl.int32), col.to(tl.int32)]).to(ACC)
    else:
        return tl.load(ptr + rows[:, None] * ld + cols[None, :], mask=inside, other=0.0).to(ACC)


@triton.jit
def _store_tile(ptr, desc, ld, rows, cols, inside, row, col, value):
    value = value.to(ptr.dtype.element_ty)
    if desc is not None:
        desc.store([row.to(tl.int32), col.to(tl.int32)], value)
    else:
        tl.store(ptr + rows[:, None] * ld + cols[None, :], value, mask=inside)


@triton.jit
def _accumulated(
    a, b, b_up, a_desc, b_desc, up_desc, a_sums, m0, n0, tile_m, M, N, K, lda, ldb, ACC: tl.constexpr,
    GATED: tl.constexpr, A_COLUMNS: tl.constexpr, A_T: tl.constexpr, B_T: tl.constexpr, LOADS: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRET: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A tile of A B, of its second half in the form "gated", and the sum of A's rows; sums of columns are stored."""
    acc = tl.zeros((BM, BN), ACC)
    acc2 = tl.zeros((BM, BN), ACC) if GATED else None
    a_total = tl.zeros((BM,), ACC) if a_sums is not None and not A_COLUMNS else None
    if not LOADS:
        am = m0 + tl.arange(0, BM)
        bn = n0 + tl.arange(0, BN)
        ks = tl.arange(0, BK)
        if A_T:
            a_tile = a + ks.to(tl.int64)[:, None] * lda + am[None, :]
        else:
            a_tile = a + am[:, None] * lda + ks[None, :]
        if B_T:
            b_tile = b + bn[:, None] * ldb + ks[None, :]
        else:
            b_tile = b + ks.to(tl.int64)[:, None] * ldb + bn[None, :]
    for k in tl.range(0, tl.cdiv(K, BK)):
        k0 = k * BK
        if LOADS:
            x = a_desc.load([k0, m0.to(tl.int32)]).T if A_T else a_desc.load([m0.to(tl.int32), k0])
            w = b_desc.load([n0.to(tl.int32), k0]).T if B_T else b_desc.load([k0, n0.to(tl.int32)])
        else:
            step = tl.cast(k, tl.int64) * BK
            if A_T:
                x = tl.load(a_tile + step * lda, mask=(ks[:, None] < K - k0) & (am[None, :] < M), other=0.0).T
            else:
                x = tl.load(a_tile + step, mask=(am[:, None] < M) & (ks[None, :] < K - k0), other=0.0)
            if B_T:
                w = tl.load(b_tile + step, mask=(bn[:, None] < N) & (ks[None, :] < K - k0), other=0.0).T
            else:
                w = tl.load(b_tile + step * ldb, mask=(ks[:, None] < K - k0) & (bn[None, :] < N), other=0.0)
        if INTERPRET:
            x = x.to(ACC)
            w = w.to(ACC)
        if a_sums is not None:
            if A_COLUMNS:
                at = tl.cast(k, tl.int64) * BK + tl.arange(0, BK)
                tl.store(a_sums + tile_m * K + at, tl.sum(x.to(ACC), 0), mask=at < K)
            else:
                a_total += tl.sum(x.to(ACC), 1)
        acc = tl.dot(x, w, acc, input_precision=PRECISION, out_dtype=ACC)
        if GATED:
            if LOADS:
                n1 = n0.to(tl.int32) if b_up is not None else N + n0.to(tl.int32)
                w2 = up_desc.load([n1, k0]).T if B_T else up_desc.load([k0, n1])
            elif B_T:
                if b_up is not None:
                    up_tile = b_up + bn[:, None] * ldb + ks[None, :] + step
                else:
                    up_tile = b_tile + (step + tl.cast(N, tl.int64) * ldb)
                w2 = tl.load(up_tile, mask=(bn[:, None] < N) & (ks[None, :] < K - k0), other=0.0).T
            else:
                if b_up is not None:
                    up_tile = b_up + ks.to(tl.int64)[:, None] * ldb + bn[None, :] + step * ldb
                else:
                    up_tile = b_tile + (step * ldb + N)
                w2 = tl.load(up_tile, mask=(ks[:, None] < K - k0) & (bn[None, :] < N), other=0.0)
            if INTERPRET:
                w2 = w2.to(ACC)
            acc2 = tl.dot(x, w2, acc2, input_precision=PRECISION, out_dtype=ACC)
    # A device function returns no None: what is not there is the first tile again, which nobody reads.
    return acc, acc2 if GATED else acc, a_total if a_sums is not None and not A_COLUMNS else acc


@triton.jit
def _gemm_kernel(
    a,  # [M, K], or [K, M] where A_T
    b,  # [K, N], or [N, K] where B_T; 2 N for N in the form "gated"
    c,  # [M, N]; [M, 2 N] in the form "dgated"
    pre,  # [M, N]; [M, 2 N] in the form "gated"; or None, as everything below
    emitted,  # [M, N]
    bias,  # [N]; [2 N] in the form "gated"
    residual,  # [M, N]
    t,  # [M, N]; [M, 2 N] in the form "dgated"
    seed,  # one int64
    partials,  # float32, or float64 as ACC, [tiles_m, N]; [tiles_m, 2 N] in the form "dgated"
    a_sums,  # [M]; in the form "dact" of columns, [tiles_m, K], of the dtype of partials
    b_up,  # in the form "gated" the second half of b where it is a tensor of its own, of the same strides
    bias_up,  # and of the bias
    M,
    N,
    K,
    lda,
    ldb,
    ldc,
    ldp,
    lde,
    ldr,
    ldt,
    FORM: tl.constexpr,  # "plain", "gated", "dact", "dgated"
    VALUE: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    P: tl.constexpr,
    T_IS_OUTPUT: tl.constexpr,  # t, or pre, is the activation's output
    READS_OUTPUT: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    DROP: tl.constexpr,  # of `dropped`
    GROUPED: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    LOADS: tl.constexpr,
    TILES: tl.constexpr,
    PRECISION: tl.constexpr,
    INTERPRET: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """C = epilogue(A B), a tile at a time, accumulated in float32 (float64 for float64)."""
    ACC: tl.constexpr = tl.float64 if a.dtype.element_ty == tl.float64 else tl.float32
    GATED: tl.constexpr = FORM == "gated"
    DGATED: tl.constexpr = FORM == "dgated"
    A_COLUMNS: tl.constexpr = FORM == "dact"
    BS: tl.constexpr = BN // SPLIT
    HALF: tl.constexpr = is_half(c.dtype.element_ty)

    a_desc = None
    b_desc = None
    up_desc = None
    if LOADS:
        width = 2 * N if GATED and b_up is None else N
        if A_T:
            a_desc = tl.make_tensor_descriptor(a, [K, M], [lda, 1], [BK, BM])
        else:
            a_desc = tl.make_tensor_descriptor(a, [M, K], [lda, 1], [BM, BK])
        if B_T:
            b_desc = tl.make_tensor_descriptor(b, [width, K], [ldb, 1], [BN, BK])
        else:
            b_desc = tl.make_tensor_descriptor(b, [K, width], [ldb, 1], [BK, BN])
        if b_up is None:
            up_desc = b_desc
        elif B_T:
            up_desc = tl.make_tensor_descriptor(b_up, [N, K], [ldb, 1], [BN, BK])
        else:
            up_desc = tl.make_tensor_descriptor(b_up, [K, N], [ldb, 1], [BK, BN])
    # The two halves of a packed tensor have a descriptor each, whose end cuts the last tile off.
    c_desc = tl.make_tensor_descriptor(c, [M, N], [ldc, 1], [BM, BS]) if TILES else None
    c2_desc = tl.make_tensor_descriptor(c + N, [M, N], [ldc, 1], [BM, BS]) if TILES and DGATED else None
    p_desc = tl.make_tensor_descriptor(pre, [M, N], [ldp, 1], [BM, BS]) if TILES and pre is not None else None
    p2_desc = (
        tl.make_tensor_descriptor(pre + N, [M, N], [ldp, 1], [BM, BS]) if TILES and GATED and pre is not None else None
    )
    e_desc = tl.make_tensor_descriptor(emitted, [M, N], [lde, 1], [BM, BS]) if TILES and emitted is not None else None
    r_desc = tl.make_tensor_descriptor(residual, [M, N], [ldr, 1], [BM, BS]) if TILES and residual is not None else None
    t_desc = tl.make_tensor_descriptor(t, [M, N], [ldt, 1], [BM, BS]) if TILES and t is not None else None
    t2_desc = tl.make_tensor_descriptor(t + N, [M, N], [ldt, 1], [BM, BS]) if TILES and DGATED else None

    # Whatever an address is made of has 64 bits.
    tiles_m = tl.cast(tl.cdiv(M, BM), tl.int64)
    tiles_n = tl.cast(tl.cdiv(N, BN), tl.int64)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * tl.cdiv(N, BN), tl.num_programs(0), flatten=FLATTEN):
        tile_m, tile_n = _place(tl.cast(tile, tl.int64), tiles_m, tiles_n, GROUP)
        m0 = tile_m * BM
        n0 = tile_n * BN
        # Two loops: a sum under a condition inside one of them would have every program load A into registers.
        if a_sums is None:
            acc, acc2, _ = _accumulated(
                a, b, b_up, a_desc, b_desc, up_desc, None, m0, n0, tile_m, M, N, K, lda, ldb, ACC, GATED, A_COLUMNS,
                A_T, B_T, LOADS, PRECISION, INTERPRET, BM, BN, BK,
            )  # fmt: skip
        elif tile_n == 0:
            acc, acc2, a_total = _accumulated(
                a, b, b_up, a_desc, b_desc, up_desc, a_sums, m0, n0, tile_m, M, N, K, lda, ldb, ACC, GATED, A_COLUMNS,
                A_T, B_T, LOADS, PRECISION, INTERPRET, BM, BN, BK,
            )  # fmt: skip
            if not A_COLUMNS:
                rows = m0 + tl.arange(0, BM)
                tl.store(a_sums + rows, a_total.to(a_sums.dtype.element_ty), mask=rows < M)
        else:
            acc, acc2, _ = _accumulated(
                a, b, b_up, a_desc, b_desc, up_desc, None, m0, n0, tile_m, M, N, K, lda, ldb, ACC, GATED, A_COLUMNS,
                A_T, B_T, LOADS, PRECISION, INTERPRET, BM, BN, BK,
            )  # fmt: skip

        rows = m0 + tl.arange(0, BM)
        parts = _parts(acc, SPLIT)
        parts2 = _parts(acc2, SPLIT) if GATED else None
        for s in tl.static_range(SPLIT):
            col = n0 + s * BS
            cols = col + tl.arange(0, BS)
            inside = (rows[:, None] < M) & (cols[None, :] < N)
            z = parts[s]
            z2 = parts2[s] if GATED else None
            if bias is not None:
                z += tl.load(bias + cols, mask=cols < N, other=0.0).to(ACC)[None, :]
                if GATED:
                    second = bias_up if bias_up is not None else bias + N
                    z2 += tl.load(second + cols, mask=cols < N, other=0.0).to(ACC)[None, :]
            if pre is not None and not T_IS_OUTPUT:
                _store_tile(pre, p_desc, ldp, rows, cols, inside, m0, col, z)
                if GATED:
                    _store_tile(pre + N, p2_desc, ldp, rows, cols, inside, m0, col, z2)
            if FORM == "plain" and VALUE is not None:
                z = apply(VALUE, z, P, HALF)
            if pre is not None and T_IS_OUTPUT:
                _store_tile(pre, p_desc, ldp, rows, cols, inside, m0, col, z)
            if GATED:
                z = apply(VALUE, z, P, HALF) * z2
            if seed is not None:
                z = dropped(z, seed, rows, col, tl.cast(N, tl.int64), DROP, BS, GROUPED)
            z2 = None
            if FORM == "dact":
                u = _load_tile(t, t_desc, ldt, rows, cols, inside, m0, col, ACC)
                if T_IS_OUTPUT or (emitted is None and not READS_OUTPUT):
                    v = u
                else:
                    v = apply(VALUE, u, P, HALF)
                if emitted is not None:
                    h = dropped(v, seed, rows, col, tl.cast(N, tl.int64), DROP, BS, GROUPED) if seed is not None else v
                    _store_tile(emitted, e_desc, lde, rows, cols, inside, m0, col, h)
                z = gradient(DERIVATIVE, z, v if READS_OUTPUT else u, P, HALF)
            if DGATED:
                gate = _load_tile(t, t_desc, ldt, rows, cols, inside, m0, col, ACC)
                up = _load_tile(t + N, t2_desc, ldt, rows, cols, inside, m0, col, ACC)
                v = apply(VALUE, gate, P, HALF)
                if emitted is not None:
                    h = v * up
                    if seed is not None:
                        h = dropped(h, seed, rows, col, tl.cast(N, tl.int64), DROP, BS, GROUPED)
                    _store_tile(emitted, e_desc, lde, rows, cols, inside, m0, col, h)
                z2 = z * v
                z = gradient(DERIVATIVE, z * up, v if READS_OUTPUT else gate, P, HALF)
            if residual is not None:
                z += _load_tile(residual, r_desc, ldr, rows, cols, inside, m0, col, ACC)
            if ACCUMULATE:
                z += _load_tile(c, c_desc, ldc, rows, cols, inside, m0, col, ACC)
            if partials is not None:
                line = partials + tile_m * (tl.cast(N, tl.int64) * (2 if DGATED else 1)) + cols
                tl.store(line, tl.sum(tl.where(inside, z, 0.0), 0), mask=cols < N)
                if DGATED:
                    tl.store(line + N, tl.sum(tl.where(inside, z2, 0.0), 0), mask=cols < N)
            _store_tile(c, c_desc, ldc, rows, cols, inside, m0, col, z)
            if DGATED:
                _store_tile(c + N, c2_desc, ldc, rows, cols, inside, m0, col, z2)


class _Operand(NamedTuple):
    """A matrix as the kernel reads it: its storage, whether its columns are the contiguous ones, its other stride."""

    tensor: Tensor
    transposed: bool
    ld: int

    @property
    def described(self) -> bool:
        """Whether a descriptor can stand for it: 16-byte address and stride, and lines that do not overlap."""
        size = self.tensor.element_size()
        line = self.tensor.shape[0 if self.transposed else 1]
        return address(self.tensor) & 15 == 0 and self.ld * size & 15 == 0 and line <= self.ld < 2**39

    @property
    def aligned(self) -> bool:
        """Whether the compiler is told enough to load 16 bytes at a time: see `_launch`."""
        return address(self.tensor) & 15 == 0 and self.ld & 15 == 0


def _matrix(name: str, tensor: Tensor) -> _Operand:
    rows, columns = tensor.shape
    if tensor.stride(1) == 1 or columns == 1:
        return _Operand(tensor, False, tensor.stride(0) if rows > 1 else max(columns, 1))
    if tensor.stride(0) == 1 or rows == 1:
        return _Operand(tensor, True, tensor.stride(1))
    raise ValueError(
        f"{name} must be contiguous in its rows or in its columns, got shape {tuple(tensor.shape)} with strides "
        f"{tensor.stride()}"
    )


def _flat(tensor: Tensor) -> Tensor:
    """All leading dimensions as one; a copy only where no stride can stand for them."""
    return tensor if tensor.ndim == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _tile_operand(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    return inner_contiguous(name, _flat(tensor))


def _row_operand(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(tensor.shape)}")
    return tensor.reshape(-1).contiguous()


def _ld(tensor: Tensor) -> int:
    return tensor.stride(0) if tensor.shape[0] > 1 else max(tensor.shape[1], 1)


def _fits(tensor: Tensor, half: int, described: bool) -> bool:
    """Whether tiles of a tensor, and of what begins `half` elements into its rows, are moved 16 bytes at a time."""
    ld, size = _ld(tensor), tensor.element_size()
    if address(tensor) & 15 or half * size & 15:
        return False
    return ld * size & 15 == 0 and tensor.shape[1] <= ld < 2**39 if described else ld & 15 == 0


def _factors(a_name: str, a: Tensor, b_name: str, b: Tensor) -> None:
    if a.dtype not in _DTYPES:
        raise ValueError(f"{a_name} of {a.dtype} cannot be multiplied here: float16, bfloat16, float32 or float64 can")
    if a.dtype != b.dtype:
        raise ValueError(f"{a_name} and {b_name} must have one dtype, got {a.dtype} and {b.dtype}")
    if b.ndim != 2 and b_name == "weight":
        raise ValueError(f"weight must have two dimensions, got shape {tuple(b.shape)}")
    for name, factor in ((a_name, a), (b_name, b)):
        if factor.ndim == 0:
            raise ValueError(f"{name} must have at least one dimension")


def _lead(name: str, tensor: Tensor, columns: int) -> tuple[int, ...]:
    """The leading dimensions of a factor of as many columns."""
    if tensor.shape[-1] != columns:
        raise ValueError(f"{name}: expected last dimension {columns}, got shape {tuple(tensor.shape)}")
    return tuple(tensor.shape[:-1])


class Dropout(NamedTuple):
    """Dropout in an epilogue: element i of the contiguous result is kept by `_philox`'s rule.

    Args:
        seed: one int64 on the device, never read by the host.
        p: probability of dropping an element.
        upscale: whether what is kept is multiplied by 1 / (1 - p).
    """

    seed: Tensor
    p: float
    upscale: bool = True


class Gradients(NamedTuple):
    """What `linear_dgrad` and `linear_dgrad_gated` give; `None` for what was not asked for."""

    dz: Tensor  # [*, K], of a gated unit [*, 2 K]
    sum: Tensor | None  # [K], [2 K]
    x: Tensor | None  # [*, K]
    dy_sum: Tensor | None  # [N]


class Epilogue(NamedTuple):
    """What follows a product, in this order as far as it is there, and the sums beside it.

    Args:
        form: of the kernel.
        act: an activation, or that of a gated unit; in backward forms its gradient is taken.
        t_is_output: whether `t`, or what is stored as `pre`, is the activation's output.
        bias: [N], [2 N] if `up` is none of its own.
        up: the second half of a gated unit's weight, where it is a tensor of its own.
        up_bias: of `up`.
        pre: where the pre-activation is stored.
        dropout: after the activation, before the residual.
        t: what the activation's gradient is taken at.
        emitted: where the activation of `t` is stored.
        residual: what is added.
        accumulate: whether the result is added to what is there.
        sums: whether the sum over rows is made.
        a_sums: where sums over the rows of A are stored.
        a_columns: whether sums over its columns are made.
    """

    form: str = "plain"
    act: Activation | None = None
    t_is_output: bool = False
    bias: Tensor | None = None
    up: Tensor | None = None
    up_bias: Tensor | None = None
    pre: Tensor | None = None
    dropout: Dropout | None = None
    t: Tensor | None = None
    emitted: Tensor | None = None
    residual: Tensor | None = None
    accumulate: bool = False
    sums: bool = False
    a_sums: Tensor | None = None
    a_columns: bool = False

    @property
    def heavy(self) -> bool:
        """Whether it has tiles of its own to load or store."""
        return self.accumulate or any(part is not None for part in (self.pre, self.residual, self.dropout))


def _multiply(
    a: _Operand, b: _Operand, a_t: bool, b_t: bool, c: Tensor, K: int, e: Epilogue, tf32: bool, tile: Tile | None
) -> tuple[Tensor | None, Tensor | None]:
    """Launch the kernel; returns the partial sums over rows, of the result and of A, where they are asked for."""
    M, N = c.shape[0], c.shape[1] // (2 if e.form == "dgated" else 1)
    if max(M, 2 * N, K) >= 2**31:
        raise ValueError(f"a product of {M} x {K} by {K} x {N} has a dimension beyond 2^31 - 1")
    device = c.device
    if e.dropout is not None and e.dropout.p == 0:
        e = e._replace(dropout=None)
    up = None if e.up is None else _matrix("up", e.up)
    tiles = (c, e.pre, e.emitted, e.residual, e.t)
    of = family(architecture(device))
    described = of in DESCRIBED if tile is None else tile.descriptors
    # The second half of a packed tensor begins N elements after the first.
    packed = e.form in ("gated", "dgated")
    fit = all(x is None or _fits(x, N if packed and x.shape[1] == 2 * N else 0, described) for x in tiles)
    factors = (a, b) if up is None else (a, b, up)
    if tile is None:
        if not all(x.described if described else x.aligned for x in factors):
            of += " unaligned"
        weight = weight_of(e.form, e.heavy)
        tile = choose(of, _number(a.tensor.dtype, tf32), weight, fit, M, N, processors(device))
    loads = tile.descriptors and K > 0 and all(x.described for x in factors)
    moved = tile.descriptors and fit
    if K == 0:
        tile = tile._replace(flatten=False)  # two loops made one need a step in the inner one
    tiles_m = cdiv(M, tile.m)
    count = tiles_m * cdiv(N, tile.n)
    if count >= 2**31:
        raise ValueError(f"a product of {M} x {N} has {count} tiles, at most 2^31 - 1 can be counted")
    dtype = torch.float64 if a.tensor.dtype == torch.float64 else torch.float32
    partials, a_sums = None, e.a_sums
    if e.sums:
        width = 2 * N if e.form == "dgated" else N
        partials = torch.empty(tiles_m * width, dtype=dtype, device=device)[: tiles_m * width].view(tiles_m, width)
    # Tiles that are not aligned take the registers that these sums need.
    if e.a_columns and fit:
        a_sums = torch.empty(tiles_m * K, dtype=dtype, device=device)[: tiles_m * K].view(tiles_m, K)
    if loads or moved:
        allow_scratch()
    strides = [0 if x is None else _ld(x) for x in tiles]
    launch(
        _gemm_kernel,
        min(count, processors(device) * tile.per_processor),
        (
            a.tensor, b.tensor, c, e.pre, e.emitted, e.bias, e.residual, e.t,
            None if e.dropout is None else e.dropout.seed, partials, a_sums, e.up, e.up_bias,
            M, N, K, a.ld, b.ld, *strides,
        ),
        {
            "FORM": e.form,
            "VALUE": None if e.act is None else e.act.value,
            "DERIVATIVE": None if e.act is None or e.form not in ("dact", "dgated") else e.act.derivative,
            "P": () if e.act is None else e.act.P,
            "T_IS_OUTPUT": e.t_is_output,
            "READS_OUTPUT": e.act is not None and e.act.reads == "output",
            "ACCUMULATE": e.accumulate,
            "DROP": None if e.dropout is None else threshold_and_scale(e.dropout.p, e.dropout.upscale),
            "GROUPED": N % 4 == 0, "A_T": a_t, "B_T": b_t, "LOADS": loads, "TILES": moved,
            "PRECISION": "tf32" if tf32 else "ieee", "INTERPRET": interpreted(),
            "BM": tile.m, "BN": tile.n, "BK": tile.k, "GROUP": tile.group, "SPLIT": tile.split, "FLATTEN": tile.flatten,
        },
        tile.num_warps,
        tile.num_stages,
    )  # fmt: skip
    return partials, a_sums


def _number(dtype: torch.dtype, tf32: bool) -> Number:
    if dtype == torch.float32:
        return "tf32" if tf32 else "float32"
    return "float64" if dtype == torch.float64 else "half"


def _flops(a: Tensor, weight: Tensor, *_: Any, up: Tensor | None = None, **__: Any) -> int:
    """Of x weight^T and of dy weight; a gated unit whose weight is in two has the GEMM of `up` as well."""
    (N, K), rows = weight.shape, a.shape[:-1].numel()
    return 2 * rows * N * K * (1 if up is None else 2)


def _wgrad_flops(dy: Tensor, x: Tensor, **_: Any) -> int:
    return 2 * dy.numel() * x.shape[-1]


_operator = functools.partial(operator, without=("tile",), tags=(torch.Tag.needs_fixed_stride_order,))


@_operator("linear", flops=_flops)
def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    act: Activation | None = None,
    store_pre: bool = False,
    store_act: bool = False,
    dropout: Dropout | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A product and all that follows it up to a residual, in one launch; returns (y, z or act(z) or `None`).

    y = residual + dropout(act(z)), z = x weight^T + bias; what is not given is left out.

    x: [*, K] and weight: [N, K] of one dtype, each contiguous in its rows or its columns; bias: [N];
    residual, y, z: [*, N].  Sums and the epilogue are float32 (float64 for float64), rounded when stored; K = 0 gives
    the epilogue of 0.

    Args:
        x: the input.
        weight: as in `torch.nn.functional.linear`.
        bias: any floating dtype.
        act: an activation, such as one of `activations.ACTIVATIONS`; `None` for none.
        store_pre: whether z is wanted.
        store_act: whether act(z) is wanted in its place, as it is before dropout.
        dropout: after the activation, before the residual.
        residual: any floating dtype, last dimension contiguous.
        dtype: of y and z; x's by default.
        tf32: whether float32 operands may be rounded to TF32.
        tile: instead of the one the table has.

    Raises:
        ValueError: for shapes, strides or dtypes that cannot be multiplied.
    """
    e = Epilogue("plain", act, store_act, bias, dropout=dropout, residual=residual)
    return _forward(x, weight, e, store_pre or store_act, dtype, tf32, tile)


@_operator("linear_gated", flops=_flops)
def linear_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    up: Tensor | None = None,
    up_bias: Tensor | None = None,
    act: Activation,
    store_pre: bool = False,
    dropout: Dropout | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A product and a gated unit in one launch; returns (y, [gate; up] or `None`).

    y = residual + dropout(act(gate) up), [gate; up] = x weight^T + bias.

    x: [*, K], weight: [2 F, K] with the rows of the gate first, bias: [2 F], y: [*, F], [gate; up]: [*, 2 F].  The rest
    is as in `linear`. With a weight `up` of its own, weight and up are [F, K], of one layout, and bias and up_bias [F].
    Source: Shazeer 2020, arXiv:2002.05202.

    Raises:
        ValueError: as `linear`, for an odd number of rows of the weight, and for an up that is not like the weight.
    """
    e = Epilogue("gated", act, False, bias, up, up_bias, dropout=dropout, residual=residual)
    return _forward(x, weight, e, store_pre, dtype, tf32, tile)


def _forward(
    x: Tensor, weight: Tensor, e: Epilogue, store: bool, dtype: torch.dtype | None, tf32: bool, tile: Tile | None
) -> tuple[Tensor, Tensor | None]:
    _factors("x", x, "weight", weight)
    packed, K = weight.shape
    N = packed
    if e.up is not None:
        if e.up.shape != weight.shape or e.up.dtype is not weight.dtype or e.up.stride() != weight.stride():
            raise ValueError(f"up must be like the weight, got {tuple(e.up.shape)} {e.up.stride()}, {e.up.dtype}")
        if (e.bias is None) != (e.up_bias is None):
            raise ValueError("bias and up_bias are given together")
        packed = 2 * N
    elif e.form == "gated":
        if packed % 2:
            raise ValueError(f"a [gate; up] weight has an even number of rows, got shape {tuple(weight.shape)}")
        N = packed // 2
    lead = _lead("x", x, K)
    y = torch.empty((*lead, N), dtype=dtype or x.dtype, device=x.device)
    pre = torch.empty((*lead, packed), dtype=dtype or x.dtype, device=x.device) if store else None
    if stops():
        return y, pre
    flat = _flat(x)
    M = flat.shape[0]
    e = e._replace(
        pre=None if pre is None else pre.view(M, packed),
        bias=None if e.bias is None else _row_operand("bias", e.bias, (packed if e.up is None else N,)),
        up_bias=None if e.up_bias is None else _row_operand("up_bias", e.up_bias, (N,)),
        residual=None if e.residual is None else _tile_operand("residual", e.residual, (*lead, N)),
    )
    if M and N:
        a, b = _matrix("x", flat), _matrix("weight", weight)
        _multiply(a, b, a.transposed, not b.transposed, y.view(M, N), K, e, tf32, tile)
    return y, pre


@_operator("linear_dgrad", flops=_flops)
def linear_dgrad(
    dy: Tensor,
    weight: Tensor,
    *,
    act: Activation | None = None,
    t: Tensor | None = None,
    t_is_output: bool = False,
    dropout: Dropout | None = None,
    residual: Tensor | None = None,
    sums: bool = False,
    emit: bool = False,
    dtype: torch.dtype | None = None,
    sums_dtype: torch.dtype | None = None,
    dy_sums: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> Gradients:
    """The gradient of a product's input, of the activation and the bias before it and of a bias after it.

    dz = residual + act'(t) dropout(dy weight), its sum over rows, and x = dropout(act(t)): what a `Linear`
    hands to x = dropout(act(z)), z = ... + bias before it, the gradient of that bias and, where x was not kept, x
    again; and the sum of dy over rows, the gradient of a bias behind the product.

    dy: [*, N] and weight: [N, K] of one dtype, each contiguous in its rows or its columns; t, residual,
    dz, x: [*, K]; sum: [K]; dy_sum: [N].  Sums over rows are of the unrounded float32 dz, in a fixed order.

    Args:
        dy: the gradient of the product.
        weight: of the product.
        act: the activation whose gradient is taken; `None` for the product alone.
        t: the activation's input z, or its output.
        t_is_output: whether t is the output: act(z) before dropout.
        dropout: the one between the activation and the product: it has the mask of the forward pass.
        residual: a gradient that is added: of z, or of x where there is no activation.
        sums: whether the sum over rows is wanted.
        emit: whether dropout(act(t)) is wanted.
        dtype: of dz and x; dy's by default.
        sums_dtype: of the sum; that of dz by default.
        dy_sums: dtype of the sum of dy; `None` where it is not wanted. Not with a residual or emit.
        tf32: whether float32 operands may be rounded to TF32.
        tile: instead of the one the table has.

    Raises:
        ValueError: for shapes, strides or dtypes that cannot be multiplied; for an activation without t or t without an
            activation, and for the output of one whose derivative reads its input; for dy_sums without an activation or
            with what does not go with it.
    """
    if (act is None) != (t is None):
        raise ValueError("act and t come together: the gradient of an activation is taken at t")
    if emit and act is None:
        raise ValueError("emit: there is no activation to compute again")
    if dy_sums is not None and (act is None or emit or residual is not None):
        # Not all of it fits in registers.
        raise ValueError("dy_sums: made with an activation's gradient, without residual and emit")
    if act is not None and t_is_output and act.reads != "output":
        raise ValueError(f"{name_of(act)}: the derivative reads the input, so t cannot be the output")
    e = Epilogue(
        "plain" if act is None else "dact", act, t_is_output, dropout=dropout, t=t, residual=residual, sums=sums
    )
    return _backward(dy, weight, e, emit, dtype, sums_dtype, dy_sums, tf32, tile)


@_operator("linear_dgrad_gated", flops=_flops)
def linear_dgrad_gated(
    dy: Tensor,
    weight: Tensor,
    *,
    act: Activation,
    t: Tensor,
    dropout: Dropout | None = None,
    sums: bool = False,
    emit: bool = False,
    dtype: torch.dtype | None = None,
    sums_dtype: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> Gradients:
    """The gradient of a product's input and of the gated unit before it: dz = [dgate; dup], and x is h.

    dh = dropout(dy weight), dgate = dh up act'(gate), dup = dh act(gate), h = dropout(act(gate) up).

    dy: [*, N], weight: [N, F], t = [gate; up] and its gradient: [*, 2 F], sum: [2 F], h: [*, F].  The rest is as in
    `linear_dgrad`.

    Raises:
        ValueError: as `linear_dgrad`.
    """
    e = Epilogue("dgated", act, dropout=dropout, t=t, sums=sums)
    return _backward(dy, weight, e, emit, dtype, sums_dtype, None, tf32, tile)


def _backward(
    dy: Tensor,
    weight: Tensor,
    e: Epilogue,
    emit: bool,
    dtype: torch.dtype | None,
    sums_dtype: torch.dtype | None,
    dy_sums: torch.dtype | None,
    tf32: bool,
    tile: Tile | None,
) -> Gradients:
    _factors("dy", dy, "weight", weight)
    K, N = weight.shape
    lead, device, dtype = _lead("dy", dy, K), dy.device, dtype or dy.dtype
    width = 2 * N if e.form == "dgated" else N
    dz = torch.empty((*lead, width), dtype=dtype, device=device)
    emitted = torch.empty((*lead, N), dtype=dtype, device=device) if emit else None
    total = torch.empty(width, dtype=sums_dtype or dtype, device=device) if e.sums else None
    dy_sum = None if dy_sums is None else torch.empty(K, dtype=dy_sums, device=device)
    results = Gradients(dz, total, emitted, dy_sum)
    if stops():
        return results
    flat = _flat(dy)
    M = flat.shape[0]
    partials = a_partials = None
    # What a number that is 1 is compiled for has no sums of dy: they are torch's.
    e = e._replace(
        t=None if e.t is None else _tile_operand("t", e.t, (*lead, width)),
        emitted=None if emitted is None else emitted.view(M, N),
        residual=None if e.residual is None else _tile_operand("residual", e.residual, (*lead, N)),
        a_columns=dy_sum is not None and K > 1 and M > 1,
    )
    if M and N:
        a, b = _matrix("dy", flat), _matrix("weight", weight)
        partials, a_partials = _multiply(
            a, b, a.transposed, b.transposed, dz.view(M, width), K, e, tf32, tile
        )  # fmt: skip
    if total is not None and partials is None:
        total.zero_()
    elif total is not None:
        column_sums(partials, width, total)
    if dy_sum is not None and a_partials is None:
        torch.sum(flat, 0, dtype=dy_sums, out=dy_sum)
    elif dy_sum is not None:
        column_sums(a_partials, K, dy_sum)
    return results


@_operator("linear_wgrad_bias", flops=_wgrad_flops)
def linear_wgrad_bias(
    dy: Tensor,
    x: Tensor,
    *,
    dtype: torch.dtype | None = None,
    sums_dtype: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """The gradients of a weight, dweight = dy^T x, and of the bias after the product, dbias = sum of dy, in one launch.

    dy: [*, N] and x: [*, K] of one dtype, each contiguous in its rows or its columns; dweight: [N, K]; dbias: [N].
    Sums over rows are float32 (float64 for float64), in a fixed order, and rounded once.

    Args:
        dy: the gradient of the product.
        x: its input.
        dtype: of dweight; dy's by default.
        sums_dtype: of dbias; dy's by default.
        tf32: whether float32 operands may be rounded to TF32.
        tile: instead of the one the table has.

    Raises:
        ValueError: for shapes, strides or dtypes that cannot be multiplied.
    """
    dweight = torch.empty(_wgrad_shape(dy, x), dtype=dtype or dy.dtype, device=dy.device)
    return dweight, _wgrad(dweight, dy, x, sums_dtype, False, tf32, tile)


@_operator("linear_wgrad_bias_", written=("main_grad",), flops=lambda main_grad, *args, **rest: _wgrad_flops(*args))
def linear_wgrad_bias_(
    main_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    *,
    sums_dtype: torch.dtype | None = None,
    tf32: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """`linear_wgrad_bias`, which adds dweight to `main_grad` and gives dbias.

    main_grad: [N, K] float32 (float64 for float64), last dimension contiguous.

    Raises:
        ValueError: for shapes, strides or dtypes that cannot be multiplied or added.
    """
    out = _tile_operand("main_grad", main_grad, _wgrad_shape(dy, x))
    wanted = torch.float64 if dy.dtype == torch.float64 else torch.float32
    if out.dtype != wanted:
        raise ValueError(f"main_grad must be {wanted} for gradients of {dy.dtype}, got {out.dtype}")
    if out.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ValueError(f"main_grad has rows that overlap: strides {main_grad.stride()}")
    return _wgrad(out, dy, x, sums_dtype, True, tf32, tile)


def _wgrad_shape(dy: Tensor, x: Tensor) -> tuple[int, int]:
    _factors("dy", dy, "x", x)
    if dy.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"dy and x must have the same rows, got shapes {tuple(dy.shape)} and {tuple(x.shape)}")
    return dy.shape[-1], x.shape[-1]


def _wgrad(
    out: Tensor,
    dy: Tensor,
    x: Tensor,
    sums_dtype: torch.dtype | None,
    accumulate: bool,
    tf32: bool,
    tile: Tile | None,
) -> Tensor:
    """Make dweight in `out`; returns the sum of dy."""
    total = torch.empty(dy.shape[-1], dtype=sums_dtype or dy.dtype, device=dy.device)
    if stops():
        return total
    left, right = _flat(dy), _flat(x)
    if out.numel():
        a, b = _matrix("dy", left), _matrix("x", right)
        e = Epilogue(accumulate=accumulate, a_sums=total)
        _multiply(a, b, not a.transposed, b.transposed, out, left.shape[0], e, tf32, tile)
    else:
        # Nothing is multiplied: x has no columns.
        torch.sum(left, 0, dtype=total.dtype, out=total)
    return total

# pyright: basic, reportOptionalSubscript=false, reportOptionalCall=false, reportArgumentType=false
# pyright: reportAssignmentType=false, reportGeneralTypeIssues=false
# Device functions are Triton's language: it has no types, and what is None in it was decided when it was compiled.
"""The kernel of all GEMMs, and its tiles: which are worth launching, by architecture and by how much an epilogue holds.

What they compile to for sm_90 in bfloat16, aligned, with Triton 3.7.1 and 3.6.0; none spills, and 232,448 bytes is what
a program may have:

| epilogue | tile, warps, stages, runs | registers | shared bytes |
| --- | --- | --- | --- |
| none | 128x256x64 w8 s4 /4 | 154, 154 | 213,024 |
| bias, gelu | 128x256x64 w8 s4 /4 | 194, 197 | 213,024 |
| sums (dgrad) | 128x256x64 w8 s4 /4 | 235, 243 | 215,072 |
| main_grad (wgrad) | 128x256x64 w8 s3 /4 | 165, 196 | 213,064 |
| bias, gelu, pre-activation stored | 128x256x64 w8 s3 /4 | 205, 214 | 163,864 |
| bias, dropout, residual | 128x256x64 w8 s3 /4 | 237, 240 | 180,264 |
| everything a forward can have | 128x256x64 w8 s3 /4 | 255, 255 | 180,264 |
| d gelu | 128x128x64 w8 s4 /2 | 128, 128 | 163,888 |
| d gelu, sums, gelu again | 128x128x64 w8 s4 /2 | 179, 246 | 163,888 |
| swiglu, [gate; up] stored | 128x128x64 w8 s3 /2, twice | 174, 192 | 163,896 |
| d swiglu, sums, swiglu again | 128x128x64 w8 s3 /4 | 175, 179 | 114,728 |

Tried and dropped, since they spill: 128x256 with d gelu; 128x128 in one run with d gelu or d swiglu; 128x256 in one run
with a stored pre-activation; any of these where each element has an address of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import triton
import triton.language as tl

from ._device import dropped
from ._launch import cdiv
from .activations import apply, gradient, is_half

Weight = Literal["light", "heavy", "gradient", "gated", "dgated"]
"""What an epilogue keeps in registers beside the accumulator: nothing or a row; tiles it stores or adds; a tile that it
differentiates; a second accumulator; two tiles read and two written."""

Precision = Literal["half", "tf32", "float32", "float64"]
"""How operands are multiplied: 16-bit formats, float32 by TF32 or exactly, float64."""


class Tile(NamedTuple):
    """One way to cut a product up.

    Args:
        m: rows of a tile of C.
        n: columns of a tile of C, of each of the two accumulators where there are two.
        k: depth of a step.
        num_warps: as in a launch.
        num_stages: as in a launch.
        split: runs of columns, 1, 2 or 4, that an epilogue is applied to one after the other.
        flatten: whether the next tile's operands are loaded during an epilogue.
        descriptors: whether tiles are moved by descriptors (TMA) where strides and addresses allow.
        group: rows of tiles that programs side by side work on.
        per_processor: programs for each multiprocessor.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    split: int = 1
    flatten: bool = True
    descriptors: bool = False
    group: int = 8
    per_processor: int = 1


DESCRIBED = frozenset({"sm_90", "sm_100"})
"""Families whose tiles are moved by descriptors."""

_WEIGHTS: tuple[Weight, ...] = ("light", "heavy", "gradient", "gated", "dgated")
_NUMBERS: tuple[Precision, ...] = ("half", "tf32", "float32", "float64")


_Six = tuple[int, int, int, int, int, int]


def _described(*tiles: _Six, flatten: bool = True) -> tuple[Tile, ...]:
    return tuple(Tile(*tile, flatten=flatten, descriptors=True) for tile in tiles)


def _pointers(*tiles: _Six) -> tuple[Tile, ...]:
    return tuple(Tile(*tile, flatten=False) for tile in tiles)


_GPUS = ("sm_80", "sm_90", "sm_100", "gfx942")


def _everywhere(
    number: Precision, tiles: tuple[Tile, ...], suffix: str
) -> dict[tuple[str, Precision, Weight], tuple[Tile, ...]]:
    return {(of + suffix, number, weight): tiles for of in _GPUS for weight in _WEIGHTS}


# m, n, k, warps, stages, split. Factors that are not aligned are in "<family> unaligned".
_TABLE: dict[tuple[str, Precision, Weight], tuple[Tile, ...]] = {
    **{
        (f"interpreter{s}", n, w): (Tile(32, 32, 32, 4, 1),)
        for s in ("", " unaligned")
        for n in _NUMBERS
        for w in _WEIGHTS
    },
    ("sm_90", "half", "light"): _described((128, 256, 64, 8, 4, 4), (128, 128, 64, 8, 4, 2), (64, 128, 64, 4, 4, 2)),
    ("sm_90", "half", "heavy"): _described((128, 256, 64, 8, 3, 4), (128, 128, 64, 8, 4, 2), (64, 128, 64, 4, 4, 2)),
    ("sm_90", "half", "gradient"): _described((128, 128, 64, 8, 4, 4), (64, 128, 64, 4, 4, 2)),
    ("sm_90", "half", "gated"): _described((128, 128, 64, 8, 3, 4), (64, 128, 64, 4, 3, 2)),
    ("sm_90", "half", "dgated"): _described((128, 128, 64, 8, 3, 4), (64, 128, 64, 4, 4, 4)),
    ("sm_100", "half", "light"): _described((128, 256, 64, 8, 4, 4), (128, 128, 64, 8, 4, 2)),
    ("sm_100", "half", "heavy"): _described((128, 256, 64, 8, 3, 4), (128, 128, 64, 8, 4, 2)),
    ("sm_100", "half", "gradient"): _described((128, 128, 64, 8, 4, 4), flatten=False),
    ("sm_100", "half", "gated"): _described((128, 128, 64, 8, 3, 2)),
    ("sm_100", "half", "dgated"): _described((128, 128, 64, 8, 3, 4), flatten=False),
    ("sm_80", "half", "light"): _pointers((128, 128, 32, 8, 4, 2), (64, 64, 64, 4, 3, 2)),
    ("sm_80", "half", "heavy"): _pointers((128, 128, 32, 8, 4, 2), (64, 64, 64, 4, 3, 2)),
    ("sm_80", "half", "gradient"): _pointers((128, 128, 32, 8, 4, 4), (64, 64, 64, 4, 3, 4)),
    ("sm_80", "half", "gated"): _pointers((128, 64, 32, 8, 4, 1), (64, 64, 32, 4, 4, 1)),
    ("sm_80", "half", "dgated"): _pointers((128, 64, 32, 8, 4, 4), (64, 64, 64, 4, 3, 4)),
    ("gfx942", "half", "light"): _pointers((128, 128, 32, 8, 2, 2), (64, 64, 32, 4, 2, 1)),
    ("gfx942", "half", "heavy"): _pointers((128, 128, 32, 8, 2, 2), (64, 64, 32, 4, 2, 1)),
    ("gfx942", "half", "gradient"): _pointers((128, 128, 32, 8, 2, 4), (64, 64, 32, 4, 2, 2)),
    ("gfx942", "half", "gated"): _pointers((128, 64, 32, 8, 2, 1)),
    ("gfx942", "half", "dgated"): _pointers((128, 64, 32, 8, 2, 2)),
    **_everywhere("half", _pointers((64, 64, 32, 8, 2, 2)), " unaligned"),
    **_everywhere("tf32", _pointers((64, 64, 32, 8, 2, 2)), " unaligned"),
    **_everywhere("tf32", _pointers((64, 64, 32, 8, 3, 2)), ""),
    ("sm_90", "tf32", "light"): _described((128, 128, 32, 8, 4, 4), (64, 64, 32, 4, 4, 2)),
    ("sm_90", "tf32", "heavy"): _described((128, 128, 32, 8, 3, 4), (64, 64, 32, 4, 3, 2)),
    ("sm_90", "tf32", "gradient"): _described((128, 64, 32, 8, 3, 2)),
    ("sm_90", "tf32", "gated"): _described((128, 64, 32, 8, 3, 2)),
    ("sm_90", "tf32", "dgated"): _described((128, 64, 32, 8, 3, 4)),
    **_everywhere("float32", _pointers((64, 64, 16, 8, 2, 2)), ""),
    **_everywhere("float32", _pointers((64, 64, 16, 8, 2, 2)), " unaligned"),
    **_everywhere("float64", _pointers((32, 16, 16, 4, 2, 1)), ""),
    **_everywhere("float64", _pointers((32, 16, 16, 4, 2, 1)), " unaligned"),
    ("sm_100 unaligned", "half", "dgated"): _pointers((64, 16, 32, 4, 2, 1)),
    **{(of, "float32", "gated"): _pointers((64, 32, 16, 4, 2, 2)) for of in _GPUS},
    **{(of, "tf32", "gated"): _pointers((64, 32, 32, 4, 3, 2)) for of in _GPUS if of != "sm_90"},
}


def table() -> Iterator[tuple[str, Precision, Weight, tuple[Tile, ...]]]:
    """Every entry: family, number, weight and tiles."""
    for (of, number, weight), candidates in _TABLE.items():
        yield of, number, weight, candidates


def weight_of(form: str, heavy: bool) -> Weight:
    """Of an epilogue of a form of the kernel; `heavy` where it has tiles of its own to load or store."""
    if form == "plain":
        return "heavy" if heavy else "light"
    return "gradient" if form == "dact" else "gated" if form == "gated" else "dgated"


def tiles(of: str, number: Precision, weight: Weight) -> tuple[Tile, ...]:
    """Tiles for a family, the best for large products first."""
    return _TABLE[of, number, weight]


def stored_singly(weight: Weight, candidates: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """The tiles for results or added tiles that are not aligned.

    Each element then has an address of its own in two registers, so fewer of them are worked on at a time.
    """
    if weight == "light":
        return tuple(tile._replace(split=4) for tile in candidates if tile.m * tile.n <= 128 * 128)
    last = candidates[-1]
    m, n = min(last.m, 64), min(last.n, 32 if weight == "dgated" and last.descriptors else 64)
    return (last._replace(m=m, n=n, num_warps=max(4, n // 8), split=4 if n > 16 else 1, flatten=False),)


def choose(of: str, number: Precision, weight: Weight, aligned: bool, M: int, N: int, processors: int) -> Tile:
    """The tile whose programs, all of them together, cover the fewest elements of C; the first of equals.

    A product of few tiles leaves processors idle, and the last round of a larger one may be almost empty.
    """
    candidates = _TABLE[of, number, weight]
    if not aligned:
        candidates = stored_singly(weight, candidates)
    if len(candidates) == 1:
        return candidates[0]

    def cost(tile: Tile) -> float:
        width = processors * tile.per_processor
        rounds = cdiv(cdiv(M, tile.m) * cdiv(N, tile.n), width)
        # Small tiles read each operand more often.
        return rounds * tile.per_processor * tile.m * tile.n * (1 + 16 / tile.m + 16 / tile.n)

    return min(candidates, key=cost)


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

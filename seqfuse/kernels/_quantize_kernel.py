# pyright: basic, reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false, reportUnboundVariable=false
# Device functions are in Triton's language, which has no types; pyright does not evaluate constexpr branches.
"""The kernels of quantization to 8 bits: maxima, then scales and codes, of rows and columns in one pass.

Results equal those of `recipes.quantize`, bit for bit. So scales use `tl.div_rn`, because `/` is off by up to two units
in the last place. Maxima are compared as integers, which are ordered like float32 from 0 on, with NaN above all, so the
order of programs does not matter. Before the cast, values beyond the range are clamped, and non-finite ones become NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def magnitude(x):
    """The bits of |x|, int32, of a float32 x."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scales_of(most, EXPONENT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Scale and inverse scale of numbers whose largest magnitude is `most`."""
    value = most.to(tl.float32, bitcast=True)
    scale = tl.minimum(tl.div_rn(tl.zeros_like(value) + 1.75 * 2.0**EXPONENT, value), _FLOAT32_MAX)
    scale = tl.where((most > 0) & (most < _INFINITE), scale, 1.0)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
    return scale, inverse_of(scale)


@triton.jit
def inverse_of(scale):
    """1 / scale, rounded once."""
    return tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit
def scales_of_mx(most, EXPONENT: tl.constexpr):
    """The scale 2^-e, and e as E8M0: the smallest e without overflow."""
    above = ((most & 0x7FFFFF) > 0x600000).to(tl.int32)  # above 1.75 times its power of two
    stored = tl.minimum(tl.maximum((most >> 23) - EXPONENT + above, 0), 254)
    stored = tl.where(most < _INFINITE, stored, 127)
    return ((254 - stored) << 23).to(tl.float32, bitcast=True), stored.to(tl.uint8)


@triton.jit
def codes_of(x, scale, EXPONENT: tl.constexpr, ROUNDED: tl.constexpr, KIND: tl.constexpr):
    """Return x * scale in 8 bits, from float32; ROUNDED if the cast is exact only for values of `KIND`."""
    LARGEST: tl.constexpr = 1.75 * 2.0**EXPONENT
    scaled = tl.minimum(tl.maximum(x * scale, -LARGEST), LARGEST)
    if ROUNDED:
        # To the nearest multiple of the unit of its power of two, by adding a float32 whose last bit is that unit.
        MANTISSA: tl.constexpr = 3 if EXPONENT == 8 else 2
        SMALLEST: tl.constexpr = -6 if EXPONENT == 8 else -14
        bits = magnitude(scaled)
        power = tl.maximum(bits & 0x7F800000, (SMALLEST + 127) << 23) + ((23 - MANTISSA) << 23)
        power = power.to(tl.float32, bitcast=True)
        near = (bits.to(tl.float32, bitcast=True) + power) - power
        sign = scaled.to(tl.int32, bitcast=True) ^ bits
        scaled = (near.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(magnitude(x) < _INFINITE, scaled, float("nan")).to(KIND)


@triton.jit
def _tile(x, program, stride, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A program's tile, 0 outside the matrix, and its first row and column."""
    N = tl.cast(N, tl.int64)
    program = program.to(tl.int64)
    across = tl.cdiv(N, BLOCK_N)
    row = program // across * BLOCK_M
    col = program % across * BLOCK_N
    rows = (row + tl.arange(0, BLOCK_M))[:, None]
    cols = (col + tl.arange(0, BLOCK_N))[None, :]
    return tl.load(x + rows * stride + cols, mask=(rows < M) & (cols < N), other=0.0), row, col


@triton.jit
def _zero_kernel(out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.zeros((BLOCK,), tl.int32), mask=at < N)


@triton.jit
def _largest_kernel(x, whole, by_row, by_column, stride, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The largest magnitudes of the whole matrix, of each row and of each column, each only if requested."""
    tile, row, col = _tile(x, tl.program_id(0), stride, M, N, BLOCK_M, BLOCK_N)
    bits = magnitude(tile.to(tl.float32))
    if whole is not None:
        tl.atomic_max(whole, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    if by_row is not None:
        rows = row + tl.arange(0, BLOCK_M)
        tl.atomic_max(by_row + rows, tl.max(bits, 1), mask=rows < M, sem="relaxed")
    if by_column is not None:
        cols = col + tl.arange(0, BLOCK_N)
        tl.atomic_max(by_column + cols, tl.max(bits, 0), mask=cols < N, sem="relaxed")


@triton.jit
def _quantize_kernel(
    x, scale, largest, whole, by_row, by_column, rows, rows_inverse, columns, columns_inverse, stride, M, N,
    SCALING: tl.constexpr, EXPONENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Codes and inverse scales of a tile, along its rows and, transposed, down its columns.

    SCALING: "given", with the maximum written to `largest`, if any; "tensor" and "row", from maxima computed before;
    "1x128" and "1x32", with whole blocks in a tile; "128x128", with one block per tile.
    """
    tile, row, col = _tile(x, tl.program_id(0), stride, M, N, BLOCK_M, BLOCK_N)
    one = scale
    if SCALING == "tensor":
        one, inverse = scales_of(tl.load(whole), EXPONENT, POWER_OF_TWO)
        tl.store(rows_inverse, inverse, mask=(row == 0) & (col == 0))
    elif SCALING == "128x128":
        one = _scale_of_block(tile, rows_inverse, columns_inverse, row, col, M, N, EXPONENT, POWER_OF_TWO, BLOCK_M)
    quantize_tile(
        tile, one, largest, by_row, by_column, rows, rows_inverse, columns, columns_inverse, row, col, M, N,
        SCALING, EXPONENT, POWER_OF_TWO, ROUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _scale_of_block(
    tile, rows, columns, row, col, M, N, EXPONENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, SIZE: tl.constexpr
):
    """The scale of a tile that is one block; writes the inverse, for columns transposed."""
    bits = magnitude(tile.to(tl.float32))
    scale, inverse = scales_of(tl.max(tl.max(bits, 1), 0), EXPONENT, POWER_OF_TWO)
    if rows is not None:
        _write_scale(rows, inverse, row // SIZE, col // SIZE, tl.cdiv(tl.cast(N, tl.int64), SIZE))
    if columns is not None:
        _write_scale(columns, inverse, col // SIZE, row // SIZE, tl.cdiv(tl.cast(M, tl.int64), SIZE))
    return scale


@triton.jit
def _write_scale(out, inverse, i, j, across):
    """Write an inverse scale; after the last one of a row also zeros, up to a multiple of 4."""
    at = tl.arange(0, 4)
    there = (at == 0) | ((j == across - 1) & (j + at < (across + 3) // 4 * 4))
    tl.store(out + i * ((across + 3) // 4 * 4) + j + at, tl.where(at == 0, inverse, 0.0), mask=there)


@triton.jit
def _quantize_several_kernel(
    xs, rows, rows_inverses, columns, columns_inverses, firsts, strides, heights, widths,
    SCALING: tl.constexpr, EXPONENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """`_quantize_kernel` for several matrices, "128x128" or "1x32"; matrix j begins at program `firsts[j]`."""
    pid = tl.program_id(0)
    x, first, stride, M, N = xs[0], firsts[0], strides[0], heights[0], widths[0]
    along, along_inverse, down, down_inverse = rows[0], rows_inverses[0], columns[0], columns_inverses[0]
    for j in tl.static_range(1, len(xs)):  # only selects, so that the tile's code is compiled once
        if pid >= firsts[j]:
            x, first, stride, M, N = xs[j], firsts[j], strides[j], heights[j], widths[j]
            along, along_inverse = rows[j], rows_inverses[j]
            if columns[j] is not None:
                down, down_inverse = columns[j], columns_inverses[j]
    tile, row, col = _tile(x, pid - first, stride, M, N, BLOCK_M, BLOCK_N)
    one = None
    if SCALING == "128x128":
        one = _scale_of_block(tile, along_inverse, down_inverse, row, col, M, N, EXPONENT, POWER_OF_TWO, BLOCK_M)
    quantize_tile(
        tile, one, None, None, None, along, along_inverse, down, down_inverse, row, col, M, N,
        SCALING, EXPONENT, POWER_OF_TWO, ROUNDED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def quantize_tile(
    tile, one, largest, by_row, by_column, rows, rows_inverse, columns, columns_inverse, row, col, M, N,
    SCALING: tl.constexpr, EXPONENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write codes and inverse scales of a tile, which is 0 outside the matrix.

    `one` is the scale, or its address if "given", unless each row or block has its own. The maximum is written to
    `largest`, if any. The largest number of the format is 1.75 times 2^EXPONENT.
    """
    if largest is not None:
        bits = magnitude(tile.to(tl.float32))
        tl.atomic_max(largest, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    if SCALING == "given":
        one = tl.load(one)
        tl.store(rows_inverse, inverse_of(one), mask=(row == 0) & (col == 0))
    if rows is not None:
        _write(
            tile, one, by_row, rows, rows_inverse, row, col, M, N,
            SCALING, EXPONENT, POWER_OF_TWO, ROUNDED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if columns is not None:
        # Transposed before the cast, because `tl.trans` of 8-bit tiles is wrong on some GPUs.
        _write(
            tl.trans(tile), one, by_column, columns, columns_inverse, col, row, N, M,
            SCALING, EXPONENT, POWER_OF_TWO, ROUNDED, BLOCK_N, BLOCK_M,
        )  # fmt: skip


@triton.jit
def _write(
    tile, one, by_row, out, inverses, row, col, M, N,
    SCALING: tl.constexpr, EXPONENT: tl.constexpr, POWER_OF_TWO: tl.constexpr, ROUNDED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a tile that is quantized along its rows. out: [M, N]; inverses: [M], for blocks [ceil(N / block), M].

    Rows of `out` begin at multiples of 16 bytes, with zeros between them, so stores are wide for every N.
    """
    kind = out.dtype.element_ty
    M, N = tl.cast(M, tl.int64), tl.cast(N, tl.int64)
    WIDTH = tl.cdiv(N, 16) * 16
    rows, cols = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    value = tile.to(tl.float32)
    if SCALING == "1x128" or SCALING == "1x32":
        SIZE: tl.constexpr = 32 if SCALING == "1x32" else 128
        BLOCKS: tl.constexpr = BLOCK_N // SIZE
        value = tl.reshape(value, (BLOCK_M, BLOCKS, SIZE))
        most = tl.max(magnitude(value), 2)
        if SCALING == "1x32":
            scale, inverse = scales_of_mx(most, EXPONENT)
        else:
            scale, inverse = scales_of(most, EXPONENT, POWER_OF_TWO)
        codes = tl.reshape(codes_of(value, scale[:, :, None], EXPONENT, ROUNDED, kind), (BLOCK_M, BLOCK_N))
        blocks = col // SIZE + tl.arange(0, BLOCKS)
        inside = (rows < M)[:, None] & (blocks < tl.cdiv(N, SIZE))[None, :]
        tl.store(inverses + blocks[None, :] * M + rows[:, None], inverse, mask=inside)
    elif SCALING == "row":
        most = tl.load(by_row + rows, mask=rows < M, other=0)
        scale, inverse = scales_of(most, EXPONENT, POWER_OF_TWO)
        tl.store(inverses + rows, inverse, mask=(rows < M) & (col == 0))
        codes = codes_of(value, scale[:, None], EXPONENT, ROUNDED, kind)
    else:
        codes = codes_of(value, one, EXPONENT, ROUNDED, kind)
    tl.store(out + rows[:, None] * WIDTH + cols[None, :], codes, mask=(rows < M)[:, None] & (cols < WIDTH)[None, :])

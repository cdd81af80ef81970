# pyright: basic
# Triton has no type annotations.
"""Quantization to 8 bits: codes and inverse scales along rows and down columns, in one pass over a matrix.

With one scale per tensor, or per row or column, a pass before it finds the maxima.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..hardware import capability
from ._launch import architecture, cdiv, launch, stops
from ._operators import operator, viewed_as_rows
from ._quantize_kernel import _largest_kernel, _quantize_kernel, _quantize_several_kernel, _zero_kernel

Scaling = Literal["given", "tensor", "row", "1x128", "128x128", "1x32"]
"""The elements that share a scale; "given": all of them share a scale that is passed; "1x32": scales are E8M0."""

_BLOCK, _ZEROS = 128, 1024
MULTIPLE = 16
"""Rows of codes begin at multiples of 16 bytes, as GEMMs require."""

TRITON_KINDS: dict[torch.dtype, Any] = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""The dtypes to which kernels round values before quantizing them."""

# The largest number of a format is 1.75 times this power of two.
_EXPONENT = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}


@dataclasses.dataclass(frozen=True)
class QuantizeTile:
    """Rows and columns per tile; warps."""

    m: int
    n: int
    num_warps: int


def codes_tile(scaling: Scaling) -> QuantizeTile:
    """128 x 128 for blocks of 128, with 32 numbers per thread."""
    return QuantizeTile(128, 128, 16) if "128" in scaling else QuantizeTile(64, 128, 8)


class Codes(NamedTuple):
    """Results of `quantize_matrix`; `None` for results that were not requested.

    Inverse scales are float32, with "1x32" E8M0 codes: of a tensor [1], of a row or column [M] or [N], of blocks along
    rows [ceil(N / B), M], down columns [ceil(M / B), N]. Those of 128 x 128 are stored as GEMMs read them, with rows
    padded by zeros to a multiple of 4: [ceil(M / 128), ceil(N / 128)], of columns the transpose.
    """

    rows: Tensor | None  # [M, N] quantized along rows
    rows_inverse: Tensor | None  # also of columns, if they share their scales
    columns: Tensor | None  # [N, M], transposed: quantized down columns; its rows begin at multiples of 16 bytes
    columns_inverse: Tensor | None


class As(NamedTuple):
    """How a kernel quantizes its result before it writes it; arguments are those of `quantize_matrix`."""

    scaling: Scaling
    code_dtype: torch.dtype | None = None
    power_of_two: bool = False
    along_rows: bool = False
    down_columns: bool = False
    given_scale: Tensor | None = None

    def tile(self, parts: int) -> QuantizeTile:
        """A program's tile of the result, for a result of `parts` parts.

        Computing several parts one after the other from the same operands needs more registers than 16 warps have.
        """
        tile = codes_tile(self.scaling)
        return tile if parts == 1 else dataclasses.replace(tile, num_warps=8)

    def made(self, M: int, N: int, device: torch.device) -> Codes:
        """Allocate the results for a matrix."""
        scaling, dtype, rows, columns = self.scaling, self.code_dtype, self.along_rows, self.down_columns
        kind = torch.uint8 if scaling == "1x32" else torch.float32
        shared = (1,) if scaling in ("given", "tensor") else None
        size = {"1x128": 128, "1x32": 32}.get(scaling)
        along, down = ((M,), (N,)) if size is None else ((cdiv(N, size), M), (cdiv(M, size), N))
        if scaling == "128x128":
            high, wide = cdiv(M, _BLOCK), cdiv(N, _BLOCK)
            along, down = (high, cdiv(wide, 4) * 4), (wide, cdiv(high, 4) * 4)
        return Codes(
            torch.empty((M, N), dtype=dtype, device=device) if rows else None,
            torch.empty(shared or along, dtype=kind, device=device) if shared or rows else None,
            torch.empty((N, cdiv(M, MULTIPLE) * MULTIPLE), dtype=dtype, device=device)[:, :M] if columns else None,
            torch.empty(down, dtype=kind, device=device) if columns and not shared else None,
        )

    def named(self, made: Sequence[Tensor]) -> Codes:
        """The allocated results by name."""
        shared, left = self.scaling == "given", iter(made)
        there = self.along_rows, shared or self.along_rows, self.down_columns, self.down_columns and not shared
        return Codes(*[next(left) if one else None for one in there])

    def constexprs(self, device: torch.device) -> dict[str, Any]:
        """Compile-time arguments of a launch."""
        assert self.code_dtype is not None
        return {
            "SCALING": self.scaling, "EXPONENT": _EXPONENT[self.code_dtype], "POWER_OF_TWO": self.power_of_two,
            "ROUNDED": _casts_by_float16(architecture(device)),
        }  # fmt: skip


@operator("quantize", written=("largest",))
def quantize_matrix(
    x: Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    *,
    power_of_two: bool = False,
    rows: bool = True,
    columns: bool = False,
    scale: Tensor | None = None,
    largest: Tensor | None = None,
) -> Codes:
    """The 8-bit numbers of a matrix and the inverse of their scales, bit for bit those of `recipes.quantize`.

    Args:
        x: [M, N] float32, bfloat16 or float16, N a multiple of 16, any stride of rows.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        scaling: the elements that share a scale.
        power_of_two: whether scales are rounded down to powers of two.
        rows: whether codes along rows are needed.
        columns: whether codes down columns are needed, transposed; only in 16 bits.
        scale: the given scale, float32 of one number.
        largest: float32 of one number, with a given scale: becomes max |x| if that is larger, or NaN.

    Raises:
        ValueError: for any other x.
    """
    _check(x, rows, columns)
    (M, N), device, to = x.shape, x.device, As(scaling, dtype, power_of_two, rows, columns)
    results = to.made(M, N, device)
    if stops():
        return results
    source = viewed_as_rows("x", x, N)
    tile = codes_tile(scaling)
    grid, sizes = cdiv(M, tile.m) * cdiv(N, tile.n), {"BLOCK_M": tile.m, "BLOCK_N": tile.n}
    whole = by_row = by_column = None
    if scaling in ("tensor", "row"):
        counts = [1, 0, 0] if scaling == "tensor" else [0, M * rows, N * columns]
        most = torch.empty(sum(counts), dtype=torch.int32, device=device)
        launch(_zero_kernel, cdiv(sum(counts), _ZEROS), (most, sum(counts)), {"BLOCK": _ZEROS})
        whole, by_row, by_column = (part if len(part) else None for part in most.split(counts))
        launch(_largest_kernel, grid, (source, whole, by_row, by_column, source.stride(0), M, N), sizes, tile.num_warps)
    launch(
        _quantize_kernel,
        grid,
        (
            source, scale, None if largest is None else largest.view(torch.int32), whole, by_row, by_column,
            *results, source.stride(0), M, N,
        ),
        {**to.constexprs(device), **sizes},
        tile.num_warps,
    )  # fmt: skip
    return results


@operator("quantize_several")
def quantize_several(
    x: Tensor,
    others: Sequence[Tensor],
    dtype: torch.dtype,
    scaling: Literal["128x128", "1x32"],
    *,
    power_of_two: bool = False,
    columns: bool = False,
) -> tuple[Tensor, ...]:
    """`quantize_matrix` for several matrices of one dtype in one launch: the codes of x, then of each other matrix.

    For each matrix codes along rows and their inverse scales, and with `columns` both down columns.

    Raises:
        ValueError: for matrices that `quantize_matrix` does not support.
    """
    every, device, to = (x, *others), x.device, As(scaling, dtype, power_of_two, True, columns)
    for one in every:
        _check(one, True, columns)
        if one.dtype is not x.dtype:
            raise ValueError(f"matrices must have one dtype, got {x.dtype} and {one.dtype}")
    found = [to.made(one.shape[0], one.shape[1], device) for one in every]
    results = tuple([t for codes in found for t in codes if t is not None])
    if stops():
        return results
    tile = codes_tile(scaling)
    counts = [cdiv(one.shape[0], tile.m) * cdiv(one.shape[1], tile.n) for one in every]
    sources = tuple([viewed_as_rows("x", one, one.shape[1]) for one in every])
    numbers = [*itertools.accumulate(counts[:-1], initial=0)], [one.stride(0) for one in sources]
    numbers += [one.shape[0] for one in every], [one.shape[1] for one in every]
    launch(
        _quantize_several_kernel,
        sum(counts),
        (sources, *zip(*found, strict=True), *map(tuple, numbers)),
        {**to.constexprs(device), "BLOCK_M": tile.m, "BLOCK_N": tile.n},
        tile.num_warps,
    )
    return results


def named_codes(made: Sequence[Tensor], columns: bool) -> Iterator[Codes]:
    """The results of `quantize_several`, matrix by matrix."""
    count = 4 if columns else 2
    for first in range(0, len(made), count):
        yield Codes(*made[first : first + count], *[None] * (4 - count))


def _check(x: Tensor, rows: bool, columns: bool) -> None:
    if columns and x.dtype is torch.float32:
        # Tiles are transposed before the cast. In 16 bits that moves 16 bits between threads; in float32 the compiler
        # moves the transposition after the cast, and codes of 8 bits were wrong on an H100.
        raise ValueError("columns of float32 are not quantized by a kernel")
    if x.ndim != 2 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"x must be a matrix of float32, bfloat16 or float16, got {x.dtype} {tuple(x.shape)}")
    if not x.numel() or x.shape[1] % MULTIPLE or not (rows or columns):
        asked = f"rows={rows} and columns={columns}"
        raise ValueError(f"expects rows of a multiple of {MULTIPLE} numbers, got {tuple(x.shape)} with {asked}")


def _casts_by_float16(arch: str) -> bool:
    """Whether Triton casts float32 to 8 bits through float16 there; assumed for architectures that were not checked."""
    return arch != "interpreter" and capability(arch) < 90

# pyright: basic
# Device functions are Triton's language, which has no types.
"""Sums over rows in two launches: partial sums per program by whichever kernel has the rows, and this one after it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._launch import cdiv, launch, next_power_of_2
from ._variants import TRITON_DTYPES, Variant

_BLOCK_N = 64


@triton.jit
def _column_sums_kernel(partials, out, R, N, stride, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    cols = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = cols < N
    total = tl.zeros((BLOCK_R, BLOCK_N), partials.dtype.element_ty)
    for first in tl.range(0, R, BLOCK_R):
        rows = first + tl.arange(0, BLOCK_R)
        at = rows.to(tl.int64)[:, None] * stride + cols[None, :]
        total += tl.load(partials + at, mask=(rows < R)[:, None] & mask[None, :], other=0.0)
    tl.store(out + cols, tl.sum(total, 0).to(out.dtype.element_ty), mask=mask)


def column_sums(partials: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Sum the rows of partial sums in a fixed order and round once.

    partials: [R, N] float32 or float64, any row stride.  Returns [columns] of `dtype`, the first columns of N.
    """
    out = torch.empty(columns, dtype=dtype, device=partials.device)
    rows = partials.shape[0]
    block = min(64, next_power_of_2(rows))
    launch(
        _column_sums_kernel,
        cdiv(columns, _BLOCK_N),
        (partials, out, rows, columns, partials.stride(0)),
        {"BLOCK_R": block, "BLOCK_N": _BLOCK_N},
    )
    return out


def variants() -> Iterator[Variant]:
    """Every dtype and block, and one row or one column of partial sums, which Triton makes constants."""
    for dtype, block in itertools.product(("float32", "bfloat16", "float16", "float64"), (1, 8, 64)):
        yield _variant(dtype, block)
    yield _variant("bfloat16", 1, "R")
    yield _variant("bfloat16", 8, "N")
    yield _variant("bfloat16", 8, "N", "stride")


def _variant(dtype: str, block: int, *ones: str) -> Variant:
    partial = "fp64" if dtype == "float64" else "fp32"
    types = {"partials": f"*{partial}", "out": f"*{TRITON_DTYPES[dtype]}", "R": "i32", "N": "i32", "stride": "i32"}
    return Variant(
        name=f"column_sums {TRITON_DTYPES[dtype]} {block}" + "".join(f" {one}=1" for one in ones),
        kernel=_column_sums_kernel,
        signature={key: value for key, value in types.items() if key not in ones},
        constexprs={"BLOCK_R": block, "BLOCK_N": _BLOCK_N, **dict.fromkeys(ones, 1)},
        divisible=() if ones else ("partials", "out", "N", "stride"),
    )

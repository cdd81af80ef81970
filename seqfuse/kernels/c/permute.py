# pyright: basic
"""Rows of tokens and experts in C: `kernels.permute` on a CPU, and how rows are sorted there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compiler
from .._launch import is_faking
from .call import (
    CKernel,
    Decided,
    Outline,
    allocator,
    by_parts,
    copies,
    load_as,
    parts_of,
    row_stride,
    store_as,
    written,
)

_INTEGERS = {torch.int32: "int32_t", torch.int64: "int64_t"}
_BLOCK = 1024
"""Products that are summed in float32; such partial sums are added in float64."""


class PairTypes(NamedTuple):
    """The dtypes of a `permute.Pairs`."""

    rows: torch.dtype
    ends: torch.dtype
    factors: torch.dtype | None


def kinds_of(pairs: Any) -> PairTypes | None:
    """The dtypes of pairs, or `None` without pairs."""
    if pairs is None:
        return None
    rows, ends, factors = pairs
    return PairTypes(rows.dtype, ends.dtype, None if factors is None else factors.dtype)


def end_of(kinds: PairTypes) -> str:
    """C of the last of the `ends` of groups; rows from it on belong to no group."""
    return f"const I end = ((const {_integers(kinds.ends)} *)ends)[G - 1];\n"


def each_pair(kinds: PairTypes, kept: str, dropped: str = "") -> str:
    """A loop over the pairs of token `row`, with the row `r` and the factor `f` of each pair that was not dropped."""
    factor = f"const float f = {load_as(kinds.factors, 'factors', 'row * K + j')};\n" if kinds.factors else ""
    at = f"const I r = ((const {_integers(kinds.rows)} *)rows)[row * K + j];\n"
    rest = f"else {{\n{dropped}}}\n" if dropped else ""
    return f"for (I j = 0; j < K; j++) {{\n{at}if (r < end) {{\n{factor}{kept}}} {rest}}}\n"


def gather_in_c(of: torch.dtype, kinds: PairTypes) -> str:
    """C of `u`, the sum over the pairs of token `row` of their rows of x, in order."""
    added = _loop(f"u[c] += {load_as(of, 'x', 'r * sx + c')}{' * f' * bool(kinds.factors)};")
    return "memset(u, 0, 4 * W);\n" + each_pair(kinds, added)


def row_dot(product: str, of: torch.dtype, pointer: str) -> str:
    """C that stores the sum over columns of a product, for pair `j` of token `row`."""
    return (
        f"double sum = 0;\nfor (I c0 = 0; c0 < W; c0 += {_BLOCK}) {{\nfloat part = 0.f;\n"
        f"const I c1 = c0 + {_BLOCK} < W ? c0 + {_BLOCK} : W;\n#pragma omp simd reduction(+ : part)\n"
        f"for (I c = c0; c < c1; c++) part += {product};\nsum += part;\n}}\n"
        f"{store_as(of, pointer, 'row * K + j', '(float)sum')}\n"
    )


def _integers(of: torch.dtype) -> str:
    if of not in _INTEGERS:
        raise ValueError(f"rows and ends must be int32 or int64, not {str(of).removeprefix('torch.')}")
    return _INTEGERS[of]


def _loop(body: str) -> str:
    return f"#pragma omp simd\nfor (I c = 0; c < W; c++) {{\n{body}\n}}\n"


@functools.lru_cache(128)
def _spread_kernel(
    of: torch.dtype, kinds: PairTypes, of_other: torch.dtype | None, spread: bool, of_sums: torch.dtype | None
) -> CKernel:
    kept = dropped = ""
    x, size = load_as(of, "x", "row * sx + c"), of.itemsize
    if spread:
        dropped = f"memset((char *)y + r * W * {size}, 0, W * {size});\n"
        kept = f"memcpy((char *)y + r * W * {size}, (const char *)x + row * sx * {size}, W * {size});\n"
        kept = _loop(store_as(of, "y", "r * W + c", f"{x} * f")) if kinds.factors else kept
    if of_sums is not None and of_other is not None:
        kept += row_dot(f"{x} * {load_as(of_other, 'other', 'r * so + c')}", of_sums, "sums")
        dropped += store_as(of_sums, "sums", "row * K + j", "0.f") + "\n"
    given = ["x", "rows", "ends", *["factors"] * bool(kinds.factors), *["other"] * bool(of_other)]
    pointers = [f"const void *restrict {name}" for name in given]
    pointers += ["void *restrict y"] * spread + ["void *restrict sums"] * bool(of_sums)
    body = end_of(kinds) + by_parts("M", "", each_pair(kinds, kept, dropped))
    return written(pointers, ["M", "W", "K", "G", "parts", "sx", "so"], [], body)


def decide_spread(a: Any, made: Sequence[Outline | None]) -> Decided:
    """Decide `permute.spread_rows`."""
    (tokens, top_k), columns, other = a.rows.shape, a.x.shape[-1], a.other
    (sx, copy), (so, copy_other) = row_stride(a.x, columns), (0, False) if other is None else row_stride(other, columns)
    kinds, (spread, sums) = kinds_of((a.rows, a.offsets, a.factors)), made
    assert kinds is not None
    kernel = _spread_kernel(
        a.x.dtype, kinds, None if other is None else other.dtype, spread is not None, sums and sums[1]
    )
    numbers = (tokens, columns, top_k, len(a.offsets), parts_of(tokens, columns * top_k, False), sx, so)
    copied = [0] * copy + [2] * (not a.offsets.is_contiguous()) + [3 + (a.factors is not None)] * copy_other
    return Decided(kernel, made, numbers, a.rows.numel() * columns, None, copies(copied))


@functools.lru_cache(64)
def _gather_kernel(of: torch.dtype, kinds: PairTypes) -> CKernel:
    wide = of is torch.float32
    row = "float *restrict u = (float *)y + row * W;\n" if wide else ""
    row += gather_in_c(of, kinds)
    row += "" if wide else _loop(store_as(of, "y", "row * W + c", "u[c]"))
    given = ["x", "rows", "ends", *["factors"] * bool(kinds.factors)]
    pointers = [*(f"const void *restrict {name}" for name in given), "void *restrict y"]
    memory = "" if wide else "float *restrict memory = malloc(4 * W), *restrict u = memory;\n"
    body = end_of(kinds) + by_parts("M", "", row, memory)
    return written(pointers, ["M", "W", "K", "G", "parts", "sx"], [], body)


def decide_gather(a: Any, made: Sequence[Outline | None]) -> Decided:
    """Decide `permute.gather_rows`."""
    (tokens, top_k), columns = a.rows.shape, a.x.shape[-1]
    (sx, copy), kinds = row_stride(a.x, columns), kinds_of((a.rows, a.offsets, a.factors))
    assert kinds is not None
    numbers = (tokens, columns, top_k, len(a.offsets), parts_of(tokens, columns * top_k, False), sx)
    copied = [0] * copy + [2] * (not a.offsets.is_contiguous())
    return Decided(_gather_kernel(a.x.dtype, kinds), made, numbers, a.rows.numel() * columns, None, copies(copied))


@functools.cache
def _sort_kernel() -> CKernel:
    """Counts pairs per expert, then computes where its rows begin and the row of each pair; dropped pairs come last."""
    expert = "const I e = (uint64_t)experts[p] < (uint64_t)E ? experts[p] : E;\n"
    body = (
        f"I *at = calloc(E + 2, sizeof(I));\nfor (I p = 0; p < P; p++) {{\n{expert}at[e + 1]++;\n}}\n"
        "for (I e = 0; e < E; e++) {\nat[e + 1] += at[e];\nends[e] = (int32_t)at[e + 1];\n}\n"
        f"for (I p = 0; p < P; p++) {{\n{expert}rows[p] = at[e]++;\n}}\nfree(at);\n"
    )
    pointers = ["const int64_t *restrict experts", "int64_t *restrict rows", "int32_t *restrict ends"]
    return written(pointers, ["P", "E"], [], body)


def sorted_pairs(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The row of each (token, expert) pair, int64 of the shape of `experts`, and the ends of `count` experts.

    Pairs of one expert keep their order. Pairs whose expert is out of range come last. experts: int64.
    """
    empty, shape = allocator(), tuple(experts.shape)
    if is_faking():
        compiler.ask(_sort_kernel().source)
        return torch.empty_like(experts), experts.new_empty(count, dtype=torch.int32)
    experts = experts.contiguous()
    rows, ends = empty(shape, experts.stride(), torch.int64), empty((count,), (1,), torch.int32)
    _sort_kernel().function()(experts.data_ptr(), rows.data_ptr(), ends.data_ptr(), experts.numel(), count, 1)
    return rows, ends

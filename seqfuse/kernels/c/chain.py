# pyright: basic
"""Chains of point-wise steps in C: `kernels.pointwise` on a CPU.

The loops run over rows and columns; a step is a few expressions in the innermost one. Sums over rows are computed in
parts of `call.ROWS` rows, which are added in order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import activations, chains
from .call import CKernel, Decided, Outline, by_parts, copies, load_as, parts_of, row_stride, store_as, written
from .trace import Lines, Number, gradient_in_c, value_in_c


class Printed(NamedTuple):
    """A kernel, and the numbers of its chain that are its arguments."""

    kernel: CKernel
    integers: tuple[int, ...]
    floats: tuple[float, ...]


class Numbers:
    """Numbers of a chain or an activation that are arguments of a kernel: other numbers need no compilation."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.integers: list[int] = []
        self.floats: list[float] = []

    def names(self, kind: str) -> list[str]:
        """The names of all integer arguments, `"n"`, or of all float arguments, `"f"`."""
        return [f"{kind}{i}" for i in range(len(self.integers if kind == "n" else self.floats))]

    def integer(self, value: int) -> str:
        """Add an integer argument; returns its name."""
        self.integers.append(value)
        return f"n{len(self.integers) - 1}"

    def number(self, value: float) -> Number:
        """Add a float argument."""
        self.floats.append(value)
        return Number(self._lines, f"f{len(self.floats) - 1}")

    def of(self, function: Any, constants: Any) -> Any:
        """The configuration numbers of a device function, with constant factors as arguments."""
        if function in (activations._composed, activations._composed_derivative):
            return tuple((f, df, of_output, self.of(f, inner)) for f, df, of_output, inner in constants)
        return (self.number(constants[0]),) if function is activations.scaled else constants


def drop_element(value: Number, keep: str, numbers: Numbers, P: Sequence[Any], lines: Lines) -> Number:
    """An element after dropout, by its random word `keep`; `P` is from `_device.threshold_and_scale`.

    If p is 1, scale and threshold are 0: kept elements are multiplied by 0, like dropped ones.
    """
    kept, dropped = value * numbers.number(P[1]), value * 0.0
    return lines.number(f"{keep} >= (uint32_t){numbers.integer(P[0])} ? {kept.name} : {dropped.name}")


@functools.lru_cache(512)
def printed(
    chain: Any,
    of_x: torch.dtype,
    of_operands: tuple[torch.dtype | None, ...],
    dtypes: tuple[torch.dtype, ...],
    of_y: torch.dtype | None,
) -> Printed:
    """The kernel of a chain.

    Args:
        chain: the steps.
        of_x: dtype of the input.
        of_operands: dtypes of the operands; `None` for an operand that a step has read before.
        dtypes: dtypes of the steps' extra results.
        of_y: dtype of the last value, `None` if it is not needed.
    """
    lines = Lines()
    numbers = Numbers(lines)
    operands, left, wanted = -1, iter(of_operands), iter(dtypes)
    of_operand: Any = None
    reader: tuple[int, Any] = -1, None  # the operand that was read last, and its dtype
    before: list[str] = []
    outputs: list[str] = []
    totals: list[tuple[torch.dtype, int]] = []
    sums = 0
    shift: tuple[str, torch.dtype] | None = None
    dots: list[tuple[torch.dtype, int]] = []
    factor: Number | None = None  # of a token

    def columns(count: int) -> list[str]:
        """The current column in each of `count` parts of a row."""
        return [f"2 * c + {j}" if chain.interleaved and count == 2 else f"c + {j} * W" for j in range(count)]

    def matrix(of: torch.dtype, pointer: str, stride: str, count: int) -> list[Number]:
        return [lines.number(load_as(of, pointer, f"row * {stride} + {column}")) for column in columns(count)]

    def row(values: Sequence[Number], of: torch.dtype, pointer: str) -> list[Number]:
        pairs = zip(values, columns(len(values)), strict=True)
        return [v + lines.number(load_as(of, pointer, column)) for v, column in pairs]

    def read(count: int) -> list[Number]:
        at, of = reader
        found = matrix(of, f"p{at}", f"s{at}", count)
        return found if shift is None else row(found, shift[1], shift[0])

    def give(values: Sequence[Number], of: torch.dtype, pointer: str) -> None:
        for value, column in zip(values, columns(len(values)), strict=True):
            lines.add(store_as(of, pointer, f"row * {len(values)} * W + {column}", value.name))

    tiles = matrix(of_x, "x", "sx", chain.parts[0])

    for s, step in enumerate(chain.steps):
        if step.operand:
            given = next(left)
            if given is not None:
                operands, of_operand = operands + 1, given
                reader = (operands, given) if step.kind in chains.READERS else reader
        functions = step.functions
        if step.packing:
            P: Any = tuple(numbers.of(f, p) for f, p in zip(functions, step.P, strict=False))
        else:
            P = numbers.of(functions[0], step.P) if functions else step.P
        of = next(wanted) if step.output else torch.float32
        if step.kind == "act":
            tiles = [value_in_c(functions[0], t, P) for t in tiles]
        elif step.kind == "dact":
            tiles = [gradient_in_c(functions[0], t, v, P) for t, v in zip(tiles, read(len(tiles)), strict=True)]
        elif step.kind == "gated":
            tiles = _gated(step, tiles, P)
        elif step.kind == "dgated":
            tiles = _dgated(step, tiles, read(2 * len(tiles)), P)
        elif step.kind == "bias":
            tiles = row(tiles, of_operand, f"p{operands}")
        elif step.kind == "add":
            others = matrix(of_operand, f"p{operands}", f"s{operands}", len(tiles))
            tiles = [t + v for t, v in zip(tiles, others, strict=True)]
        elif step.kind == "scale":
            constant = numbers.number(step.P[0])
            tiles = [t * constant for t in tiles]
        elif step.kind == "dropout":
            before.append(f"keys_of(*(const int64_t *)p{operands}, &k{s});")
            words = [f"w{s}_{j}" for j in range(len(tiles))]
            tiles = [drop_element(t, f"{w}[c - c0]", numbers, step.P, lines) for t, w in zip(tiles, words, strict=True)]
        elif step.kind == "store":
            give(tiles, of, f"o{len(outputs)}")
            outputs.append("matrix")
        elif step.kind == "emit":
            give([value_in_c(functions[0], v, P) for v in read(len(tiles))], of, f"o{len(outputs)}")
            outputs.append("matrix")
        elif step.kind == "emit_gated":
            made = _gated(step, read(2 * len(tiles)), P)
            give(made if factor is None else [v * factor for v in made], of, f"o{len(outputs)}")
            outputs.append("matrix")
        elif step.kind == "dot_gated":
            for t, v in zip(tiles, _gated(step, read(2 * len(tiles)), P), strict=True):
                lines.add(f"d{len(dots)} += {(t * v).name};")
            dots.append((of, len(outputs)))
            outputs.append("tokens")
        elif step.kind == "token_scale":
            factor = lines.number(load_as(of_operand, f"p{operands}", "row"))
            tiles = [t * factor for t in tiles]
        elif step.kind == "shift":
            shift = f"p{operands}", of_operand
        elif step.kind == "sum":
            for t, column in zip(tiles, columns(len(tiles)), strict=True):
                lines.add(f"s[{sums} * W + {column}] += {t.name};")
            totals.append((of, len(tiles)))
            outputs.append("row")
            sums += len(tiles)
    if of_y is not None:
        give(tiles, of_y, "y")
    return Printed(
        _kernel(chain, lines, numbers, operands + 1, outputs, totals, sums, before, of_y is not None, dots),
        tuple(numbers.integers),
        tuple(numbers.floats),
    )


def _halves(step: Any, packed: list[Number]) -> Iterator[tuple[Number, Number]]:
    """Each tile of the gate, with that of up."""
    n = len(packed) // 2
    pairs = zip(packed[:n], packed[n:], strict=True)
    return ((b, a) for a, b in pairs) if step.packing == "up_gate" else pairs


def _gated(step: Any, packed: list[Number], P: Any) -> list[Number]:
    f, g = step.functions[:2]
    return [value_in_c(f, gate, P[0]) * value_in_c(g, up, P[1]) for gate, up in _halves(step, packed)]


def _dgated(step: Any, tiles: list[Number], packed: list[Number], P: Any) -> list[Number]:
    f, g, df, of_output, dg, up_of_output = step.functions
    gates, ups = [], []
    for t, (gate, up) in zip(tiles, _halves(step, packed), strict=True):
        activated, shifted = value_in_c(f, gate, P[0]), value_in_c(g, up, P[1])
        gates.append(gradient_in_c(df, t * shifted, activated if of_output else gate, P[0]))
        ups.append(gradient_in_c(dg, t * activated, shifted if up_of_output else up, P[1]))
    return ups + gates if step.packing == "up_gate" else gates + ups


def _kernel(
    chain: Any, lines: Lines, numbers: Numbers, operands: int, outputs: list[str], totals: Any, sums: int,
    before: list[str], result: bool, dots: list[tuple[torch.dtype, int]],
) -> CKernel:  # fmt: skip
    pointers = ["const void *restrict x", *(f"const void *restrict p{i}" for i in range(operands))]
    pointers += ["void *restrict y"] * result + [f"void *restrict o{i}" for i in range(len(outputs))]
    pointers += ["float *restrict scratch"] * bool(sums)
    integers = ["M", "W", "parts", "sx", *(f"s{i}" for i in range(operands)), *numbers.names("n")]
    body = "\n".join(lines.lines)
    drops = [(s, chain.parts[s]) for s, step in enumerate(chain.steps) if step.kind == "dropout"]
    keys = "".join(f"Keys k{s};\n" for s, _ in drops) + "\n".join(before)
    words = "\n".join(
        f"uint32_t w{s}_{j}[NB]; words(&k{s}, row * {n} * W + {j} * W + c0, n, w{s}_{j});"
        for s, n in drops for j in range(n)
    )  # fmt: skip
    names = ", ".join(f"d{i}" for i in range(len(dots)))
    simd = "#pragma omp simd" + (f" reduction(+ : {names})" if dots else "")
    inner = f"{simd}\nfor (I c = 0; c < W; c++) {{\n{body}\n}}"
    if drops or dots:
        inner = f"{words}\n{simd}\nfor (I c = c0; c < c0 + n; c++) {{\n{body}\n}}\n"
        if dots:  # float32 within a block of columns: vectors hold half as many wider numbers
            added = "\n".join(f"sum{i} += d{i};" for i in range(len(dots)))
            inner = f"float {', '.join(f'd{i} = 0.f' for i in range(len(dots)))};\n{inner}{added}\n"
        block = "NB" if drops else "1024"
        inner = f"for (I c0 = 0; c0 < W; c0 += {block}) {{\nI n = W - c0 < {block} ? W - c0 : {block};\n{inner}}}"
    if dots:
        kept = "\n".join(store_as(of, f"o{at}", "row", f"(float)sum{i}") for i, (of, at) in enumerate(dots))
        inner = f"double {', '.join(f'sum{i} = 0' for i in range(len(dots)))};\n{inner}\n{kept}"
    start = f"float *restrict s = scratch + part * {sums} * W;\nmemset(s, 0, 4 * {sums} * W);\n" if sums else ""
    text = by_parts("M", f"{start}{keys}\n", f"{inner}\n")
    at = 0
    for i, (of, count) in zip((i for i, kind in enumerate(outputs) if kind == "row"), totals, strict=True):
        keep = store_as(of, f"o{i}", "c", "(float)sum[c - c0]")
        text += f"{{\nI from = {at} * W, N = {count} * W;\n{total(sums, keep)}}}\n"
        at += count
    return written(pointers, integers, numbers.names("f"), text, *["philox.h"] * bool(drops))


def total(sums: int, keep: str) -> str:
    """C that adds the parts of `scratch`, in order and in float64: columns `from` to `from + N` of `sums` rows of W."""
    return (
        "for (I c0 = 0; c0 < N; c0 += 256) {\n"
        "I n = N - c0 < 256 ? N - c0 : 256;\ndouble sum[256] = {0};\n"
        f"for (I part = 0; part < parts; part++) {{\nconst float *restrict s = scratch + part * {sums} * W + from;\n"
        "#pragma omp simd\nfor (I c = c0; c < c0 + n; c++) sum[c - c0] += s[c];\n}\n"
        f"#pragma omp simd\nfor (I c = c0; c < c0 + n; c++) {{\n{keep}\n}}\n}}\n"
    )


def decide_chain(a: Any, made: Sequence[Outline | None]) -> Decided:
    """Decide `pointwise.pointwise`; an operand that a step has read before may be `None`."""
    if a.to is not None or a.largest is not None:
        raise ValueError("no C kernel quantizes its result")
    x, chain = a.x, a.chain
    steps = [result for result in made if result is not None][a.result :]
    width = (x.shape[-1] if x.ndim else 1) // chain.parts[0]
    lead, columns = tuple(x.shape[:-1]), width * chain.parts[0]
    rows = x.numel() // columns if columns else 0
    stride, copy = row_stride(x, columns)
    strides, copied = [stride], [0] * copy
    left: Iterator[Tensor | None] = iter(a.operands)
    at = 0
    try:
        for step, parts in zip(chain.steps, chain.parts, strict=False):
            given = next(left) if step.operand else None
            if given is None:
                continue
            at += 1
            if step.operand in ("seed", "row", "packed row", "tokens"):
                chains.fit_operand(step, given, lead, parts * width)
                stride, copy = 0, not given.is_contiguous()
            else:
                own = parts * width * (2 if step.operand == "packed" else 1)
                stride, copy = row_stride(given, own)
                if given.ndim and tuple(given.shape) != (*lead, own):
                    raise ValueError(f"{step.name} takes shape {(*lead, own)}, got {tuple(given.shape)}")
            strides.append(stride)
            copied += [at] * copy
    except StopIteration:
        raise ValueError(f"{chain}: too few operands or dtypes") from None
    if next(left, None) is not None:
        raise ValueError(f"{chain}: more operands than steps that take one")
    of_operands = tuple(None if t is None else t.dtype for t in a.operands)
    of_y = (a.dtype or x.dtype) if a.result else None
    kernel, integers, floats = printed(chain, x.dtype, of_operands, tuple(of for _, of in steps), of_y)
    parts = parts_of(rows, columns, bool(chain.sums))
    numbers = (rows, width, parts, *strides, *integers, *floats)
    scratch = parts * chain.sums * width if chain.sums else None
    return Decided(kernel, made, numbers, x.numel(), scratch, copies(copied))

# pyright: basic
"""LayerNorm and RMSNorm in C, with the operations around them: `kernels.norm` on a CPU.

Each pass over a row reads it from the cache; the stored row is normalized. Sums over rows are computed in parts of
`call.ROWS` rows, which are added in order.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._device import threshold_and_scale
from .call import CKernel, Decided, Outline, by_parts, copies, load_as, parts_of, row_stride, store_as, written
from .chain import Numbers, Printed, drop_element, total
from .permute import PairTypes, each_pair, end_of, gather_in_c, kinds_of, row_dot
from .trace import Lines, Number, gradient_in_c, value_in_c

_Dtype = torch.dtype | None
_Act = tuple[Any, Any, bool, tuple[Any, ...]] | None  # value, derivative, whether that reads the output, numbers


def _gain(lines: Lines, of_weight: torch.dtype, zero_centered: bool) -> Number:
    gain = lines.number(load_as(of_weight, "weight", "c"))
    return gain + 1.0 if zero_centered else gain


def _columns(body: str, words: bool) -> str:
    """A loop over the columns of a row, with a random word `w[c - c0]` for each if `words`."""
    if not words:
        return f"#pragma omp simd\nfor (I c = 0; c < W; c++) {{\n{body}\n}}\n"
    return (
        "for (I c0 = 0; c0 < W; c0 += NB) {\nI n = W - c0 < NB ? W - c0 : NB;\nuint32_t w[NB];\n"
        "words(&keys, row * W + c0, n, w);\n"
        f"#pragma omp simd\nfor (I c = c0; c < c0 + n; c++) {{\n{body}\n}}\n}}\n"
    )


def _row(of: torch.dtype, pointer: str, stride: str) -> str:
    """C that sets `z` to a row in float32, in place if it is float32."""
    if of is torch.float32:
        return f"const float *restrict z = (const float *){pointer} + row * {stride};\n"
    return _columns(f"z[c] = {load_as(of, pointer, f'row * {stride} + c')};", False)


def _kernel(
    given: Iterable[str], made: Iterable[str], strides: Iterable[str], numbers: Numbers, floats: Iterable[str],
    thread: str, part: str, row: str, after: str, words: bool,
) -> CKernel:  # fmt: skip
    """A kernel of loops over parts and rows.

    Args:
        given: declarations of pointers that are read.
        made: declarations of pointers that are written.
        strides: names of row strides.
        numbers: arguments of activations and dropout.
        floats: names of floats before those.
        thread: C at the start of each thread; `memory` is freed at its end.
        part: C at the start of each part.
        row: C for a row.
        after: C after all parts.
        words: whether random words are needed.
    """
    keys = "Keys keys;\nkeys_of(*(const int64_t *)seed, &keys);\n" if words else ""
    integers = ["M", "W", "parts", *strides, *numbers.names("n")]
    body = by_parts("M", part, row, thread + keys) + after
    return written([*given, *made], integers, [*floats, *numbers.names("f")], body, "norm.h", *["philox.h"] * words)


def _given(pairs: PairTypes | None) -> dict[str, _Dtype]:
    """The dtypes of the tensors of pairs."""
    return {} if pairs is None else {"rows": pairs.rows, "ends": pairs.ends, "factors": pairs.factors}


@functools.lru_cache(512)
def _printed_forward(
    centered: bool, zero_centered: bool, act: _Act, p: float | None, of_x: torch.dtype, of_weight: _Dtype,
    of_bias: _Dtype, of_pre_bias: _Dtype, of_residual: _Dtype, of_y: torch.dtype, of_stream: _Dtype,
    pairs: PairTypes | None,
) -> Printed:  # fmt: skip
    """The forward kernel; absent tensors have no dtype, and `p` is that of dropout, if there is any."""
    read = {"x": of_x, "weight": of_weight, "bias": of_bias, "pre_bias": of_pre_bias}
    read |= {"seed": None if p is None else torch.int64, "residual": of_residual} | _given(pairs)
    given = [f"const void *restrict {name}" for name, of in read.items() if of is not None]
    strides = ["sx", *["sr"] * (of_residual is not None), *["K", "G"] * (pairs is not None)]
    before, behind = Lines(), Lines()
    numbers = Numbers(behind)
    row, source, of_source, stride = "", "x", of_x, "sx"
    if of_stream is not None:
        z = before.number(load_as(of_x, "x", "row * sx + c") if pairs is None else "u[c]")
        if of_pre_bias is not None:
            z = z + before.number(load_as(of_pre_bias, "pre_bias", "c"))
        if p is not None:
            z = drop_element(z, "w[c - c0]", numbers, threshold_and_scale(p), before)
        if of_residual is not None:
            z = z + before.number(load_as(of_residual, "residual", "row * sr + c"))
        before.add(store_as(of_stream, "stream", "row * W + c", z.name))
        row = "" if pairs is None else gather_in_c(of_x, pairs)
        row += _columns("\n".join(before.lines), p is not None)
        source, of_source, stride = "stream", of_stream, "W"
    row += _row(of_source, source, stride)
    row += "double squares;\nfloat mean = 0;\n"
    row += "moments(z, W, &mean, &squares);\nmeans[row] = mean;\n" if centered else "squares = dot(z, z, W);\n"
    row += "const float rstd = rstd_of(squares, W, eps);\nrstds[row] = rstd;\n"
    y = behind.number("z[c] - mean" if centered else "z[c]") * behind.number("rstd")
    if of_weight is not None:
        y = y * _gain(behind, of_weight, zero_centered)
    if of_bias is not None:
        y = y + behind.number(load_as(of_bias, "bias", "c"))
    if act is not None:
        y = value_in_c(act[0], y, numbers.of(act[0], act[3]))
    behind.add(store_as(of_y, "y", "row * W + c", y.name))
    row += _columns("\n".join(behind.lines), False)
    made = ["void *restrict y", *["void *restrict stream"] * (of_stream is not None)]
    made += [*["float *restrict means"] * centered, "float *restrict rstds"]
    held = [*["z"] * (of_source is not torch.float32), *["u"] * (pairs is not None)]
    thread = "" if pairs is None else end_of(pairs)
    if held:
        thread += f"float *restrict memory = malloc({4 * len(held)} * W)"
        thread += "".join(f", *restrict {name} = memory + {i} * W" for i, name in enumerate(held)) + ";\n"
    kernel = _kernel(given, made, strides, numbers, ["eps"], thread, "", row, "", p is not None)
    return Printed(kernel, tuple(numbers.integers), tuple(numbers.floats))


@functools.lru_cache(512)
def _printed_backward(
    centered: bool, zero_centered: bool, act: _Act, p: float | None, of_dy: torch.dtype, of_x: torch.dtype,
    of_mean: _Dtype, of_rstd: torch.dtype, of_weight: _Dtype, of_bias: _Dtype, of_dstream: _Dtype, of_dx: _Dtype,
    of_branch: _Dtype, of_sums: tuple[_Dtype, _Dtype, _Dtype], pairs: PairTypes | None, of_other: _Dtype,
    of_dpairs: _Dtype, of_dfactors: _Dtype,
) -> Printed:  # fmt: skip
    """The backward kernel; results that are not needed have no dtype, and `p` is that of dropout, if there is any."""
    read = {"dy": of_dy, "x": of_x, "means": of_mean, "rstds": of_rstd, "weight": of_weight, "bias": of_bias}
    read |= {"dstream": of_dstream, "seed": None if p is None else torch.int64, **_given(pairs), "other": of_other}
    given = [f"const void *restrict {name}" for name, of in read.items() if of is not None]
    strides = ["sd", "sx", *["sa"] * (of_dstream is not None), *["so"] * (of_other is not None)]
    strides += ["K", "G"] * (pairs is not None)
    dweight, dbias, dpre_bias = (of is not None for of in of_sums)
    to_pairs = of_dpairs is not None or of_dfactors is not None
    spread = of_dx is not None or of_branch is not None or dpre_bias or to_pairs
    first, second = Lines(), Lines()
    numbers = Numbers(first)
    d = first.number(load_as(of_dy, "dy", "row * sd + c"))
    x = first.number(load_as(of_x, "x", "row * sx + c"))
    xhat = (x - first.number("mean") if centered else x) * first.number("rstd")
    gain = None if of_weight is None else _gain(first, of_weight, zero_centered)
    if act is not None:
        value, derivative, of_output, P = act
        P = numbers.of(value, P)
        taken = xhat if gain is None else xhat * gain
        if of_bias is not None:
            taken = taken + first.number(load_as(of_bias, "bias", "c"))
        d = gradient_in_c(derivative, d, value_in_c(value, taken, P) if of_output else taken, P)
    g = d if gain is None else d * gain
    if dweight:
        first.add(f"s[c] += {(d * xhat).name};")
    if dbias:
        first.add(f"s[{int(dweight)} * W + c] += {d.name};")
    row = f"const float rstd = {load_as(of_rstd, 'rstds', 'row')};\n"
    if of_mean is not None:
        row += f"const float mean = {load_as(of_mean, 'means', 'row')};\n"
    if spread:
        first.add(f"g[c] = {g.name};\nh[c] = {xhat.name};")
    row += _columns("\n".join(first.lines), False)
    if spread:
        row += "const float by = (float)(dot(g, h, W) / W);\n"
        row += "const float plain = (float)(plain_sum(g, W) / W);\n" * centered
        out = second.number("g[c]") - second.number("h[c]") * second.number("by")
        if centered:
            out = out - second.number("plain")
        out = out * second.number("rstd")
        if of_dstream is not None:
            out = out + second.number(load_as(of_dstream, "dstream", "row * sa + c"))
        if of_dx is not None:
            second.add(store_as(of_dx, "dx", "row * W + c", out.name))
        if p is not None:
            out = drop_element(out, "w[c - c0]", numbers, threshold_and_scale(p), second)
        if of_branch is not None:
            second.add(store_as(of_branch, "dbranch", "row * W + c", out.name))
        if dpre_bias:
            second.add(f"s[{dweight + dbias} * W + c] += {out.name};")
        if to_pairs:
            second.add(f"g[c] = {out.name};")
        row += _columns("\n".join(second.lines), p is not None)
    if pairs is not None and to_pairs:
        kept = left = ""
        if of_dpairs is not None:
            kept += _columns(store_as(of_dpairs, "dpairs", "r * W + c", "g[c]" + " * f" * bool(pairs.factors)), False)
            left += f"memset((char *)dpairs + r * W * {of_dpairs.itemsize}, 0, W * {of_dpairs.itemsize});\n"
        if of_dfactors is not None and of_other is not None:
            kept += row_dot(f"g[c] * {load_as(of_other, 'other', 'r * so + c')}", of_dfactors, "dfactors")
            left += store_as(of_dfactors, "dfactors", "row * K + j", "0.f") + "\n"
        row += each_pair(pairs, kept, left)
    of_made = {"dx": of_dx, "dweight": of_sums[0], "dbias": of_sums[1], "dbranch": of_branch, "dpre_bias": of_sums[2]}
    of_made |= {"dpairs": of_dpairs, "dfactors": of_dfactors}
    made = [f"void *restrict {name}" for name, of in of_made.items() if of is not None]
    part = after = ""
    totals = [(name, of) for name, of in zip(("dweight", "dbias", "dpre_bias"), of_sums, strict=True) if of is not None]
    if totals:
        made.append("float *restrict scratch")
        part = f"float *restrict s = scratch + part * {len(totals)} * W;\nmemset(s, 0, 4 * {len(totals)} * W);\n"
    for i, (name, of) in enumerate(totals):
        keep = store_as(of, name, "c", "(float)sum[c - c0]")
        after += f"{{\nI from = {i} * W, N = W;\n{total(len(totals), keep)}}}\n"
    thread = "" if pairs is None else end_of(pairs)
    thread += "float *restrict memory = malloc(8 * W), *restrict g = memory, *restrict h = g + W;\n" if spread else ""
    kernel = _kernel(given, made, strides, numbers, [], thread, part, row, after, p is not None and spread)
    return Printed(kernel, tuple(numbers.integers), tuple(numbers.floats))


def _of(t: Tensor | None) -> _Dtype:
    return None if t is None else t.dtype


def _act_of(act: Any) -> _Act:
    return None if act is None else (act.value, act.derivative, act.reads == "output", tuple(act.P))


def normalized_shape(x: Tensor, pairs: Any) -> torch.Size:
    """The shape of the norm's input: of x, or of the sums over rows of x."""
    return x.shape if pairs is None else torch.Size([*x.shape[:-2], x.shape[-1]])


class _Reads:
    """Tensors that a kernel reads: their row strides, and which of them must be copied."""

    def __init__(self, shape: torch.Size, columns: int) -> None:
        self._shape, self._columns, self._count = shape, columns, 0
        self.strides: list[int] = []
        self.copied: list[int] = []

    def rows(self, name: str, t: Tensor, shape: torch.Size | None = None) -> None:
        if t.shape != (shape or self._shape):
            raise ValueError(f"{name} must have shape {tuple(self._shape)}, got {tuple(t.shape)}")
        stride, copy = row_stride(t, self._columns)
        self.strides.append(stride)
        self._next(copy)

    def others(self, *tensors: Tensor | None) -> None:
        for t in tensors:
            if t is not None:
                self._next(not t.is_contiguous())

    def pairs(self, pairs: Any) -> tuple[int, ...]:
        """The number of experts per token, and of groups."""
        self.others(*pairs or ())
        return () if pairs is None else (pairs.rows.shape[-1], len(pairs.offsets))

    def _next(self, copy: bool) -> None:
        self.copied += [self._count] * copy
        self._count += 1


def decide_norm(a: Any, made: Sequence[Outline | None]) -> Decided:
    """Decide `norm.norm_fwd`."""
    W, whole = a.x.shape[-1], normalized_shape(a.x, a.pairs)
    given = _Reads(whole, W)
    given.rows("x", a.x, a.x.shape)
    given.others(a.weight, a.bias, a.pre_bias, a.seed)
    if a.residual is not None:
        given.rows("residual", a.residual)
    of_pairs = given.pairs(a.pairs)
    y, stream, *_ = made
    assert y is not None
    kernel, integers, floats = _printed_forward(
        a.centered, a.zero_centered, _act_of(a.act), None if a.seed is None else a.p, a.x.dtype, _of(a.weight),
        _of(a.bias), _of(a.pre_bias), _of(a.residual), y[1], stream and stream[1], kinds_of(a.pairs),
    )  # fmt: skip
    rows = whole.numel() // W
    numbers = (rows, W, parts_of(rows, W, False), *given.strides, *of_pairs, *integers, a.eps, *floats)
    return Decided(kernel, made, numbers, a.x.numel(), None, copies(given.copied))


def decide_norm_backward(a: Any, made: Sequence[Outline | None]) -> Decided:
    """Decide `norm.norm_bwd`."""
    W = a.x.shape[-1]
    given = _Reads(a.x.shape, W)
    given.rows("dy", a.dy)
    given.rows("x", a.x)
    given.others(a.mean, a.rstd, a.weight, a.bias)
    if a.dstream is not None:
        given.rows("dstream", a.dstream)
    given.others(a.seed)
    of_pairs = given.pairs(a.pairs)
    if a.other is not None:
        given.rows("other", a.other, a.other.shape)
    of_dx, of_dweight, of_dbias, of_branch, of_dpre_bias, *of_rows = [result and result[1] for result in made]
    totals = of_dweight, of_dbias, of_dpre_bias
    kernel, integers, floats = _printed_backward(
        a.mean is not None, a.zero_centered, _act_of(a.act), None if a.seed is None else a.p, a.dy.dtype, a.x.dtype,
        _of(a.mean), a.rstd.dtype, _of(a.weight), _of(a.bias), _of(a.dstream), of_dx, of_branch, totals,
        kinds_of(a.pairs), _of(a.other), *of_rows,
    )  # fmt: skip
    rows, sums = a.x.numel() // W, sum(of is not None for of in totals)
    parts = parts_of(rows, W, sums > 0)
    numbers = (rows, W, parts, *given.strides, *of_pairs, *integers, *floats)
    return Decided(kernel, made, numbers, a.x.numel(), parts * sums * W if sums else None, copies(given.copied))

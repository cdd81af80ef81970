# pyright: basic
"""Bias, norm of heads and RoPE in C: `kernels.rope` on a CPU.

The angles of a row are computed or read once, then its heads follow. Sums over rows are computed in parts of
`call.ROWS` rows, first over the heads of each row, and the parts are added in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._heads import MAX_HEAD, Rotation, frequencies_of, head_sizes, rows_of_angles, spread
from .call import CKernel, Decided, Outline, by_parts, load_as, parts_of, row_stride, store_as, written
from .chain import total

# For float32 angles of any size, as `_rope_kernel._sine_cosine`: reduced to a quarter turn in float64, where adding
# 1.5 2^52 rounds to a whole number and leaves it in the lowest bits, then polynomials of Cephes' `sinf`.
_TURN = """
INLINE void turn(float angle, float *sine, float *cosine) {
  double wide = angle, m = wide * 0.6366197723675814 + 6755399441055744.0, quarters = m - 6755399441055744.0;
  float r = (float)(wide - quarters * 1.5707963267948966), z = r * r;
  int64_t bits_of;
  memcpy(&bits_of, &m, 8);
  int32_t quadrant = (int32_t)bits_of;
  float s = r + r * z * ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z - 1.6666654611e-1f);
  float c = 1.f - .5f * z + z * z * ((2.443315711809948e-5f * z - 1.388731625493765e-3f) * z + 4.166664568298827e-2f);
  float odd_s = quadrant & 1 ? c : s, odd_c = quadrant & 1 ? s : c;
  *sine = quadrant & 2 ? -odd_s : odd_s;
  *cosine = (quadrant + 1) & 2 ? -odd_c : odd_c;
}
"""
_POSITIONS = {
    torch.int64: "int64_t", torch.int32: "int32_t", torch.int16: "int16_t", torch.int8: "int8_t",
    torch.uint8: "uint8_t", torch.float64: "double",
}  # fmt: skip


class Angles(NamedTuple):
    """The source of a kernel's angles: row numbers, positions, or cosines and sines."""

    style: str
    positions: torch.dtype | None = None
    cos: torch.dtype | None = None
    sin: torch.dtype | None = None
    by_pair: bool = False

    def pointers(self) -> list[str]:
        """Names of the tensors."""
        return ["cos", "sin"] if self.cos else ["positions", "frequencies"] if self.positions else ["frequencies"]

    def read(self) -> str:
        """C that fills `c1` and `s1`, and `c2` and `s2` if the elements of a pair have different angles."""
        if self.cos is None or self.sin is None:
            position = "place"
            if self.positions in _POSITIONS:
                position = f"((const {_POSITIONS[self.positions]} *)positions)[place]"
            elif self.positions is not None:
                position = load_as(self.positions, "positions", "place")
            made = "turn(position * ((const float *)frequencies)[i], &s1[i], &c1[i]);"
            return f"float position = (float){position};\n" + _loop("R / 2", made)
        if self.by_pair:
            each = [(f"{n}1", n, of, "place * (R / 2) + i") for n, of in (("c", self.cos), ("s", self.sin))]
        else:
            each = [
                (f"{n}{j + 1}", n, of, f"place * R + {self.at('i')[j]}")
                for n, of in (("c", self.cos), ("s", self.sin)) for j in (0, 1)
            ]  # fmt: skip
        return _loop("R / 2", *(f"{to}[i] = {load_as(of, {'c': 'cos', 's': 'sin'}[n], at)};" for to, n, of, at in each))

    def at(self, i: str) -> tuple[str, str]:
        """The indices of a pair's elements in a head."""
        return (i, f"R / 2 + {i}") if self.style == "half" else (f"2 * {i}", f"2 * {i} + 1")

    def second(self) -> tuple[str, str]:
        """The names of the cosines and sines of second elements."""
        return ("c1", "s1") if self.by_pair or self.cos is None else ("c2", "s2")


def _loop(count: str, *lines: str, first: str = "0", sum: str = "") -> str:
    reduction = f" reduction(+ : {sum})" if sum else ""
    body = "\n".join(lines)
    return f"#pragma omp simd{reduction}\nfor (I i = {first}; i < {count}; i++) {{\n{body}\n}}\n"


def _gains(weights: tuple[torch.dtype, torch.dtype] | None, zero_centered: bool) -> str:
    """C that fills `gains`, those of queries and those of keys."""
    if weights is None:
        return ""
    one = " + 1.f" if zero_centered else ""
    each = [
        f"gains[{at}][i] = {load_as(of, f'{n}_weight', 'i')}{one};"
        for at, (n, of) in enumerate(zip("qk", weights, strict=True))
    ]
    return f"float gains[2][{MAX_HEAD}];\n" + _loop("D", *each)


_GAIN = "const float *restrict g = gains[h >= Q];\n"
"""C that selects the gain of a head by an index: for a branch, GCC would split the loop of heads into slower ones."""


def _source(
    pointers: list[str], angles: Angles | None, start: str, row: str, end: str = "", width: str = "0", eps: bool = False
) -> CKernel:  # fmt: skip
    """A kernel whose threads share parts of the rows; each part has a row of sums of this width."""
    integers = ["M", "Q", "K", "D", "R", "period", "parts", "sx", "sdy"]
    half = MAX_HEAD // 2
    buffers = f"float c1[{half}], s1[{half}], c2[{half}], s2[{half}];\n" if angles else ""
    turn = f"I place = row % period;\n{angles.read()}" if angles else ""
    before = _TURN if angles and not angles.cos else ""
    body = f"I C = (Q + K + K) * D, W = {width};\n{by_parts('M', buffers + start, turn + row)}{end}"
    return written(pointers, integers, ["eps"] * eps, body, before=before)


@functools.lru_cache(512)
def forward_kernel(
    of: torch.dtype,
    of_bias: torch.dtype | None,
    angles: Angles | None,
    norm: bool,
    weights: tuple[torch.dtype, torch.dtype] | None,
    zero_centered: bool,
    keep: bool,
) -> CKernel:
    """The forward kernel; with `keep` it stores x + bias."""

    def read(at: str) -> str:
        found = load_as(of, "x", f"row * sx + h * D + {at}")
        return found if of_bias is None else f"{found} + {load_as(of_bias, 'bias', f'h * D + {at}')}"

    def summed(count: str) -> tuple[str, str]:
        """Statements for x + bias, and its expression: the stored sum, if any, as the backward pass reads it."""
        if not keep:
            return "", read("i")
        return _loop(count, store_as(of, "z", "to + i", read("i"))), load_as(of, "z", "to + i")

    def normed(at: str) -> str:
        return f"v[{at}] * r" + (f" * g[{at}]" if weights else "") if norm else f"v[{at}]" if keep else read(at)

    head = ""
    if norm or keep:
        before, value = summed("D")
        head += "float squares = 0.f;\n" + before
        head += _loop("D", f"float a = {value};", "v[i] = a;", "squares += a * a;", sum="squares")
    if norm:
        head += "float r = 1.f / __builtin_sqrtf(squares / (float)D + eps);\nrstd[row * (Q + K) + h] = r;\n"
        head += _GAIN if weights else ""
    if angles is not None:
        (one, two), (c2, s2) = angles.at("i"), angles.second()
        head += _loop(
            "R / 2",
            f"float a = {normed(one)}, b = {normed(two)};",
            store_as(of, "y", f"to + {one}", "a * c1[i] - b * s1[i]"),
            store_as(of, "y", f"to + {two}", f"b * {c2}[i] + a * {s2}[i]"),
        )
    head += _loop("D", store_as(of, "y", "to + i", normed("i")), first="R")
    before, value = summed("K * D")
    row = (
        f"for (I h = 0; h < Q + K; h++) {{\nI to = row * C + h * D;\n{head}}}\n"
        f"{{\nI h = Q + K, to = row * C + h * D;\n{before}{_loop('K * D', store_as(of, 'y', 'to + i', value))}}}\n"
    )
    pointers = ["x", *["bias"] * (of_bias is not None), *(angles.pointers() if angles else [])]
    pointers += ["q_weight", "k_weight"] * (weights is not None)
    named = [f"const void *restrict {p}" for p in pointers] + ["void *restrict y"] + ["void *restrict z"] * keep
    named += ["float *restrict rstd"] * norm
    start = f"float v[{MAX_HEAD}];\n" if norm or keep else ""
    return _source(named, angles, start + _gains(weights, zero_centered), row, eps=True)


@functools.lru_cache(512)
def backward_kernel(
    of: torch.dtype,
    of_x: torch.dtype | None,
    angles: Angles | None,
    weights: tuple[torch.dtype, torch.dtype] | None,
    zero_centered: bool,
    dx: bool,
    sums: tuple[torch.dtype | None, ...],
) -> CKernel:
    """The backward kernel; `of_x` if there was a norm, `sums` are the dtypes of the gradients of bias and weights."""
    norm = of_x is not None
    dbias, *dweights = sums
    most = MAX_HEAD

    def give(at: str, value: str) -> list[str]:
        """Statements for an element of dx; `h * D + at` is its column."""
        found = [f"float v = {value};"]
        found += [store_as(of, "dx", f"row * C + h * D + {at}", "v")] * dx
        return found + [f"s[h * D + {at}] += v;"] * (dbias is not None)

    def dy(at: str) -> str:
        return load_as(of, "dy", f"row * sdy + h * D + {at}")

    def back(at: str, value: str) -> list[str]:
        return [f"u[{at}] = {value};"] if norm else ["{", *give(at, value), "}"]

    head = ""
    if angles is not None:
        (one, two), (c2, s2) = angles.at("i"), angles.second()
        head += _loop(
            "R / 2",
            f"float a = {dy(one)}, b = {dy(two)};",
            *back(one, f"a * c1[i] + b * {s2}[i]"),
            *back(two, f"b * {c2}[i] - a * s1[i]"),
        )
    head += _loop("D", *back("i", dy("i")), first="R")
    if of_x is not None:
        head += _GAIN if weights else ""
        head += "float *restrict w = sums[h >= Q];\n" if any(dweights) else ""
        head += "float r = ((const float *)rstd)[row * (Q + K) + h], along = 0.f;\n"
        head += _loop(
            "D",
            f"float e = {load_as(of_x, 'x', 'row * sx + h * D + i')} * r, d = u[i];",
            *["w[i] += d * e;"] * any(dweights),
            *["d *= g[i];"] * (weights is not None),
            "u[i] = d;",
            "e_[i] = e;",
        )
        # In a separate loop, which is the same for all sets of results, and so are its bits.
        head += _loop("D", "along += u[i] * e_[i];", sum="along")
        if dx or dbias is not None:
            # Stored before it is summed: otherwise the multiplication would be fused with the sum, and rounded once.
            head += "float mean = along / (float)D;\n" + _loop("D", "u[i] = (u[i] - e_[i] * mean) * r;")
            head += _loop("D", *give("i", "u[i]"))
    row = f"for (I h = 0; h < Q + K; h++) {{\n{head}}}\n"
    if any(dweights):
        row = f"memset(sums[0], 0, 4 * D);\nmemset(sums[1], 0, 4 * D);\n{row}"
    at = "C" if dbias is not None else "0"
    tail = ""
    end, width = "", []
    if dbias is not None:
        end += f"{{\nI from = 0, N = C;\n{total(1, store_as(dbias, 'dbias', 'c', '(float)sum[c - c0]'))}}}\n"
        width.append("C")
    for which, (n, kind) in enumerate(zip("qk", dweights, strict=True)):
        if kind is not None:
            tail += _loop("D", f"s[{at} + i] += sums[{which}][i];")
            put = store_as(kind, f"d{n}_weight", "c", "(float)sum[c - c0]")
            end += f"{{\nI from = {at}, N = D;\n{total(1, put)}}}\n"
            at += " + D"
            width.append("D")
    if dx or dbias is not None:
        row += f"{{\nI h = Q + K;\n{_loop('K * D', *give('i', dy('i')))}}}\n"
    start = f"float u[{most}], e_[{most}];\n" if norm else ""
    start += f"float sums[2][{most}];\n" if any(dweights) else ""
    if width:
        start += "float *restrict s = scratch + part * W;\nmemset(s, 0, 4 * W);\n"
    pointers = ["dy", *(angles.pointers() if angles else []), *["x", "rstd"] * norm]
    pointers += ["q_weight", "k_weight"] * (weights is not None)
    made = ["dx"] * dx
    made += [n for n, kind in zip(("dbias", "dq_weight", "dk_weight"), sums, strict=True) if kind is not None]
    named = [f"const void *restrict {p}" for p in pointers] + [f"void *restrict {p}" for p in made]
    named += ["float *restrict scratch"] * bool(width)
    return _source(
        named, angles, start + _gains(weights, zero_centered), row + tail, end, " + ".join(width) or "0"
    )  # fmt: skip


class _Takes:
    """The tensors of a call, in order, and which of them a kernel takes."""

    def __init__(self, arguments: Any, *names: str) -> None:
        tensors: dict[str, Tensor | None] = {name: getattr(arguments, name) for name in names}
        self._at = {name: i for i, name in enumerate(name for name, t in tensors.items() if t is not None)}
        self._tensors = tensors
        self._takes: list[Callable[[Sequence[Tensor]], Tensor]] = []

    def take(self, name: str, how: Callable[[Tensor], Tensor] | None = None) -> None:
        """Pass a tensor, or the result of `how`, to the kernel; nothing if the tensor is absent."""
        if name in self._at:
            get = itemgetter(self._at[name])
            self._takes.append(get if how is None else lambda given: how(get(given)))

    def angles(self, x: Tensor, rotation: Rotation | None) -> tuple[Angles | None, int]:
        """The kernel's angles, and the number of rows after which they repeat."""
        positions, cos, sin = (self._tensors[name] for name in ("positions", "cos", "sin"))
        rows = rows_of_angles(x, rotation, positions, cos, sin)
        period = max(1, rows.numel())
        if rotation is None:
            return None, period
        if cos is None or sin is None:
            frequencies: Any = frequencies_of(rotation, x.device)
            whole = positions is None or (positions.is_contiguous() and positions.numel() == rows.numel())
            self.take("positions", None if whole else lambda t: spread(t, rows))
            self._takes.append(lambda given: frequencies)
            return Angles(rotation.style, None if positions is None else positions.dtype), period
        width = cos.shape[-1]
        for name, t in (("cos", cos), ("sin", sin)):
            whole = t.is_contiguous() and t.numel() == rows.numel() * width
            self.take(name, None if whole else lambda t: spread(t, rows, width))
        return Angles(rotation.style, None, cos.dtype, sin.dtype, width < rotation.dim), period

    def fit(self) -> Callable[..., Sequence[Tensor]]:
        """A function that returns the kernel's tensors for the given ones."""
        takes = self._takes
        return lambda *given: [take(given) for take in takes]


def _copied(copy: bool) -> Callable[[Tensor], Tensor] | None:
    return Tensor.contiguous if copy else None


def _weights(q_weight: Tensor | None, k_weight: Tensor | None) -> tuple[torch.dtype, torch.dtype] | None:
    return None if q_weight is None or k_weight is None else (q_weight.dtype, k_weight.dtype)


def decide_rope(a: Any, made: Sequence[Outline | None]) -> Decided:
    """Decide `rope.rope_fwd`."""
    size, rotary = head_sizes(a.x, a.heads, a.kv_heads, a.rotation)
    given = _Takes(a, "x", "bias", "positions", "cos", "sin", "q_weight", "k_weight")
    norm, columns = a.norm_eps is not None, a.x.shape[-1]
    stride, copy = row_stride(a.x, columns)
    given.take("x", _copied(copy))
    given.take("bias")
    angles, period = given.angles(a.x, a.rotation)
    weights = _weights(a.q_weight, a.k_weight) if norm else None
    if norm:
        given.take("q_weight")
        given.take("k_weight")
    of_bias = None if a.bias is None else a.bias.dtype
    kernel = forward_kernel(a.x.dtype, of_bias, angles, norm, weights, a.zero_centered, a.store)
    rows = a.x.numel() // columns
    numbers = (rows, a.heads, a.kv_heads, size, rotary, period, parts_of(rows, columns, False), stride, 0)
    return Decided(kernel, made, (*numbers, float(a.norm_eps or 0.0)), a.x.numel(), None, given.fit())


def decide_rope_backward(a: Any, made: Sequence[Outline | None]) -> Decided:
    """Decide `rope.rope_bwd`."""
    size, rotary = head_sizes(a.dy, a.heads, a.kv_heads, a.rotation)
    given = _Takes(a, "dy", "positions", "cos", "sin", "x", "rstd", "q_weight", "k_weight")
    columns, weights, norm = a.dy.shape[-1], None, a.x is not None
    (of_dy, copy), (of_x, copy_x) = row_stride(a.dy, columns), row_stride(a.x, columns) if norm else (0, False)
    given.take("dy", _copied(copy))
    angles, period = given.angles(a.dy, a.rotation)
    if norm:
        weights = _weights(a.q_weight, a.k_weight)
        given.take("x", _copied(copy_x))
        given.take("rstd", _copied(not a.rstd.is_contiguous()))
        given.take("q_weight")
        given.take("k_weight")
    dx, *totals = made
    sums = tuple([None if total is None else total[1] for total in totals])
    of = a.x.dtype if norm else None
    kernel = backward_kernel(a.dy.dtype, of, angles, weights, a.zero_centered, dx is not None, sums)
    width, rows = sum(shape[0] for shape, _ in filter(None, totals)), a.dy.numel() // columns
    parts = parts_of(rows, columns, width > 0)
    numbers = (rows, a.heads, a.kv_heads, size, rotary, period, parts, of_x, of_dy)
    return Decided(kernel, made, numbers, a.dy.numel() * (1 + norm), parts * width if width else None, given.fit())

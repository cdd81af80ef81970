"""The numbers of 8-bit formats and how matrices are quantized to them, in numpy, written from the formats alone.

e4m3fn and e5m2: OCP 8-bit Floating Point Specification (OFP8) v1.0; E8M0 and blocks of 32: OCP Microscaling Formats
(MX) v1.0. Nothing here is seqfuse's. Codes are uint8, values float64, scales float32, as each step of the page on low
precision says.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

Array = np.ndarray


class Format(NamedTuple):
    """Values of the codes from 0 to the largest finite one, in order; codes of negative values are 128 larger."""

    values: Array
    nan: tuple[int, int]  # first and last code of a positive NaN

    @property
    def largest(self) -> float:
        return float(self.values[-1])


def _format(mantissa: int, bias: int, finite: int, nan: tuple[int, int]) -> Format:
    values = []
    for code in range(finite):
        exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
        if exponent == 0:
            values.append(fraction * 2.0 ** (1 - bias - mantissa))
        else:
            values.append((1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias))
    return Format(np.array(values), nan)


E4M3 = _format(3, 7, 0x7F, (0x7F, 0x7F))
E5M2 = _format(2, 15, 0x7C, (0x7D, 0x7F))
assert E4M3.largest == 448
assert E5M2.largest == 57344


def encode(x: Array, form: Format) -> Array:
    """Codes of the nearest values, ties to the even code; saturated. NaN and Inf become the code 0x7F."""
    x = x.astype(np.float64)
    finite = np.isfinite(x)
    size = np.minimum(np.where(finite, np.abs(x), 0.0), form.largest)
    low = np.searchsorted(form.values, size, side="right") - 1
    high = np.minimum(low + 1, len(form.values) - 1)
    middle = (form.values[low] + form.values[high]) / 2
    up = (size > middle) | ((size == middle) & (low % 2 == 1))
    codes = np.where(up, high, low) + np.where(np.signbit(x), 128, 0)
    return np.where(finite, codes, 0x7F).astype(np.uint8)


def decode(codes: Array, form: Format) -> Array:
    """Values of codes, NaN where they represent none."""
    padded = np.concatenate([form.values, np.full(128 - len(form.values), np.nan)])
    return np.where(codes >= 128, -1.0, 1.0) * padded[codes & 127]


def scale_of(block: Array, form: Format, power_of_two: bool) -> np.float32:
    """The scale of numbers that share one."""
    most = np.float32(np.max(np.abs(block))) if block.size else np.float32(0)
    if not (most > 0 and np.isfinite(most)):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(form.largest) / most
    scale = min(scale, np.finfo(np.float32).max)
    if power_of_two:
        scale = np.float32(np.ldexp(np.float32(0.5), np.frexp(scale)[1]))
    return np.float32(scale)


def exponent_of(block: Array, form: Format) -> int:
    """The smallest e from -127 on with max |x| <= largest 2^e; 0 if that is not finite."""
    most = float(np.max(np.abs(block.astype(np.float64))))
    if not np.isfinite(most):
        return 0
    e = max(-127, int(np.frexp(most)[1]) - 20) if most else -127  # from where it is too small
    while most > form.largest * 2.0**e:
        e += 1
    return e


def blocks(shape: tuple[int, int], size: tuple[int | None, int | None]) -> tuple[int, int, int, int]:
    """Number of blocks down and across, and their sizes; a block without a size is the whole."""
    (m, n), (high, wide) = shape, size
    down = 1 if high is None else -(-m // high)
    across = 1 if wide is None else -(-n // wide)
    return down, across, max(m, 1) if high is None else high, max(n, 1) if wide is None else wide


def quantized(
    x: torch.Tensor, size: tuple[int | None, int | None], form: Format, power_of_two: bool = False, mx: bool = False
) -> tuple[Array, Array]:
    """Codes of x as a matrix, and inverse scales by block, of MX the code of E8M0."""
    rows = x.detach().float().numpy()
    rows = rows.reshape(-1, rows.shape[-1]) if rows.shape[-1] else np.zeros((int(np.prod(rows.shape[:-1])), 0), "f4")
    down, across, high, wide = blocks(rows.shape, size)
    inverse = np.ones((down, across), np.uint8 if mx else np.float32)
    scales = np.ones((down, across), np.float32)
    for i in range(down):
        for j in range(across):
            block = rows[i * high : (i + 1) * high, j * wide : (j + 1) * wide]
            if mx:
                e = exponent_of(block, form)
                inverse[i, j], scales[i, j] = e + 127, np.float32(2.0**-e)
            else:
                scales[i, j] = scale_of(block, form, power_of_two)
                inverse[i, j] = np.float32(1) / scales[i, j]
    with np.errstate(over="ignore", invalid="ignore"):
        codes = encode(rows * spread(scales, high, wide, rows.shape), form)
    codes[~np.isfinite(rows)] = 0x7F
    return codes, inverse


def spread(scales: Array, high: int, wide: int, shape: tuple[int, ...]) -> Array:
    """The scale of each number."""
    return np.repeat(np.repeat(scales, high, 0), wide, 1)[: shape[0], : shape[1]]


def values(codes: Array, inverse: Array, size: tuple[int | None, int | None], form: Format, mx: bool = False) -> Array:
    """The exact operand of a GEMM: codes times their inverse scales, in float64."""
    _, _, high, wide = blocks(codes.shape, size)
    scale = 2.0 ** (inverse.astype(np.float64) - 127) if mx else inverse.astype(np.float64)
    return decode(codes, form) * spread(scale, high, wide, codes.shape)

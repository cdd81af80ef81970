# pyright: basic
"""Cross-entropy of rows of logits in C, with a gradient that overwrites them: `kernels.crossentropy` on a CPU.

A row is read three times: for its largest logit, for the sum of exponentials, and for the gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .. import activations
from .call import CKernel, Decided, Outline, by_parts, load_as, parts_of, store_as, written
from .trace import Lines, Number, _language, value_in_c

_LANES = 16
_BLOCK = 1024
"""Logits that are summed in float32; such partial sums are added in float64."""


def _logit(lines: Lines, of: torch.dtype, at: str, softcap: bool) -> tuple[Number, Number]:
    """A logit after the soft-cap, and the argument of its tanh."""
    u = z = lines.number(load_as(of, "logits", at))
    if softcap:
        cap = Number(lines, "softcap")
        u = z / cap
        z = value_in_c(activations.tanh, u, ()) * cap
    return z, u


def _gradient(
    of: torch.dtype, at: str, less: str, softcap: bool, z_loss: bool, exponential: str | None = None
) -> tuple[str, str]:
    """C that computes the gradient of a logit, and its name; `exponential` is e^(z - top), if that is stored."""
    lines = Lines()
    if exponential is None:
        z, u = _logit(lines, of, at, softcap)
        p = lines.number(f"exp_({z.name} - top) * by_softmax")
    else:
        p = u = lines.number(f"{exponential} * by_softmax")
    # Multiplied, not selected: as in torch, a row that does not count propagates NaN.
    d = p - Number(lines, less)
    if z_loss:
        # Added last: with p near one, the loss's own term would absorb the digits of this one.
        d = d + p * Number(lines, "of_lse")
    if softcap:
        # 1 - tanh^2 without cancellation near the cap.
        q = _language.exp(-2.0 * _language.abs(u))  # as in `activations.tanh`, so that C computes it once
        d = d * (4.0 * q / ((1.0 + q) * (1.0 + q)))
    return "\n".join(lines.lines), d.name


@functools.lru_cache(64)
def kernel_of(
    of: torch.dtype, scaled: torch.dtype | None, given: bool, smoothing: bool, z_loss: bool, softcap: bool,
    gradient: bool,
) -> CKernel:  # fmt: skip
    """The kernel for logits of a dtype, with these options."""
    kept = gradient and not given and not softcap and of is torch.float32
    row = (
        "I at = row * stride, target = targets[row];\n"
        "int counted = target != ignore, known = counted && target >= 0 && target < V;\n"
    )
    if given:
        row += "float top = softmax[row];\ndouble total = softmax[softmax_stride + row];\n"
    else:
        lines = Lines()
        z, _ = _logit(lines, of, "at + target", softcap)
        picked = "\n".join(lines.lines)
        lines = Lines()
        each, _ = _logit(lines, of, "at + c", softcap)
        exponential = "\n".join(lines.lines)
        raw, most = load_as(of, "logits", "at + c + j"), load_as(of, "logits", "at + c")
        capped = Lines()
        largest = Number(capped, "most")
        bent = value_in_c(activations.tanh, largest / Number(capped, "softcap"), ()) * Number(capped, "softcap")
        row += (
            f"float picked = 0.f;\nif (known) {{\n{picked}\npicked = {z.name};\n}}\n"
            f"float lane[{_LANES}], most = -__builtin_inff();\nI c = 0;\n"
            f"for (I j = 0; j < {_LANES}; j++) lane[j] = most;\n"
            f"for (; c + {_LANES} <= V; c += {_LANES}) {{\n#pragma omp simd\nfor (I j = 0; j < {_LANES}; j++) {{\n"
            f"float z = {raw};\nlane[j] = z > lane[j] ? z : lane[j];\n}}\n}}\n"
            f"for (; c < V; c++) {{\nfloat z = {most};\nmost = z > most ? z : most;\n}}\n"
            f"for (I j = 0; j < {_LANES}; j++) most = lane[j] > most ? lane[j] : most;\n"
        )
        row += "\n".join(capped.lines) + f"\nfloat top = {bent.name};\n" if softcap else "float top = most;\n"
        row += (
            f"double total = 0{', plain = 0' if smoothing else ''};\nfor (I c0 = 0; c0 < V; c0 += {_BLOCK}) {{\n"
            f"I last = c0 + {_BLOCK} < V ? c0 + {_BLOCK} : V;\nfloat sum = 0.f, away = 0.f;\n"
            f"#pragma omp simd reduction(+ : sum, away)\nfor (I c = c0; c < last; c++) {{\n{exponential}\n"
            f"float z = {each.name} - top, e = exp_(z);\nsum += e;\n{'away += z;' if smoothing else ''}\n"
            f"{store_as(of, 'logits', 'at + c', 'e') if kept else ''}\n}}\n"
            f"total += sum;\n{'plain += away;' if smoothing else ''}\n}}\n"
            "double value = log(total) - (1. - smoothing) * ((double)picked - top);\n"
        )
        row += "value -= smoothing * (plain / V);\n" if smoothing else ""
        row += "double lse = top + log(total);\nvalue += z_loss * lse * lse;\n" if z_loss else ""
        row += "loss[row] = counted ? (float)value : 0.f;\nmade[row] = top;\nmade[R + row] = (float)total;\n"
    if gradient:
        g = "1.f" if scaled is None else load_as(scaled, "scale", "row")
        row += (
            f"double g = counted ? {g} : 0.f, spread = smoothing / V;\nfloat by_softmax = (float)(g / total);\n"
            "float away = (float)(g * spread), at_target = (float)(g * (1. - smoothing + spread));\n"
        )
        row += "float of_lse = (float)(2. * z_loss * (top + log(total)));\n" if z_loss else ""
        exponential = load_as(of, "logits", "at + target") if kept else None
        lines, value = _gradient(of, "at + target", "at_target", softcap, z_loss, exponential)
        row += f"float own = 0.f;\nif (known) {{\n{lines}\nown = {value};\n}}\n"
        lines, value = _gradient(
            of, "at + c", "away", softcap, z_loss, load_as(of, "logits", "at + c") if kept else None
        )
        row += (
            f"#pragma omp simd\nfor (I c = 0; c < V; c++) {{\n{lines}\n{store_as(of, 'logits', 'at + c', value)}\n}}\n"
        )
        row += f"if (known) {store_as(of, 'logits', 'at + target', 'own')}\n"
    pointers = ["void *restrict logits", "const int64_t *restrict targets"]
    pointers += ["const void *restrict scale"] * (scaled is not None)
    pointers += ["const float *restrict softmax"] if given else ["float *restrict loss", "float *restrict made"]
    integers = ["R", "V", "parts", "ignore", "stride", "softmax_stride"]
    floats = ["smoothing", "z_loss", "softcap"]
    return written(pointers, integers, floats, by_parts("R", "", row))


def decide_cross_entropy(a: Any, made: Sequence[Outline | None]) -> Decided:
    """Decide `crossentropy.cross_entropy_`."""
    logits, softmax, softcap = a.logits, a.softmax, a.softcap
    if a.targets.dtype is not torch.int64 or (softmax is not None and softmax.dtype is not torch.float32):
        raise ValueError("targets must be int64, and softmax float32")
    R, V = logits.shape
    kernel = kernel_of(
        logits.dtype, None if a.scale is None else a.scale.dtype, softmax is not None, a.label_smoothing > 0,
        a.z_loss != 0, softcap is not None, a.gradient,
    )  # fmt: skip
    stride = 0 if softmax is None else softmax.stride(0)
    numbers = (R, V, parts_of(R, V, False), a.ignore_index, logits.stride(0), stride)
    floats = (float(a.label_smoothing), float(a.z_loss), float(softcap or 0.0))
    return Decided(kernel, made, (*numbers, *floats), logits.numel())

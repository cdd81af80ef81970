"""What fusions of a Linear in calls of ATen share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..env import Env
from ..fusion import Requirements
from ..ops import Bias, Linear
from ..ops.linear import scaled_mm


def one_dtype(linear: Linear, bias: Bias | None) -> bool:
    """Whether a GEMM can start from the bias: torch promotes in `x + bias`, not in `linear(x, weight, bias)`."""
    return bias is None or linear.weight.dtype == bias.bias.dtype


def output_bytes(linear: Linear, env: Env) -> float:
    """Bytes of the output; of one row where the number of rows is not known."""
    dtype = env.autocast or linear.weight.dtype
    return float((env.rows or 1) * linear.out_features * dtype.itemsize)


def as_rows(t: Tensor) -> Tensor:
    """All leading dimensions as one."""
    return t if t.ndim == 2 else t.flatten(0, -2) if t.ndim > 2 else t.unsqueeze(0)


def gemm_takes(linear: Linear, bias: Bias | None, env: Env) -> Requirements:
    """What a GEMM with a factor or an addend asks of its operands."""
    yield not env.dtype.is_complex, "gradients of complex numbers need conjugates"
    yield env.autocast is None, "under autocast the addend would be rounded to the GEMM's dtype"
    one = linear.weight.dtype == env.dtype and one_dtype(linear, bias)
    yield one, "input, weight and bias must have one dtype"


def fits(factor: float) -> bool:
    """Whether a GEMM may take a factor: one times 0 does not read its operands, and loses their NaN and Inf."""
    return factor != 0 and math.isfinite(factor)


def dgrad(dy: Tensor, weight: Tensor, addend: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Return addend + factor (dy weight) from one GEMM, rounded once."""
    if addend is not None and addend.dtype is not weight.dtype:
        return dgrad(dy, weight, None, factor) + addend
    flat = dy.ndim == 2
    rows = dy if flat else as_rows(dy)
    if addend is None:
        dx = scaled_mm(rows, weight, factor)
    else:
        dx = torch.addmm(addend if flat else as_rows(addend), rows, weight, alpha=factor)
    return dx if flat else dx.view(*dy.shape[:-1], weight.shape[1])

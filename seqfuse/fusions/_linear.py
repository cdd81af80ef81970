"""What fusions of a Linear in calls of ATen share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from ..casts import dtype_of
from ..env import Env, Savings, autocast_of, constant_under_compile
from ..fusion import Requirements
from ..hardware import STEP
from ..ops import Add, Bias, Linear, MergedLinear
from ..ops._mm import addmm, mm
from ..ops._mm import linear as gemm
from ..ops.linear import saved_linear

_gelu_: Callable[[Tensor], Tensor] = torch._C._nn.gelu_  # pyright: ignore


def one_dtype(linear: Linear, bias: Bias | None, env: Env) -> bool:
    """Whether a GEMM can start from the bias: torch promotes in `x + bias`, not in `linear(x, weight, bias)`."""
    return bias is None or env.autocast is not None or dtype_of(linear, "weight") == bias.dtype


def linear_of(linear: Linear, bias: Bias | None) -> Callable[[Tensor], tuple[Tensor, Linear.Saved]]:
    """Of x, x weight^T + bias and what the GEMM saves; where the parameters are kept is found once."""
    weights, biases = linear.__dict__["_parameters"], {"bias": None} if bias is None else bias.held()

    def run(x: Tensor) -> tuple[Tensor, Linear.Saved]:
        weight, shift = weights.get("weight"), biases.get("bias")
        if weight is None or weight.dtype is not x.dtype:
            weight = linear.weight_for(x)
        if shift is None and bias is not None:
            shift = bias.read()
        return gemm(x, weight, shift), saved_linear(x, weight)

    return run


def plus_in_place(y: Tensor, add: Add, other: Tensor) -> Tensor:
    """The residual sum y + other, written over y where that has its shape and dtype."""
    if y.shape == other.shape and y.dtype is other.dtype:
        return y.add_(other)
    return add.fwd(y, other=other)[0]


def output_bytes(linear: Linear | MergedLinear, env: Env) -> float:
    """Bytes of the output."""
    return float(env.tokens * linear.out_features * env.itemsize)


def in_place(linear: Linear, env: Env) -> Savings:
    """What a pass over the output costs that ATen makes behind a GEMM in the same step, in place."""
    return Savings(launches=1 - STEP, bytes=output_bytes(linear, env))


def linear_epilogue(x: Tensor, weight: Tensor, bias: Tensor, act: Literal["relu", "gelu"]) -> Tensor:
    """act(x weight^T + bias) as one call of ATen; GeLU is by tanh on a GPU and exact on a CPU."""
    cast_to = autocast_of(x.device.type)
    if cast_to is not None and any(t.dtype is not cast_to for t in (x, weight, bias)):  # autocast does not reach it
        y = gemm(x, weight, bias)
        return torch.relu_(y) if act == "relu" else F.gelu(y, approximate="tanh" if x.is_cuda else "none")
    if x.device.type == "cpu":  # where the call does these two, after views
        y = gemm(x, weight, bias)
        return torch.relu_(y) if act == "relu" else _gelu_(y)
    y = torch._addmm_activation(bias, as_rows(x), weight.t(), use_gelu=act == "gelu")  # pyright: ignore
    return y.view(*x.shape[:-1], weight.shape[0])


@constant_under_compile
def epilogue_keeps_nan(kind: str, dtype: torch.dtype) -> bool:
    """Whether the GEMM with ReLU in its epilogue keeps NaN; a GPU is tried once, one that is not here trusted."""
    return kind != "cuda" or not torch.cuda.is_available() or tried_with_nan(kind, dtype)


@functools.cache
def tried_with_nan(kind: str, dtype: torch.dtype) -> bool:
    """Whether a small GEMM and one of whole tiles give NaN for NaN."""
    kept = True
    with _disable_current_modes():
        for size in (16, 512):
            bias = torch.full((size,), torch.nan, dtype=dtype, device=kind)
            t = bias.new_zeros(size, size)
            kept = kept and bool(torch._addmm_activation(bias, t, t).isnan().all())  # pyright: ignore
    return kept


def as_rows(t: Tensor) -> Tensor:
    """All leading dimensions as one."""
    return t if t.ndim == 2 else t.flatten(0, -2) if t.ndim > 2 else t.unsqueeze(0)


def gemm_takes(linear: Linear, bias: Bias | None, env: Env) -> Requirements:
    """What a GEMM with a factor or an addend asks of its operands."""
    yield not env.dtype.is_complex, "gradients of complex numbers need conjugates"
    one = env.cast(dtype_of(linear, "weight")) == env.dtype and one_dtype(linear, bias, env)
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
        dx = mm(rows, weight, factor)
    else:
        dx = addmm(addend if flat else as_rows(addend), rows, weight, factor)
    return dx if flat else dx.view(*dy.shape[:-1], weight.shape[1])

"""GEMMs by torch: on a CPU by the faster of its two libraries, and in float32 for dtypes without CPU instructions.

GEMMs in those dtypes take many times as long. Their operands are exact in float32, sums are in float32, and the
result is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import compiler, env
from ..casts import autocasting
from ..hardware import ONEDNN_FLOAT32_LEAST, ONEDNN_FLOAT32_WORTHWHILE
from ._philox import watched
from ._tensors import dispatch_modes

_LOWERED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that autocast casts
# With fewer rows, torch's kernel, which reads the weight uncast, costs less than casting the weight.
_FEW = 8

_mkldnn: Any = torch.ops.mkldnn
_mkldnn_enabled: Any = torch._C._get_mkldnn_enabled  # pyright: ignore
PLAIN = (Tensor, torch.nn.Parameter)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`. x: [*, K], weight: [N, K], bias: [N]."""
    if not env.ONEDNN_FLOAT32 and (not env.WIDENED or (x.dtype not in env.WIDENED and not env.any_autocast())):
        return F.linear(x, weight, bias)
    widened = env.WIDENED and (x.dtype in env.WIDENED or env.any_autocast()) and x.numel() >= _FEW * weight.shape[1]
    if widened and (dtype := _widened(x, weight)) is not None:
        with autocasting("cpu", None):
            bias = None if bias is None else _wide(bias, dtype)
            return _linear(_wide(x, dtype), _wide(weight, dtype), bias).to(dtype)
    return _linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if env.ONEDNN_FLOAT32 and _is_large(x, weight.shape[0]):
        rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        if _fits_onednn(rows, weight, bias):
            y = _onednn(rows, weight, bias)
            return y if x.ndim == 2 else y.view(*x.shape[:-1], weight.shape[0])
    return F.linear(x, weight, bias)


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if env.ONEDNN_FLOAT32 and _is_large(a, b.shape[1]) and _fits_onednn(a, b.mT):
        return _onednn(a, b.mT)
    return torch.mm(a, b)


def _is_large(a: Tensor, columns: int, least: int | None = None) -> bool:
    """Whether a GEMM of `a` with so many columns is large enough for oneDNN in float32."""
    return a.numel() * columns >= (ONEDNN_FLOAT32_WORTHWHILE if least is None else least)


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a b^T + bias. a: [M, K], b: [N, K], bias: [N]."""
    if compiler.is_collecting():  # for fake tensors, whose bytes are counted: oneDNN copies a column-major `a`
        return F.linear(a.contiguous(), b, bias)
    return _mkldnn._linear_pointwise(a, b, bias, "none", [], "")


def _fits_onednn(a: Tensor, b: Tensor, *others: Tensor | None) -> bool:
    """Whether oneDNN supports a b^T, and nothing differentiates, records or counts the call."""
    given, tried = [t for t in (a, b, *others) if t is not None], compiler.is_collecting()
    if not all(t.dtype is torch.float32 and t.is_cpu and (tried or type(t) in PLAIN) for t in given):
        return False
    if min(*a.shape, b.shape[0]) < ONEDNN_FLOAT32_LEAST or not (_lies_plainly(a) and _lies_plainly(b)):
        return False
    if not all(t is None or t.is_contiguous() for t in others) or not _mkldnn_enabled():
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    return not (env.any_autocast() or (dispatch_modes() and not tried) or watched())


def _lies_plainly(t: Tensor) -> bool:
    """Whether rows or columns are contiguous, and none overlap."""
    (rows, columns), (down, along) = t.shape, t.stride()
    return (along == 1 and down >= columns) or (down == 1 and along >= rows)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, least: int | None = None) -> None:
    """Write x weight^T + bias into the slice `out`; an x wider than the weight is rounded, unless the GEMM is widened.

    x: [M, K], weight: [N, K], bias: [N], out: [M, N]. A GEMM of fewer than `least` multiplications is not oneDNN's.
    """
    if out.dtype in env.WIDENED and out.is_cpu:
        with autocasting("cpu", None):
            out.copy_(_linear(x.float(), weight.float(), None if bias is None else bias.float()))
        return
    x = x if x.dtype is weight.dtype else x.to(weight.dtype)
    if env.ONEDNN_FLOAT32 and _is_large(x, weight.shape[0], least) and _fits_onednn(x, weight, bias):
        out.copy_(_onednn(x, weight, bias))
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def mm(a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    """Return factor (a b) from one GEMM, rounded once. a: [M, K], b: [K, N]."""
    widened = env.WIDENED
    plain = not env.ONEDNN_FLOAT32 and (not widened or (a.dtype not in widened and not env.any_autocast()))
    if plain and factor == 1.0:
        return torch.mm(a, b)  # few steps, because each GEMM of a small model comes here
    if widened and (a.dtype in widened or env.any_autocast()) and (dtype := _widened(a, b)) is not None:
        with autocasting("cpu", None):
            y = _mm(_wide(a, dtype), _wide(b, dtype))
            return (y if factor == 1.0 else y.mul_(factor)).to(dtype)
    return _mm(a, b) if factor == 1.0 else a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=factor)


def addmm(addend: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    """Return addend + factor (a b), rounded once. addend: [M, N], a: [M, K], b: [K, N]."""
    if env.WIDENED and (dtype := _widened(a, b)) is not None:
        with autocasting("cpu", None):
            return _addmm(_wide(addend, dtype), _wide(a, dtype), _wide(b, dtype), factor).to(dtype)
    return _addmm(addend, a, b, factor)


def _addmm(addend: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    whole = factor == 1.0 and addend.shape == (a.shape[0], b.shape[1])
    if whole and env.ONEDNN_FLOAT32 and _is_large(a, b.shape[1]) and _fits_onednn(a, b.mT, addend):
        if compiler.is_collecting():
            return torch.addmm(addend, a.contiguous(), b)
        return _mkldnn._linear_pointwise.binary(a, addend, b.mT, None, "add")
    return torch.addmm(addend, a, b, alpha=factor)


def _plus(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return total + a b, which may overwrite total."""
    return _addmm(total, a, b) if env.ONEDNN_FLOAT32 and _is_large(a, b.shape[1]) else total.addmm_(a, b)


def sum_of_mm(pairs: Sequence[tuple[Tensor, Tensor]], addend: Tensor | None = None) -> Tensor:
    """Return addend + the sum of a b over these pairs. addend: [M, N], a: [M, K], b: [K, N]."""
    dtype = _widened(*pairs[0]) if env.WIDENED else None
    if dtype is None:
        (a, b), *others = pairs
        total = _mm(a, b) if addend is None else _addmm(addend, a, b)
        for a, b in others:
            total = _plus(total, a, b)
        return total
    with autocasting("cpu", None):
        total = None if addend is None else _wide(addend, dtype)
        for a, b in pairs:
            a, b = _wide(a, dtype), _wide(b, dtype)
            total = _mm(a, b) if total is None else _plus(total, a, b)
        assert total is not None
        return total.to(dtype)


def _widened(a: Tensor, b: Tensor) -> torch.dtype | None:
    """The dtype of the result if this GEMM is computed in float32 instead; else `None`."""
    if not env.any_autocast():  # first, and in few steps, because each GEMM of a small model comes here
        dtype = a.dtype
        return dtype if dtype in env.WIDENED and dtype is b.dtype and a.is_cpu else None
    dtype = env.autocast_of("cpu")
    if dtype is None:
        dtype = a.dtype if a.dtype is b.dtype else None
    elif a.dtype not in _LOWERED or b.dtype not in _LOWERED:
        return None
    return dtype if dtype in env.WIDENED and a.is_cpu else None


def _wide(t: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand cast to float32, rounded to `dtype` first."""
    return (t if t.dtype is dtype else t.to(dtype)).to(torch.float32)

"""GEMMs by torch, in float32 where a CPU has no instructions for their dtype: torch's own take many times as long.

Factors are exact in float32, sums are of float32 numbers, and what comes out is rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import env
from ..casts import autocasting

_LOWERED = (torch.float32, torch.bfloat16, torch.float16)  # by autocast
# Of fewer rows torch's kernel reads the weight as it is, which costs less than its cast.
_FEW = 8


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`. x: [*, K], weight: [N, K], bias: [N]."""
    if env.WIDENED and (dtype := _widened(x, weight)) is not None and x.numel() >= _FEW * weight.shape[1]:
        with autocasting("cpu", None):
            bias = None if bias is None else _wide(bias, dtype)
            return F.linear(_wide(x, dtype), _wide(weight, dtype), bias).to(dtype)
    return F.linear(x, weight, bias)


def linear_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Write x weight^T + bias into `out`, a slice; an x that is wider than the weight is rounded where the GEMM is not.

    x: [M, K], weight: [N, K], bias: [N], out: [M, N].
    """
    if out.dtype in env.WIDENED and out.is_cpu:
        with autocasting("cpu", None):
            out.copy_(F.linear(x.float(), weight.float(), None if bias is None else bias.float()))
        return
    x = x if x.dtype is weight.dtype else x.to(weight.dtype)
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def mm(a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    """Return factor (a b) from one GEMM, rounded once. a: [M, K], b: [K, N]."""
    if env.WIDENED and (dtype := _widened(a, b)) is not None:
        with autocasting("cpu", None):
            y = torch.mm(_wide(a, dtype), _wide(b, dtype))
            return (y if factor == 1.0 else y.mul_(factor)).to(dtype)
    return torch.mm(a, b) if factor == 1.0 else a.new_empty(a.shape[0], b.shape[1]).addmm_(a, b, beta=0, alpha=factor)


def addmm(addend: Tensor, a: Tensor, b: Tensor, factor: float = 1.0) -> Tensor:
    """Return addend + factor (a b), rounded once. addend: [M, N], a: [M, K], b: [K, N]."""
    if env.WIDENED and (dtype := _widened(a, b)) is not None:
        with autocasting("cpu", None):
            return torch.addmm(_wide(addend, dtype), _wide(a, dtype), _wide(b, dtype), alpha=factor).to(dtype)
    return torch.addmm(addend, a, b, alpha=factor)


def sum_of_mm(pairs: Sequence[tuple[Tensor, Tensor]], addend: Tensor | None = None) -> Tensor:
    """Return addend + the sum of a b over these pairs. addend: [M, N], a: [M, K], b: [K, N]."""
    dtype = _widened(*pairs[0]) if env.WIDENED else None
    if dtype is None:
        (a, b), *others = pairs
        total = torch.mm(a, b) if addend is None else torch.addmm(addend, a, b)
        for a, b in others:
            total.addmm_(a, b)
        return total
    with autocasting("cpu", None):
        total = None if addend is None else _wide(addend, dtype)
        for a, b in pairs:
            a, b = _wide(a, dtype), _wide(b, dtype)
            total = torch.mm(a, b) if total is None else total.addmm_(a, b)
        assert total is not None
        return total.to(dtype)


def _widened(a: Tensor, b: Tensor) -> torch.dtype | None:
    """The dtype of a GEMM of these that is computed in float32; `None` for any other."""
    if not env.any_autocast():  # first, and by few steps: each GEMM of a small model asks
        dtype = a.dtype
        return dtype if dtype in env.WIDENED and dtype is b.dtype and a.is_cpu else None
    dtype = env.autocast_of("cpu")
    if dtype is None:
        dtype = a.dtype if a.dtype is b.dtype else None
    elif a.dtype not in _LOWERED or b.dtype not in _LOWERED:
        return None
    return dtype if dtype in env.WIDENED and a.is_cpu else None


def _wide(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A factor as torch's GEMM takes it, in float32."""
    return (t if t.dtype is dtype else t.to(dtype)).to(torch.float32)

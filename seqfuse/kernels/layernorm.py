# pyright: basic
# Triton has no type stubs.
"""LayerNorm, forward and backward, with the residual stream around it and an activation after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ._norm import Backward, Forward, backward, forward, norm_variants
from ._variants import Variant


def layernorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    pre_bias: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    residual: Tensor | None = None,
    act: Any = None,
    dtype: torch.dtype | None = None,
    stream_dtype: torch.dtype | None = None,
) -> Forward:
    """LayerNorm: y = act((z - E[z]) rstd gain + bias), rstd = (Var[z] + eps)^-1/2.

    z = x, or dropout(x + pre_bias) + residual as far as these are given. x, residual, y, stream: [*, N]; parameters:
    [N]; statistics: [*] float32, float64 for a float64 x. Everything is computed in that dtype.
    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.

    Args:
        x: what is normalized, or what the prologue starts from.
        weight: gain, `None` for one.
        bias: added to the product, or `None`.
        eps: added to the variance.
        zero_centered: whether the gain is 1 + weight.
        pre_bias: added to x first.
        seed: of dropout after that, int64, on the device.
        p: probability of dropping.
        residual: added last; with any of these the sum is returned as `stream`.
        act: an activation of the result.
        dtype: of y; x's by default.
        stream_dtype: of the stream; x's by default.

    Raises:
        ValueError: for rows of more than 65,536 columns, shapes that differ, or strides that need a copy.
    """
    return forward(True, x, weight, bias, eps, zero_centered, pre_bias, seed, p, residual, act, dtype, stream_dtype)


def layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    zero_centered: bool = False,
    dstream: Tensor | None = None,
    seed: Tensor | None = None,
    p: float = 0.0,
    act: Any = None,
    dx: bool = True,
    dweight: torch.dtype | None = None,
    dbias: torch.dtype | None = None,
    dbranch: bool = False,
    dpre_bias: torch.dtype | None = None,
    branch_dtype: torch.dtype | None = None,
) -> Backward:
    """LayerNorm's gradients: dx = rstd (g - E[g] - xhat E[g xhat]) + dstream.

    g = dy act' gain, xhat the normalized row. Sums over rows are made in a fixed order: the same bits each time.
    Beyond 8,192 columns they take a second pass over dy and x; half of that with an activation or dropout, and half
    again for rows that are not aligned.

    Args:
        dy: gradient of the result.
        x: what was normalized: the stream, where there was a prologue.
        mean: as saved.
        rstd: as saved.
        weight: gain, `None` for one.
        bias: read where there is an activation.
        zero_centered: as in the forward.
        dstream: gradient of the stream itself, added to dx.
        seed: of the prologue's dropout.
        p: as in the forward.
        act: as in the forward.
        dx: whether dx is wanted.
        dweight: dtype of the weight's gradient, `None` where it is not wanted.
        dbias: dtype of the bias's gradient, `None` where it is not wanted.
        dbranch: whether the gradient of what dropout took is wanted.
        dpre_bias: dtype of the gradient of the prologue's bias, the sum of dbranch over rows.
        branch_dtype: of dbranch; that of dx by default.

    Raises:
        ValueError: for rows of more than 65,536 columns, shapes that differ, or strides that need a copy.
    """
    return backward(
        True,
        dy,
        x,
        mean,
        rstd,
        weight,
        bias,
        zero_centered,
        dstream,
        seed,
        p,
        act,
        dx,
        dweight,
        dbias,
        dbranch,
        dpre_bias,
        branch_dtype,
    )


def variants() -> Iterator[Variant]:
    """Every tile, with and without what may stand around the norm."""
    yield from norm_variants(True)

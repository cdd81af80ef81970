"""What fusions around a norm share: what its kernels take, and its own record from what they return."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..casts import dtype_of
from ..env import Env
from ..fusion import Requirements
from ..generated import Source
from ..hardware import NORM_COLUMNS
from ..ops import LayerNorm, RMSNorm
from ..ops._parameters import parameter
from ..ops._tensors import stats_dtype
from ._kernels import kernels_read, kernels_run

if TYPE_CHECKING:
    from ..kernels.norm import Normed, NormGradients

Record = LayerNorm.Saved | RMSNorm.Saved


def kernels_take(norm: LayerNorm | RMSNorm, env: Env) -> Requirements:
    """What the kernels ask of a norm and its input."""
    yield from kernels_run(env)
    yield len(norm.normalized_shape) == 1, "its kernel normalizes over one dimension"
    width = norm.normalized_shape[-1]
    yield 0 < width <= NORM_COLUMNS, f"its kernel is for 1 to {NORM_COLUMNS:,} columns, not {width:,}"
    yield from kernels_read("weight", dtype_of(norm, "weight"), env)
    if isinstance(norm, LayerNorm):
        yield from kernels_read("bias", dtype_of(norm, "bias"), env)


def shift(norm: LayerNorm | RMSNorm) -> Tensor | None:
    """The bias of a norm, if it has one."""
    return parameter(norm, "bias") if isinstance(norm, LayerNorm) else None


def gives_own(norm: LayerNorm | RMSNorm, env: Env) -> Requirements:
    """What fusions ask of a norm whose result they make again from x."""
    yield norm.y_dtype_in(env) is env.dtype, "under autocast the norm gives float32, and x is not"


# Import statements would cost a call more than all else that it does in Python.
@functools.cache
def _kernels():
    from ..kernels.norm import norm_bwd, norm_fwd

    return norm_fwd, norm_bwd


@functools.cache
def _backward_of():
    from ..kernels.norm import backward_of

    return backward_of


def norm_fwd(norm: LayerNorm | RMSNorm, x: Tensor, **around: Any) -> tuple[Normed, Record]:
    """The norm with what stands around it, and the norm's own record; `around` is for the kernel."""
    weight, bias = parameter(norm, "weight"), shift(norm)
    gain = _in_one_piece(weight)
    if isinstance(norm, LayerNorm):
        out = _kernels()[0](x, gain, _in_one_piece(bias), norm.eps, zero_centered=norm.zero_centered, **around)
        source = x if out.stream is None else out.stream
        assert out.mean is not None
        return out, LayerNorm.Saved(x=source, mean=out.mean, rstd=out.rstd, weight=weight)
    eps = torch.finfo(stats_dtype(x)).eps if norm.eps is None else norm.eps
    out = _kernels()[0](x, gain, None, eps, centered=False, zero_centered=norm.zero_centered, **around)
    return out, RMSNorm.Saved(x=x if out.stream is None else out.stream, rstd=out.rstd, weight=weight)


def norm_bwd(
    norm: LayerNorm | RMSNorm,
    dy: Tensor,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    needs: frozenset[str],
    **around: Any,
) -> tuple[NormGradients, dict[str, Tensor | None]]:
    """What the kernel gives, and of that what is wanted of the slot `norm`, by name."""
    wanted = [name for name in ("weight", "bias") if f"norm.{name}" in needs]
    sums = {f"d{name}": owner.dtype for name in wanted if (owner := parameter(norm, name)) is not None}
    gain, start = _in_one_piece(weight), _in_one_piece(bias)
    out = _kernels()[1](dy, x, mean, rstd, gain, start, zero_centered=norm.zero_centered, **sums, **around)
    return out, {f"norm.{name}": getattr(out, f"d{name}") for name in wanted}


def recorded_bwd(
    norm: LayerNorm | RMSNorm, dy: Tensor, saved: Record, needs: frozenset[str], *, dx: bool, **around: Any
) -> tuple[NormGradients | None, dict[str, Tensor | None]]:
    """As `norm_bwd`, from the norm's own record; `dx` is whether anything before the norm needs a gradient.

    Where that is not so and the weight wants none either, the record is empty, and the sum of dy is the operation's.
    """
    if not dx and "norm.weight" not in needs:
        bias: Any = norm.bwd(dy, saved, needs=frozenset({"bias"}))[1]["bias"]  # pyright: ignore[reportArgumentType]
        return None, {"norm.bias": bias}
    mean = saved.mean if isinstance(saved, LayerNorm.Saved) else None
    weight = saved.weight if dx else None
    return norm_bwd(norm, dy, saved.x, mean, saved.rstd, weight, None, needs, dx=dx, **around)


def gradients_of(
    norm: LayerNorm | RMSNorm, needs: frozenset[str], weighted: bool, added: bool
) -> Callable[[Tensor, Record, Tensor | None, Tensor | None], tuple[Tensor | None, dict[str, Tensor | None]]]:
    """`recorded_bwd` with nothing around the norm, of its tensors: dy, the record, its weight and dstream.

    The last two are there or not as it is said here; the weight is read where dx is needed.
    """
    owners = {name: parameter(norm, name) for name in ("weight", "bias") if f"norm.{name}" in needs}
    dweight, dbias = (None if t is None else t.dtype for t in map(owners.get, ("weight", "bias")))
    centered = isinstance(norm, LayerNorm)
    source = Source("gradients", "dy, saved, weight, dstream")
    source.constants["kernel"] = _backward_of()(
        centered, norm.zero_centered, "x" in needs, dweight, dbias, weighted, added
    )
    given = ["dy", "saved.x", *["saved.mean"] * centered, "saved.rstd", *["weight"] * weighted, *["dstream"] * added]
    sums = [f"{source.put(f'norm.{name}')}: out.d{name}" for name in owners]
    source.add(f"out = kernel({', '.join(given)})", f"return out.dx, {{{', '.join(sums)}}}")
    return source.define()


def _in_one_piece(row: Tensor | None) -> Tensor | None:
    return None if row is None else row.contiguous()

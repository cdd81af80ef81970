"""Norms: alone, with activations after them, and functions that all fusions with a norm share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import saved as context
from ..casts import dtype_of
from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, FusedOperation, JointFusion, Requirements
from ..generated import Source
from ..hardware import C_NORM_WORTHWHILE, NORM_COLUMNS
from ..kernels import kernels_of
from ..operation import Grads
from ..ops import Fork, LayerNorm, RMSNorm, Scale
from ..ops._lowprecision import as_codes, as_quantized
from ..ops._parameters import parameter
from ..ops._tensors import stats_dtype
from ..pointwise import Pointwise
from ..quantized import COLUMNS, Quantize, Quantized
from ._shared import (
    as_one_activation,
    factors_of,
    functions_fit,
    kernels_read,
    kernels_run,
    own_records,
    with_parameters,
)

if TYPE_CHECKING:
    from ..kernels.norm import NormCodes, Normed, NormGradients
    from ..kernels.quantize import As

NormRecord = LayerNorm.Saved | RMSNorm.Saved
_saved_layer, _saved_rms = context.maker(LayerNorm.Saved), context.maker(RMSNorm.Saved)


class NormForward(ForwardFusion):
    """y = norm(x) in one pass.

    ATen's kernels have no gain of 1 + weight, and for 16-bit x no parameters of another dtype: the operation copies x
    to float32 and y back. They also do not write y in the dtype of the next operation, as this kernel does under
    autocast. Otherwise it depends on the machine: faster than ATen on an H200; on a CPU faster than ATen's RMSNorm,
    which is several operators, and than its LayerNorm except in float32 and for small tensors. x, y: [*, H]. Saves the
    same tensors as the operation.
    """

    norm: LayerNorm | RMSNorm

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from norm_fits(self.norm, env)
        wasteful = self.norm.converts(env) or self.norm.y_is_cast(env)
        yield wasteful or _is_faster(self.norm, env), "ATen also runs this norm in one pass"

    def saves(self, env: Env) -> Savings:
        if (env.kernels == "c" and isinstance(self.norm, RMSNorm)) or not _is_faster(self.norm, env):
            return super().saves(env)
        # One pass over memory as well; it saves 0.1 to 0.5 of the time of reading x with AVX2, in either dtype, and as
        # much or more on an H200, depending on the length of rows.
        return super().saves(env) + Savings(bytes=0.2 * env.tokens * self.norm.normalized_shape[-1] * env.itemsize)

    def can_quantize(self, to: Quantize, env: Env) -> bool:
        return is_worthwhile(to, env)

    def fwd(
        self, x: Tensor, *, dtype: torch.dtype | None = None, to: Quantize | None = None
    ) -> tuple[Tensor | Quantized, dict[str, NormRecord]]:
        if to is not None and x.numel():
            y, _, record = norm_to(self.norm, x, to, dtype=dtype)
            return y, {"norm": record}
        out, record = run_decided(self, self.norm, x, (dtype,), lambda: {"dtype": dtype})
        return out.y, {"norm": record}


class NormBackward(BackwardFusion):
    """dx = norm'(dy) + d_fork_out, and the gradients of the norm's parameters in one pass over dy and x.

    The gradient of the residual stream is added before dx is written. Sums over tokens are in float32 and a fixed
    order, rounded once. ATen reads dy and x twice. dy, d_fork_out, dx: [*, H].
    """

    fork: Fork | None
    norm: LayerNorm | RMSNorm

    kernels = ("triton", "c")
    any_dy = True
    layout = "any"  # its host function copies tensors with other strides

    def requires(self, env: Env) -> Requirements:
        return norm_fits(self.norm, env)

    def bwd(
        self, dy: Tensor, *, norm: NormRecord, d_fork_out: Tensor | None = None, needs: frozenset[str]
    ) -> tuple[Tensor | None, Grads]:
        if "x" not in needs and "norm.weight" not in needs:
            return None, bias_gradient(self.norm, dy, norm)
        weight, dstream = norm.weight if "x" in needs else None, d_fork_out
        key = needs, weight is not None, dstream is not None
        return self.decided(key, gradients_of, self.norm, *key)(dy, norm, weight, dstream)


def _is_faster(norm: LayerNorm | RMSNorm, env: Env) -> bool:
    """Whether the forward pass is faster than ATen's, although both are one pass."""
    columns = norm.normalized_shape[-1]
    if env.kernels == "triton":
        # For a LayerNorm of long rows, lanes without a column cost time; ATen's kernel has no such lanes.
        filled = isinstance(norm, RMSNorm) or columns <= 4096 or 4 * columns > 3 << (columns - 1).bit_length()
        return env.dtype.itemsize <= 4 and filled
    if env.kernels != "c":
        return False
    few = (env.rows or 0) * columns < C_NORM_WORTHWHILE
    return isinstance(norm, RMSNorm) or env.dtype.itemsize == 2 or not few


class NormActivationJoint(JointFusion):
    """y = act(norm(x)) and its gradients, act up to eight activations and constant factors in sequence.

    z = xhat gain + bias, y = act(z);  with d = dy act'(z) and g = d gain, dx is the norm's gradient for g, dweight =
    sum of d xhat and dbias = sum of d over all tokens. Each pass reads and writes every tensor once: the backward pass
    recomputes everything between x and y in registers.

    x, y: [*, H], weight, bias: [H], mean, rstd: [*].
    """

    norm: LayerNorm | RMSNorm
    acts: tuple[Pointwise | Scale, ...]

    kernels = ("triton", "c")
    any_dy = True

    class Saved(context.Saved):
        x: Tensor  # [*, H]
        mean: Tensor | None  # [*] float32; LayerNorm only
        rstd: Tensor  # [*] float32
        weight: Tensor | None  # [H], the parameter
        bias: Tensor | None  # [H], the parameter
        factors: tuple[float, ...]  # constant factors

    def requires(self, env: Env) -> Requirements:
        yield from norm_fits(self.norm, env)
        yield from functions_fit(self.acts, env)
        yield from gives_own(self.norm, env)

    def saved_at(self) -> tuple[int, ...]:
        return (0,)

    def fwd(self, x: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Saved]:
        norm, factors = self.norm, factors_of(self.acts)
        out, _ = run_norm(norm, x, act=as_one_activation(self.acts, factors), dtype=dtype)
        saved = self.Saved(
            x=x,
            mean=out.mean,
            rstd=out.rstd,
            weight=parameter(norm, "weight"),
            bias=parameter(norm, "bias"),
            factors=factors,
        )
        return out.y, saved

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        weight, bias, dx = saved.weight, saved.bias, "x" in needs
        act = as_one_activation(self.acts, saved.factors)
        out, grads = run_norm_bwd(self.norm, dy, saved.x, saved.mean, saved.rstd, weight, bias, needs, act=act, dx=dx)
        return out.dx, grads

    def unfused(self, saved: Saved) -> dict[str, Any]:
        """The `Saved` of each operation, for the unfused backward pass."""
        z, record = with_parameters(self.norm, {"weight": saved.weight, "bias": saved.bias}).fwd(saved.x)
        return {"norm": record, "acts": own_records(self.acts, z, saved.factors)}


def norm_fits(norm: LayerNorm | RMSNorm, env: Env) -> Requirements:
    """Requirements of the kernels for a norm and its input."""
    yield from kernels_run(env)
    yield len(norm.normalized_shape) == 1, "its kernel normalizes over one dimension"
    width = norm.normalized_shape[-1]
    yield 0 < width <= NORM_COLUMNS, f"its kernel is for 1 to {NORM_COLUMNS:,} columns, not {width:,}"
    for name in ("weight", "bias"):
        yield from kernels_read(name, dtype_of(norm, name), env)


def eps_of(norm: LayerNorm | RMSNorm, x: Tensor) -> float:
    """The number added to the variance or mean square of x."""
    return torch.finfo(stats_dtype(x)).eps if norm.eps is None else norm.eps


def gives_own(norm: LayerNorm | RMSNorm, env: Env) -> Requirements:
    """Requirements of fusions that recompute the norm's output from x."""
    yield norm.y_dtype_in(env) is env.dtype, "under autocast the norm gives float32, and x is not"


def run_norm(norm: LayerNorm | RMSNorm, x: Tensor, **around: Any) -> tuple[Normed, NormRecord]:
    """Run the norm with the operations `around` it (arguments of the kernel); also returns the norm's `Saved`."""
    weight, kind = parameter(norm, "weight"), {"centered": norm.centered, "zero_centered": norm.zero_centered}
    gain, bias = _in_one_piece(weight), _in_one_piece(parameter(norm, "bias"))
    out = kernels_of("norm").norm_fwd(x, gain, bias, eps_of(norm, x), **kind, **around)
    return out, _record(x if out.stream is None else out.stream, out.mean, out.rstd, weight)


def run_decided(
    fusion: FusedOperation,
    norm: LayerNorm | RMSNorm,
    x: Tensor,
    key: tuple[Any, ...],
    around: Callable[[], dict[str, Any]],
    *others: Tensor,
) -> tuple[Normed, NormRecord]:
    """`run_norm`, with all decisions that do not depend on tensors cached.

    Args:
        fusion: the fusion that contains the norm.
        norm: the norm.
        x: its input, or the input of the prologue.
        key: all that `around()` depends on, in addition to the dtype of x and the configuration.
        around: returns the kernel's arguments for the operations around the norm.
        others: the tensors among these arguments, in the order of the kernel's parameters.
    """
    weight, bias = parameter(norm, "weight"), parameter(norm, "bias")
    rows = [t.contiguous() for t in (weight, bias) if t is not None]
    run = fusion.decided((key, x.dtype, weight is None, bias is None), _forward_of, norm, x, weight, bias, around)
    out = run(x, *rows, *others)
    return out, _record(x if out.stream is None else out.stream, out.mean, out.rstd, weight)


def _forward_of(
    norm: LayerNorm | RMSNorm,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    around: Callable[[], dict[str, Any]],
) -> Callable[..., Normed]:
    given = {"weight": weight, "bias": bias, **around()}
    tensors = [name for name, value in given.items() if isinstance(value, Tensor)]
    rest = {name: value for name, value in given.items() if name not in tensors}
    rest |= {"eps": eps_of(norm, x), "centered": norm.centered, "zero_centered": norm.zero_centered}
    kernels = kernels_of("norm")
    return kernels.norm_of(kernels.norm_fwd, ["x", *tensors], rest)


def norm_to(
    norm: LayerNorm | RMSNorm, x: Tensor, to: Quantize, **around: Any
) -> tuple[Quantized, Tensor | None, NormRecord]:
    """`run_norm` with a quantized result: y, the norm's input if it is not x, and the `Saved`."""
    wanted, newest = as_codes(to, x)
    weight, kind = parameter(norm, "weight"), {"centered": norm.centered, "zero_centered": norm.zero_centered}
    gain, bias, eps = _in_one_piece(weight), _in_one_piece(parameter(norm, "bias")), eps_of(norm, x)
    out = kernels_of("norm").norm_codes(x, gain, bias, eps, wanted, largest=newest, **kind, **around)
    assert out.rstd is not None
    y = as_quantized(out.codes, wanted, x.shape, around["dtype"] or x.dtype, x.device)
    return y, out.stream, _record(x if out.stream is None else out.stream, out.mean, out.rstd, weight)


def _record(x: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor | None) -> NormRecord:
    return _saved_rms(x, rstd, weight) if mean is None else _saved_layer(x, mean, rstd, weight)


def is_worthwhile(to: Quantize, env: Env) -> bool:
    """Whether the norm's kernel should quantize its result.

    Blocks of 128 rows, each of at most four programs, fill a GPU from 4,096 tokens on. Smaller inputs are not quantized
    here; this was not measured. With blocks of 128 rows, float32 tensors do not fit in registers.
    """
    few = env.device != "cpu" and env.tokens < 4096
    return not few and (env.autocast is None or to.block != COLUMNS)


def run_norm_bwd(
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
    """The kernel's results, and the needed gradients of the slot `norm` among them, by name."""
    sums, gain, start = _sums_of(norm, needs), _in_one_piece(weight), _in_one_piece(bias)
    out = kernels_of("norm").norm_bwd(
        dy, x, mean, rstd, gain, start, zero_centered=norm.zero_centered, **sums, **around
    )
    return out, {f"norm.{name[1:]}": getattr(out, name) for name in sums}


def norm_bwd_to(
    norm: LayerNorm | RMSNorm, dy: Tensor, saved: NormRecord, to: As, needs: frozenset[str], **around: Any
) -> tuple[NormCodes, dict[str, Tensor | None]]:
    """`run_norm_bwd` with a quantized gradient of the operations before the norm."""
    mean = saved.mean if isinstance(saved, LayerNorm.Saved) else None
    sums, gain = _sums_of(norm, needs), _in_one_piece(saved.weight)
    given = dy, saved.x, mean, saved.rstd, gain, to
    out = kernels_of("norm").norm_codes_backward(*given, zero_centered=norm.zero_centered, **sums, **around)
    return out, {f"norm.{name[1:]}": getattr(out, name) for name in sums}


def _sums_of(norm: LayerNorm | RMSNorm, needs: frozenset[str]) -> dict[str, Any]:
    """The kernel's arguments for the needed gradients of parameters: their dtypes."""
    owners = {name: parameter(norm, name) for name in ("weight", "bias") if f"norm.{name}" in needs}
    return {f"d{name}": owner.dtype for name, owner in owners.items() if owner is not None}


def bias_gradient(norm: LayerNorm | RMSNorm, dy: Tensor, saved: NormRecord) -> dict[str, Tensor | None]:
    """The gradient of the norm's bias, where no other is needed: `Saved` is empty then, and the kernels read it."""
    return {"norm.bias": norm.bwd(dy, saved, needs=frozenset({"bias"}))[1]["bias"]}  # pyright: ignore


def gradients_of(
    norm: LayerNorm | RMSNorm,
    needs: frozenset[str],
    weighted: bool,
    added: bool,
    dropped: bool = False,
    dx: bool | None = None,
    branch: str | None = "dx",
    others: Mapping[str, str] = MappingProxyType({}),
    **around: Any,
) -> Callable[..., tuple[Tensor | None, dict[str, Tensor | None]]]:
    """`run_norm_bwd` as a function `gradients(dy, saved, weight, dstream, seed)` of tensors: dx, and others by name.

    The flags define which of the last three tensors are given; the weight is only read for dx.

    Args:
        norm: the norm.
        needs: the names of needed gradients, as of the slot `norm`.
        weighted: whether `weight` is given.
        added: whether `dstream`, the gradient of the residual stream, is given.
        dropped: whether `seed` is given.
        dx: whether any operation before the norm needs a gradient; by default whether `needs` contains x.
        branch: the kernel's result that is the gradient of x.
        others: the kernel's results that are gradients of other slots, by their names.
        around: further arguments of the kernel.
    """
    owners = {name: parameter(norm, name) for name in ("weight", "bias") if f"norm.{name}" in needs}
    rest = {"zero_centered": norm.zero_centered, "dx": "x" in needs if dx is None else dx, **around}
    rest |= {f"d{name}": owner.dtype for name, owner in owners.items() if owner is not None}
    source = Source("gradients", "dy, saved, weight=None, dstream=None, seed=None")
    given = {"dy": "dy", **{name: f"saved.{name}" for name in ("x", *["mean"] * norm.centered, "rstd")}}
    given |= {"weight": "weight.contiguous()"} if weighted else {}
    given |= {name: name for name, there in (("dstream", added), ("seed", dropped)) if there}
    kernels = kernels_of("norm")
    source.constants["kernel"] = kernels.norm_of(kernels.norm_bwd, [*given], rest)
    found = {**{f"norm.{name}": f"d{name}" for name in owners}, **others}
    sums = [f"{source.put(name)}: out.{result}" for name, result in found.items()]
    result = "None" if branch is None else f"out.{branch}"
    source.add(f"out = kernel({', '.join(given.values())})", f"return {result}, {{{', '.join(sums)}}}")
    return source.define()


def _in_one_piece(row: Tensor | None) -> Tensor | None:
    return None if row is None else row.contiguous()

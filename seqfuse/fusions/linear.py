"""Fusions of ATen calls, for any device: a GEMM with the operations before and after it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from ..casts import dtype_of, lowered
from ..env import Env, Savings, autocast_of, constant_under_compile
from ..fusion import BackwardFusion, ForwardFusion, InferenceFusion, Requirements
from ..hardware import C_BESIDE_TORCH, ONEDNN_WORTHWHILE, STEP
from ..maingrad import Accumulated
from ..operation import Grads
from ..ops import (
    Add,
    Bias,
    CopyToTensorParallel,
    Fork,
    GeLU,
    Linear,
    MergedLinear,
    ReLU,
    Scale,
    Sigmoid,
    SiLU,
    Tanh,
)
from ..ops._mm import addmm, linear, mm
from ..ops._parameters import required
from ..ops._tensors import may_overwrite
from ..ops.linear import saved_linear, weight_grad
from ._shared import as_rows, cost_in_place, dgrad, gemm_fits, linear_of, one_dtype, output_bytes, plus_in_place

_IN_PLACE: dict[type, Callable[[Tensor], Tensor]] = {ReLU: torch.relu_, Sigmoid: torch.sigmoid_, Tanh: torch.tanh_}
_gelu_: Callable[[Tensor], Tensor] = torch._C._nn.gelu_  # pyright: ignore
_mkldnn: Any = torch.ops.mkldnn
_POST_OPS: dict[type, str] = {GeLU: "gelu", SiLU: "swish", Sigmoid: "sigmoid", Tanh: "tanh"}


class LinearBias(ForwardFusion):
    """y = x weight^T + bias in one GEMM that includes the bias, on any device.

    x: [*, in_features], y: [*, out_features]. Saves the same tensors as the operations.
    """

    linear: Linear
    bias: Bias

    native_below = math.inf
    layout = "any"

    def requires(self, env: Env) -> Requirements:
        return _bias_joins(self.linear, self.bias, env)

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Linear.Saved]]:
        y, gemm = self.decided("linear", linear_of, self.linear, self.bias)(x)
        return y, {"linear": gemm}


class LinearBiasAct(ForwardFusion):
    """y = act(x weight^T + bias), with the activation in place; on any device.

    The backward pass of these activations reads y, so the pre-activation is not saved and no second tensor is
    allocated. Results equal `LinearBias` followed by the activation, bit for bit. On a GPU bias and ReLU run in the
    GEMM's epilogue (cuBLASLt), unless that does not propagate NaN.

    x: [*, in_features], y: [*, out_features]. Saves the same tensors as the operations.
    """

    linear: Linear
    bias: Bias | None
    act: ReLU | Sigmoid | Tanh

    native_below = C_BESIDE_TORCH
    layout = "any"

    def requires(self, env: Env) -> Requirements:
        return _bias_joins(self.linear, self.bias, env)

    def saves(self, env: Env) -> Savings:
        if self.bias is None:
            return Savings(launches=STEP)  # the same kernels
        inside = env.device == "cuda" and isinstance(self.act, ReLU) and _epilogue_keeps_nan(env.device, env.dtype)
        return super().saves(env) - (Savings() if inside else cost_in_place(self.linear, env))

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        weight, bias, act = self.linear.weight_for(x), self.bias, self.act
        if bias is not None and isinstance(act, ReLU) and _epilogue_keeps_nan(x.device.type, x.dtype):
            # Autocast on a GPU does not apply to this call.
            y = _epilogue(x, lowered(weight, always=True), lowered(bias.read(), always=True), "relu")
        else:
            y = linear(x, weight, None if bias is None else bias.read())
            y = _IN_PLACE[type(act)](y) if may_overwrite() else act.reference(y)
        record = act.Saved(y=y)  # pyright: ignore[reportCallIssue]
        return y, {"linear": saved_linear(x, weight), "act": record}


class LinearBiasGeLU(InferenceFusion):
    """y = gelu(x weight^T + bias) in one ATen call: in the GEMM's epilogue on a GPU, in place on a CPU.

    Inference only, because the pre-activation is not returned. The cuBLASLt epilogue is the tanh GeLU, rounded once. On
    a CPU it is the exact GeLU, equal to `LinearBias` followed by `GeLU`, bit for bit.

    x: [*, in_features], y: [*, out_features].
    """

    linear: Linear
    bias: Bias
    act: GeLU

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield env.autocast is None, "under autocast weight and bias would have to be cast"
        one = dtype_of(self.linear, "weight") == env.dtype and one_dtype(self.linear, self.bias, env)
        yield one, "input, weight and bias must have one dtype"
        made = "tanh" if env.device == "cuda" else "none"
        yield self.act.approximate == made, f'the call makes approximate="{made}" on this device'

    def saves(self, env: Env) -> Savings:
        return super().saves(env) - (Savings() if env.device == "cuda" else cost_in_place(self.linear, env))

    def fwd(self, x: Tensor) -> Tensor:
        return _epilogue(x, self.linear.weight_for(x), self.bias.read(), "gelu")


def _epilogue(x: Tensor, weight: Tensor, bias: Tensor, act: Literal["relu", "gelu"]) -> Tensor:
    """act(x weight^T + bias) in one ATen call; GeLU is the tanh approximation on a GPU and exact on a CPU."""
    cast_to = autocast_of(x.device.type)
    if cast_to is not None and any(t.dtype is not cast_to for t in (x, weight, bias)):  # autocast does not apply to it
        y = linear(x, weight, bias)
        return torch.relu_(y) if act == "relu" else F.gelu(y, approximate="tanh" if x.is_cuda else "none")
    if x.device.type == "cpu":  # ATen would call these two as well, after views
        y = linear(x, weight, bias)
        return _gelu_(y) if act == "gelu" else torch.relu_(y) if may_overwrite() else torch.relu(y)
    y = torch._addmm_activation(bias, as_rows(x), weight.t(), use_gelu=act == "gelu")  # pyright: ignore
    return y.view(*x.shape[:-1], weight.shape[0])


@constant_under_compile
def _epilogue_keeps_nan(kind: str, dtype: torch.dtype) -> bool:
    """Whether the GEMM with ReLU in its epilogue propagates NaN; tested once per GPU, assumed if no GPU is present."""
    return kind != "cuda" or not torch.cuda.is_available() or _tried_with_nan(kind, dtype)


@functools.cache
def _tried_with_nan(kind: str, dtype: torch.dtype) -> bool:
    """Whether a small GEMM and a GEMM of whole tiles return NaN for NaN."""
    kept = True
    with _disable_current_modes():
        for size in (16, 512):
            bias = torch.full((size,), torch.nan, dtype=dtype, device=kind)
            t = bias.new_zeros(size, size)
            kept = kept and bool(torch._addmm_activation(bias, t, t).isnan().all())  # pyright: ignore
    return kept


class LinearBiasActOneDNN(InferenceFusion):
    """y = act(x weight^T + bias) in bfloat16 on a CPU, rounded once, after the activation.

    Not in float32, where oneDNN's activations are less accurate than ATen's; not for ReLU, which returns 0 for NaN; not
    for the exact GeLU, whose tail suffers from cancellation and depends on the rounding of the GEMM.

    x: [*, in_features], y: [*, out_features].
    """

    linear: Linear
    bias: Bias | None
    act: GeLU | SiLU | Sigmoid | Tanh

    def requires(self, env: Env) -> Requirements:
        linear, dtype = self.linear, dtype_of(self.linear, "weight")
        yield env.device == "cpu", "oneDNN runs on the CPU"
        available = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
        yield available, "oneDNN is not built in, or off"
        yield env.autocast is None, "under autocast weight and bias would have to be cast"
        yield dtype == torch.bfloat16, "it is for bfloat16: in float32 oneDNN's activations are less accurate"
        exact = isinstance(self.act, GeLU) and self.act.approximate == "none"
        yield not exact, "the tail of the exact GeLU depends on the rounding of the GEMM"
        yield env.dtype == dtype and one_dtype(linear, self.bias, env), "input, weight and bias must have one dtype"
        yield _mkldnn._is_mkldnn_bf16_supported(), "this CPU has no bfloat16 GEMMs"
        # `rows` is rounded up to a power of two, so there are more than half as many.
        work = (env.rows or 0) // 2 * linear.in_features * linear.out_features
        yield work >= ONEDNN_WORTHWHILE, "too small: making the oneDNN primitive may cost more than it saves"

    def fwd(self, x: Tensor) -> Tensor:
        act, bias = self.act, self.bias
        algorithm = act.approximate if isinstance(act, GeLU) else ""
        weight, start = required(self.linear, "weight"), None if bias is None else bias.read()
        if not torch.backends.mkldnn.enabled:  # since the plan was made
            return act.reference(linear(x, weight, start))
        return _mkldnn._linear_pointwise(x, weight, start, _POST_OPS[type(act)], [], algorithm)


class LinearBiasAdd(ForwardFusion):
    """y = (x weight^T + bias) + other, with the sum in place; on any device.

    Results equal `LinearBias` followed by `Add`, bit for bit. If `other` has another dtype, such as a float32 residual
    under autocast, the sum is not in place, and has the dtype that torch promotes to.

    x: [*, in_features], other, y: [*, out_features]. Saves the same tensors as the operations.
    """

    linear: Linear
    bias: Bias | None
    add: Add

    native_below = C_BESIDE_TORCH
    layout = "any"

    def requires(self, env: Env) -> Requirements:
        return _bias_joins(self.linear, self.bias, env)

    def saves(self, env: Env) -> Savings:
        return super().saves(env) - cost_in_place(self.linear, env)

    def fwd(self, x: Tensor, *, add_other: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y, gemm = self.decided("linear", linear_of, self.linear, self.bias)(x)
        return plus_in_place(y, self.add, add_other), {"linear": gemm}


class ForwardLinearScaleAdd(ForwardFusion):
    """y = factor (x weight^T) + other in one GEMM, rounded once; on any device.

    x: [*, in_features], other, y: [*, out_features]. Saves the same tensors as the operations.
    """

    linear: Linear
    scale: Scale
    add: Add

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield from _addend_fits(self.linear, None, env)
        yield env.leaving is env.dtype, "the GEMM and what is added to it must have one dtype"

    def saves(self, env: Env) -> Savings:
        # ATen copies `other`, on a GPU by a separate kernel.
        copied = Savings(launches=0 if env.device == "cpu" else 1 - STEP, bytes=2 * output_bytes(self.linear, env))
        return super().saves(env) - copied

    def fwd(self, x: Tensor, *, add_other: Tensor) -> tuple[Tensor, dict[str, Any]]:
        weight, factor = self.linear.weight_for(x), self.scale.factor
        shape = (*x.shape[:-1], weight.shape[0])
        if add_other.shape == shape and add_other.dtype is x.dtype and _fits_factor(factor):
            y = addmm(as_rows(add_other), as_rows(x), weight.t(), factor)
            y = y if x.ndim == 2 else y.view(shape)
        else:
            y, _ = self.add.fwd(linear(x, weight) * factor, other=add_other)
        return y, {"linear": Linear.Saved(x=x, weight=weight)}


class ScaleAdd(ForwardFusion):
    """y = factor x + other in one pass, on any device.

    x, other, y: the same shape. Saves the same tensors as the operations. In 16 bits factor x is not rounded before the
    sum, unless torch would round the factor (on a CPU).
    """

    scale: Scale
    add: Add

    layout = "any"

    def fwd(self, x: Tensor, *, add_other: Tensor) -> tuple[Tensor, dict[str, Any]]:
        factor = self.scale.factor
        # On a CPU torch rounds alpha to 16 bits, which moves all elements in one direction.
        exact = not x.is_cpu or _is_exact(factor, torch.promote_types(x.dtype, add_other.dtype))
        if x.shape == add_other.shape and x.is_floating_point() and exact:
            y = torch.add(add_other, x, alpha=factor)
        else:
            y, _ = self.add.fwd(x * factor, other=add_other)
        return y, {}


class AllReduceLinearBackward(BackwardFusion):
    """dx = sum of dy weight over the processes, overlapped with dweight = dy^T x and dbias = sum of dy.

    dy: [*, out_features], dx: [*, in_features]. Unfused, the operations wait for the all-reduce. There is no fallback
    if it fails, because processes communicate in it.
    """

    enter: CopyToTensorParallel
    linear: Linear
    bias: Bias | None

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield self.enter.group.size > 1, "needs several processes"
        yield not env.dtype.is_complex, "gradients of complex numbers need conjugates"
        yield from _bias_joins(self.linear, self.bias, env)
        yield env.autocast is None, "under autocast the sum is of x's dtype, not of the GEMM's"

    def saves(self, env: Env) -> Savings:
        """The shorter of the overlapping steps, assuming a network as fast as memory."""
        rows, linear, size = float(env.rows or 1), self.linear, self.enter.group.size
        product = Savings(flops=2 * rows * linear.in_features * linear.out_features)
        sent = Savings(bytes=2 * (size - 1) / size * rows * linear.in_features * env.itemsize)
        return dataclasses.replace(min(product, sent, key=env.microseconds), launches=1 if env.device == "cpu" else 0)

    def bwd(
        self, dy: Tensor, *, linear: Linear.Saved, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, Grads]:
        rows, wait = as_rows(dy), None
        if "x" in needs:
            dx = mm(rows, linear.weight).view(*dy.shape[:-1], linear.weight.shape[1])
            wait = self.enter.group.begin_all_reduce(dx, "CopyToTensorParallel")
        grads = _of_parameters(rows, linear, needs, main_grads)
        return None if wait is None else wait(), grads


class BackwardLinearAdd(BackwardFusion):
    """dx = d_fork_out + dy weight, with the sum in the GEMM, rounded once.

    dweight = dy^T x;  dbias = sum of dy over all tokens. Saves a call on a CPU. On a GPU ATen copies d_fork_out first,
    which takes as long as the separate sum.

    d_fork_out, x, dx: [*, in_features], dy: [*, out_features].
    """

    fork: Fork
    linear: Linear
    bias: Bias | None

    native_below = C_BESIDE_TORCH
    layout = "any"
    separable = True

    def requires(self, env: Env) -> Requirements:
        return _addend_fits(self.linear, self.bias, env)

    def saves(self, env: Env) -> Savings:
        return Savings(launches=1 + (self.bias is not None) if env.device == "cpu" else 0)

    def bwd(
        self,
        dy: Tensor,
        *,
        linear: Linear.Saved,
        d_fork_out: Tensor | None,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        dx = dgrad(dy, linear.weight, d_fork_out) if "x" in needs else None
        return dx, _of_parameters(as_rows(dy), linear, needs, main_grads)


class BackwardMergedLinearAdd(BackwardFusion):
    """dx = d_fork_out + sum of dy_i weight_i, with the first sum in the GEMM, rounded once.

    Gradients of the parameters are as in `MergedLinear`. Saves a call on a CPU. On a GPU ATen copies d_fork_out first,
    which takes as long as the separate sum.

    d_fork_out, x, dx: [*, in_features], dy: [*, out_features].
    """

    fork: Fork
    linear: MergedLinear

    layout = "any"
    separable = True

    def requires(self, env: Env) -> Requirements:
        yield not env.dtype.is_complex, "gradients of complex numbers need conjugates"
        one = all(env.cast(w.dtype) == env.dtype for w in self.linear.weights())
        yield one, "input and weights must have one dtype"

    def saves(self, env: Env) -> Savings:
        return Savings(launches=1 if env.device == "cpu" else 0)

    def bwd(
        self,
        dy: Tensor,
        *,
        linear: MergedLinear.Saved,
        d_fork_out: Tensor | None,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        operation, dx = self.linear, None
        if "x" in needs:
            same = d_fork_out is None or d_fork_out.dtype is dy.dtype
            dx = operation.dgrad(dy, linear.weights, d_fork_out if same else None)
            dx = dx if same or d_fork_out is None else dx + d_fork_out
        return dx, operation.grads(dy, linear, needs, main_grads, "linear.")


class BackwardLinearScale(BackwardFusion):
    """dx = factor (dy weight) in one GEMM, rounded once, for a `Scale` before or after a `Linear`.

    Before, y = (factor x) weight^T: dweight as in `Linear`, whose saved input is factor x.
    After, y = factor (x weight^T + bias): dweight = factor (dy^T x), dbias = factor times the sum of dy over all
    tokens. No separate pass multiplies by the factor.

    dx: [*, in_features], dy: [*, out_features].
    """

    first: Scale | Linear
    bias: Bias | None
    second: Linear | Scale

    layout = "any"
    separable = True

    @property
    def _linear(self) -> Linear:
        linear = self.first if isinstance(self.first, Linear) else self.second
        assert isinstance(linear, Linear)
        return linear

    def requires(self, env: Env) -> Requirements:
        one = isinstance(self.first, Linear) is not isinstance(self.second, Linear)  # parametrized ones are subclasses
        yield one, "there is no Scale beside the Linear"
        yield self.bias is None or self._linear is self.first, "a Bias stands between the Scale and the Linear"
        yield from _addend_fits(self._linear, self.bias, env)

    def saves(self, env: Env) -> Savings:
        columns = self._linear.out_features if self._linear is self.first else self._linear.in_features
        joined = self.bias is not None and env.device == "cpu"
        return Savings(launches=1 + joined, bytes=2.0 * env.tokens * env.itemsize * columns)

    def bwd(
        self, dy: Tensor, *, first: Any, second: Any, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, Grads]:
        grads: dict[str, Tensor | Accumulated | None] = {}
        before = isinstance(self.first, Scale)
        scale, linear, weight = (first, second, "second.weight") if before else (second, first, "first.weight")
        factor, behind = scale.factor, 1.0 if before else scale.factor
        if not _fits_factor(factor):
            dy, factor, behind = dy if before else dy * factor, 1.0, 1.0
        dx = dgrad(dy, linear.weight, factor=factor) if "x" in needs else None
        if dx is not None and before and not _fits_factor(scale.factor):
            dx = dx * scale.factor
        if "bias.bias" in needs:
            wide = torch.float32 if dy.dtype.itemsize < 4 else dy.dtype
            grads["bias.bias"] = (as_rows(dy).sum(0, dtype=wide) * behind).to(dy.dtype)
        if weight in needs:  # last: after an error before it, a fallback may still run
            grads[weight] = weight_grad(dy, linear.x, main_grads.pop(weight, None), behind)
        return dx, grads


class LinearBiasBackward(BackwardFusion):
    """All gradients of a GEMM and its bias in one step.

    dx = dy weight;  dweight = dy^T x;  dbias = sum of dy over all tokens. ATen has no kernel for two of them; this
    saves CPU overhead: a step of the engine, and with more than two dimensions a reshape.
    """

    linear: Linear
    bias: Bias

    native_below = math.inf
    layout = "any"
    separable = True

    def requires(self, env: Env) -> Requirements:
        yield not env.dtype.is_complex, "gradients of complex numbers need conjugates"
        yield from _bias_joins(self.linear, self.bias, env)

    def saves(self, env: Env) -> Savings:
        return Savings(launches=1 if env.device == "cpu" else STEP)

    def bwd(
        self, dy: Tensor, *, linear: Linear.Saved, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, Grads]:
        flat = dy.ndim == 2
        rows = dy if flat else as_rows(dy)
        dx: Tensor | None = None
        if "x" in needs:
            dx = mm(rows, linear.weight)
            dx = dx if flat else dx.view(*dy.shape[:-1], dx.shape[1])
        return dx, _of_parameters(rows, linear, needs, main_grads)


def _of_parameters(
    rows: Tensor, linear: Linear.Saved, needs: frozenset[str], main_grads: dict[str, Tensor]
) -> dict[str, Tensor | Accumulated | None]:
    """The gradients of the slots `bias` and `linear`, from dy as rows."""
    grads: dict[str, Tensor | Accumulated | None] = {}
    if "bias.bias" in needs:
        grads["bias.bias"] = torch.sum(rows, 0)
    if "linear.weight" in needs:  # last: after an error before it, a fallback may still run
        buffer = main_grads.pop("linear.weight", None) if main_grads else None
        grads["linear.weight"] = weight_grad(rows, linear.x, buffer)
    return grads


def _addend_fits(linear: Linear, bias: Bias | None, env: Env) -> Requirements:
    """Requirements of a GEMM with a factor or an addend for its operands."""
    yield not env.dtype.is_complex, "gradients of complex numbers need conjugates"
    yield from gemm_fits(linear, bias, env)


def _fits_factor(factor: float) -> bool:
    """Whether a GEMM may apply the factor: with a factor of 0 it does not read its operands, and loses NaN and Inf."""
    return factor != 0 and math.isfinite(factor)


@functools.lru_cache
def _is_exact(factor: float, dtype: torch.dtype) -> bool:
    """Whether a factor is not rounded to 16 bits."""
    with _disable_current_modes():
        return dtype.itemsize > 2 or torch.tensor(factor, dtype=dtype).item() == factor


def _bias_joins(linear: Linear, bias: Bias | None, env: Env) -> Requirements:
    """A GEMM that includes a bias requires one dtype of weight and bias."""
    yield one_dtype(linear, bias, env), "weight and bias must have one dtype"

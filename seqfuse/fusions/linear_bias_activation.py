"""Linear, an optional Bias and an activation, forward: in a Triton GEMM, by ATen in place, as a oneDNN primitive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..casts import dtype_of, lowered
from ..env import Env, Savings
from ..fusion import ForwardFusion, InferenceFusion, Requirements
from ..hardware import C_WORTHWHILE, ONEDNN_WORTHWHILE, STEP
from ..ops import Bias, Dropout, GeLU, Linear, ReLU, Sigmoid, SiLU, Tanh
from ..ops._mm import linear as gemm
from ..ops._parameters import parameter
from ..ops.linear import saved_linear
from ..pointwise import Gated, Pointwise
from ._gemm import epilogue, epilogue_takes, mask
from ._linear import epilogue_keeps_nan, in_place, linear_epilogue, one_dtype

_IN_PLACE: dict[type, Callable[[Tensor], Tensor]] = {
    ReLU: torch.relu_,
    Sigmoid: torch.sigmoid_,
    Tanh: torch.tanh_,
}
_mkldnn: Any = torch.ops.mkldnn
_POST_OPS: dict[type, str] = {GeLU: "gelu", SiLU: "swish", Sigmoid: "sigmoid", Tanh: "tanh"}


class LinearBiasActivation(ForwardFusion):
    """y = dropout(act(z)), z = x weight^T + bias, in one GEMM, for any activation or gated unit with device functions.

    All is computed from the float32 sums; z is rounded when it is stored, which it is only where the activation's
    gradient reads it, and so is act(z) where that is read and something was dropped from it. Of a gated unit
    z = [gate; up], from two accumulators; the weight stays as it is, the rows of the gate first. The mask is the one
    that the operation makes of the same seed; none is stored.

    x: [*, in_features], z: [*, out_features], y: like z, of a gated unit [*, out_features / 2]. Saves what the
    operations save.
    Source: Shazeer 2020, arXiv:2002.05202, of gated units.
    """

    linear: Linear
    bias: Bias | None
    act: Pointwise | Gated
    dropout: Dropout | None

    kernels = ("triton",)
    needs_measurement = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        yield from epilogue_takes(self.linear, self.bias, self.act, env, self.dropout)
        yield env.leaving is env.dtype, "its kernel gives y in the dtype of x"

    def fwd(
        self,
        x: Tensor,
        *,
        dropout_seed: Tensor | None = None,
        dtype: torch.dtype | None = None,
        needs: frozenset[str],
    ) -> Any:
        act, drop, saves = self.act, mask(self.dropout, dropout_seed), bool(needs)
        before = isinstance(act, Gated) or act.reads == "input"
        after = saves and not before and drop is not None
        y, t = epilogue(x, self.linear, self.bias, act, drop, saves and before, after)
        if not saves:
            return y
        t = y if t is None else t
        record = act.Saved(x=t) if isinstance(act, Gated) else act.record(t, t)  # pyright: ignore[reportCallIssue]
        return y, {"linear": Linear.Saved(x=x, weight=self.linear.weight_for(x)), "act": record}


class LinearBiasAct(ForwardFusion):
    """y = act(x weight^T + bias), the activation written over the GEMM's result; on any device.

    The backward of these activations reads y, so the pre-activation need not stay and no second tensor is allocated.
    The numbers are those of `LinearBias` followed by the activation, bit for bit. A ReLU behind a bias is in the GEMM's
    epilogue on a GPU (cuBLASLt's), unless that makes a number of NaN.

    x: [*, in_features], y: [*, out_features]. Saves what the operations save.
    """

    linear: Linear
    bias: Bias | None
    act: ReLU | Sigmoid | Tanh

    native_below = C_WORTHWHILE
    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield one_dtype(self.linear, self.bias, env), "weight and bias must have one dtype"

    def saves(self, env: Env) -> Savings:
        if self.bias is None:
            return Savings(launches=STEP)  # the same kernels
        inside = env.device == "cuda" and isinstance(self.act, ReLU) and epilogue_keeps_nan(env.device, env.dtype)
        return super().saves(env) - (Savings() if inside else in_place(self.linear, env))

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        weight, bias, act = self.linear.weight_for(x), self.bias, self.act
        if bias is not None and isinstance(act, ReLU) and epilogue_keeps_nan(x.device.type, x.dtype):
            # Autocast of a GPU does not reach this call.
            y = linear_epilogue(x, lowered(weight, always=True), lowered(bias.read(), always=True), "relu")
        else:
            y = gemm(x, weight, None if bias is None else bias.read())
            y = _IN_PLACE[type(act)](y)
        record = act.Saved(y=y)  # pyright: ignore[reportCallIssue]
        return y, {"linear": saved_linear(x, weight), "act": record}


class LinearBiasGeLU(InferenceFusion):
    """y = gelu(x weight^T + bias) in one call of ATen: in the GEMM's epilogue on a GPU, in place on a CPU.

    The epilogue of cuBLASLt is GeLU by tanh, rounded once; ATen's for a CPU is the exact one, with the bits of
    `LinearBias` followed by `GeLU`. The gradient reads the pre-activation, which neither returns.

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
        return super().saves(env) - (Savings() if env.device == "cuda" else in_place(self.linear, env))

    def fwd(self, x: Tensor) -> Tensor:
        return linear_epilogue(x, self.linear.weight_for(x), self.bias.read(), "gelu")


class LinearBiasActOneDNN(InferenceFusion):
    """y = act(x weight^T + bias) in bfloat16, rounded once, after the activation.

    In float32 oneDNN's activations are less accurate than ATen's, and its ReLU makes 0 of NaN in any dtype. The tail of
    the exact GeLU is what cancellation leaves of it, another number for an argument that was not rounded. These stay
    with ATen.

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
        # `rows` is rounded up to a power of two: more than half of them are there.
        work = (env.rows or 0) // 2 * linear.in_features * linear.out_features
        yield work >= ONEDNN_WORTHWHILE, "too small: making the oneDNN primitive may cost more than it saves"

    def fwd(self, x: Tensor) -> Tensor:
        act, bias = self.act, self.bias
        algorithm = act.approximate if isinstance(act, GeLU) else ""
        weight, start = parameter(self.linear, "weight"), None if bias is None else bias.read()
        return _mkldnn._linear_pointwise(x, weight, start, _POST_OPS[type(act)], [], algorithm)

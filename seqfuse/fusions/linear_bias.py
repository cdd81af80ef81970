"""Linear and Bias, forward and backward: in ATen's calls, and the backward also as one Triton GEMM."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..hardware import STEP
from ..maingrad import Accumulated, accumulated
from ..operation import Grads
from ..ops import Bias, Linear
from ..ops._mm import mm
from ..ops.linear import weight_grad
from ._gemm import kernel_takes, like, tf32
from ._linear import as_rows, linear_of, one_dtype


class LinearBias(ForwardFusion):
    """y = x weight^T + bias in one GEMM that starts from the bias, on any device.

    x: [*, in_features], y: [*, out_features]. Saves what `Linear` and `Bias` save.
    """

    linear: Linear
    bias: Bias

    native_below = math.inf
    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield one_dtype(self.linear, self.bias, env), "weight and bias must have one dtype"

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Linear.Saved]]:
        y, gemm = self.decided("linear", linear_of, self.linear, self.bias)(x)
        return y, {"linear": gemm}


class LinearBiasBackward(BackwardFusion):
    """All gradients of a GEMM and its bias in one step over the rows of dy.

    dx = dy weight;  dweight = dy^T x;  dbias = sum of dy over all rows. ATen has no kernel that makes two of them; what
    is saved is a step of the engine and, beyond two dimensions, a second look for the rows.
    """

    linear: Linear
    bias: Bias

    native_below = math.inf
    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield not env.dtype.is_complex, "gradients of complex numbers need conjugates"
        yield one_dtype(self.linear, self.bias, env), "weight and bias must have one dtype"

    def saves(self, env: Env) -> Savings:
        return Savings(launches=1 if env.device == "cpu" else STEP)

    def bwd(
        self,
        dy: Tensor,
        *,
        linear: Linear.Saved,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        flat = dy.ndim == 2
        rows = dy if flat else as_rows(dy)
        dx: Tensor | None = None
        grads: dict[str, Tensor | Accumulated | None] = {}
        if "x" in needs:
            dx = mm(rows, linear.weight)
            dx = dx if flat else dx.view(*dy.shape[:-1], dx.shape[1])
        if "bias.bias" in needs:
            grads["bias.bias"] = torch.sum(rows, 0)
        if "linear.weight" in needs:  # last: what fails before it may fall back
            x = linear.x if flat else linear.x.reshape(rows.shape[0], linear.x.shape[-1])
            buffer = main_grads.pop("linear.weight", None) if main_grads else None
            grads["linear.weight"] = mm(rows.mT, x) if buffer is None else weight_grad(rows, x, buffer)
        return dx, grads


class LinearBiasBackwardTriton(BackwardFusion):
    """dweight = dy^T x and dbias, the sum of dy over all rows, in one GEMM: dy is read once for both.

    dx = dy weight is torch's GEMM. The sum is of float32 numbers and in a fixed order. Where one of the two is not
    needed, the other is torch's as well. It is worth a pass over dy, and so pays where a row of x is short.

    dy: [*, out_features], x, dx: [*, in_features].
    """

    linear: Linear
    bias: Bias

    kernels = ("triton",)
    needs_measurement = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return kernel_takes(self.linear, self.bias, env)

    def bwd(
        self,
        dy: Tensor,
        *,
        linear: Linear.Saved,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        rows = as_rows(dy)
        dx: Tensor | None = None
        grads: dict[str, Tensor | Accumulated | None] = {}
        if "x" in needs:
            dx = like(rows, linear.weight).mm(linear.weight).view(*dy.shape[:-1], linear.weight.shape[1])
        summed = "bias.bias" in needs
        if "linear.weight" not in needs:
            return dx, {"bias.bias": rows.sum(0, dtype=self.bias.dtype) if summed else None}
        # Last: what fails before it may fall back.
        buffer, d = main_grads.pop("linear.weight", None), like(rows, linear.x)
        if summed and (buffer is None or buffer.is_contiguous()):
            from ..kernels.gemm import linear_wgrad_bias, linear_wgrad_bias_

            x, of = as_rows(linear.x), self.bias.dtype
            if buffer is None:
                made, total = linear_wgrad_bias(d, x, sums_dtype=of, tf32=tf32())
            else:
                made, total = accumulated, linear_wgrad_bias_(buffer, d, x, sums_dtype=of, tf32=tf32())
            return dx, grads | {"linear.weight": made, "bias.bias": total}
        if summed:
            grads["bias.bias"] = rows.sum(0, dtype=self.bias.dtype)
        grads["linear.weight"] = weight_grad(d, linear.x, buffer)
        return dx, grads

"""Linear and Bias as one GEMM of torch, and the activation behind them as one Triton kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..casts import dtype_of
from ..env import Env, Savings
from ..fusion import ForwardFusion, Requirements
from ..hardware import STEP
from ..ops import Bias, Linear
from ..pointwise import Pointwise
from ._kernels import device, kernel_takes_act, kernels_run, recorder
from ._linear import linear_of, one_dtype, output_bytes
from ._pointwise import chain_of, pointwise_of


class LinearBiasPointwise(ForwardFusion):
    """y = act(z), z = x weight^T + bias: a GEMM that adds the bias in its epilogue, as cuBLAS does, and one pass.

    z is written once, which the gradient of the activation reads in any case. Where no GEMM of our own was measured to
    be faster, nothing moves fewer bytes in training.

    x: [*, in_features], z, y: [*, out_features]. Saves what the operations save.
    """

    linear: Linear
    bias: Bias
    act: Pointwise

    kernels = ("triton", "c")
    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield from kernels_run(env)
        yield from kernel_takes_act(self.act, env)
        one = env.cast(dtype_of(self.linear, "weight")) == env.dtype and one_dtype(self.linear, self.bias, env)
        yield one, "input, weight and bias must have one dtype"
        keeps = self.act.reads == "input" or env.leaving is env.dtype
        yield keeps, f"{type(self.act).__name__} keeps y, which is cast for what comes next"

    def saves(self, env: Env) -> Savings:
        return Savings(launches=1 + STEP, bytes=2 * output_bytes(self.linear, env))  # two kernels in one step

    def fwd(self, x: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Any]]:
        return self.decided((dtype, self.act.P), self._passes, dtype)(x)

    def _passes(self, dtype: torch.dtype | None) -> Callable[[Tensor], tuple[Tensor, dict[str, Any]]]:
        gemm, record = linear_of(self.linear, self.bias), recorder(self.act)
        kernel = pointwise_of()(chain_of([("act", (device(self.act),))]), dtype)

        def run(x: Tensor) -> tuple[Tensor, dict[str, Any]]:
            z, saved = gemm(x)
            y: Any = kernel(z)[0]
            return y, {"linear": saved, "act": record(z, y)}

        return run

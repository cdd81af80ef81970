"""Linear, an optional Bias and an activation as one oneDNN primitive, where nothing needs a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..env import Env, Savings
from ..fusion import InferenceFusion, Requirements
from ..ops import Bias, GeLU, Linear, Sigmoid, SiLU, Tanh
from ..ops._read import parameter
from ._linear import one_dtype, output_bytes

_mkldnn: Any = torch.ops.mkldnn
_POST_OPS: dict[type, str] = {GeLU: "gelu", SiLU: "swish", Sigmoid: "sigmoid", Tanh: "tanh"}
# Below this many multiplications, making the primitive may cost more than it saves.
_WORTHWHILE = 2**16


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
        linear, dtype = self.linear, self.linear.weight.dtype
        yield env.device == "cpu", "oneDNN runs on the CPU"
        available = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
        yield available, "oneDNN is not built in, or off"
        yield env.autocast is None, "under autocast weight and bias would have to be cast"
        yield dtype == torch.bfloat16, "it is for bfloat16: in float32 oneDNN's activations are less accurate"
        exact = isinstance(self.act, GeLU) and self.act.approximate == "none"
        yield not exact, "the tail of the exact GeLU depends on the rounding of the product"
        yield env.dtype == dtype and one_dtype(linear, self.bias), "input, weight and bias must have one dtype"
        yield _mkldnn._is_mkldnn_bf16_supported(), "this CPU has no bfloat16 products"
        # `rows` is rounded up to a power of two: more than half of them are there.
        work = (env.rows or 0) // 2 * linear.in_features * linear.out_features
        yield work >= _WORTHWHILE, "too small: making the oneDNN primitive may cost more than it saves"

    def saves(self, env: Env) -> Savings:
        tensors = 2 if self.bias is None else 4
        return Savings(launches=1 if self.bias is None else 2, bytes=tensors * output_bytes(self.linear, env))

    def fwd(self, x: Tensor) -> Tensor:
        act, bias = self.act, self.bias
        algorithm = act.approximate if isinstance(act, GeLU) else ""
        weight, start = parameter(self.linear, "weight"), None if bias is None else bias.read()
        return _mkldnn._linear_pointwise(x, weight, start, _POST_OPS[type(act)], [], algorithm)

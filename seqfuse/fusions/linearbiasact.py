"""Linear, an optional Bias, and an activation whose derivative is a function of its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..env import Env, Savings
from ..fusion import ForwardFusion, Requirements
from ..ops import Bias, Linear, ReLU, Sigmoid, Tanh
from ..ops._read import required
from ._linear import one_dtype, output_bytes

_IN_PLACE: dict[type, Callable[[Tensor], Tensor]] = {
    ReLU: torch.relu_,
    Sigmoid: torch.sigmoid_,
    Tanh: torch.tanh_,
}


class LinearBiasAct(ForwardFusion):
    """y = act(x weight^T + bias), the activation in place of the product, which nobody else sees; on any device.

    The backward of these activations reads y, so the pre-activation need not stay and no second tensor is allocated.
    The numbers are those of `LinearBias` followed by the activation, bit for bit.

    x: [*, in_features], y: [*, out_features]. Saves what the operations save.
    """

    linear: Linear
    bias: Bias | None
    act: ReLU | Sigmoid | Tanh

    layout = "any"

    def requires(self, env: Env) -> Requirements:
        yield one_dtype(self.linear, self.bias), "weight and bias must have one dtype"

    def saves(self, env: Env) -> Savings:
        tensors = 1 if self.bias is None else 3
        return Savings(launches=0 if self.bias is None else 1, bytes=tensors * output_bytes(self.linear, env))

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        weight, bias = required(self.linear, "weight"), self.bias
        y = F.linear(x, weight, None if bias is None else bias.read())
        y = _IN_PLACE[type(self.act)](y)
        record = self.act.Saved(y=y)  # pyright: ignore[reportCallIssue]
        saved: dict[str, Any] = {"linear": Linear.Saved(x=x, weight=weight), "act": record}
        return y, saved if bias is None else {**saved, "bias": Bias.NOTHING}

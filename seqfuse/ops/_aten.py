"""Operators of ATen that have no public binding in `torch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten

gelu_backward: Callable[..., Tensor] = _aten.gelu_backward.default
sigmoid_backward: Callable[..., Tensor] = _aten.sigmoid_backward.default
silu_backward: Callable[..., Tensor] = _aten.silu_backward.default
tanh_backward: Callable[..., Tensor] = _aten.tanh_backward.default
threshold_backward: Callable[..., Tensor] = _aten.threshold_backward.default
layer_norm_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = _aten.native_layer_norm_backward.default
fused_rms_norm: Callable[..., tuple[Tensor, Tensor]] = _aten._fused_rms_norm.default
fused_rms_norm_backward: Callable[..., tuple[Tensor, Tensor]] = _aten._fused_rms_norm_backward.default

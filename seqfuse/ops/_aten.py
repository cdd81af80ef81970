"""Operators of ATen that have no public name in `torch`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Not the overload itself, which would pass every argument on in Python.
_aten: Any = torch.ops.aten

gelu_backward: Callable[..., Tensor] = _aten.gelu_backward.default._op
sigmoid_backward: Callable[..., Tensor] = _aten.sigmoid_backward.default._op
silu_backward: Callable[..., Tensor] = _aten.silu_backward.default._op
tanh_backward: Callable[..., Tensor] = _aten.tanh_backward.default._op
threshold_backward: Callable[..., Tensor] = _aten.threshold_backward.default._op
layer_norm_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = _aten.native_layer_norm_backward.default._op
fused_rms_norm_backward: Callable[..., tuple[Tensor, Tensor]] = _aten._fused_rms_norm_backward.default._op
flash_cpu_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = (
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default._op
)
# Those that `torch` binds by a parser of their own, which is quicker.
_torch: Any = torch
fused_rms_norm: Callable[..., tuple[Tensor, Tensor]] = _torch._fused_rms_norm
flash_cpu: Callable[..., tuple[Tensor, Tensor]] = _torch._scaled_dot_product_flash_attention_for_cpu

"""Torch's attention kernels on NVIDIA GPUs, and which of them `scaled_dot_product_attention` chooses.

q: [B, H, S, D], k and v: [B, Hkv, S, D], as views of one packed tensor that no kernel copies; results and their
gradients are [B, S, H, D]. The log-sum-exp is [B, H, S] in all of them, so forward and backward kernels may differ.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from ..env import constant_under_compile
from ..fake import is_fake

_aten: Any = torch.ops.aten
_flash: Callable[..., tuple[Tensor, ...]] = _aten._flash_attention_forward.default
_flash_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = _aten._flash_attention_backward.default
_cudnn: Callable[..., tuple[Any, ...]] = _aten._scaled_dot_product_cudnn_attention.default
_cudnn_backward: Callable[..., tuple[Tensor, ...]] = _aten._scaled_dot_product_cudnn_attention_backward.default
_efficient: Callable[..., tuple[Tensor, ...]] = _aten._scaled_dot_product_efficient_attention.default
_efficient_backward: Callable[..., tuple[Tensor, ...]] = _aten._scaled_dot_product_efficient_attention_backward.default
_sdp_choice: Callable[..., int] = torch._fused_sdp_choice  # pyright: ignore

Backend = Literal["cudnn", "flash", "efficient"]
BACKENDS: tuple[Backend, ...] = ("cudnn", "flash", "efficient")
# Keys are the values of `torch.nn.attention.SDPBackend`.
_NUMBERED: dict[int, Backend] = {1: "flash", 2: "efficient", 3: "cudnn"}
_choices: dict[Any, Backend | None] = {}


def aligned(x: Tensor) -> bool:
    """Whether rows of a packed x are aligned to the 16-byte loads of these kernels, unless their size rules it out."""
    if not x.is_cuda:
        return True
    size = x.element_size()
    ends = (x.storage_offset(), *x.stride()[:-1])
    return x.shape[-1] * size % 16 != 0 or all(n * size % 16 == 0 for n in ends)


@functools.cache
def has_flash(device: torch.device) -> bool:
    """Whether FlashAttention runs on this GPU."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def sdpa_backend(q: Tensor, k: Tensor, causal: bool) -> Backend | None:
    """The kernel that `scaled_dot_product_attention` chooses for both passes, if it is one of these."""
    # Sizes that torch compares with a bound become one value per side, so a compiler guards only the side.
    batch, rows = 65536 if q.shape[0] > 65535 else 1, 1 if q.shape[2] == 1 else 128
    heads, kv_heads, size = (operator.index(n) for n in (q.shape[1], k.shape[1], q.shape[3]))
    return _choice(q.device, q.dtype, batch, heads, kv_heads, rows, size, causal)


@constant_under_compile
def _choice(
    device: torch.device, dtype: torch.dtype, batch: int, heads: int, kv_heads: int, rows: int, size: int, causal: bool
) -> Backend | None:
    """The choice depends on dtype, sizes and settings only, so torch is queried with small expanded tensors.

    Torch would pad heads for one kernel and repeat GQA heads for another; this module does neither.
    """
    _settle(device)
    kinds = torch.backends.cuda
    settings = (
        kinds.flash_sdp_enabled(), kinds.mem_efficient_sdp_enabled(), kinds.cudnn_sdp_enabled(),
        kinds.math_sdp_enabled(), torch.are_deterministic_algorithms_enabled(),
        *torch._C._get_sdp_priority_order(),  # pyright: ignore
    )  # fmt: skip
    key = (device, dtype, batch, heads, kv_heads, rows, size, causal, settings)
    if key not in _choices:
        with _real(device), torch.enable_grad():
            element = torch.empty(1, 1, 1, size, dtype=dtype, device=device, requires_grad=True)
            q, k = (element.expand(batch, n, rows, size) for n in (heads, kv_heads))
            found = _NUMBERED.get(_sdp_choice(q, k, k, None, 0.0, causal, enable_gqa=heads != kv_heads))
        refused = (found == "flash" and size % 8) or (found == "efficient" and heads != kv_heads)
        _choices[key] = None if refused else found
    return _choices[key]


def _is_here(device: torch.device) -> bool:
    """Whether this GPU is present; a plan may be for another GPU."""
    return torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()


def _real(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context of real tensors if the GPU is present: a plan on fake tensors must choose the same kernel."""
    modes: Any = _disable_current_modes
    return modes() if _is_here(device) else contextlib.nullcontext()


@functools.cache
def _settle(device: torch.device) -> None:
    """Query torch's choice once: the first query sets its priority order, on which later choices depend."""
    if _is_here(device):
        with _real(device):
            q = torch.empty(1, 1, 128, 64, dtype=torch.bfloat16, device=device)
            _sdp_choice(q, q, q)


@functools.cache
def _cudnn_sums(device: torch.device) -> int:
    """The rank of the log-sum-exp that cuDNN's operator returns and reads: [B, H, S] or [B, H, S, 1]."""
    q = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return _cudnn(q, q, q, None, True)[1].ndim


def forward(
    q: Tensor, k: Tensor, v: Tensor, kind: Backend, scale: float, causal: bool, window: int | None, ends: Tensor | None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The result, the log-sum-exp, and the state of torch's generator from which weights were dropped, int64 [2].

    Only FlashAttention supports a window, packed sequences (`ends`) and dropout.
    """
    if kind == "cudnn":
        out = _cudnn(q, k, v, None, True, 0.0, causal, False, scale=scale)
        return out[0].transpose(1, 2), out[1].reshape(q.shape[:3]), None
    if kind == "efficient":
        out = _efficient(q, k, v, None, True, 0.0, causal, scale=scale)
        return out[0].transpose(1, 2), out[1][..., : q.shape[2]].contiguous(), None
    limits = _limits(scale, causal, window)
    if ends is None:
        out = _flash(*_turned((q, k, v)), None, None, q.shape[2], k.shape[2], p, causal, False, **limits)
        return out[0], out[1], out[2].view(torch.int64) if p else None
    rows, ends = q.shape[2], ends.int()
    out = _flash(*_sequence((q, k, v)), ends, ends, rows, rows, p, causal, False, **limits)
    return out[0].unsqueeze(0), out[1].unsqueeze(0), out[2].view(torch.int64) if p else None


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, kind: Backend, scale: float, causal: bool,
    window: int | None, ends: Tensor | None, p: float = 0.0, state: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k and v, [B, S, heads, D]; dy and y: [B, S, H, D]."""
    rows = q.shape[2]
    _held = _scratch(q, k, kind) if type(q) is not Tensor and is_fake(q) else None  # for the peak of a plan
    # Without dropout the generator's state is not read.
    unread = q.new_empty(2, dtype=torch.int64)
    turned = (dy.transpose(1, 2), q, k, v)
    if kind == "cudnn":
        sums = lse if _cudnn_sums(q.device) == 3 else lse.unsqueeze(-1)
        given = (*turned, y.transpose(1, 2), sums, unread[0], unread[1], None, None, None, rows, rows)
        return tuple(_turned(_cudnn_backward(*given, 0.0, causal, scale=scale)))
    if kind == "efficient":
        # As padded by the forward kernel, because it reads several rows at a time; infinity gives padding no weights.
        sums = F.pad(lse, (0, -rows % 32), value=torch.inf) if rows % 32 else lse
        given = (*turned, None, y.transpose(1, 2), sums, unread[0], unread[1], 0.0, [True, True, True, False])
        return tuple(_turned(_efficient_backward(*given, causal, scale=scale)[:3]))
    drawn = unread if state is None else state.view(torch.uint64)
    last, limits = (rows, rows, p, causal, drawn, unread), _limits(scale, causal, window)
    if ends is None:
        return _flash_backward(dy, *_turned((q, k, v)), y, lse, None, None, *last, **limits)
    ends = ends.int()
    grads = _flash_backward(dy[0], *_sequence((q, k, v)), y[0], lse[0], ends, ends, *last, **limits)
    return tuple(grad.unsqueeze(0) for grad in grads)


def _scratch(q: Tensor, k: Tensor, kind: Backend) -> Tensor:
    """A tensor of the size of the workspace of FlashAttention's and cuDNN's backward: dq and one sum per row in
    float32, and for FlashAttention with GQA the gradients of k and v per query head.
    """
    if kind == "efficient":
        return q
    size, each = (q.numel() + q.numel() // q.shape[-1]) * 4, k.numel() // k.shape[1] * q.shape[1]
    shared = 2 * each * q.element_size() if kind == "flash" and q.shape[1] != k.shape[1] else 0
    return torch.empty(size + shared, dtype=torch.uint8, device=q.device)


def _limits(scale: float, causal: bool, window: int | None) -> dict[str, Any]:
    left = None if window is None else window - 1
    return {"scale": scale, "window_size_left": left, "window_size_right": 0 if causal else left}


def _turned(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    return (t.transpose(1, 2) for t in tensors)


def _sequence(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Views [S, heads, D] of the only batch element."""
    return (t[0].transpose(0, 1) for t in tensors)

"""Operations restated in plain torch: random sequences do not rely on their references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from seqfuse.ops._philox import drop_mask

_ACTIVATIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "Identity": lambda _, x: x,
    "ReLU": lambda _, x: F.relu(x),
    "SquaredReLU": lambda _, x: F.relu(x) ** 2,
    "Sigmoid": lambda _, x: F.sigmoid(x),
    "Tanh": lambda _, x: F.tanh(x),
    "SiLU": lambda _, x: F.silu(x),
    "QuickGeLU": lambda _, x: x * F.sigmoid(1.702 * x),
    "GeLU": lambda op, x: F.gelu(x, approximate=op.approximate),
    "Clamp": lambda op, x: x.clamp(-op.limit, op.limit) + op.offset,
    "ClampedSiLU": lambda op, x: (lambda c: c * F.sigmoid(op.alpha * c))(x.clamp(max=op.limit)),
}
_UNITS = {
    "SwiGLU": "SiLU", "GEGLU": "GeLU", "ReGLU": "ReLU", "GLU": "Sigmoid", "QGEGLU": "QuickGeLU",
    "SReGLU": "SquaredReLU", "ClampedSwiGLU": "ClampedSiLU",
}  # fmt: skip


def plain(op: Any, x: Tensor, seed: Tensor | None, mask: Tensor | None, stats: torch.dtype) -> Tensor:
    """The output of an operation for `x`, `[*, H]`.

    `stats` is the dtype in which the operation computes statistics and attention scores; `x` may be wider. Raises
    KeyError for an operation without a plain counterpart.
    """
    kind = type(op).__name__
    if kind in _ACTIVATIONS:
        return _ACTIVATIONS[kind](op, x)
    if kind in _UNITS:
        half = x.shape[-1] // 2
        gate, up = x[..., :half], x[..., half:]
        if kind == "ClampedSwiGLU":
            up = up.clamp(-op.limit, op.limit) + op.offset
        return _ACTIVATIONS[_UNITS[kind]](op, gate) * up
    return _OTHERS[kind](op, x, seed, mask, stats)


def _kept(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """Dropout with the mask of `Dropout`, whose bits have tests against published Philox numbers."""
    return x if seed is None else torch.where(drop_mask(seed, x.shape, p), 0.0 * x, x / (1 - p))


def _heads(op: Any, x: Tensor, known: int) -> tuple[Tensor, Tensor]:
    """The first `known` heads of x, [*, known, D], and the remaining columns."""
    size = x.shape[-1] // (op.heads + 2 * op.kv_heads)
    return x[..., : known * size].reshape(*x.shape[:-1], known, size), x[..., known * size :]


def _qk_norm(op: Any, x: Tensor, *_: Any) -> Tensor:
    heads, values = _heads(op, x, op.heads + op.kv_heads)
    size = (heads.shape[-1],)
    gained = [F.rms_norm(t, size, w, op.eps) for t, w in (
        (heads[..., : op.heads, :], op.q_weight), (heads[..., op.heads :, :], op.k_weight),
    )]  # fmt: skip
    return torch.cat((torch.cat(gained, -2).flatten(-2), values), -1)


def _turned(op: Any, x: Tensor, *_: Any) -> Tensor:
    """RoPE: pairs of columns as complex numbers, multiplied by e^(i angle)."""
    if not x.numel():
        return 1 * x
    heads, values = _heads(op, x, op.heads + op.kv_heads)
    size = op.rotary_dim or heads.shape[-1]
    pairs = torch.stack(
        heads[..., :size].chunk(2, -1) if op.style == "half" else (heads[..., :size:2], heads[..., 1:size:2]), -1
    )
    positions = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device)
    angle = positions[:, None, None] * op.base ** (-torch.arange(0, size, 2, dtype=x.dtype, device=x.device) / size)
    spun = torch.view_as_real(torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angle), angle))
    spun = (spun.transpose(-1, -2) if op.style == "half" else spun).flatten(-2)
    return torch.cat((torch.cat((spun, heads[..., size:]), -1).flatten(-2), values), -1)


def _attention(op: Any, x: Tensor, seed: Tensor | None, mask: Tensor | None, stats: torch.dtype) -> Tensor:
    """Softmax attention. The sum of a score and a float mask is rounded to `stats`, since -1e9 leaves no digit of a
    float32 score; all else is computed in the dtype of x."""
    heads = _heads(op, x, op.heads + 2 * op.kv_heads)[0].transpose(-2, -3)
    q, values = heads[..., : op.heads, :, :], op.heads + op.kv_heads
    k, v = (
        t.repeat_interleave(op.heads // op.kv_heads, -3)
        for t in (heads[..., op.heads : values, :, :], heads[..., values:, :, :])
    )
    scores = torch.einsum("...id,...jd->...ij", q, k) * (q.shape[-1] ** -0.5 if op.scale is None else op.scale)
    if op.softcap is not None:
        scores = op.softcap * torch.tanh(scores / op.softcap)
    i = torch.arange(x.shape[-2], device=x.device)
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    if op.causal:
        hidden = hidden | (i[None, :] > i[:, None])
    if op.window is not None:
        hidden = hidden | ((i[None, :] - i[:, None]).abs() >= op.window)
    if mask is not None and mask.is_floating_point():
        scores = (scores.to(stats) + mask.to(stats)).to(x.dtype)
    elif mask is not None:
        hidden = hidden | (mask == 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return torch.einsum("...ij,...jd->...id", _kept(weights, seed, op.dropout), v).movedim(-3, -2).flatten(-2)


_OTHERS: dict[str, Callable[[Any, Tensor, Tensor | None, Tensor | None, torch.dtype], Tensor]] = {
    "Scale": lambda op, x, seed, mask, stats: x * op.factor,
    "Bias": lambda op, x, seed, mask, stats: x + op.bias,
    "Linear": lambda op, x, seed, mask, stats: F.linear(x, op.weight, op.bias),
    "LayerNorm": lambda op, x, seed, mask, stats: F.layer_norm(x, op.normalized_shape, op.weight, op.bias, op.eps),
    "RMSNorm": lambda op, x, seed, mask, stats: F.rms_norm(
        x, op.normalized_shape, op.weight, torch.finfo(stats).eps if op.eps is None else op.eps
    ),
    "Dropout": lambda op, x, seed, mask, stats: _kept(x, seed, op.p),
    "QKNorm": _qk_norm,
    "RotaryEmbedding": _turned,
    "Attention": _attention,
}

"""The shapes that kernels of heads and RoPE take, and their angles: for Triton and for C."""

from __future__ import annotations

import torch
from torch import Tensor

from ._launch import MAX_GRID, inner_contiguous
from ._rope_ops import Rotation

MAX_HEAD = 1024
"""The widest head."""


def checked(
    x: Tensor, heads: int, kv_heads: int, rotation: Rotation | None, *, bias: Tensor | None = None
) -> tuple[int, int]:
    """Sizes of a head, and of its part that has RoPE."""
    parts = heads + 2 * kv_heads
    if x.ndim < 1 + (rotation is not None) or not x.shape[-1] or x.shape[-1] % parts:
        raise ValueError(f"x must be [*, S, {parts} D], got shape {tuple(x.shape)}")
    size = x.shape[-1] // parts
    rotary = 0 if rotation is None else rotation.dim
    if size > MAX_HEAD:
        raise ValueError(f"heads of {size}: at most {MAX_HEAD} can have RoPE or a norm")
    if x.numel() // x.shape[-1] > MAX_GRID:
        raise ValueError(f"at most {MAX_GRID} rows can have RoPE or a norm")
    if x.dtype is torch.float64:
        raise ValueError("the kernels compute in float32, so x must not be float64")
    if rotary % 2 or rotary > size or (rotation is not None and rotary < 2):
        raise ValueError(f"an even number of at most {size} elements of a head can have RoPE, got {rotary}")
    if bias is not None and tuple(bias.shape) != (x.shape[-1],):
        raise ValueError(f"bias must have shape ({x.shape[-1]},), got {tuple(bias.shape)}")
    if bias is not None:
        inner_contiguous("bias", bias)
    return size, rotary


def check_weights(size: int, *weights: Tensor | None) -> None:
    """Raise `ValueError` unless the weights of queries and keys are given together, each [size]."""
    if len({weight is None for weight in weights}) > 1:
        raise ValueError("q_weight and k_weight are given together")
    for weight in weights:
        if weight is not None and tuple(weight.shape) != (size,):
            raise ValueError(f"weights must have shape ({size},), got {tuple(weight.shape)}")
        if weight is not None:
            inner_contiguous("weight", weight)


def check_normed(dy: Tensor, x: Tensor | None, rstd: Tensor | None) -> None:
    """Check what the forward of a norm of heads kept, for the gradient `dy` of its output."""
    if (x is None) != (rstd is None) or (x is not None and x.shape != dy.shape):
        raise ValueError("x and rstd are those of the norm's forward, and x has the shape of dy")


def angles_of(
    x: Tensor,
    rotation: Rotation | None,
    positions: Tensor | None,
    frequencies: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
) -> tuple[tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None], int, bool]:
    """What the kernels make angles of, or the angles; after how many rows they begin again; whether by pair."""
    if rotation is None:
        return (None, None, None, None), 1, False
    if cos is None or sin is None:
        at, period = positions_of(x, positions)
        return (frequencies, at, None, None), period, False
    width = cos.shape[-1]
    lead = x.shape[:-1]
    fits = all(a in (1, b) for a, b in zip(cos.shape[-2::-1], lead[::-1], strict=False))
    if sin.shape != cos.shape or width not in (rotation.dim, rotation.dim // 2) or cos.ndim > x.ndim or not fits:
        wanted = f"{(*lead, rotation.dim)} or {(*lead, rotation.dim // 2)}"
        raise ValueError(f"cos and sin must broadcast to {wanted}, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    of = lead if cos.shape[:-2].numel() > 1 else lead[-1:]
    cos, sin = (t.reshape(t.shape[-len(of) - 1 :]).expand(*of, width).contiguous() for t in (cos, sin))
    return (None, None, cos, sin), max(1, of.numel()), width < rotation.dim


def positions_of(x: Tensor, positions: Tensor | None) -> tuple[Tensor | None, int]:
    """Positions in one piece, `None` for 0, 1, ..., and after how many rows they begin again."""
    lead = x.shape[:-1]
    if positions is None:
        return None, max(1, lead[-1])
    fits = all(a in (1, b) for a, b in zip(positions.shape[::-1], lead[::-1], strict=False))
    if positions.ndim > len(lead) or not fits:
        raise ValueError(f"positions must broadcast to {tuple(lead)}, got shape {tuple(positions.shape)}")
    of = lead if positions.numel() > positions.shape[-1:].numel() else lead[-1:]
    return positions.reshape(positions.shape[-len(of) :]).expand(of).reshape(-1).contiguous(), max(1, of.numel())


_known: dict[tuple[float, int, torch.device], Tensor] = {}


def frequencies_of(rotation: Rotation | None, device: torch.device) -> Tensor | None:
    """The angle of one position, of each pair, float32 [dim / 2]; made once per device."""
    if rotation is None:
        return None
    key = (rotation.base, rotation.dim, device)
    found = _known.get(key)
    if found is None:
        powers = torch.arange(0, rotation.dim, 2, dtype=torch.float64, device=device) / -rotation.dim
        found = rotation.base ** powers.float()
        on_gpu = device.type == "cuda"
        # A graph under capture owns what it makes, and a tensor that is none has no memory.
        if type(found) is Tensor and not (on_gpu and torch.cuda.is_current_stream_capturing()):
            if on_gpu:  # the next call may be on another stream, which does not wait for this one
                torch.cuda.current_stream(device).synchronize()
            _known[key] = found
    return found

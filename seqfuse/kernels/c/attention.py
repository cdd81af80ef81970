# pyright: basic
"""Attention as C, forward and backward: some rows of scores at a time, and GEMMs that never leave the cache."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compiler
from .._device import threshold_and_scale
from .._launch import faking
from .call import NAMES, CKernel, header

_LANES, _WIDTH = 16, 64  # multiples of those of `tile.h`
# Scores held at a time: of so many rows that they stay in a cache, but as few as take the longest to read the keys for.
_HELD, _MOST, _LEAST = 2**16, 60, 12
_FIELDS = ("B", "H", "G", "S", "N", "D", "P", "M")
_STRIDES = ("q", "k", "v", "y", "dy", "dq", "dk", "dv")


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _FIELDS),
        *((name, ctypes.c_int64 * 3) for name in _STRIDES),
        ("mask", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("masked", "causal", "window", "threshold", "direct", "rows", "memory")),
    ]


class ScoreLimits(NamedTuple):
    """What makes scores and limits them: `ops._attention.Scores` without tensors.

    Args:
        scale: scores are q k^T times this.
        causal: whether row i sees keys 0..i alone.
        window: how many keys a row sees on each side, its own included; all if `None`.
        softcap: scores become softcap tanh(score / softcap), if given.
        p: probability of dropping a weight.
    """

    scale: float
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    p: float = 0.0


@functools.cache
def _kernel(backward: bool, drops: bool, bends: bool, dtype: torch.dtype) -> CKernel:
    name = NAMES[dtype]
    defined = {
        "BACKWARD": int(backward),
        "DROPS": int(drops),
        "BENDS": int(bends),
        "LD": f"ld_{name}",
        "ST": f"st_{name}",
    }
    text = "".join(f"#define {key} {value}\n" for key, value in defined.items())
    parts = map(header, ("head.h", *["philox.h"] * drops, "tile.h", "attention.h"))
    return CKernel("\n".join([text, *parts]), 11 if backward else 9, 0, 3)


def ask(drops: bool, bends: bool, dtype: torch.dtype) -> None:
    """Have both kernels compiled before they are called."""
    for backward in (False, True):
        compiler.ask(_kernel(backward, drops, bends, dtype).source)


@functools.cache
def compiled(drops: bool, bends: bool, dtype: torch.dtype) -> None:
    """Compile both kernels.

    Raises:
        CompileError: if they cannot be.
    """
    for backward in (False, True):
        _kernel(backward, drops, bends, dtype).function()


def attention_fwd(
    q: Tensor, k: Tensor, v: Tensor, how: ScoreLimits, mask: Tensor | None = None, seed: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return y = softmax(scores) v with dropout, [B, S, H, D] in the dtype of q, and log-sum-exps, [B, H, S] float32.

    Zeros for a row that sees no key, whose log-sum-exp is 0. The mask of dropout is that of `kernels.c.mask` over
    contiguous [B, H, S, N].

    q: [B, H, S, D], k, v: [B, Hkv, N, D], of one dtype, with a contiguous last dimension; mask: float32 of four
    dimensions, broadcast to [B, H, S, N], added; seed: int64 of one element.
    """
    B, H, S, D = q.shape
    y = torch.empty(B, S, H, D, dtype=q.dtype, device="cpu")
    lse = torch.empty(B, H, S, dtype=torch.float32, device="cpu")
    if faking():
        return y, lse
    n = _shape({"q": q, "k": k, "v": v, "y": y.transpose(1, 2)}, how, mask, seed)
    shared = n.D * n.M + (0 if n.direct else n.N * n.P)
    threads = min(torch.get_num_threads(), B * H * -(-S // n.rows))
    memory = _memory(B * k.shape[1] * shared + threads * n.memory)
    _call(False, (q, k, v, mask, y, lse, memory), n, how, seed, threads)
    return y, lse


def attention_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: tuple[Tensor, Tensor, Tensor],
    how: ScoreLimits, mask: Tensor | None = None, seed: Tensor | None = None,
) -> None:  # fmt: skip
    """Write dq, dk and dv into `out`, of the shapes of q, k and v, with a contiguous last dimension.

    The weights are made again: of a log-sum-exp in float32 they would not add up to one where scores are large.

    dy: [B, S, H, D]; the rest as `attention_fwd` has it.
    """
    if faking():
        return
    dy = (dy if dy.stride(-1) == 1 else dy.contiguous()).transpose(1, 2)
    n = _shape({"q": q, "k": k, "v": v, "dy": dy, **dict(zip(("dq", "dk", "dv"), out, strict=True))}, how, mask, seed)
    threads = min(torch.get_num_threads(), q.shape[0] * k.shape[1])
    _call(True, (q, k, v, mask, dy, *out, _memory(threads * n.memory)), n, how, seed, threads)


def _shape(tensors: dict[str, Tensor], how: ScoreLimits, mask: Tensor | None, seed: Tensor | None) -> Any:
    q, k = tensors["q"], tensors["k"]
    threshold = threshold_and_scale(how.p)[0] if seed is not None and how.p else 0
    lies = None if mask is None else mask.expand(*q.shape[:3], k.shape[2]).stride()
    strides = tuple([t.stride() for t in tensors.values()])
    wide = q.dtype is torch.float32
    return _shape_of(q.shape, k.shape, tuple(tensors), strides, lies, how.causal, how.window, threshold, wide)


@functools.lru_cache(1024)
def _shape_of(
    of_q: tuple[int, ...], of_k: tuple[int, ...], names: tuple[str, ...], strides: tuple[tuple[int, ...], ...],
    mask: tuple[int, ...] | None, causal: bool, window: int | None, threshold: int, wide: bool,
) -> Any:  # fmt: skip
    (B, H, S, D), N = of_q, of_k[2]
    P = -(-D // _LANES) * _LANES
    n = _Shape(B, H, H // of_k[1], S, N, D, P, -(-N // _WIDTH) * _WIDTH + _LANES)
    n.rows = min(_MOST, max(_LEAST, _HELD // n.M), S)
    for name, stride in zip(names, strides, strict=True):
        setattr(n, name, stride[:3])
    if mask is not None:
        n.mask, n.masked = mask, 1
    n.causal, n.window, n.threshold, n.direct = causal, window or 0, threshold, wide and P == D
    if "dq" in names:
        n.memory = n.M * (2 * D + 2 * n.rows + 1) + P * (3 * N + 3 * n.rows)
    else:
        n.memory = n.rows * (n.M + 2 * P) + n.M
    return n


def _memory(floats: int) -> Tensor:
    return torch.empty(floats, dtype=torch.float32, device="cpu")


def _call(
    backward: bool, tensors: tuple[Tensor | None, ...], n: Any, how: ScoreLimits, seed: Tensor | None, threads: int
) -> None:
    drops = seed is not None and how.p > 0
    keep = threshold_and_scale(how.p)[1] if drops else 1.0
    q = tensors[0]
    assert q is not None
    pointers = [None if t is None else t.data_ptr() for t in (seed if drops else None, *tensors)]
    function = _kernel(backward, drops, how.softcap is not None, q.dtype).function()
    function(*pointers, ctypes.addressof(n), how.scale, how.softcap or 0.0, keep, max(threads, 1))

# pyright: basic
"""Attention as C, forward and backward: some rows of scores at a time, and GEMMs that never leave the cache."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import compiler
from .._device import threshold_and_scale
from .._launch import is_faking
from .call import NAMES, CKernel, allocator, header

_LANES, _WIDTH = 16, 64  # multiples of those of `tile.h`
# Scores held at a time: of so many rows that they stay in a cache; at most, and at least, as each block reads all keys.
_HELD, _MOST, _LEAST = 2**16, 60, 12
_FIELDS = ("B", "H", "G", "S", "N", "D", "P", "M")
_FORWARD, _BACKWARD = ("q", "k", "v", "y"), ("q", "k", "v", "dy", "dq", "dk", "dv")
_LARGE = 2**20  # multiplications of queries by keys below which a second thread takes longer to begin than it saves


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _FIELDS),
        *((name, ctypes.c_int64 * 3) for name in (*_FORWARD, *_BACKWARD[3:])),
        ("mask", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ("masked", "causal", "window", "threshold", "direct", "rows", "memory")),
    ]


@functools.cache
def _kernel(backward: bool, drops: bool, bends: bool, dtype: torch.dtype) -> CKernel:
    name = NAMES[dtype]
    defined = {"BACKWARD": int(backward), "DROPS": int(drops), "BENDS": int(bends), "LD": f"ld_{name}"}
    defined["ST"] = f"st_{name}"
    text = "".join(f"#define {key} {value}\n" for key, value in defined.items())
    parts = map(header, ("head.h", *["philox.h"] * drops, "tile.h", "attention.h"))
    return CKernel("\n".join([text, *parts]), 11 if backward else 9, 0, 3)


def ask_for_both(drops: bool, bends: bool, dtype: torch.dtype) -> None:
    """Have both kernels compiled before they are called."""
    for backward in (False, True):
        compiler.ask(_kernel(backward, drops, bends, dtype).source)


@functools.cache
def compile_both(drops: bool, bends: bool, dtype: torch.dtype) -> None:
    """Compile both kernels.

    Raises:
        CompileError: if they cannot be.
    """
    for backward in (False, True):
        _kernel(backward, drops, bends, dtype).function()


def attention_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, window: int | None = None,
    softcap: float | None = None, mask: Tensor | None = None, seed: Tensor | None = None, p: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `kernels.attention.attention_fwd`, for a CPU; returns y and log-sum-exps, [B, H, S] float32.

    The mask of dropout is that of `kernels.c.mask` over contiguous [B, H, S, N].

    q: [B, H, S, D], k, v: [B, Hkv, N, D], of one dtype, with a contiguous last dimension; mask: float32 of four
    dimensions, broadcast to [B, H, S, N], added; seed: int64 of one element. y: [B, S, H, D] in the dtype of q.
    """
    B, H, S, D = q.shape
    new, wide = allocator(), torch.float32
    y, lse = new((B, S, H, D), (S * H * D, H * D, D, 1), q.dtype), new((B, H, S), (H * S, S, 1), wide)
    n = _shape((q, k, v, y.transpose(1, 2)), False, causal, window, mask, p if seed is not None else 0.0)
    threads, floats = _forward_memory(q, k, n)
    memory = new((floats,), (1,), wide)
    _call(False, (q, k, v, mask, y, lse, memory), n, (scale, softcap, p), seed, threads)
    return y, lse


def scratch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A tensor of the bytes that `attention_on_cpu` takes while it runs, for a plan that counts them."""
    floats = _forward_memory(q, k, _shape((q, k, v, q), False, False, None, None, 0.0))[1]
    return torch.empty(floats, dtype=torch.float32, device=q.device)


def _forward_memory(q: Tensor, k: Tensor, n: Any) -> tuple[int, int]:
    """The threads of a forward pass, and the float32 numbers that they hold."""
    shared = n.D * n.M + (0 if n.direct else n.N * n.P)
    threads = _threads(q, k, q.shape[0] * q.shape[1] * -(-q.shape[2] // n.rows))
    return threads, q.shape[0] * k.shape[1] * shared + threads * n.memory


def attention_on_cpu_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: tuple[Tensor, Tensor, Tensor], scale: float, *,
    causal: bool = False, window: int | None = None, softcap: float | None = None, mask: Tensor | None = None,
    seed: Tensor | None = None, p: float = 0.0,
) -> None:  # fmt: skip
    """Write dq, dk and dv into `out`, of the shapes of q, k and v, with a contiguous last dimension.

    The weights are made again: of a log-sum-exp in float32 they would not add up to one where scores are large.

    dy: [B, S, H, D]; the rest as `attention_on_cpu` has it.
    """
    dy = (dy if dy.stride(-1) == 1 else dy.contiguous()).transpose(1, 2)
    n = _shape((q, k, v, dy, *out), True, causal, window, mask, p if seed is not None else 0.0)
    threads = _threads(q, k, q.shape[0] * k.shape[1])
    if is_faking():  # held until it is counted
        _ = torch.empty(threads * n.memory, dtype=torch.float32, device=q.device)
        return
    memory = allocator()((threads * n.memory,), (1,), torch.float32)
    _call(True, (q, k, v, mask, dy, *out, memory), n, (scale, softcap, p), seed, threads)


def _threads(q: Tensor, k: Tensor, parts: int) -> int:
    large = q.numel() * k.shape[2] >= _LARGE
    return max(1, min(torch.get_num_threads(), parts)) if large else 1


def _shape(
    tensors: Sequence[Tensor], backward: bool, causal: bool, window: int | None, mask: Tensor | None, p: float
) -> Any:
    q, k = tensors[:2]
    lies = None if mask is None else mask.expand(*q.shape[:3], k.shape[2]).stride()
    strides = tuple([t.stride() for t in tensors])
    threshold = threshold_and_scale(p)[0] if p else 0
    return _shape_of(q.shape, k.shape, backward, strides, lies, causal, window, threshold, q.dtype is torch.float32)


@functools.lru_cache(1024)
def _shape_of(
    of_q: tuple[int, ...], of_k: tuple[int, ...], backward: bool, strides: tuple[tuple[int, ...], ...],
    mask: tuple[int, ...] | None, causal: bool, window: int | None, threshold: int, wide: bool,
) -> Any:  # fmt: skip
    (B, H, S, D), N = of_q, of_k[2]
    P = -(-D // _LANES) * _LANES
    n = _Shape(B, H, H // of_k[1], S, N, D, P, -(-N // _WIDTH) * _WIDTH + _LANES)
    n.rows = min(_MOST, max(_LEAST, _HELD // n.M), S)
    for name, stride in zip(_BACKWARD if backward else _FORWARD, strides, strict=True):
        setattr(n, name, stride[:3])
    if mask is not None:
        n.mask, n.masked = mask, 1
    n.causal, n.window, n.threshold, n.direct = causal, window or 0, threshold, wide and P == D
    if backward:
        n.memory = n.M * (2 * D + 2 * n.rows + 1) + P * (3 * N + 3 * n.rows)
    else:
        n.memory = n.rows * (n.M + 2 * P) + n.M
    return n


def _call(
    backward: bool, tensors: tuple[Tensor | None, ...], n: Any, numbers: tuple[float, float | None, float],
    seed: Tensor | None, threads: int,
) -> None:  # fmt: skip
    (scale, softcap, p), q = numbers, tensors[0]
    assert q is not None
    drops = seed is not None and p > 0
    keep = threshold_and_scale(p)[1] if drops else 1.0
    pointers = [None if t is None else t.data_ptr() for t in (seed if drops else None, *tensors)]
    function = _kernel(backward, drops, softcap is not None, q.dtype).function()
    function(*pointers, ctypes.addressof(n), scale, softcap or 0.0, keep, threads)

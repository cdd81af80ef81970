# pyright: basic
"""Attention in C, forward and backward: a block of rows of scores at a time, and GEMMs that stay in the cache."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import compiler
from .._device import threshold_and_scale
from .._launch import is_faking
from .call import NAMES, CKernel, allocator, header, kernel, strides_of

_LANES, _WIDTH = 16, 64  # multiples of those in `tile.h`
# Scores per block, which stay in a cache; and the most and the fewest rows of a block, because each reads all keys.
_HELD, _MOST, _LEAST = 2**16, 60, 12
_FIELDS = ("B", "H", "G", "S", "N", "D", "P", "M")
_FORWARD, _BACKWARD = ("q", "k", "v", "y"), ("q", "k", "v", "dy", "dq", "dk", "dv")
_LARGE = 2**20  # multiplications of queries by keys below which a second thread costs more than it saves


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
    above = map(header, ("head.h", *["philox.h"] * drops, "tile.h"))
    return kernel("\n".join([text, *above]), header("attention.h"), 12 if backward else 9, 0, 3)


def ask_for_both(drops: bool, bends: bool, dtype: torch.dtype) -> None:
    """Request that both kernels are compiled before they are called."""
    for backward in (False, True):
        compiler.ask(_kernel(backward, drops, bends, dtype).source)


@functools.cache
def compile_both(drops: bool, bends: bool, dtype: torch.dtype) -> None:
    """Compile both kernels.

    Raises:
        CompileError: if compilation fails.
    """
    for backward in (False, True):
        _kernel(backward, drops, bends, dtype).function()


def attention_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = False, window: int | None = None,
    softcap: float | None = None, mask: Tensor | None = None, seed: Tensor | None = None, p: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`kernels.attention.attention_fwd` for a CPU; returns y and log-sum-exps, [B, H, S] float32.

    The dropout mask is that of `kernels.c.mask` over contiguous [B, H, S, N].

    q: [B, H, S, D], k, v: [B, Hkv, N, D], of one dtype, with a contiguous last dimension; mask: of four dimensions,
    broadcast to [B, H, S, N], float32 (added) or bool (True is seen); seed: int64 of one element. y: [B, S, H, D] in
    the dtype of q.
    """
    B, H, S, D = q.shape
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    new, wide = allocator(), torch.float32
    y, lse = new((B, S, H, D), (S * H * D, H * D, D, 1), q.dtype), new((B, H, S), (H * S, S, 1), wide)
    n = _shape((q, k, v, y.transpose(1, 2)), False, causal, window, mask, p if seed is not None else 0.0)
    most, shared, each = _memory(n, False)
    threads = min(torch.get_num_threads(), most)
    memory = new((shared + threads * each,), (1,), wide)
    _call(False, (q, k, v, mask, y, lse, memory), n, (scale, softcap, p), seed, threads)
    return y, lse


def both_on_cpu(
    inputs: Sequence[Tensor], heads: Sequence[Tensor], grads: Sequence[Tensor], result: Sequence[int], scale: float, *,
    causal: bool = False, window: int | None = None, softcap: float | None = None, mask: Tensor | None = None,
    p: float = 0.0, needs_mask: bool = False,
) -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., tuple[Sequence[Tensor], Tensor | None]]]:  # fmt: skip
    """Both passes for inputs, one or three, of which q, k and v are views, `heads`.

    The first one maps inputs, mask, and the seed of dropout, if p > 0, to y, [*, S, H D], of the shape `result`, and
    log-sum-exps [*, H, S]. The second one maps the contiguous dy, inputs, mask and seed to new gradients of the inputs,
    of which `grads` are such views, and, with `needs_mask`, `dmask` of `attention_on_cpu_bwd`.
    """
    (q, k, v), dtype, wide = heads, inputs[0].dtype, torch.float32
    (B, H, S, D), leading = q.shape, tuple(result[:-2])
    of_y, of_lse = ((of, strides_of(of), kind) for of, kind in ((tuple(result), dtype), ((*leading, H, S), wide)))
    of_grads = [(tuple(t.shape), strides_of(t.shape), dtype) for t in inputs]
    limits, rows = (causal, window, mask, p), q.new_empty((q.shape[0], S, H, D), device="meta").transpose(1, 2)
    n, back = _shape((q, k, v, rows), False, *limits), _shape((q, k, v, rows, *grads), True, *limits)
    run, run_back = (_kernel(backward, p > 0, softcap is not None, dtype).function() for backward in (False, True))
    (most, shared, each), (most_back, _, each_back) = _memory(n, False), _memory(back, True)
    numbers, threads_now = (scale, softcap or 0.0, threshold_and_scale(p)[1] if p else 1.0), torch.get_num_threads
    of_mask = ((B, H, S, k.shape[2]), strides_of((B, H, S, k.shape[2])), wide)
    to_k, to_v = _after(*heads)
    new_k, new_v = _after(*grads)

    def addresses(tensors: Sequence[Tensor], second: int, third: int) -> tuple[int, int, int]:
        if len(tensors) == 1:
            at = tensors[0].data_ptr()
            return at, at + second, at + third
        x, k, v = tensors
        return x.data_ptr(), k.data_ptr(), v.data_ptr()

    def forward(inputs: Sequence[Tensor], mask: Tensor | None, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        new, threads = allocator(), min(threads_now(), most)
        y, lse, memory = new(*of_y), new(*of_lse), new((shared + threads * each,), (1,), wide)
        made, drops = (y.data_ptr(), lse.data_ptr(), memory.data_ptr()), 0 if seed is None else seed.data_ptr()
        added = 0 if mask is None else mask.data_ptr()
        run(drops, *addresses(inputs, to_k, to_v), added, *made, ctypes.addressof(n), *numbers, threads)
        return y, lse

    def backward(
        dy: Tensor, inputs: Sequence[Tensor], mask: Tensor | None, seed: Tensor | None
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        new, threads = allocator(), min(threads_now(), most_back)
        made, memory = [new(*of) for of in of_grads], new((threads * each_back,), (1,), wide)
        dmask = new(*of_mask) if needs_mask else None
        drops, added = 0 if seed is None else seed.data_ptr(), 0 if mask is None else mask.data_ptr()
        written = *addresses(made, new_k, new_v), 0 if dmask is None else dmask.data_ptr(), memory.data_ptr()
        read = drops, *addresses(inputs, to_k, to_v), added, dy.data_ptr()
        run_back(*read, *written, ctypes.addressof(back), *numbers, threads)
        return made, dmask

    return forward, backward


def _after(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """How many bytes after q the views k and v of the same tensor begin."""
    return tuple([int(t.storage_offset() - q.storage_offset()) * q.itemsize for t in (k, v)])  # pyright: ignore


def scratch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A tensor of the size of `attention_on_cpu`'s workspace, for a plan that counts it."""
    most, shared, each = _memory(_shape((q, k, v, q), False, False, None, None, 0.0), False)
    return torch.empty(shared + min(torch.get_num_threads(), most) * each, dtype=torch.float32, device=q.device)


def _memory(n: Any, backward: bool) -> tuple[int, int, int]:
    """The most threads of a pass, the floats of workspace that they share, and the floats of each thread."""
    groups = n.B * n.H // n.G
    shared = 0 if backward else groups * (n.D * n.M + (0 if n.direct else n.N * n.P))
    parts = groups if backward else n.B * n.H * -(-n.S // n.rows)
    return max(1, parts) if n.B * n.H * n.S * n.D * n.N >= _LARGE else 1, shared, n.memory


def attention_on_cpu_bwd(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: tuple[Tensor, Tensor, Tensor], scale: float, *,
    causal: bool = False, window: int | None = None, softcap: float | None = None, mask: Tensor | None = None,
    seed: Tensor | None = None, p: float = 0.0, dmask: Tensor | None = None,
) -> None:  # fmt: skip
    """Write dq, dk and dv into `out`, of the shapes of q, k and v, with a contiguous last dimension.

    The gradient of an added mask, before it is summed over broadcast dimensions, is written into `dmask`, contiguous
    [B, H, S, N] float32, if given.

    Weights are recomputed from scores: from a log-sum-exp in float32, they would not add up to one for large scores.

    dy: [B, S, H, D]; other arguments as in `attention_on_cpu`.
    """
    dy = (dy if dy.stride(-1) == 1 else dy.contiguous()).resolve_neg().transpose(1, 2)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    n = _shape((q, k, v, dy, *out), True, causal, window, mask, p if seed is not None else 0.0)
    threads = min(torch.get_num_threads(), _memory(n, True)[0])
    if is_faking():  # kept alive until it is counted
        _ = torch.empty(threads * n.memory, dtype=torch.float32, device=q.device)
        return
    memory = allocator()((threads * n.memory,), (1,), torch.float32)
    _call(True, (q, k, v, mask, dy, *out, dmask, memory), n, (scale, softcap, p), seed, threads)


def _shape(
    tensors: Sequence[Tensor], backward: bool, causal: bool, window: int | None, mask: Tensor | None, p: float
) -> Any:
    q, k = tensors[:2]
    lies = None if mask is None else (*mask.expand(*q.shape[:3], k.shape[2]).stride(), mask.dtype is torch.bool)
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
        n.mask, n.masked = mask[:4], 1 + mask[4]
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
    pointers = [0 if t is None else t.data_ptr() for t in (seed if drops else None, *tensors)]
    function = _kernel(backward, drops, softcap is not None, q.dtype).function()
    function(*pointers, ctypes.addressof(n), scale, softcap or 0.0, keep, threads)

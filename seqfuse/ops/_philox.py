"""Philox4x32-10: random words that are functions of a seed and a position only."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..compiler import CompileError, give_up
from ..env import kernels_on, triton_installed
from ..errors import FallbackWarning, device_is_lost
from ..kernels import kernels_of

_LOW = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
# Counters per block on a CPU: four buffers of half a MiB stay in a cache.
_BLOCK = 32768

# True in tests that run the kernel on a CPU, in Triton's interpreter.
interpreting = False
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
# Why the kernel failed, once it has.
_failures: list[str] = []

_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack  # pyright: ignore
_tracing: Callable[[], Any] = torch._C._get_tracing_state  # pyright: ignore


def watched() -> bool:
    """Whether a compiler, a tracer or a transform records calls, so that our kernels must not run."""
    return torch.compiler.is_compiling() or _transform() is not None or _tracing() is not None


def round_keys(seed: Tensor) -> tuple[Tensor, ...]:
    """The key of each round, int64 [2, 1], from an int64 seed of one element; the host never reads the seed."""
    seed = seed.reshape(())
    steps = torch.arange(_ROUNDS, device=seed.device)
    low, high = steps * _W0 + (seed & _LOW), steps * _W1 + ((seed >> 32) & _LOW)
    return torch.stack((low, high), 1).bitwise_and_(_LOW).unsqueeze(-1).unbind()


def philox4x32(even: Tensor, odd: Tensor, keys: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Words 0 and 2, and words 1 and 3, of each counter, laid out as the counters; int64 [2, n], values 0..2^32-1.

    Both arguments are overwritten. Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3 (SC'11).
    """
    high = torch.empty_like(even)
    # Each buffer with views of its two rows: creating a view costs as much as multiplying a short row.
    a, b, free = ((t, t[0], t[1]) for t in (even, odd, torch.empty_like(even)))
    for key in keys:
        # int64 products wrap, but their 64 bits equal those of the unsigned product: its high word is the shifted one
        # without the sign extension, which the mask removes. Low words are masked only after the xor.
        torch.mul(a[2], _M1, out=free[1])
        torch.mul(a[1], _M0, out=free[2])
        torch.bitwise_right_shift(free[0], 32, out=high)
        b[0].bitwise_xor_(high).bitwise_xor_(key).bitwise_and_(_LOW)
        a, b, free = b, free, a
    return a[0], b[0].bitwise_and_(_LOW)


def drop_mask(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """True with probability `p`, bool of `shape`: element i of the contiguous order reads word i & 3 of counter i >> 2.

    An element is kept iff its word is at least floor(p 2^32).
    """
    if seed.is_meta:
        return torch.empty(shape, dtype=torch.bool, device="meta")  # a plan reads only the shape
    if watched():
        return _traceable_mask(seed, shape, p)
    size = math.prod(shape)
    if p < 1 and runs_in_c(seed):
        try:
            return kernels_of("c.mask").mask_on_cpu(seed, shape, p)
        except CompileError as error:
            gave_up("Dropout", error)
    groups = (size + 3) // 4
    threshold = math.floor(p * 2**32)
    keys = round_keys(seed)
    drop = torch.empty((groups, 2, 2), dtype=torch.bool, device=seed.device)
    # Other tensors, such as the fake tensors of a plan, are not processed in blocks: there is no cache to fit.
    block = _BLOCK if seed.device.type == "cpu" and type(seed) is Tensor else max(groups, 1)
    for first in range(0, groups, block):
        stop = min(first + block, groups)
        counter = torch.arange(first, stop, device=seed.device)
        even, odd = counter.new_zeros((2, counter.shape[0])), counter.new_zeros((2, counter.shape[0]))
        torch.bitwise_and(counter, _LOW, out=even[0])
        torch.bitwise_right_shift(counter, 32, out=odd[0])
        even, odd = philox4x32(even, odd, keys)
        drop[first:stop, :, 0].copy_(even.lt(threshold).t())
        drop[first:stop, :, 1].copy_(odd.lt(threshold).t())
    return drop.view(-1)[:size].view(shape)


def masked(x: Tensor, drop: Tensor, p: float, upscale: bool = True) -> Tensor:
    """Return x / (1 - p), or x, where it is kept, and 0 x where it is dropped, as torch does: 0 Inf and 0 NaN are NaN.

    `drop` has x's shape, or broadcasts to it. The multiplication by the mask comes first, so a dropped number is 0 even
    if scaling it would give infinity.
    """
    kept = x * drop.logical_not()
    return kept.mul_(1 / (1 - p)) if upscale and p < 1 else kept


def dropped(x: Tensor, seed: Tensor, p: float, upscale: bool) -> Tensor | None:
    """Tensor x after dropout, in one kernel launch, without autograd; `None` where no kernel can run.

    If compilation fails, as without a C compiler, it warns once, and torch computes dropout from then on.
    """
    if _failures or x.dtype not in _KERNEL_DTYPES or not triton_installed():
        return None
    if not (x.is_cuda or interpreting or (x.dtype is not torch.float64 and has_c(x))):
        return None
    if watched():
        return None
    try:
        return kernels_of("pointwise").pointwise(x.contiguous(), _chain(p, upscale), (seed,))[0]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if device_is_lost(error) or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise
        gave_up("Dropout", error)
        return None


def gave_up(what: str, error: Exception) -> None:
    """Warn that a kernel failed; from then on torch replaces all kernels of its kind."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, CompileError):
        give_up(error)  # disables C kernels only
    else:
        _failures.append(why)
    warnings.warn(f"the kernel of {what} failed ({why}); torch takes its place, in many launches", FallbackWarning, 3)


def has_c(t: Tensor) -> bool:
    """Whether there are C kernels for the tensor's device. Even for a mask of few elements, torch needs 90 calls."""
    return t.is_cpu and kernels_on("cpu") == "c"


def runs_in_c(t: Tensor) -> bool:
    """Whether a C kernel may read the tensor now: C kernels are available, and nothing records calls."""
    return not watched() and has_c(t) and kernels_of("c.mask").makes_mask(t)


@functools.lru_cache(256)
def _chain(p: float, upscale: bool) -> Any:
    pointwise = kernels_of("pointwise")
    return pointwise.Chain(pointwise.dropout(p, upscale))


def _traceable_mask(seed: Tensor, shape: torch.Size, p: float) -> Tensor:
    """The same mask without in-place operators, for compilers and transforms."""
    counters = torch.arange((math.prod(shape) + 3) // 4, device=seed.device)
    drop = torch.stack([word < math.floor(p * 2**32) for word in _words(seed, counters)], -1)
    return drop.reshape(-1)[: math.prod(shape)].view(shape)


def _words(seed: Tensor, counters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each counter, int64, values 0..2^32-1."""
    low, high = seed & _LOW, (seed >> 32) & _LOW
    zero = torch.zeros_like(counters)
    words = (counters & _LOW, counters >> 32, zero, zero)
    for i in range(_ROUNDS):
        first, second = words[0] * _M0, words[2] * _M1
        key0, key1 = (low + i * _W0) & _LOW, (high + i * _W1) & _LOW
        words = (
            ((second >> 32) & _LOW) ^ words[1] ^ key0,
            second & _LOW,
            ((first >> 32) & _LOW) ^ words[3] ^ key1,
            first & _LOW,
        )
    return words


def drop_spans(seed: Tensor, starts: Tensor, length: int, p: float) -> Tensor:
    """Spans of the mask of `drop_mask`: bool [n, length], row j from element `starts[j]` on, in contiguous order."""
    if p < 1 and runs_in_c(seed):
        try:
            return kernels_of("c.mask").mask_on_cpu(seed, (starts.shape[0], length), p, starts)
        except CompileError as error:
            gave_up("Dropout", error)
    counters = (starts >> 2).unsqueeze(1) + torch.arange((length + 6) // 4, device=seed.device)
    drop = torch.stack([word < math.floor(p * 2**32) for word in _words(seed, counters)], -1).flatten(1)
    return drop.gather(1, (starts & 3).unsqueeze(1) + torch.arange(length, device=seed.device))

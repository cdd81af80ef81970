"""Counts the bytes that are alive while ATen operators run, and the work of each call."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..env import Savings
from ..traffic import FLOPS

# ATen operators that return a tensor and neither read nor write its elements.
_FREE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view")
)


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes kept for backward (storages counted once, parameters left out) and FLOPs of the forward pass.

    Modules that run through their own `__call__` are not counted. `peak` is the most bytes that are alive at once in
    either pass: saved tensors and intermediate results, without parameters and their gradients. If it is unknown, it is
    `None`, and `peak_unknown` is the reason.
    """

    saved: int
    saved_unfused: int
    flops: int
    peak: int | None = None
    peak_unknown: str | None = dataclasses.field(default=None, repr=False)


class Tally(TorchDispatchMode):
    """Counts the live bytes of all tensors that are allocated under it, and the work of each call.

    `events` are the allocated and freed storages with their bytes, negative if freed.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.events: list[tuple[int, int]] = []
        self.work = Savings()
        self._alive: dict[int, tuple[Any, int]] = {}
        self.made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results, (makes, changes, makes_all) = _tensors(out), _work_of(func)
        if (makes and results) or changes:
            several = [*_tensors((args, tuple(kwargs.values()))), *results]
            moved, formula = sum([t.numel() * t.element_size() for t in several]), _formulas().get(func.overloadpacket)
            self.work += Savings(1, moved, 0 if formula is None else formula(*args, **kwargs, out_val=out))
        if makes_all:
            for t in results:
                self._enter(t.untyped_storage())
        return out

    def number(self, t: Tensor) -> int | None:
        """The number of a tensor's storage, if it was allocated under this mode."""
        known = self._alive.get(storage_of(t))
        return None if known is None else known[1]

    def _enter(self, storage: Any) -> None:
        size = storage.nbytes()
        if storage._cdata in self._alive:
            return
        self.made += 1
        key, number = storage._cdata, self.made

        def freed(_: Any) -> None:
            del self._alive[key]
            self.events.append((number, -size))

        self._alive[key] = weakref.ref(storage, freed), number
        self.events.append((number, size))


def most_of(events: Sequence[tuple[int, int]], without: Sequence[int] | frozenset[int] = (), alive: int = 0) -> int:
    """The peak of live bytes, starting from `alive`, without the storages of these numbers."""
    most = alive
    for number, size in events:
        alive += 0 if number in without else size
        most = max(most, alive)
    return most


@functools.cache
def _work_of(func: Any) -> tuple[bool, bool, bool]:
    """Whether an ATen operator allocates a result, mutates an argument, and allocates all of its results."""
    own = [returned.alias_info is None for returned in func._schema.returns]
    changed = [given.alias_info is not None and given.alias_info.is_write for given in func._schema.arguments]
    works = func.overloadpacket not in _FREE
    return works and any(own), works and any(changed), all(own)


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested lists and tuples, in order."""
    found, left = list[Tensor](), [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, list | tuple):
            left += cast(Sequence[Any], one)[::-1]
    return found


@functools.cache
def _formulas() -> dict[Any, Any]:
    """Functions that count FLOPs, by ATen operator: torch's own, and those that torch lacks."""
    from torch.utils import flop_counter

    of_shapes = cast(Any, flop_counter.shape_wrapper)  # pyright: ignore[reportUnknownMemberType]

    def gemm(a: Sequence[int], b: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * math.prod(a) * b[-1]

    def both_gemms(q: Sequence[int], keys: int, v: Sequence[int]) -> int:
        return 2 * math.prod(q) * keys + 2 * math.prod(q[:-1]) * keys * v[-1]

    def attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
        return both_gemms(q, k[-2], v)

    def flash(q: Any, k: Any, v: Any, ends: Sequence[int] | None = None, *_: Any, **__: Any) -> int:
        # [B, S, H, D]; packed sequences [tokens, H, D] count as sequences of the mean length.
        return both_gemms(q, k[-3] // max(1, 1 if ends is None else ends[0] - 1), v)

    def backward_of(forward: Callable[..., int]) -> Callable[..., int]:
        def backward(_: Sequence[int], q: Any, k: Any, v: Any, y: Any, lse: Any, *given: Any, **__: Any) -> int:
            return forward(q, k, v, *given) * 5 // 2  # five GEMMs where the forward pass has two

        return backward

    # Torch has no formula for the CPU's kernel, nor for GEMMs of groups and with scales of blocks, and before torch
    # 2.13 none for fewer heads of keys than of queries. It takes the sizes of FlashAttention's own operator, [B, S, H,
    # D], for [B, H, S, D].
    kernels = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    extra: dict[Any, Any] = {
        **FLOPS,
        torch.ops.aten._flash_attention_forward: flash,
        torch.ops.aten._flash_attention_backward: backward_of(flash),
        torch.ops.aten._scaled_mm_v2: gemm,
        torch.ops.aten._scaled_grouped_mm: gemm,
    }
    for kernel in kernels:
        extra[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")] = attention
        extra[getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")] = backward_of(attention)
    return {**flop_counter.flop_registry, **{name: of_shapes(formula) for name, formula in extra.items()}}


def storage_of(t: Tensor) -> int:
    """A key that identifies the storage of a tensor among all live ones."""
    return t.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]

"""Checks and helpers for tensors that several operations use: dtypes, shapes, sums over tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..env import constant_under_compile
from ..errors import InputError

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # pyright: ignore
dispatch_mode: Any = torch._C._get_dispatch_mode  # pyright: ignore[reportPrivateUsage]
FAKE: Any = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore[reportPrivateUsage]


@constant_under_compile
def may_overwrite() -> bool:
    """Whether a result of torch may be overwritten: a dispatch mode may save it, as selective checkpointing does."""
    return not dispatch_modes() or dispatch_mode(FAKE) is not None


def floating(x: Tensor, operation: str) -> None:
    """Raise InputError (SF101) unless x is floating-point; other dtypes would silently lose digits."""
    if not x.is_floating_point():
        raise InputError(f"expects floating-point x, got {x.dtype}", code="SF101", operation=operation)


def real(x: Tensor, operation: str) -> None:
    """Raise InputError (SF101) if x is complex."""
    if x.is_complex():
        raise InputError(f"expects x of real numbers, got {x.dtype}", code="SF101", operation=operation)


def is_whole(t: Tensor) -> bool:
    """Whether the tensor has an integer dtype, other than bool."""
    dtype = t.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def check_last(shape: Sequence[int], size: int) -> None:
    """Raise ValueError unless the last dimension has this size."""
    if not shape or shape[-1] != size:
        raise ValueError(f"expects last dimension {size}, got {shape[-1] if shape else 'a 0-d tensor'}")


def broadcasts(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether a tensor of this shape broadcasts to the shape `whole`."""
    return len(shape) <= len(whole) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(whole), strict=False))


def check_positions(positions: Tensor, x: Tensor, operation: str) -> None:
    """Raise InputError (SF101) unless positions are real numbers that broadcast to one per token of x."""
    if positions.dtype is torch.bool or positions.is_complex():
        message = f"expects positions that are numbers, got {positions.dtype}"
        raise InputError(message, code="SF101", operation=operation)
    if not broadcasts(positions.shape, x.shape[:-1]):
        message = f"expects positions that broadcast to {tuple(x.shape[:-1])}, got {tuple(positions.shape)}"
        raise InputError(message, code="SF101", operation=operation)


def stats_dtype(x: Tensor) -> torch.dtype:
    """The dtype of statistics and scores: float32, or float64 for a float64 input."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def rows_summed(dy: Tensor, trailing: int) -> Tensor:
    """The sum over all but the last `trailing` dimensions; never dy itself."""
    rows = tuple(range(dy.ndim - trailing))
    return dy.sum(rows) if rows else dy.clone()


def unflatten(x: Tensor, dim: int, *sizes: int) -> Tensor:
    """A view with dimension `dim` split into `sizes`."""
    return x.unflatten(dim, sizes)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

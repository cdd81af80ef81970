"""Red zones: tensors inside a poisoned buffer, so that reads and writes out of bounds are detected."""

import math
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .structure import bits, index_of
from .tensors import Shape

# 256 elements: more than the width of any vector load, and a whole block of a small kernel.
MARGIN = 256


class Guarded:
    """A tensor inside a larger buffer of one value; `check()` fails if the buffer around `tensor` changed."""

    def __init__(
        self, shape: Shape, dtype: torch.dtype, fill: float, margin: int, device: torch.device | str | None
    ) -> None:
        count = math.prod(shape)
        self._buffer = torch.full((margin + count + margin,), fill, dtype=dtype, device=device)
        self._margin, self._fill = margin, fill
        # `data`, since autograd restricts views that leave a Function.
        self.tensor = self._buffer[margin : margin + count].view(shape).data

    def check(self, name: str = "tensor") -> None:
        """Raise `AssertionError` with the distance of the first bad write from the nearest end."""
        expected = torch.full_like(self._buffer[: self._margin], self._fill)
        count = self._buffer.numel() - 2 * self._margin
        zones = {"before the start": self._buffer[: self._margin], "past the end": self._buffer[self._margin + count :]}
        for side, zone in zones.items():
            wrong = (bits(zone) != bits(expected)).nonzero().flatten() // self._buffer.element_size()
            if len(wrong):
                first, last = (int(wrong[at].item()) for at in (0, -1))
                distance = self._margin - last if side == "before the start" else first + 1
                written = "1 element was" if distance == 1 else f"{distance} elements were"
                raise AssertionError(f"{name}: {written} written {side}")


def poisoned(
    shape: Shape,
    *,
    dtype: torch.dtype = torch.float32,
    fill: float | None = None,
    margin: int = MARGIN,
    device: torch.device | str | None = None,
) -> Guarded:
    """An uninitialized tensor, filled with NaN, between red zones of NaN.

    `fill` is another value; integer dtypes use their largest value. An element that a kernel does not write stays NaN.
    """
    if fill is None:
        fill = math.nan if dtype.is_floating_point else 1 if dtype == torch.bool else torch.iinfo(dtype).max
    return Guarded(tuple(shape), dtype, fill, margin, device)


def guarded(values: Tensor, *, margin: int = MARGIN) -> Guarded:
    """A contiguous copy of `values` between two red zones of NaN: a kernel that reads past the end computes NaN."""
    guard = poisoned(tuple(values.shape), dtype=values.dtype, margin=margin, device=values.device)
    guard.tensor.copy_(values.detach())
    return guard


@contextmanager
def red_zones(*, margin: int = MARGIN) -> Generator[None]:
    """Context manager: `torch.empty`, `empty_like` and `new_empty` return NaN-filled tensors between red zones.

    At the end of the block an out-of-bounds write raises `AssertionError`; an element that was never written is NaN.
    Allocations in Python code are replaced, allocations inside ATen operations are not, nor are those with strides, a
    memory format or pinned memory.
    """
    mode = _Allocations(margin)
    with mode:
        yield
    for number, guard in enumerate(mode.guards):
        guard.check(f"allocation {number} {tuple(guard.tensor.shape)}")


@contextmanager
def unwritten_is_nan() -> Generator[None]:
    """Context manager: new floating-point memory is NaN until it is written, also inside ATen operations."""
    memory: Any = torch.utils.deterministic
    before, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, True
    mode = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = before


def assert_written(name: str, once: Iterable[tuple[str, Tensor]], again: Iterable[tuple[str, Tensor]]) -> None:
    """Results of a pass do not depend on memory that it did not write."""
    for (tensor, mine), (_, spoiled) in zip(once, again, strict=False):
        if mine.is_floating_point() and mine.shape == spoiled.shape:
            unwritten = spoiled.isnan() & ~mine.isnan()
            if bool(unwritten.any()):
                at = index_of(int(unwritten.flatten().int().argmax().item()), tuple(unwritten.shape))
                said = "is made of memory that was never written, such as that of torch.empty"
                raise AssertionError(f"{name}: {tensor} at {at} {said}")


class _Allocations(TorchFunctionMode):
    def __init__(self, margin: int) -> None:
        super().__init__()
        self._margin = margin
        self.guards: list[Guarded] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        wanted = self._request(func, args, kwargs)
        if wanted is None:
            return func(*args, **kwargs)
        shape, dtype, device, requires_grad = wanted
        guard = poisoned(shape, dtype=dtype, margin=self._margin, device=device)
        self.guards.append(guard)
        return guard.tensor.requires_grad_(requires_grad)

    def _request(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Shape, torch.dtype, torch.device | str | None, bool] | None:
        if not set(kwargs) <= {"size", "dtype", "device", "requires_grad"}:
            return None
        grad = bool(kwargs.get("requires_grad", False))
        if func is torch.empty:
            return _shape(args, kwargs), kwargs.get("dtype") or torch.get_default_dtype(), kwargs.get("device"), grad
        if func is not Tensor.new_empty and func is not torch.empty_like:
            return None
        like: Tensor = args[0]
        if func is torch.empty_like and not like.is_contiguous():
            return None  # it keeps the strides of `like`
        shape = tuple(like.shape) if func is torch.empty_like else _shape(args[1:], kwargs)
        return shape, kwargs.get("dtype") or like.dtype, kwargs.get("device") or like.device, grad


def _shape(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Shape:
    sizes: tuple[Any, ...] = args or (kwargs["size"],)
    return sizes if isinstance(sizes[0], int) else tuple(sizes[0])

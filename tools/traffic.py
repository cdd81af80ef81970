"""Counts the bytes that interpreted kernels move, by launch and argument, and the least bytes needed.

The time of a memory-bound kernel is proportional to its bytes. Inside `counted()` every unmasked lane of a load or
store counts, lanes of descriptors if within the bounds of their tensor, atomics twice. Caches are not modeled.
"""

# pyright: basic
# The watched parts of Triton's interpreter have no types.
from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from seqfuse.testing.interpreter_bounds import ACCESSES, tensors_of


@dataclasses.dataclass(frozen=True)
class Moved:
    """The bytes that one launch moved in one tensor.

    Args:
        shape: shape of the tensor.
        loaded: bytes read, including repetitions.
        stored: bytes written, including repetitions.
        loaded_once: distinct bytes read.
        stored_once: distinct bytes written.
    """

    shape: tuple[int, ...]
    loaded: int
    stored: int
    loaded_once: int
    stored_once: int

    @property
    def total(self) -> int:
        """Bytes moved."""
        return self.loaded + self.stored


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch of one kernel.

    Args:
        kernel: name of the kernel.
        arguments: by parameter name; a tensor in a tuple as `operands.1`. Where two arguments overlap, bytes count for
            the first one.
        outside: bytes outside all arguments, which is a defect of the kernel.
    """

    kernel: str
    arguments: dict[str, Moved]
    outside: int

    @property
    def total(self) -> int:
        """Bytes moved."""
        return sum(moved.total for moved in self.arguments.values()) + self.outside


@dataclasses.dataclass
class Traffic:
    """The launches inside a block, in order."""

    launches: list[Launch] = dataclasses.field(default_factory=list[Launch])

    @property
    def total(self) -> int:
        """Bytes moved."""
        return sum(launch.total for launch in self.launches)


class _Argument:
    """The memory range of a tensor, and which of its elements were moved."""

    def __init__(self, tensor: Tensor) -> None:
        import numpy as np

        self.shape, self.size, self.first = tuple(tensor.shape), tensor.element_size(), tensor.data_ptr()
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        elements = 1 + last if tensor.numel() else 0
        self.end = self.first + elements * self.size
        self.moved = {"loaded": 0, "stored": 0}
        self.seen = {kind: np.zeros(elements, dtype=bool) for kind in self.moved}

    def take(self, kind: str, addresses: Any) -> Any:
        """Count the addresses inside the tensor; returns the others."""
        own = (addresses >= self.first) & (addresses < self.end)
        places = (addresses[own] - self.first) // self.size
        self.moved[kind] += int(places.size) * self.size
        self.seen[kind][places] = True
        return addresses[~own]

    def result(self) -> Moved:
        once = {f"{kind}_once": int(seen.sum()) * self.size for kind, seen in self.seen.items()}
        return Moved(self.shape, **self.moved, **once)


class _Counter:
    """Counts for the current launch."""

    def __init__(self, arguments: dict[str, _Argument]) -> None:
        self.arguments = arguments
        self.outside = 0

    def count(self, kind: str, pointers: Any, mask: Any = None) -> None:
        import numpy as np

        addresses = pointers.data.astype(np.int64)
        if mask is None:
            addresses = addresses.ravel()
        else:  # booleans, or integers if a kernel combined masks with `&`
            addresses = addresses[np.broadcast_to(np.asarray(mask.data, dtype=bool), addresses.shape)]
        for argument in self.arguments.values():
            if not addresses.size:
                return
            addresses = argument.take(kind, addresses)
        self.outside += int(addresses.size) * (pointers.get_element_ty().primitive_bitwidth // 8)


@contextmanager
def counted() -> Generator[Traffic]:
    """A block in which loads and stores of interpreted kernels are counted, on the CPU, in a single thread.

    Raises:
        RuntimeError: if the interpreter of this version of Triton differs from the known ones.
    """
    from triton.runtime import interpreter

    _probe(interpreter)
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    plain = {name: getattr(builder, name) for name in ACCESSES}
    run = executor.__call__
    traffic = Traffic()
    under_way: list[_Counter] = []

    def load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        under_way[-1].count("loaded", ptrs, mask)
        return plain["create_masked_load"](self, ptrs, mask, *rest, **named)

    def store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        under_way[-1].count("stored", ptrs, mask)
        return plain["create_masked_store"](self, ptrs, value, mask, *rest, **named)

    def rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        under_way[-1].count("loaded", ptr, mask)
        under_way[-1].count("stored", ptr, mask)
        return plain["create_atomic_rmw"](self, op, ptr, val, mask, *rest, **named)

    def cas(self: Any, ptr: Any, *rest: Any, **named: Any) -> Any:
        under_way[-1].count("loaded", ptr)
        under_way[-1].count("stored", ptr)
        return plain["create_atomic_cas"](self, ptr, *rest, **named)

    def launch(self: Any, *args: Any, **named: Any) -> Any:
        given = [*zip(self.arg_names, args, strict=False), *named.items()]
        counter = _Counter({name: _Argument(tensor) for pair in given for name, tensor in tensors_of(*pair)})
        under_way.append(counter)
        try:
            run(self, *args, **named)
        finally:
            under_way.pop()
        arguments = {name: argument.result() for name, argument in counter.arguments.items()}
        traffic.launches.append(Launch(self.fn.__name__, arguments, counter.outside))

    try:
        for name, watched in zip(ACCESSES, (load, store, rmw, cas), strict=True):
            setattr(builder, name, watched)
        executor.__call__ = launch
        yield traffic
    finally:
        executor.__call__ = run
        for name, method in plain.items():
            setattr(builder, name, method)


def fewest(*tensors: Tensor | None) -> int:
    """The minimum bytes to read or write each of these tensors once, without repetitions by strides of 0."""
    distinct = {(t.data_ptr(), t.shape, t.stride()): t for t in tensors if t is not None}
    total = 0
    for t in distinct.values():
        elements = t.element_size() * (t.numel() > 0)
        for n, stride in zip(t.shape, t.stride(), strict=True):
            elements *= n if stride else 1
        total += elements
    return total


def _probe(interpreter: Any) -> None:
    import triton

    builder = getattr(interpreter, "InterpreterBuilder", None)
    unknown = [
        name
        for name, arguments in ACCESSES.items()
        if tuple(inspect.signature(getattr(builder, name, _probe)).parameters)[1 : 1 + len(arguments)] != arguments
    ]
    unknown += [] if hasattr(interpreter, "GridExecutor") else ["GridExecutor"]
    if unknown:
        raise RuntimeError(
            f"Triton {triton.__version__} has another interpreter than the one that is watched here: "
            f"{', '.join(unknown)} not as known; versions 3.6 to 3.9 are"
        )

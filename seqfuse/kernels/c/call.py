# pyright: basic
# torch's guards are its internals.
"""Calls of C kernels: what depends on shapes and dtypes is decided once, and kept for tensors like these."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import compiler

PARALLEL = 16384
"""Elements below which a kernel runs on the thread that calls it."""

ROWS = 64
"""Rows whose sum is made in float32 one after the other; such sums are added in float64, in order.

Rows, not threads, decide what is summed together: the number of threads changes no bit.
"""

_MOST, _MOST_ALIKE = 1024, 16
_POINTER, _INTEGER, _FLOAT, _THREADS = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_guards: Any = torch._C._dynamo.guards  # pyright: ignore
_empty = _guards._empty_strided_cpu  # half of what `torch.empty` costs
_function_modes: Any = torch._C._len_torch_function_stack
_NO_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl

NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
"""dtypes that kernels read and write, by the name that `head.h` has for them."""


@functools.cache
def header(name: str) -> str:
    """A file of C that stands beside this one."""
    return Path(__file__).with_name(name).read_text()


def load(dtype: torch.dtype, pointer: str, at: str) -> str:
    """The element of an array, as float."""
    return f"ld_{_name(dtype)}({pointer}, {at})"


def store(dtype: torch.dtype, pointer: str, at: str, value: str) -> str:
    """A statement that rounds a float and stores it."""
    return f"st_{_name(dtype)}({pointer}, {at}, {value});"


def _name(dtype: torch.dtype) -> str:
    if dtype not in NAMES:
        raise ValueError(f"C kernels are for float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}")
    return NAMES[dtype]


class Kernel(NamedTuple):
    """The source of a C function and what it takes: pointers, integers, floats, and last the number of threads."""

    source: str
    pointers: int
    integers: int
    floats: int

    def function(self) -> Any:
        """The compiled function."""
        found = compiler.function(self.source)
        found.restype = None
        found.argtypes = [_POINTER] * self.pointers + [_INTEGER] * self.integers + [_FLOAT] * self.floats + [_THREADS]
        return found


class Decided(NamedTuple):
    """How a host function runs for tensors like some.

    Args:
        kernel: takes the tensors that are given, those that are made, the numbers and how many threads there are.
        made: shape and dtype of each tensor that it makes, scratch memory included.
        numbers: integers, then floats.
        work: elements that are read.
        result: makes the result of what was made.
        copied: which of the tensors given have to be copied.
    """

    kernel: Kernel
    made: Sequence[tuple[Sequence[int], torch.dtype]]
    numbers: tuple[float, ...]
    work: int
    result: Callable[[list[Tensor]], Any]
    copied: tuple[int, ...] = ()

    def bound(self) -> Callable[..., Any]:
        """The same as a function of the tensors."""
        kernel, made, numbers, work, finish, copied = self
        function = kernel.function()
        parallel, threads = work >= PARALLEL, torch.get_num_threads
        outlines = [(shape, _strides(shape), of) for shape, of in made]

        def run(*given: Tensor) -> Any:
            if copied:
                several = list(given)
                for i in copied:
                    several[i] = given[i].contiguous()
                given = tuple(several)  # which keeps the copies until the kernel has run
            empty = _watched_empty if _function_modes() else _empty
            outputs = [empty(*outline) for outline in outlines]
            function(
                *[t.data_ptr() for t in given], *[t.data_ptr() for t in outputs], *numbers,
                threads() if parallel else 1,
            )  # fmt: skip
            return finish(outputs)

        return run


def _watched_empty(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """`_empty` where a mode watches what is allocated."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    found = [1]
    for size in shape[:0:-1]:
        found.append(found[-1] * max(size, 1))
    return tuple(found[::-1]) if shape else ()


_entries: dict[Any, list[tuple[Callable[..., bool], Callable[..., Any]]]] = {}


def replayed(decide: Callable[..., Decided], act: Any, others: tuple[Any, ...], *tensors: Tensor | None) -> Any:
    """The result of what `decide(act, *others, *tensors)` says, decided once for like tensors.

    Args:
        decide: a function of a module, of these arguments alone.
        act: an activation, or `None`.
        others: hashable arguments.
        tensors: all that are read; the first one is not `None`.
    """
    given = [t for t in tensors if t is not None]
    for check, run in _entries.get(_key(decide, act, others, tensors), ()):
        if check(*given):
            return run(*given)
    return _decided(decide, act, others, tensors)[1](*given)


def bound(
    decide: Callable[..., Decided], others: tuple[Any, ...], present: tuple[bool, ...] | None = None
) -> Callable[..., Any]:
    """`replayed` of everything but the tensors: for tensors like the last ones nothing is looked up.

    Args:
        decide: the same.
        others: the same.
        present: which of the tensors of `decide` will be given, `None` for all; the rest are `None`.
    """
    latest: tuple[Callable[..., bool], Callable[..., Any]] | None = None

    def run(*given: Tensor) -> Any:
        nonlocal latest
        known = latest
        if known is not None and known[0](*given):
            return known[1](*given)
        tensors: Sequence[Tensor | None] = given
        if present is not None:
            left = iter(given)
            tensors = [next(left) if there else None for there in present]
        for entry in _entries.get(_key(decide, None, others, tensors), ()):
            if entry[0](*given):
                latest = entry
                return entry[1](*given)
        latest = entry = _decided(decide, None, others, tensors)
        return entry[1](*given)

    return run


def _key(decide: Any, act: Any, others: tuple[Any, ...], tensors: Sequence[Tensor | None]) -> Any:
    key: Any = (decide, others, tuple(map(type, tensors)), tensors[0].shape)  # pyright: ignore[reportOptionalMemberAccess]
    if act is not None:  # the hash of a Triton function is that of its source
        key += (id(act.value), id(act.derivative), act.reads, act.P)
    return key


def _decided(
    decide: Callable[..., Decided], act: Any, others: tuple[Any, ...], tensors: Sequence[Tensor | None]
) -> tuple[Callable[..., bool], Callable[..., Any]]:
    given = [t for t in tensors if t is not None]
    kinds: set[Any] = {type(t) for t in given}
    for kind in kinds:
        if kind.__torch_dispatch__ is not _NO_DISPATCH:
            raise ValueError(f"a {kind.__name__} has no memory that a C kernel could read")
    found = decide(act, *others, *tensors)
    run = found.bound()
    if any(t.is_neg() for t in given):  # a view whose memory has the other sign
        bare = run

        def run(*tensors: Tensor) -> Any:
            return bare(*[t.resolve_neg() for t in tensors])

    # The key has the identity of an activation, which has to live as long.
    alive = act

    def keeping(*tensors: Tensor, _alive: Any = alive) -> Any:
        return run(*tensors)

    check = _guards.TensorGuards(*given, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    if not check(*given):  # as where one tensor is given twice, which torch's guards take for a change
        check = _alike(given)
    if len(_entries) >= _MOST:
        _entries.clear()
    alike = _entries.setdefault(_key(decide, act, others, tensors), [])
    if len(alike) >= _MOST_ALIKE:
        alike.clear()
    entry = (check, run if act is None else keeping)
    alike.append(entry)
    return entry


def _alike(given: Sequence[Tensor]) -> Callable[..., bool]:
    known = [(t.dtype, t.shape, t.stride()) for t in given]
    return lambda *others: [(t.dtype, t.shape, t.stride()) for t in others] == known


def rows_of(t: Tensor, columns: int) -> tuple[int, bool]:
    """The stride from row to row of a tensor as [M, columns], and whether it has to be copied to have one."""
    if t.is_contiguous() or t.numel() == 0:
        return columns, False
    if t.ndim and (t.shape[-1] == 1 or t.stride(-1) == 1):
        try:
            return t.view(-1, columns).stride(0), False
        except RuntimeError:
            pass
    return columns, True


def parts_of(rows: int, columns: int, sums: bool) -> int:
    """How many parts rows are cut into: what is summed in one part does not depend on the number of threads."""
    return max(1, -(-rows // ROWS) if sums else min(rows, -(-rows * columns // PARALLEL)))

"""Makes errors that a GPU would not report visible in interpreted kernels: loads and stores outside the launch's
tensors, global numbers, and undefined lanes.

Out-of-bounds accesses and globals raise before memory is written: the former corrupt memory on a GPU, the latter do not
compile. A lane that is masked off, without `other=`, is 0 in Triton's interpreter and undefined on a GPU: here it is
NaN or near an end of its dtype's range, which spoils each result that uses it, but none stored under the same mask.
"""

# pyright: basic, reportGeneralTypeIssues=false
# The replaced parts have no types.
from __future__ import annotations

import dis
import functools
import types
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# The builder's methods for memory accesses, with their first parameters after self: the others differ by version.
ACCESSES = {
    "create_masked_load": ("ptrs", "mask", "other"),
    "create_masked_store": ("ptrs", "value", "mask"),
    "create_atomic_rmw": ("rmwOp", "ptr", "val", "mask"),
    "create_atomic_cas": ("ptr",),
}


NARROW = {
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
"""Dtypes that the interpreter stores as bit patterns, by Triton's names."""

_unset: dict[tuple[str, str], None] = {}


@contextmanager
def noting_undefined_lanes() -> Generator[None]:
    """A block whose AssertionErrors get a note that names the loads with undefined lanes."""
    _unset.clear()
    try:
        yield
    except AssertionError as error:
        if _unset:
            loads = ", ".join(f"{kernel} loads {name}" for kernel, name in _unset)
            off = "a lane that the mask switches off is anything on a GPU, and here NaN or a huge number"
            error.add_note(f"{loads} under a mask without other=: {off}")
        raise


class OutOfBounds(AssertionError):
    """An access outside the memory of every argument."""

    def __repr__(self) -> str:  # the interpreter's own error shows this
        return str(self)


def replacements(interpreter: Any) -> Iterator[tuple[Any, str, Any]]:
    """The parts of Triton to replace: owner, name, replacement."""
    import numpy as np

    executor, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    kernel, memory, draws = "", list[tuple[int, int, str]](), np.random.default_rng(0)
    arguments, to_pointer = executor._init_args_hst, builder.create_int_to_ptr

    @functools.wraps(arguments)
    def init_args(self: Any, args: Any, named: Any) -> Any:
        nonlocal kernel, draws
        refuse_globals(self.fn)
        on_host = arguments(self, args, named)
        kernel, draws = self.fn.__name__, np.random.default_rng(0)  # the same values in each launch
        memory.clear()
        for name, argument in (*zip(self.arg_names, on_host[0], strict=False), *on_host[1].items()):
            for place, tensor in tensors_of(name, argument):
                storage = tensor.untyped_storage()
                memory.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), place))
        return on_host

    def inside(first: int, stop: int) -> bool:
        return any(start <= first and stop <= end for start, end, _ in memory)

    def check(verb: str, at: Any, size: int) -> None:
        if not at.size or not memory or inside(int(at.min()), int(at.max()) + size):
            return
        for first in at.flatten().tolist():  # across the memory of several arguments, or outside all of them
            if not inside(first, first + size):
                off, name = min((max(start - first, first + size - end), name) for start, end, name in memory)
                raise OutOfBounds(f"{kernel} {verb} {off} bytes outside the memory of {name}")

    def undefined(handle: Any, on: Any) -> Any:
        """Values of masked-off lanes: NaN and both signs, since a maximum hides a NaN, a comparison one sign."""
        kind = handle.get_element_ty()
        numbers = interpreter._get_np_dtype(kind)
        if kind.name in NARROW:
            most = torch.finfo(NARROW[kind.name]).max
            coded = torch.tensor([torch.nan, most, -most]).to(NARROW[kind.name])
            held = coded.view(torch.int16 if coded.itemsize == 2 else torch.int8).numpy().view(numbers)
        elif np.issubdtype(numbers, np.floating):
            held = np.array([np.nan, np.finfo(numbers).max, np.finfo(numbers).min], numbers)
        else:
            held = np.array([np.iinfo(numbers).max, np.iinfo(numbers).min + 1], numbers)
        first = int(handle.data[on].min()) if on.any() else 0
        names = [name for start, end, name in memory if start <= first < end]
        _unset.setdefault((kernel, names[0] if names else "lanes"))
        return interpreter.TensorHandle(held[draws.integers(0, len(held), handle.data.shape)], kind)

    def checked(name: str, parameters: tuple[str, ...]) -> Any:
        method, verb = getattr(builder, name), "loads" if name.endswith("load") else "stores"
        pointer = 1 if parameters[0] == "rmwOp" else 0
        mask = parameters.index("mask") if "mask" in parameters else None

        @functools.wraps(method)  # wrappers elsewhere inspect its parameters
        def access(self: Any, *args: Any, **kwargs: Any) -> Any:
            handle = args[pointer]
            on = None if mask is None else args[mask]
            if on is not None and not hasattr(on, "all"):  # from a descriptor it is already an array
                on = on.data
            at = handle.data if on is None or on.all() else handle.data[on]
            check(verb, at, max(1, handle.get_element_ty().primitive_bitwidth // 8))
            # For a single lane the interpreter replaces `other=0` by None.
            if verb == "loads" and at is not handle.data and args[2] is None and handle.data.size > 1:
                args = (*args[:2], undefined(handle, on), *args[3:])
            return method(self, *args, **kwargs)

        return access

    def create_int_to_ptr(self: Any, *args: Any) -> Any:
        memory.clear()  # addresses from a table: their bounds are unknown
        return to_pointer(self, *args)

    yield executor, "_init_args_hst", init_args
    yield builder, "create_int_to_ptr", create_int_to_ptr
    for name, parameters in ACCESSES.items():
        yield builder, name, checked(name, parameters)


def tensors_of(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an argument of a launch, by name: members of a tuple as `operands.1`, of a descriptor its base."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for i, inner in enumerate(value):
            yield from tensors_of(f"{name}.{i}", inner)
    elif isinstance(getattr(value, "base", None), Tensor):
        yield name, value.base


_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def refuse_globals(function: Any) -> None:
    """Raise NameError if a kernel, or a function that it calls, reads a number or text as a global of its module.

    The compiler accepts only globals of type `tl.constexpr`.
    """
    import triton.language as tl

    if not isinstance(function, types.FunctionType) or function in _seen:
        return
    stated = function.__globals__.get("__annotations__", {})
    for name in {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}:
        value = function.__globals__.get(name)
        if isinstance(value, int | float | str) and "constexpr" not in str(stated.get(name, "")):
            raise NameError(
                f"{function.__name__} reads the global {name} = {value!r}, which Triton compiles as a constexpr alone: "
                f"{name} = tl.constexpr({value!r})"
            )
        if not isinstance(value, tl.constexpr):
            refuse_globals(getattr(value, "fn", None))
    _seen.add(function)

# pyright: basic
# Triton has no type stubs and the objects handled here are its internals.
"""Launching a kernel: straight to the compiled function after the first time, interpreted where there is no GPU.

`kernel[grid](...)` binds, specializes and hashes its arguments at each call, 13-17 us for twenty of them. Here a key of
what a compiled kernel depends on is enough: dtypes, 16-byte alignment, the class of each integer, constexprs, device.
The first launch of a key is Triton's own and returns the compiled kernel; later ones call its `run`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import _allocation
from triton.runtime.jit import JITFunction

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether the kernels of this library are interpreted in this process: Triton asks when a kernel is decorated."""

MAX_GRID = 2**31 - 1

MAX_COLUMNS = 65536
"""The widest row that can be normalized."""

# On AMD Triton addresses what is in 2 GiB of memory with 32 bits, and compiles for that.
_SMALL = 2**31 - 1 if torch.version.hip else None

GPU_TYPES = frozenset({"cuda"})
"""Device types whose tensors compiled kernels take; the test kit's stand-in for a driver adds another."""


def in_c(tensor: Tensor) -> bool:
    """Whether the kernels that take a tensor are compiled C: on a CPU, unless kernels are interpreted."""
    return tensor.is_cpu and not INTERPRETED and "cpu" not in GPU_TYPES


_compiled: dict[Any, Any] = {}
# The interpreter patches triton.language while a kernel runs: one at a time.
_interpreting = threading.RLock()
_local = threading.local()


class Constexprs(dict[str, Any]):
    """Compile-time arguments made once and launched often: what a launch looks up is a number.

    Equal ones share their number, and everything in them is kept, since functions are told apart by identity. They
    must not be changed.
    """

    _numbers: ClassVar[dict[Any, tuple[int, Any]]] = {}

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.all = tuple(arguments.values())
        self.number = self._numbers.setdefault(_identity(self.all), (len(self._numbers), self.all))[0]


class _Keyed(tuple[Any, ...]):
    """A tuple of device functions for Triton's cache on disk, which takes the names of what is in a plain tuple.

    A function that was changed would be run as it was.
    """

    @property
    def cache_key(self) -> str:
        return f"({','.join(map(_source_key, self))})"


def _source_key(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(_source_key, value))})"
    return str(getattr(value, "cache_key", value))


def keyed(value: Any) -> Any:
    """A constexpr as Triton's cache on disk can tell it from every other."""
    return _Keyed(value) if type(value) is tuple else value


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter; Triton reads `TRITON_INTERPRET` when a kernel is decorated."""
    return bool(knobs.runtime.interpret)


_FAKE = torch._C._TorchDispatchModeKey.FAKE
_RECORDERS = (torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FUNCTIONAL)


traced: Any = torch._C._len_torch_dispatch_stack
"""How many dispatch modes watch, such as one that counts FLOPs or records a graph: with any, operators are called."""


def recording() -> bool:
    """Whether a compiler records what runs."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _RECORDERS)


def faking() -> bool:
    """Whether tensors have no memory here: shapes are wanted, and a kernel would write to address 0."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


def stops() -> bool:
    """Whether a host function stops where its results are made: it is the fake of an operator."""
    return faking() or getattr(_local, "stops", False)


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """A block in which host functions stop, also for tensors that are on `"meta"`."""
    _local.stops = True
    try:
        yield
    finally:
        _local.stops = False


def launch(
    kernel: Any,
    grid: int,
    args: tuple[Any, ...],
    constexprs: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
    **options: Any,
) -> None:
    """Run `grid` programs of a kernel on the device and the current stream of its first tensor.

    `args` are the kernel's leading parameters in order (tensors, numbers, `None`, tuples of these, tensor descriptors);
    `constexprs` are the rest, in the order of the kernel's parameters. Nothing is launched for an empty grid or on fake
    tensors. Whatever compiling or launching raises comes out as it is, that of an interpreted kernel included.

    Args:
        kernel: a `triton.jit` function whose constexpr parameters stand last.
        grid: number of programs; grids are one-dimensional.
        args: positional arguments.
        constexprs: compile-time arguments by name; `Constexprs` where they are used again.
        num_warps: warps per program.
        num_stages: stages of the software pipeline.
        options: further options of Triton's compiler, such as `maxnreg`.

    Raises:
        ValueError: for a grid beyond 2^31 - 1, tensors on two devices, or a CPU tensor without the interpreter.
        RuntimeError: where what runs is being recorded: the launch would be lost; for the first launch of a kernel
            while a CUDA graph is captured.
    """
    if traced() and recording():
        raise RuntimeError(f"{kernel.__name__} was launched where a compiler records what runs; call its operator")
    if grid <= 0 or faking():
        return
    if grid > MAX_GRID:
        raise ValueError(f"{kernel.__name__}: {grid} programs, at most {MAX_GRID} can be launched")
    if type(kernel) is not JITFunction:
        _interpret(kernel, grid, args, constexprs)
        return
    device, key = _key_of(args)
    if device is None or (device < 0 and "cpu" not in GPU_TYPES):
        raise ValueError(f"{kernel.__name__}: tensors must be on a GPU, or TRITON_INTERPRET=1 set before the start")
    if device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            _run(kernel, grid, args, constexprs, num_warps, num_stages, options, device, key)
    else:
        _run(kernel, grid, args, constexprs, num_warps, num_stages, options, device, key)


def _run(
    kernel: Any,
    grid: int,
    args: tuple[Any, ...],
    constexprs: Mapping[str, Any],
    num_warps: int,
    num_stages: int,
    options: dict[str, Any],
    device: int,
    arguments: tuple[Any, ...],
) -> None:
    # `id` rather than the function itself, whose hash is that of its source; the entry keeps it alive.
    if type(constexprs) is Constexprs:
        values, identity = constexprs.all, constexprs.number
    else:
        values = tuple(constexprs.values())
        identity = _identity(values)
    key = (id(kernel), device, arguments, identity, num_warps, num_stages, *options.items())
    entry = _compiled.get(key)
    if entry is None or hooked() or kernel.pre_run_hooks:
        _one_device(kernel, args)
        if entry is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{kernel.__name__} is launched for the first time while a CUDA graph is captured, where it can be "
                f"neither compiled nor loaded: run the same step, on the same shapes, before the capture"
            )
        named = {name: keyed(value) for name, value in constexprs.items()}
        compiled = kernel[(grid,)](*args, **named, num_warps=num_warps, num_stages=num_stages, **options)
        if entry is None and _direct() and compiled is not None:
            # Everything whose `id` is in the key stays alive with the entry.
            entry = _compiled[key] = (compiled, compiled.function, compiled.packed_metadata, values, kernel)
    else:
        compiled, function, metadata = entry[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(grid, 1, 1, stream, function, metadata, None, None, None, *args, *values)
    recording = getattr(_local, "recording", None)
    if recording is not None:
        recording.launches.append((entry, grid, args))


def watch(recording: Any) -> Any:
    """Tell an object of this thread's launches from now on, or `None`; returns the one before."""
    before = getattr(_local, "recording", None)
    _local.recording = recording
    return before


def _key_of(args: tuple[Any, ...]) -> tuple[int | None, tuple[Any, ...]]:
    """Device of the first tensor, and all of the arguments that a compiled kernel depends on."""
    device: int | None = None
    key: list[Any] = []
    for arg in args:
        if arg is None:
            key.append(None)
        elif isinstance(arg, Tensor):
            where = arg.get_device()
            if device is None:
                device = where
            small = _SMALL is None or arg.untyped_storage().nbytes() <= _SMALL
            key.append((arg.dtype, where, arg.data_ptr() & 15 == 0, small))
        elif isinstance(arg, bool):
            key.append(bool)
        elif isinstance(arg, int):
            # One becomes a constant, multiples of 16 are known as such, and the width is that of the number.
            key.append(1 if arg == 1 else (arg & 15 == 0, -(2**31) <= arg < 2**31, arg < 2**63))
        elif isinstance(arg, float):
            key.append(float)
        elif isinstance(arg, tuple):
            where, inner = _key_of(arg)
            device = where if device is None else device
            key.append(inner)
        else:  # a tensor descriptor: its strides are arguments, so their classes are not part of the type
            base = arg.base
            where = base.get_device()
            device = where if device is None else device
            key.append((base.dtype, where, tuple(arg.block_shape), getattr(arg, "padding", None)))
    return device, tuple(key)


def _identity(value: Any) -> Any:
    """A constexpr as a key: functions by identity, numbers by value and type, since 1, 1.0 and True are equal."""
    if isinstance(value, tuple):
        return tuple([_identity(v) for v in value])
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return (type(value), value)
    return id(value)


def hooked() -> bool:
    """Whether a profiler listens: chains of hooks, or functions that took their places."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if enter is _ENTER and leave is _LEAVE:
        return bool(enter.calls or leave.calls)
    return any(hook and getattr(hook, "calls", True) for hook in (enter, leave))


_ENTER: Any = knobs.runtime.launch_enter_hook
_LEAVE: Any = knobs.runtime.launch_exit_hook


@functools.cache
def _direct() -> bool:
    """Whether `CompiledKernel.run` takes what is passed here: probed once, else each launch is Triton's own."""
    import inspect

    from triton.compiler import CompiledKernel

    names = inspect.signature(CompiledKernel.__init__).parameters
    source = inspect.getsource(JITFunction.run)
    return "metadata_group" in names and "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function" in source


def _one_device(kernel: Any, args: tuple[Any, ...]) -> None:
    devices = {str(t.device) for t in _tensors(args)}
    if len(devices) > 1:
        raise ValueError(f"{kernel.__name__}: expected all tensors on one device, got {' and '.join(sorted(devices))}")


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, tuple):
            found.extend(_tensors(arg))
        elif hasattr(arg, "base"):
            found.append(arg.base)
    return found


def _interpret(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: Mapping[str, Any]) -> None:
    from triton.runtime.errors import InterpreterError

    _one_device(kernel, args)
    with _interpreting:
        try:
            kernel[(grid,)](*args, **constexprs)
        except InterpreterError as error:
            cause: BaseException = error
            while isinstance(cause, InterpreterError) and cause.__cause__ is not None:
                cause = cause.__cause__
            raise cause from None


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where Triton puts descriptors; freed, and so used again, in the order of the stream."""
    torch_c: Any = torch._C
    return torch_c._dynamo.guards._empty_strided_cuda((size,), (1,), torch.int8)


def allow_scratch() -> None:
    """Let Triton allocate: it forgets its allocator from thread to thread, and backward passes have their own."""
    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        _allocation.set_allocator(_scratch)
    recording = getattr(_local, "recording", None)
    if recording is not None:
        recording.scratch = True


def address(tensor: Tensor) -> int:
    """Where a tensor's data begins; a fake one has none, and is as good as aligned."""
    return 0 if faking() else tensor.data_ptr()


@functools.cache
def architecture(device: torch.device) -> str:
    """`"sm_90"`, `"gfx942"`, or `"interpreter"` for a CPU tensor."""
    if device.type not in GPU_TYPES:
        return "interpreter"
    properties: Any = torch.cuda.get_device_properties(device)
    return getattr(properties, "gcnArchName", "").split(":")[0] or f"sm_{properties.major}{properties.minor}"


def register_limit(registers: int | None, arch: str) -> dict[str, int]:
    """The option of a launch whose threads may have so many registers; there is none on AMD.

    Without one the compiler may spill to make room for more programs on a processor than there are.
    """
    return {"maxnreg": registers} if registers is not None and arch.startswith("sm_") else {}


# Few enough for tests to be quick, and more than one.
INTERPRETER_PROCESSORS = 2


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors, or compute units; two where kernels are interpreted."""
    if device.type not in GPU_TYPES:
        return INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def cdiv(a: int, b: int) -> int:
    """The quotient a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n`, and 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def inner_contiguous(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself; raises `ValueError` unless its last dimension is contiguous."""
    if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}"
        )
    return tensor


def columns_of(x: Tensor, **rows: Tensor | None) -> int:
    """The columns of x, if they can be normalized with these parameters; raises `ValueError` else."""
    N = x.shape[-1] if x.ndim else 0
    if not x.ndim:
        raise ValueError("a norm needs at least one dimension")
    if not 0 < N <= MAX_COLUMNS:
        raise ValueError(f"rows of {N} columns: at least 1 and at most {MAX_COLUMNS} can be normalized")
    for name, row in rows.items():
        if row is not None and tuple(row.shape) != (N,):
            raise ValueError(f"{name} must have shape ({N},), got {tuple(row.shape)}")
        if row is not None:
            inner_contiguous(name, row)
    return N


def as_rows(name: str, tensor: Tensor, columns: int) -> Tensor:
    """The tensor as [M, columns] without a copy; raises `ValueError` where its leading dimensions need one."""
    if tensor.ndim == 2:
        return inner_contiguous(name, tensor)
    if tensor.numel() == 0:
        return tensor.new_empty((0, columns))
    try:
        return inner_contiguous(name, tensor.view(-1, columns))
    except RuntimeError:
        raise ValueError(
            f"{name} must have one stride for its leading dimensions, got shape {tuple(tensor.shape)} with "
            f"strides {tensor.stride()}"
        ) from None

# pyright: basic
# Triton has no type stubs, and the objects used here are its internals.
"""Launching a kernel: by its compiled function after the first launch, or in Triton's interpreter without a GPU.

`kernel[grid](...)` binds, specializes and hashes its arguments in each call: 13-17 us for twenty of them. Here a key
of all that a compiled kernel depends on suffices: dtypes, 16-byte alignment, the class of each integer, constexprs,
device. The first launch of a key is Triton's own and returns the compiled kernel; later ones call its `run`.

A host function checks shapes, chooses a tile, and computes compile-time arguments and the number of programs: 20-40 us
of Python, with the same result for equal shapes, strides, dtypes and flags. A `Recording` of such a call holds the
tensors that it allocates and its launches with their arguments, in which only the addresses of tensors change. It
generates a function of a few lines that replays the call: it allocates the tensors, and passes addresses and numbers to
the function in Triton's launcher that calls the driver. Calls that do anything else, such as a copy, are not replayed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime.jit import JITFunction

from ..generated import Source
from ..hardware import architecture_of
from . import recording

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether this library's kernels are interpreted in this process; Triton decides this when a kernel is decorated."""

MAX_GRID = 2**31 - 1

# On AMD, Triton addresses tensors of up to 2 GiB with 32 bits, and compiles separate kernels for them.
_SMALL = 2**31 - 1 if torch.version.hip else None

GPU_TYPES = frozenset({"cuda"})
"""Device types on which compiled kernels run; the test kit's replacement of a driver adds another."""


def in_c(tensor: Tensor) -> bool:
    """Whether the kernels for a tensor are compiled C: on a CPU, unless kernels are interpreted."""
    return tensor.is_cpu and not INTERPRETED and "cpu" not in GPU_TYPES


MISS = object()
"""Returned by the replay of a call if the call has to run in full."""
OTHER = object()
"""Returned by a replay if the alignment of a one-element tensor, such as a seed, differs; another replay may fit."""
_STREAM = object()
"""Placeholder for the stream in a recorded launch."""

_guards: Any = cast(Any, torch._C)._dynamo.guards
_compiled: dict[Any, Any] = {}
# The interpreter patches triton.language while a kernel runs, so it runs one kernel at a time.
_interpreting = threading.RLock()
_local = threading.local()


class _Keyed(tuple[Any, ...]):
    """A tuple of device functions with a key of their sources; for a plain tuple, Triton's disk cache reads only names.

    With names only, a changed function would run in its old version.
    """

    @property
    def cache_key(self) -> str:
        return f"({','.join(map(_source_key, self))})"


def _source_key(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({','.join(map(_source_key, value))})"
    return str(getattr(value, "cache_key", value))


def keyed(value: Any) -> Any:
    """A constexpr with a key by which Triton's disk cache distinguishes it."""
    return _Keyed(value) if type(value) is tuple else value


_FAKE = torch._C._TorchDispatchModeKey.FAKE


traced: Any = torch._C._len_torch_dispatch_stack
"""The number of active dispatch modes, such as a FLOP counter or a graph recorder; with any, custom ops are called."""


def is_faking() -> bool:
    """Whether tensors are fake: only shapes are needed, and a kernel would write to address 0."""
    return torch._C._get_dispatch_mode(_FAKE) is not None


def stops() -> bool:
    """Whether a host function stops after allocating its results, as the fake impl of a custom op."""
    return is_faking() or getattr(_local, "stops", False)


@contextlib.contextmanager
def stopping() -> Iterator[None]:
    """A context in which host functions stop after allocating their results, also for tensors on `"meta"`."""
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

    `args` are the kernel's leading parameters in order (tensors, numbers, `None`, tuples of these); `constexprs` are
    the rest, in the order of the kernel's parameters. Nothing is launched for an empty grid or on fake tensors.
    Errors of compilation, of the launch or of an interpreted kernel are raised unchanged.

    Args:
        kernel: a `triton.jit` function whose constexpr parameters come last.
        grid: number of programs; grids are one-dimensional.
        args: positional arguments.
        constexprs: compile-time arguments by name.
        num_warps: warps per program.
        num_stages: stages of the software pipeline.
        options: further options of Triton's compiler, such as `maxnreg`.

    Raises:
        ValueError: for a grid beyond 2^31 - 1, tensors on two devices, or a CPU tensor without the interpreter.
        RuntimeError: while a compiler records calls, because the launch would be lost; for the first launch of a kernel
            while a CUDA graph is captured.
    """
    if traced() and recording():
        raise RuntimeError(f"{kernel.__name__} was launched where a compiler records what runs; call its operator")
    if grid <= 0 or is_faking():
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
    # `id` instead of the function, whose hash is the hash of its source; the entry keeps the function alive.
    values = tuple(constexprs.values())
    key = (id(kernel), device, arguments, _identity(values), num_warps, num_stages, *options.items())
    entry = _compiled.get(key)
    if entry is None or hooked() or kernel.pre_run_hooks:
        one_device(kernel.__name__, _tensors(args))
        if entry is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{kernel.__name__} is launched for the first time while a CUDA graph is captured, where it can be "
                f"neither compiled nor loaded: run the same step, on the same shapes, before the capture"
            )
        named = {name: keyed(value) for name, value in constexprs.items()}
        compiled = kernel[(grid,)](*args, **named, num_warps=num_warps, num_stages=num_stages, **options)
        if entry is None and _direct() and compiled is not None:
            # The entry keeps alive everything whose `id` is in the key.
            entry = _compiled[key] = (compiled, compiled.function, compiled.packed_metadata, values, kernel)
    else:
        compiled, function, metadata = entry[:3]
        stream = torch._C._cuda_getCurrentRawStream(device)
        compiled.run(grid, 1, 1, stream, function, metadata, None, None, None, *args, *values)
    recording = getattr(_local, "recording", None)
    if recording is not None:
        recording.launches.append((entry, grid, args))


def watch(recording: Any) -> Any:
    """Set the recording of this thread's launches, or `None`; returns the previous one."""
    before = getattr(_local, "recording", None)
    _local.recording = recording
    return before


def _key_of(args: tuple[Any, ...]) -> tuple[int | None, tuple[Any, ...]]:
    """The device of the first tensor, and all properties of the arguments that a compiled kernel depends on."""
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
            # Triton specializes on 1, on multiples of 16, and on the width of the number.
            key.append(1 if arg == 1 else (arg & 15 == 0, -(2**31) <= arg < 2**31, arg < 2**63))
        elif isinstance(arg, float):
            key.append(float)
        else:
            where, inner = _key_of(arg)
            device = where if device is None else device
            key.append(inner)
    return device, tuple(key)


def _identity(value: Any) -> Any:
    """A constexpr as a key: functions by identity; numbers by value, type and sign, as 1 equals True, and 0.0 -0.0."""
    if isinstance(value, tuple):
        return tuple([_identity(v) for v in value])
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float):
        return (float, value, math.copysign(1.0, value))
    if isinstance(value, (bool, int)):
        return (type(value), value)
    return id(value)


def hooked() -> bool:
    """Whether a profiler is attached: by hooks in Triton's chains, or by functions that replaced the chains."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    if enter is _ENTER and leave is _LEAVE:
        return bool(enter.calls or leave.calls)
    return any(hook and getattr(hook, "calls", True) for hook in (enter, leave))


_ENTER: Any = knobs.runtime.launch_enter_hook
_LEAVE: Any = knobs.runtime.launch_exit_hook


@functools.cache
def _direct() -> bool:
    """Whether `CompiledKernel.run` has the expected parameters, checked once; otherwise Triton launches each time."""
    import inspect

    from triton.compiler import CompiledKernel

    names = inspect.signature(CompiledKernel.__init__).parameters
    source = inspect.getsource(JITFunction.run)
    return "metadata_group" in names and "kernel.run(grid_0, grid_1, grid_2, stream, kernel.function" in source


def one_device(name: str, tensors: Sequence[Tensor]) -> None:
    """Raise `ValueError` unless all tensors of a kernel call are on one device."""
    devices = {str(t.device) for t in tensors}
    if len(devices) > 1:
        raise ValueError(f"{name}: expected all tensors on one device, got {' and '.join(sorted(devices))}")


def _tensors(args: tuple[Any, ...]) -> list[Tensor]:
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, tuple):
            found.extend(_tensors(arg))
    return found


def _interpret(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: Mapping[str, Any]) -> None:
    from triton.runtime.errors import InterpreterError

    one_device(kernel.__name__, _tensors(args))
    with _interpreting:
        try:
            kernel[(grid,)](*args, **constexprs)
        except InterpreterError as error:
            cause: BaseException = error
            while isinstance(cause, InterpreterError) and cause.__cause__ is not None:
                cause = cause.__cause__
            raise cause from None


@functools.cache
def architecture(device: torch.device) -> str:
    """`"sm_90"`, `"gfx942"`, or `"interpreter"` for a CPU tensor."""
    if device.type not in GPU_TYPES:
        return "interpreter"
    return architecture_of(torch.cuda.get_device_properties(device))


def family(architecture: str) -> str:
    """The architecture whose tiles are used for one such as `"sm_89"` or `"gfx950"`."""
    if architecture.startswith("gfx"):
        return "gfx942"
    major = architecture.removeprefix("sm_")[:-1]
    return {"9": "sm_90", "10": "sm_100"}.get(major, "interpreter" if architecture == "interpreter" else "sm_80")


def register_limit(registers: int | None, arch: str) -> dict[str, int]:
    """The launch option that limits registers per thread; there is none on AMD.

    Without a limit, the compiler may spill to make room for more programs per processor than there are.
    """
    return {"maxnreg": registers} if registers is not None and arch.startswith("sm_") else {}


# More than one, and few enough for quick tests.
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


def programs_of(tiles: int, most: int) -> tuple[int, int]:
    """The number of programs, at most `most`, and of tiles per program; every program has at least one tile."""
    steps = cdiv(tiles, max(1, min(tiles, most)))
    return cdiv(tiles, steps), steps


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least `n`, and 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


class Recording(TorchDispatchMode):
    """Records the allocations and launches of a host function."""

    def __init__(self) -> None:
        super().__init__()
        self.sound = True
        self.made: list[Tensor] = []
        self.launches: list[tuple[Any, int, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            self.made.append(result)
        elif not func.is_view:
            self.sound = False
        return result

    def again(self, given: list[Tensor], result: Any) -> Callable[..., Any] | None:
        """A function that replays the call, or `None`: without an entry, each launch is Triton's own.

        Args:
            given: the call's tensors.
            result: a tensor, `None`, or a tuple or list of them.
        """
        return _written(self, given, result) if self.sound and all(launch[0] for launch in self.launches) else None


class _Unknown(Exception):
    """A result that is not an argument, and that the call did not allocate."""


class _Writer:
    """Writes statements that allocate and return tensors into `source`."""

    def __init__(self, source: Source, given: list[Tensor], made: list[Tensor]) -> None:
        self._source = source
        self._names = itertools.count()
        self._addresses = {t.data_ptr(): f"at{i}" for i, t in enumerate(given)}
        self._given = given
        self._made = {t.data_ptr(): t for t in made if t.numel()}
        self._fresh: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        """The name of an object in the generated code."""
        return "None" if value is None else self._source.put(value)

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Allocate a tensor; returns its name."""
        name = f"new{next(self._names)}"
        sizes = tuple(shape)
        strides = tuple(math.prod(max(1, n) for n in sizes[i + 1 :]) for i in range(len(sizes)))
        self._source.add(f"{name} = empty({', '.join(map(self.constant, (sizes, strides, dtype)))})")
        return name

    def results(self, leaves: Sequence[Any]) -> list[str]:
        """Allocate all tensors, with the shapes of the results; returns the names of the results."""
        shapes: dict[int, Sequence[int]] = {}
        names: list[str] = []
        for leaf in leaves:
            same = next((i for i, t in enumerate(self._given) if leaf is t), None)
            if leaf is None or same is not None:
                names.append("None" if leaf is None else f"t{same}")
                continue
            at = leaf.data_ptr()
            whole = self._made.get(at)
            if whole is None or whole.numel() != leaf.numel() or not leaf.is_contiguous():
                raise _Unknown
            shapes[at] = leaf.shape
            names.append(str(at))
        for at, t in self._made.items():
            self._fresh[at] = self.make(shapes.get(at, t.shape), t.dtype)
            self._source.add(f"at_{self._fresh[at]} = {self._fresh[at]}.data_ptr()")
        return [self._fresh[int(name)] if name.isdigit() else name for name in names]

    def _address(self, tensor: Tensor) -> str:
        at = tensor.data_ptr()
        if at in self._addresses:
            return self._addresses[at]
        for begin, whole in self._made.items():
            if begin <= at < begin + whole.numel() * whole.element_size():
                name = f"at_{self._fresh[begin]}"
                return name if at == begin else f"{name} + {at - begin}"
        self._source.put(tensor)  # allocated before the call, such as a table of frequencies, and must stay alive
        return self._source.put(at)

    def expression(self, value: Any) -> str | None:
        """The expression of a value that changes from call to call; `None` for a constant."""
        if isinstance(value, Tensor):
            return self._address(value)
        if value is _STREAM:
            return "stream"
        if type(value) is tuple:
            return self.tuple(value)
        return None

    def tuple(self, values: tuple[Any, ...]) -> str | None:
        """The expression of a tuple in which values change; all values after the last of these are one constant."""
        texts = [self.expression(value) for value in values]
        last = max((i for i, text in enumerate(texts) if text is not None), default=-1)
        if last < 0:
            return None
        head = [text or self.constant(value) for text, value in zip(texts, values[: last + 1], strict=False)]
        rest = values[last + 1 :]
        return f"({', '.join(head)},)" + (f" + {self.constant(rest)}" if rest else "")


def _written(recording: Recording, given: list[Tensor], result: Any) -> Callable[..., Any] | None:
    """A generated function of the given tensors that repeats the recorded allocations and launches."""
    empty = getattr(_guards, f"_empty_strided_{given[0].device.type}", None)
    if empty is None:
        return None
    source = Source("again", ", ".join(f"t{i}" for i in range(len(given))))
    source.constants |= {
        "C": torch._C, "device": given[0].get_device(), "empty": empty, "hooks": knobs.runtime,
        "listening": _ENTER, "leaving": _LEAVE, "MISS": MISS, "OTHER": OTHER,
        "named": tuple.__new__, "modes": torch._C._len_torch_function_stack,
        "alive": [entry for entry, _, _ in recording.launches],
    }  # fmt: skip
    aligned = ["0"] + [f"at{i}" for i, t in enumerate(given) if t.numel() > 1]
    numbers = [f"{'' if t.data_ptr() & 15 else 'not '}at{i} & 15" for i, t in enumerate(given) if t.numel() == 1]
    source.add(
        "if modes():",
        "    return MISS",
        *(f"at{i} = t{i}.data_ptr()" for i in range(len(given))),
        f"if ({' | '.join(aligned)}) & 15 or C._cuda_getDevice() != device or listening.calls or leaving.calls:",
        "    return MISS",
        *([f"if not ({' and '.join(numbers)}):", "    return OTHER"] if numbers else []),
        "if hooks.launch_enter_hook is not listening or hooks.launch_exit_hook is not leaving:",
        "    return MISS",
        "stream = C._cuda_getCurrentRawStream(device)",
    )
    writer = _Writer(source, given, recording.made)
    several = isinstance(result, (tuple, list))
    try:
        names = writer.results(list(result) if several else [result])
        for entry, grid, args in recording.launches:
            launch, handed = _handed(entry, grid, args)
            tensors = writer.tuple(handed)
            source.add(f"{source.put(launch)}(*{tensors})")
    except _Unknown:
        return None
    text = f"({', '.join(names)},)" if several else names[0]
    if type(result) is list:
        text = f"[{', '.join(names)}]"
    elif several and type(result) is not tuple:  # a named tuple
        text = f"named({source.put(type(result))}, {text})"
    source.add(f"return {text}")
    return source.define()


def _handed(entry: tuple[Any, ...], grid: int, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """The function that Triton's launcher calls, with its arguments, found by a launcher whose function records them.

    If there is no such function, the launcher and its arguments.
    """
    compiled, function, metadata, values = entry[:4]
    launcher = compiled.run
    taken = (grid, 1, 1, _STREAM, function, metadata, None, None, None, *args, *values)
    state = dict(getattr(launcher, "__dict__", {}))
    launch = state.get("launch")
    scratch = state.get("profile_scratch_size", 1) or state.get("global_scratch_size")  # allocated at each launch
    if launch is None or scratch or state.get("gsan_enabled"):
        return launcher, taken
    handed: list[tuple[Any, ...]] = []
    state["launch"] = lambda *all_of_it: handed.append(all_of_it)
    type(launcher).__call__(SimpleNamespace(**state), *taken)
    return (launch, handed[0]) if len(handed) == 1 else (launcher, taken)

# pyright: basic
# Triton has no type stubs, and this module replaces parts of its internals.
"""A CUDA driver that loads and launches nothing: exercises the path of a GPU launch without a GPU.

In `stub_driver()` CPU tensors count as tensors of an H200. Host functions take the same decisions as there, Triton
binds, specializes and compiles for sm_90 (and fills `TRITON_CACHE_DIR`), a second launch finds the compiled kernel, and
the driver receives the arguments, checks them against the compiled signature, and stops. Results are undefined. Needs a
process that does not interpret kernels, and Triton 3.6 or later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from seqfuse import env
from seqfuse.kernels import _launch, _operators
from seqfuse.testing.compile import TRITON_DTYPES

ARCHITECTURE, PROCESSORS, SHARED = 90, 132, 232_448
"""Those of an H200."""

_numbers = itertools.count(1)  # Triton caches compiled kernels by device number


@dataclasses.dataclass
class Stub:
    """The activity of a stub driver.

    Args:
        launched: names of kernels, in the order of their launches.
        compiled: names of kernels that were compiled because Triton's cache did not have them.
        loaded: names of kernels that were loaded.
        launcher: called with a kernel's source and metadata when its launcher is created.
        capturing: whether torch reports that a CUDA graph is being captured.
    """

    launched: list[str] = dataclasses.field(default_factory=list)
    compiled: list[str] = dataclasses.field(default_factory=list)
    loaded: list[str] = dataclasses.field(default_factory=list)
    launcher: Callable[[Any, Any], None] = lambda source, metadata: None
    capturing: bool = False


@contextlib.contextmanager
def stub_driver(*, compiles: bool = True, checks: bool = True) -> Iterator[Stub]:
    """A block in which kernels are launched on a GPU that does not exist; must not be nested.

    Args:
        compiles: whether to compile kernels; if not, the driver still receives the arguments.
        checks: whether to check the arguments of each launch; if not, a launch has its usual CPU overhead.

    Raises:
        RuntimeError: if kernels are interpreted.
    """
    import triton.compiler
    from triton.runtime import driver

    if _launch.INTERPRETED:
        raise RuntimeError("kernels are interpreted in this process: unset TRITON_INTERPRET before it starts")
    stub = Stub()
    stand_in = _Driver(stub, checks)
    active = driver._active

    def capturing() -> bool:
        return stub.capturing

    patches: list[Any] = [
        mock.patch.object(_launch, "GPU_TYPES", frozenset({"cpu", "cuda"})),
        mock.patch.object(_launch, "_compiled", {}),
        mock.patch.object(torch._C, "_cuda_getDevice", _device, create=True),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _stream, create=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", capturing),
        mock.patch.object(torch.cuda, "get_device_properties", _properties),
        mock.patch.object(env.Env, "of", _env_of(env.Env.of)),
    ]
    if compiles:
        patches.append(mock.patch.object(triton.compiler.ASTSource, "make_ir", _watched(stub)))
    else:
        patches.append(mock.patch.object(triton.compiler, "compile", _uncompiled(stub, stand_in)))
    caches = (_launch.architecture, _launch.processors)
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.callback(driver.set_active, active)  # pyright: ignore[reportArgumentType]
        for cache in caches:
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        _operators.forget()
        stack.callback(_operators.forget)
        stack.enter_context(_allocating())
        driver.set_active(stand_in)  # pyright: ignore[reportArgumentType]
        yield stub


def _device() -> int:
    return -1  # the device of a CPU tensor


def _stream(device: int) -> int:
    return 0


def _properties(device: Any = None) -> Any:
    return SimpleNamespace(
        name="NVIDIA H200", gcnArchName="NVIDIA H200", major=9, minor=0, multi_processor_count=PROCESSORS,
        L2_cache_size=60 << 20, shared_memory_per_block_optin=SHARED, total_memory=139 << 30, warp_size=32,
    )  # fmt: skip


def _env_of(of: Callable[..., env.Env]) -> Callable[..., env.Env]:
    def on_a_gpu(device: Any, **rest: Any) -> env.Env:
        found = of(device, **rest)
        if found.device != "cpu":
            return found
        return dataclasses.replace(found, device="cuda", arch=f"sm_{ARCHITECTURE}", kernels="triton")

    return on_a_gpu


@contextlib.contextmanager
def _allocating() -> Iterator[None]:
    """Let Triton allocate memory for the descriptors of kernels."""
    from triton.runtime import _allocation

    def scratch(size: int, alignment: int, stream: int | None) -> Tensor:
        guards: Any = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
        return guards._empty_strided_cpu((size,), (1,), torch.int8)

    token = _allocation._allocator.set(scratch)
    try:
        yield
    finally:
        _allocation._allocator.reset(token)


def _watched(stub: Stub) -> Callable[..., Any]:
    from triton.compiler import ASTSource

    make_ir = ASTSource.make_ir

    def compiling(source: Any, *args: Any, **kwargs: Any) -> Any:
        stub.compiled.append(source.fn.__name__)
        return make_ir(source, *args, **kwargs)

    return compiling


def _uncompiled(stub: Stub, driver: _Driver) -> Callable[..., Any]:
    def compiling(source: Any, target: Any = None, options: Any = None, **_: Any) -> Any:
        stub.compiled.append(source.fn.__name__)
        stub.loaded.append(source.fn.__name__)
        metadata = SimpleNamespace(
            name=source.fn.__name__, num_ctas=1, global_scratch_size=0, global_scratch_align=1,
            profile_scratch_size=0, profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
        )  # fmt: skip
        return SimpleNamespace(
            name=metadata.name, function=0, packed_metadata=(), run=driver.launcher_cls(source, metadata),
            launch_metadata=lambda *_: None,
        )  # fmt: skip

    return compiling


class _Utils:
    """The driver functions that Triton calls to load a kernel."""

    def __init__(self, stub: Stub) -> None:
        self._stub = stub

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED, "multiprocessor_count": PROCESSORS, "warpSize": 32, "max_num_regs": 65_536}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        self._stub.loaded.append(name)
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: Any) -> None: ...


class _Driver:
    """The part of Triton's driver that launches need."""

    def __init__(self, stub: Stub, checks: bool) -> None:
        self.utils = _Utils(stub)
        self.number = next(_numbers)
        self.launcher_cls = _launcher(stub, checks)

    def get_current_device(self) -> int:
        return self.number

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int) -> tuple[int, int]:
        return divmod(ARCHITECTURE, 10)

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def allocate_default_profile_scratch(self, size: int, alignment: int, stream: int) -> None: ...


def _launcher(stub: Stub, checks: bool) -> Any:
    from triton.backends.nvidia import driver

    packed = hasattr(driver, "make_kernel_signature")  # from Triton 3.7 on, the last argument holds the kernel's

    class Launcher(driver.CudaLauncher):
        """Triton's launcher, with a stub instead of the driver call."""

        def __init__(self, source: Any, metadata: Any) -> None:
            stub.launcher(source, metadata)
            self.num_ctas = metadata.num_ctas
            self.global_scratch_size = metadata.global_scratch_size
            self.global_scratch_align = metadata.global_scratch_align
            self.profile_scratch_size = metadata.profile_scratch_size
            self.profile_scratch_align = metadata.profile_scratch_align
            self.launch_cooperative_grid, self.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl
            self.arg_annotations, self.kernel_signature, self.gsan_enabled = (), b"", False

            def launch(*args: Any) -> None:
                stub.launched.append(metadata.name)
                _check(source, args[:3], args[-1] if packed else args[13:])

            self.launch = launch if checks else lambda *args: None

    return Launcher


def _check(source: Any, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """Check that a kernel was compiled for these arguments."""
    signature: dict[str, Any] = source.signature
    name = source.fn.__name__
    assert all(0 < n < 2**31 for n in grid), f"{name}: grid {grid}"
    assert len(args) == len(signature), f"{name} has {len(signature)} parameters, got {len(args)} arguments"
    for position, ((parameter, kind), value) in enumerate(zip(signature.items(), args, strict=True)):
        _check_one(f"{name}: {parameter}", source, kind, (position,), value)


def _check_one(what: str, source: Any, kind: Any, path: tuple[int, ...], value: Any) -> None:
    if isinstance(kind, tuple):
        assert isinstance(value, tuple), f"{what} is a tuple, got {value!r}"
        assert len(value) == len(kind), f"{what} has {len(kind)} members, got {len(value)}"
        for i, (inner, one) in enumerate(zip(kind, value, strict=True)):
            _check_one(f"{what}[{i}]", source, inner, (*path, i), one)
        return
    divisible = any(name == "tt.divisibility" for name, _ in source.attrs.get(path, ()))
    if kind == "constexpr":
        wanted = source.constants[path]
        same = isinstance(wanted, tuple) if isinstance(value, tuple) else type(wanted) is type(value)
        assert same, f"{what} was compiled for {wanted!r}, got {value!r}"
        assert wanted is value or wanted == value, f"{what} was compiled for {wanted!r}, got {value!r}"
    elif kind.startswith("*"):
        assert type(value) is int or isinstance(value, Tensor), f"{what} is {kind}, got {value!r}"
        if isinstance(value, Tensor):
            dtype = TRITON_DTYPES[str(value.dtype).removeprefix("torch.")]
            assert kind == f"*{dtype}", f"{what} is {kind}, got {value.dtype}"
            value = value.data_ptr()
        assert not divisible or value % 16 == 0, f"{what} was compiled for 16-byte alignment"
    elif kind.startswith("i"):
        bits = int(kind[1:])
        assert type(value) is int, f"{what} is {kind}, got {value!r}"
        assert -(2 ** (bits - 1)) <= value < 2 ** (bits - 1), f"{what} is {kind}, got {value}"
        assert not divisible or value % 16 == 0, f"{what} was compiled for a multiple of 16, got {value}"
    else:
        assert isinstance(value, (int, float)), f"{what} is {kind}, got {value!r}"

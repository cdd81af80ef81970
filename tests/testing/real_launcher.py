"""Launches by Triton's own launchers, in C, with a CUDA driver that launches nothing, which is asked what reached it.

`TRITON_LIBCUDA_PATH` is the folder of that driver, `libcuda.so.1`, made of cuda_driver.c. Every kernel is launched
three times: by Triton, by its compiled kernel, and replayed. Prints how many launches there were, and of how many
kernels.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from triton.backends.nvidia import driver

from tests.testing import test_replay, test_stub_driver
from tools import stub_driver as stubs

sys.setdlopenflags(os.RTLD_LAZY | os.RTLD_GLOBAL)  # functions that Triton does not call need not be there
DRIVER = ctypes.CDLL(str(Path(os.environ["TRITON_LIBCUDA_PATH"], "libcuda.so.1")), ctypes.RTLD_GLOBAL)
DRIVER.parameters.restype = ctypes.c_void_p
DRIVER.shape.restype = ctypes.POINTER(ctypes.c_uint)
PACKED = hasattr(driver, "make_kernel_signature")  # Triton 3.7 has one launcher for all kernels
FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}


def flat(kind: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Arguments that reach a kernel, with their types."""
    if isinstance(kind, tuple):
        for inner, one in zip(kind, value, strict=True):
            yield from flat(inner, one)
    elif kind != "constexpr":
        yield kind, value


def check(name: str, grid: tuple[int, ...], arguments: list[tuple[str, Any]]) -> None:
    """Refuses arguments that would reach a kernel as something else."""
    assert (*DRIVER.shape()[:3],) == grid, f"{name}: grid {grid}"
    raw = ctypes.string_at(DRIVER.parameters(), 8 * len(arguments))
    for i, (kind, value) in enumerate(arguments):
        given = value.data_ptr() if isinstance(value, Tensor) else value
        code = "Q" if kind.startswith("*") else FORMATS[kind]
        wanted = struct.pack(code, given)
        assert raw[8 * i : 8 * i + len(wanted)] == wanted, f"{name}: argument {i} of type {kind} is {value}"


def launcher(stub: stubs.Stub, checks: bool) -> Any:
    """Triton's own launcher, whose arguments to its C function are recorded."""

    class Launcher(driver.CudaLauncher):
        def __init__(self, source: Any, metadata: Any) -> None:
            super().__init__(source, metadata)
            self.gsan_enabled = False
            real: Callable[..., None] = self.launch
            kinds = tuple(source.signature.values())

            def launch(*args: Any) -> None:
                arguments = list(flat(kinds, args[-1] if PACKED else args[13:]))
                DRIVER.expect(len(arguments))
                before = DRIVER.launches()
                real(*args)
                assert DRIVER.launches() == before + 1, f"{metadata.name} was not launched"
                check(metadata.name, args[:3], arguments)
                stub.launched.append(metadata.name)

            self.launch = launch

    return Launcher


class Utils(stubs._Utils):
    """The stub's, with the launcher of Triton 3.7 and later."""

    def __init__(self, stub: stubs.Stub) -> None:
        super().__init__(stub)
        if PACKED:
            vars(self).update({k: v for k, v in vars(driver.CudaUtils()).items() if not hasattr(self, k)})


def uncompiled(stub: stubs.Stub, active: Any) -> Callable[..., Any]:
    """A compiler that generates no code, but reports the warps, blocks per cluster and shared memory that a launch
    needs."""
    compiling = stub_uncompiled(stub, active)

    def compiled(*args: Any, **kwargs: Any) -> Any:
        found = compiling(*args, **kwargs)
        found.packed_metadata = (4, 1, 0)
        return found

    return compiled


stub_uncompiled = stubs._uncompiled
stubs._launcher, stubs._Utils, stubs._uncompiled = launcher, Utils, uncompiled

if __name__ == "__main__":
    with stubs.stub_driver(compiles=False) as stub:
        for _ in range(3):
            for group in test_stub_driver.GROUPS:
                group()
            for shapes, call in test_replay.CALLS.values():
                call(*test_replay.drawn(shapes))
    print(len(stub.launched), len(set(stub.launched)))

"""`compile_kernel`: whether an author's kernel compiles for GPUs that this machine does not have.

The interpreter also runs code that Triton cannot compile. A process that interprets kernels cannot compile them, and
some compiler failures kill the process: so a child process imports the kernel's module again and compiles the launch.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import Tensor

from ..kernels._launch import keyed

_OPTIONS = ("num_warps", "num_stages")

Type = str | tuple["Type", ...]
"""Triton's name of an argument type: `"*bf16"`, `"i64"`, `"fp32"`, `"tensordesc<bf16[128, 64]>"`; a tuple for a tuple
argument, `"none"` for a `None` in it.
"""

TRITON_DTYPES = {
    **{f"{sign}int{bits}": f"{sign or 'i'}{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"fp{bits}" for bits in (16, 32, 64)},
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "bool": "u1",
}
"""Triton's name of a torch dtype, by torch's name without `torch.`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One configuration of a kernel to compile."""

    name: str  # readable in a table: "bias,gelu bf16 4x1024"
    kernel: Any
    signature: Mapping[str, Type]  # of arguments that are not constexprs, in the order of the kernel's parameters
    constexprs: Mapping[str, Any]  # with the arguments that are None
    divisible: tuple[str, ...] = ()  # arguments whose address or value, or those of all members, is a multiple of 16
    num_warps: int = 4
    num_stages: int = 3
    has_dot: bool = False  # whether it multiplies matrices, so that wgmma must appear in its code for sm_90
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])  # such as maxnreg


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of compiling a kernel for one architecture.

    Args:
        module: the module that defines the kernel.
        variant: the kernel's name.
        target: `"sm_90"`, `"gfx942"`, ...
        error: why it did not compile, else `None`.
        registers: per thread.
        spills: bytes of local memory per thread on NVIDIA, spilled registers on AMD.
        shared: bytes of shared memory per program.
        seconds: time it took.
    """

    module: str
    variant: str
    target: str
    error: str | None = None
    registers: int = 0
    spills: int = 0
    shared: int = 0
    seconds: float = 0.0


def compile_kernel(
    kernel: Any, *args: Any, targets: str | Sequence[str] = ("sm_80", "sm_90", "sm_100", "gfx942"), **kwargs: Any
) -> tuple[Compiled, ...]:
    """Compile a Triton kernel for a launch with these arguments, also for GPUs that this machine does not have.

    Only the dtype of a tensor matters, so `"meta"` tensors work; 16-byte alignment is assumed. The kernel may be
    interpreted in this process. Another process compiles it, and imports the kernel's module again, even if it is the
    main script.

    Args:
        kernel: the `triton.jit` function.
        args: positional arguments of the launch.
        targets: one or several architectures, such as `"sm_90"` or `"gfx942"`.
        kwargs: keyword arguments of the launch, including `num_warps` and `num_stages`.

    Returns:
        Registers, spills and shared memory for each target; empty inside a compiling process.

    Raises:
        AssertionError: with kernel, target and the compiler's error.
        RuntimeError: if the kernel's module cannot be imported again.
        TypeError: for an unknown architecture, an object that is not a kernel in a file, or arguments that the kernel
            does not have.
    """
    if getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "") == __name__:
        return ()  # the child process imports the script that called it
    targets = (targets,) if isinstance(targets, str) else targets
    for target in targets:
        if not re.fullmatch(r"sm_\d+|gfx\w+", target):
            raise TypeError(f'targets: {target!r} is not an architecture such as "sm_90" or "gfx942"')
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    given = kernel
    while not is_kernel(kernel) and hasattr(kernel, "fn"):  # under an autotuner
        kernel = kernel.fn
    if not is_kernel(kernel):
        raise TypeError(f"expected a triton.jit function, got {given!r}")
    try:
        bound = inspect.signature(kernel.fn).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{kernel.fn.__qualname__}: {error}") from None
    bound.apply_defaults()
    signature: dict[str, Type] = {}
    constexprs: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if value is None or "constexpr" in str(kernel.fn.__annotations__.get(name, "")):
            constexprs[name] = value
        else:
            signature[name] = type_of(value)
    divisible = tuple(name for name in signature if is_divisible(bound.arguments[name]))
    name = kernel.fn.__qualname__
    variant = Variant(
        name=name, kernel=kernel, signature=signature, constexprs=constexprs, divisible=divisible, **options
    )
    with tempfile.TemporaryDirectory(prefix="seqfuse-compiled-") as folder:
        launch, results = Path(folder, "launch.pickle"), Path(folder, "results")
        with launch.open("wb") as file:
            _Pickler(file).dump(vars(variant))
        done = in_child(__name__, str(launch), str(results), *targets)
        lines = results.read_text().splitlines() if results.exists() else []
    found = tuple(Compiled(kernel.fn.__module__, name, **json.loads(line)) for line in lines)
    for one in found:
        if one.error is not None:
            raise AssertionError(f"{name} does not compile for {one.target}: {one.error}")
    if done.returncode < 0:
        raise AssertionError(f"{name} does not compile for {targets[len(found)]}: {ended(done)}")
    if done.returncode:
        raise RuntimeError(f"for {targets[len(found)]} {ended(done)}")
    return found


def in_child(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module in a child process that compiles kernels, with this process's import path.

    Its kernel cache is temporary unless `TRITON_CACHE_DIR` is set.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONSAFEPATH"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(folder or str(Path.cwd()) for folder in sys.path)
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    with tempfile.TemporaryDirectory(prefix="seqfuse-compiled-") as cache:
        environment.setdefault("TRITON_CACHE_DIR", cache)
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)


def ended(done: subprocess.CompletedProcess[str]) -> str:
    """The message for a child process that failed: its exit code and the last line that it printed."""
    tail = done.stderr.strip().splitlines()[-1:] or [""]
    return f"the compiler ended with {done.returncode}: {tail[0]}"


def is_kernel(kernel: Any) -> bool:
    """Whether an object is a `triton.jit` function, compiled or interpreted."""
    return inspect.isfunction(getattr(kernel, "fn", None)) and hasattr(kernel, "arg_names")


class _Pickler(pickle.Pickler):
    """Pickles kernels and device functions, also as constexprs, by their names in their modules."""

    def persistent_id(self, obj: Any) -> tuple[str, str, str] | None:
        if not is_kernel(obj):
            return None
        module = sys.modules[obj.fn.__module__]
        if getattr(module, "__file__", None) is None:
            raise TypeError(f"{obj.fn.__qualname__} is in no file, from which it could be compiled")
        return module.__name__, str(module.__file__), obj.fn.__qualname__


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: tuple[str, str, str]) -> Any:
        name, file, attributes = pid
        found: Any = _imported(name, file)
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
        return found


def _imported(name: str, file: str) -> ModuleType:
    if name != "__main__" and importlib.util.find_spec(name) is not None:
        return importlib.import_module(name)
    name = "__compiled_main__" if name == "__main__" else name
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except Exception as error:
            message = f"importing {file} again to find a kernel raised {type(error).__name__}: {error}"
            raise RuntimeError(f'{message}; keep its work under if __name__ == "__main__"') from error
    return sys.modules[name]


def type_of(value: Any) -> Type:
    """Triton's type of an argument of a launch."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return tuple(map(type_of, cast("tuple[Any, ...]", value)))
    if isinstance(value, Tensor):
        return f"*{_named(value)}"
    if isinstance(value, bool):
        return "u1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return f"tensordesc<{_named(value.base)}{list(value.block_shape)}>"
    raise TypeError(f"a kernel takes tensors, numbers and tuples of them, not {value!r}")


def _named(tensor: Tensor) -> str:
    return TRITON_DTYPES[str(tensor.dtype).removeprefix("torch.")]


def is_divisible(value: Any) -> bool:
    """Whether a number, or each member of a tuple, is divisible by 16; addresses of tensors are assumed to be."""
    if isinstance(value, tuple):
        held = [member for member in cast("tuple[Any, ...]", value) if member is not None]
        return bool(held) and all(map(is_divisible, held))
    return isinstance(value, Tensor) or (type(value) is int and value % 16 == 0)


def built(variant: Variant, target: str) -> Any:
    """The kernel that Triton compiles for a configuration; fails in a process that interprets kernels."""
    triton: Any = importlib.import_module("triton")
    GPUTarget: Any = importlib.import_module("triton.backends.compiler").GPUTarget
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    names: list[str] = variant.kernel.arg_names
    for position, name in enumerate(names):
        if name in variant.constexprs:
            signature[name] = "constexpr"
            constants[(position,)] = keyed(variant.constexprs[name])
        else:
            signature[name] = _spelled(variant.signature[name], (position,), constants)
            if name in variant.divisible:
                for path in _numbers(variant.signature[name], (position,)):
                    attributes[path] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(variant.kernel, signature, constants, attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    nvidia = target.startswith("sm_")
    of = GPUTarget("cuda", int(target.removeprefix("sm_")), 32) if nvidia else GPUTarget("hip", target, 64)
    return triton.compile(source, target=of, options=options)


def _spelled(kind: Type, path: tuple[int, ...], constants: dict[tuple[int, ...], Any]) -> Any:
    if isinstance(kind, tuple):
        return tuple(_spelled(inner, (*path, i), constants) for i, inner in enumerate(kind))
    if kind == "none":
        constants[path] = None
        return "constexpr"
    return kind


def _numbers(kind: Type, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The paths of the pointers and integers in an argument."""
    if isinstance(kind, tuple):
        for i, inner in enumerate(kind):
            yield from _numbers(inner, (*path, i))
    elif kind != "none" and (kind.startswith("*") or kind[1:].isdigit()):
        yield path


def resources(kernel: Any, target: str) -> dict[str, int]:
    """Registers, spills and shared memory of a kernel that `built` returned."""
    found = _nvidia(kernel.asm["cubin"]) if target.startswith("sm_") else _amd(kernel.asm["amdgcn"])
    return {"shared": kernel.metadata.shared, **found}


def _nvidia(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(cubin)
        binary.flush()
        tool = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin/cuobjdump"
        printed = subprocess.run([tool, "-res-usage", binary.name], capture_output=True, text=True, check=True).stdout
    usage = [dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", line)) for line in printed.splitlines() if "REG:" in line]
    if not usage:
        raise RuntimeError(f"cuobjdump printed no resource usage: {printed!r}")
    registers = max(int(u["REG"]) for u in usage)
    return {"registers": registers, "spills": max(int(u["STACK"]) + int(u["LOCAL"]) for u in usage)}


def _amd(text: str) -> dict[str, int]:
    def number(name: str) -> int:
        return max((int(n) for n in re.findall(rf"\.{name}:\s*(\d+)", text)), default=0)

    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    return {"registers": number("vgpr_count"), "spills": spills}


def why(error: BaseException) -> str:
    """The innermost cause in one line; for an error in a device function, that is the error in the function."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "error_message", None) or str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}"[:300]


def _main(launch: str, results: str, *targets: str) -> None:
    """Compile a pickled launch, in the child process; a crash leaves the results of the targets before."""
    with Path(launch).open("rb") as file:
        variant = Variant(**_Unpickler(file).load())
    for target in targets:
        begun = time.perf_counter()
        try:
            found: dict[str, Any] = resources(built(variant, target), target)
        except Exception as error:
            found = {"error": why(error)}
        found |= {"target": target, "seconds": time.perf_counter() - begun}
        with Path(results).open("a") as file:
            print(json.dumps(found), file=file)


if __name__ == "__main__":
    _main(*sys.argv[1:])

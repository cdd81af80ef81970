"""Kernels compiled for GPUs that are not here: registers, spills, shared memory, and what the code is made of.

Every launchable configuration that a kernel module lists in `variants()` is compiled in a child process, since some
failures of the compiler end the process, and one that listed interpreted kernels cannot compile them.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .. import kernels
from ..kernels._launch import keyed
from ..kernels._variants import Type, Variant
from .launches import sent
from .ttir import int32_multiplications, late_reads

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SHARED_LIMIT = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376}
"""Most bytes of shared memory a program may have; 65,536 on AMD."""
_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came of one configuration on one target.

    Args:
        module: the kernel module.
        variant: the configuration's name.
        target: `"sm_90"`, `"gfx942"`, ...
        error: why it did not compile, else `None`.
        registers: per thread.
        spills: bytes of local memory per thread on NVIDIA, spilled registers on AMD.
        shared: bytes of shared memory per program.
        mma: matrix instructions of the target's own kind: `wgmma` on sm_90, `tcgen05.mma` on sm_100, `mma.sync` below.
        wide: global accesses of 16 bytes, and tiles moved by descriptors.
        narrow: all other global accesses.
        int32_multiplications: 32-bit products that an address is made of.
        late_reads: single values read where other threads of the program may have written already.
        has_dot: whether the configuration multiplies matrices.
        seconds: time it took.
    """

    module: str
    variant: str
    target: str
    error: str | None = None
    registers: int = 0
    spills: int = 0
    shared: int = 0
    mma: int = 0
    wide: int = 0
    narrow: int = 0
    int32_multiplications: int = 0
    late_reads: int = 0
    has_dot: bool = False
    seconds: float = 0.0

    @property
    def over_shared(self) -> bool:
        """Whether it asks for more shared memory than the target has."""
        return self.shared > SHARED_LIMIT.get(self.target, 65_536)

    @property
    def dot_without_wgmma(self) -> bool:
        """Whether a product on sm_90 does without Hopper's own instruction."""
        return self.target == "sm_90" and self.has_dot and self.error is None and not self.mma


def kernel_modules() -> tuple[str, ...]:
    """Dotted names of the modules of `seqfuse.kernels` that define `variants()`; none is imported to find out."""
    files = sorted(Path(str(kernels.__file__)).parent.glob("*.py"))
    return tuple(f"{kernels.__name__}.{file.stem}" for file in files if _defines(file, "variants"))


def _defines(file: Path, name: str) -> bool:
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.parse(file.read_text()).body)


def compile_variants(
    modules: Sequence[str],
    targets: Sequence[str] = TARGETS,
    *,
    only: str = "",
    jobs: int | None = None,
    in_turn: bool = False,
) -> Iterator[Compiled]:
    """Compile the `variants()` of modules for targets, in child processes; yields results as they come.

    Args:
        modules: dotted names of kernel modules, or a file of `compile_kernel`.
        targets: architectures.
        only: a regular expression that the variant's name must contain.
        jobs: child processes at a time; the number of CPUs by default.
        in_turn: compile the first configuration for the first target, the second for the second and so on, and of all
            that follow one in eight, not all for all.
    """
    together = [",".join(targets)] if in_turn else targets
    tasks = [(module, target) for module in modules for target in together]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        futures = [pool.submit(_in_child, module, target, only) for module, target in tasks]
        for future in futures:
            yield from future.result()


def _in_child(module: str, targets: str, only: str) -> list[Compiled]:
    results: list[Compiled] = []
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    with tempfile.TemporaryDirectory(prefix="seqfuse-compiled-") as cache:
        environment.setdefault("TRITON_CACHE_DIR", cache)
        while True:
            command = [sys.executable, "-m", "seqfuse.testing.compiled", module, targets, only, str(len(results))]
            with tempfile.TemporaryFile("w+") as errors:
                child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
                begun: str | None = None
                finished = False
                assert child.stdout is not None
                with child.stdout:
                    for line in child.stdout:
                        kind, _, rest = line.strip().partition(" ")
                        if kind == "begin":
                            begun = rest
                        elif kind == "done":
                            results.append(Compiled(**json.loads(rest)))
                            begun = None
                        elif kind == "end":
                            finished = True
                code = child.wait(_TIMEOUT)
                if finished:
                    return results
                errors.seek(0)
                tail = errors.read().strip().splitlines()[-1:] or [""]
            if begun is None:
                raise RuntimeError(f"compiling {module} for {targets} ended with {code}: {tail[0]}")
            target, _, variant = begun.partition(" ")
            results.append(Compiled(module, variant, target, error=f"the compiler ended with {code}: {tail[0]}"))


def compile_one(variant: Variant, target: str, module: str = "") -> Compiled:
    """Compile one configuration in this process, which must not be interpreting."""
    triton: Any = importlib.import_module("triton")
    begun = time.perf_counter()
    names: list[str] = variant.kernel.arg_names
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for position, name in enumerate(names):
        if name in variant.constexprs:
            signature[name] = "constexpr"
            constants[(position,)] = keyed(variant.constexprs[name])
        else:
            signature[name] = _spelled(variant.signature[name], (position,), constants)
            if name in variant.divisible:
                for path in _leaves(variant.signature[name], (position,)):
                    attributes[path] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(variant.kernel, signature, constants, attributes)
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    kernel: Any = triton.compile(source, target=_target(target), options=options)
    found: Any = _nvidia(kernel, target) if target.startswith("sm_") else _amd(kernel)
    return Compiled(
        module=module,
        variant=variant.name,
        target=target,
        shared=kernel.metadata.shared,
        int32_multiplications=int32_multiplications(kernel.asm["ttir"]),
        late_reads=late_reads(kernel.asm["ttir"]),
        has_dot=variant.has_dot,
        seconds=time.perf_counter() - begun,
        **found,
    )


def _spelled(kind: Type, path: tuple[int, ...], constants: dict[tuple[int, ...], Any]) -> Any:
    if isinstance(kind, tuple):
        return tuple(_spelled(inner, (*path, i), constants) for i, inner in enumerate(kind))
    if kind == "none":
        constants[path] = None
        return "constexpr"
    return kind


def _leaves(kind: Type, path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if isinstance(kind, tuple):
        for i, inner in enumerate(kind):
            yield from _leaves(inner, (*path, i))
    elif kind != "none" and (kind.startswith("*") or kind[1:].isdigit()):
        yield path


def _target(name: str) -> Any:
    GPUTarget: Any = importlib.import_module("triton.backends.compiler").GPUTarget
    return (
        GPUTarget("cuda", int(name.removeprefix("sm_")), 32) if name.startswith("sm_") else GPUTarget("hip", name, 64)
    )


_ACCESS = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?(?:(ld|st)\.global\S*|cp\.async\.c[ag]\.shared\.global\S*)\s(.*)$", re.MULTILINE
)
_MMA = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}


def _nvidia(kernel: Any, target: str) -> dict[str, int]:
    ptx: str = kernel.asm["ptx"]
    wide = len(re.findall(r"cp\.async\.bulk\.tensor", ptx))
    narrow = 0
    for access in _ACCESS.finditer(ptx):
        text = access.group(0)
        if access.group(1) is None:
            is_wide = "0x10" in text
        else:
            is_wide = re.search(r"\.v4\.[bfsu]32|\.v2\.[bfsu]64|\.v8\.[bfsu](16|32)|\.v4\.[bfsu]64", text) is not None
        wide, narrow = wide + is_wide, narrow + (not is_wide)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(kernel.asm["cubin"])
        binary.flush()
        tool = Path(importlib.import_module("triton").__file__ or "").parent / "backends/nvidia/bin/cuobjdump"
        printed = subprocess.run([tool, "-res-usage", binary.name], capture_output=True, text=True, check=True).stdout
    usage = [dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", line)) for line in printed.splitlines() if "REG:" in line]
    if not usage:
        raise RuntimeError(f"cuobjdump printed no resource usage: {printed!r}")
    return {
        "registers": max(int(u["REG"]) for u in usage),
        "spills": max(int(u["STACK"]) + int(u["LOCAL"]) for u in usage),
        "mma": ptx.count(_MMA.get(target, "mma.sync")),
        "wide": wide,
        "narrow": narrow,
    }


def _amd(kernel: Any) -> dict[str, int]:
    text: str = kernel.asm["amdgcn"]

    def number(name: str) -> int:
        return max((int(n) for n in re.findall(rf"\.{name}:\s*(\d+)", text)), default=0)

    accesses = re.findall(r"^\s*(?:global|buffer|flat)_(?:load|store)_(\S+)", text, re.MULTILINE)
    wide = sum(a.startswith(("dwordx4", "b128")) for a in accesses)
    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "mma": len(re.findall(r"v_mfma", text)),
        "wide": wide,
        "narrow": len(accesses) - wide,
    }


def _child(module: str, targets: Sequence[str], only: str, skip: int) -> None:
    """Compile what is left of a module: all of a target, or a share for each of several; prints each begin and end."""
    if module.endswith(".pickle"):
        variants: Iterable[Variant] = sent(module)
    else:
        variants = importlib.import_module(module).variants()
    chosen = [v for v in variants if re.search(only, v.name)]
    tasks: list[tuple[Variant, str]] = []
    step = 8 * len(targets) if len(targets) > 1 else 1
    for first, target in enumerate(targets):
        tasks += [(v, target) for v in [v for v in chosen if v.runs_on(target)][first::step]]
    for variant, target in tasks[skip:]:
        print("begin", target, variant.name, flush=True)
        try:
            result = compile_one(variant, target, module)
        except Exception as error:
            result = Compiled(module, variant.name, target, error=_said(error))
        print("done", json.dumps(dataclasses.asdict(result)), flush=True)
    print("end", flush=True)


def _said(error: BaseException) -> str:
    """The innermost cause, which is in a function that the kernel calls where the fault is there, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "error_message", None) or str(error)
    return f"{type(error).__name__}: {' '.join(text.split())}"[:300]


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2].split(","), sys.argv[3], int(sys.argv[4]))

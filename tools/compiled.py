"""Compiles this library's kernels for GPUs that this machine does not have, in every configuration of `launches`.

Each module is compiled in a child process, since some compiler failures kill the process, and since a process that
interprets kernels cannot compile them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import seqfuse.testing.compile as compiling
from seqfuse.testing.compile import Variant, built, ended, in_child, resources, why

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SHARED_LIMIT = {"sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376}
"""Maximum bytes of shared memory of a program; 65,536 on AMD."""
MMA = {"sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma", "gfx942": "v_mfma"}
"""The target's newest matrix instruction; `mma.sync` on the others."""


@dataclasses.dataclass(frozen=True)
class Compiled(compiling.Compiled):
    """The result of compiling one configuration for one target.

    Args:
        wide: global accesses of 16 bytes, and tiles moved by descriptors.
        narrow: all other global accesses.
        int32_multiplications: 32-bit multiplications in the computation of addresses.
        mma: number of the target's newest matrix instructions.
        late_reads: scalars that are read where other threads of the program may already have written.
        has_dot: whether the configuration multiplies matrices.
    """

    wide: int = 0
    narrow: int = 0
    int32_multiplications: int = 0
    mma: int = 0
    late_reads: int = 0
    has_dot: bool = False

    @property
    def over_shared(self) -> bool:
        """Whether it needs more shared memory than the target has."""
        return self.shared > SHARED_LIMIT.get(self.target, 65_536)

    @property
    def dot_without_wgmma(self) -> bool:
        """Whether a matrix product on sm_90 does not use `wgmma`."""
        return self.target == "sm_90" and self.has_dot and self.error is None and not self.mma


def variants_of(module: str, target: str) -> Iterator[Variant]:
    """The configurations of a module of `seqfuse.kernels`, by its last name, or of a module with `variants(target)`."""
    from . import launches  # imports Triton and all kernels

    if module in launches.CALLS:
        return launches.variants(module, target)
    return importlib.import_module(module).variants(target)


def compile_variants(
    modules: Sequence[str],
    targets: Sequence[str] = TARGETS,
    *,
    only: str = "",
    jobs: int | None = None,
    in_turn: bool = False,
) -> Iterator[Compiled]:
    """Compile configurations of modules for targets, in child processes; yields results as they are ready.

    Args:
        modules: last names of modules of `seqfuse.kernels`, or dotted names of modules with `variants(target)`.
        targets: architectures.
        only: a regular expression that the variant's name must contain.
        jobs: maximum number of child processes; by default the number of CPUs.
        in_turn: compile the first configuration for the first target, the second for the second and so on, and one in
            eight of the others, instead of all configurations for all targets.
    """
    together = [",".join(targets)] if in_turn else targets
    tasks = [(module, target) for module in modules for target in together]
    with ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
        futures = [pool.submit(_of_module, module, target, only) for module, target in tasks]
        for future in futures:
            yield from future.result()


def _of_module(module: str, targets: str, only: str) -> list[Compiled]:
    results: list[Compiled] = []
    while True:
        done = in_child(__name__, module, targets, only, str(len(results)))
        begun: str | None = None
        for line in done.stdout.splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "begin":
                begun = rest
            elif kind == "done":
                results.append(Compiled(**json.loads(rest)))
                begun = None
            elif kind == "end":
                return results
        if begun is None:
            raise RuntimeError(f"{module} for {targets}: {ended(done)}")
        target, _, variant = begun.partition(" ")
        results.append(Compiled(module, variant, target, error=ended(done)))


def compile_one(variant: Variant, target: str, module: str = "") -> Compiled:
    """Compile one configuration in this process, which must not interpret kernels."""
    begun = time.perf_counter()
    kernel = built(variant, target)
    code: str = kernel.asm["ptx" if target.startswith("sm_") else "amdgcn"]
    return Compiled(
        module=module,
        variant=variant.name,
        target=target,
        mma=code.count(MMA.get(target, "mma.sync")),
        int32_multiplications=int32_multiplications(kernel.asm["ttir"]),
        late_reads=late_reads(kernel.asm["ttir"]),
        **_accesses(code, target),
        has_dot=variant.has_dot,
        **resources(kernel, target),
        seconds=time.perf_counter() - begun,
    )


_ACCESS = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?(?:(ld|st)\.global\S*|cp\.async\.c[ag]\.shared\.global\S*)\s(.*)$", re.MULTILINE
)


def _accesses(code: str, target: str) -> dict[str, int]:
    """The numbers of accesses to global memory of 16 bytes, and of fewer."""
    if target.startswith("gfx"):
        kinds: list[str] = re.findall(r"^\s*(?:global|buffer|flat)_(?:load|store)_(\S+)", code, re.MULTILINE)
        wide = sum(kind.startswith(("dwordx4", "b128")) for kind in kinds)
        return {"wide": wide, "narrow": len(kinds) - wide}
    descriptors, are_wide = len(re.findall(r"cp\.async\.bulk\.tensor", code)), list[bool]()
    for access in _ACCESS.finditer(code):
        text = access.group(0)
        if access.group(1) is None:
            are_wide.append("0x10" in text)
        else:
            vector = re.search(r"\.v4\.[bfsu]32|\.v2\.[bfsu]64|\.v8\.[bfsu](16|32)|\.v4\.[bfsu]64", text)
            are_wide.append(vector is not None)
    return {"wide": descriptors + sum(are_wide), "narrow": are_wide.count(False)}


_DEFINED = re.compile(r"^\s*(%[\w#:, %]+?)\s*=\s*(?:\"?)([\w.]+)(.*)$")
_NAME = re.compile(r"%[\w]+")


def int32_multiplications(ttir: str) -> int:
    """The number of 32-bit multiplications that compute addresses in Triton IR: each may overflow beyond 2^31 elements.

    Coordinates of descriptors are always 32-bit and are not counted.
    """
    operation: dict[str, tuple[str, list[str], str]] = {}
    carried: dict[str, list[str]] = {}
    roots: list[str] = []
    for line in ttir.splitlines():
        line = line.split(" loc(")[0]
        for name, value in re.findall(r"(%[\w]+) = (%[\w]+)", line.partition("iter_args(")[2]):
            carried.setdefault(name, []).append(value)
        match = _DEFINED.match(line)
        if match is None:
            continue
        results, kind, rest = match.groups()
        inputs = _NAME.findall(rest.partition("iter_args(")[0])
        for result in results.split(","):
            operation[result.strip().split(":")[0]] = (kind, inputs, rest)
        if kind == "tt.addptr":
            roots.extend(inputs[1:2])
    seen: set[str] = set()
    products = 0
    while roots:
        name = roots.pop().split("#")[0]
        if name in seen:
            continue
        seen.add(name)
        roots.extend(carried.get(name, ()))
        kind, inputs, rest = operation.get(name, ("", [], ""))
        if kind == "tt.load":
            continue  # an index from memory does not count
        products += kind == "arith.muli" and re.search(r": (?:tensor<[\dx]*x)?i32", rest) is not None
        roots.extend(inputs)
    return products


def late_reads(ttir: str) -> int:
    """The number of scalars read from a tensor that other threads of the program may already have written.

    Each thread loads a scalar by itself. If a block is stored to the same tensor after it, there must be a reduction
    between the two, whose barrier makes all threads read before one of them writes.
    """
    base: dict[str, str] = {}
    unordered: dict[str, int] = {}
    late = 0
    for line in ttir.splitlines():
        match = _DEFINED.match(line)
        names: list[str] = _NAME.findall(line)
        if match is not None and match.group(2) in ("tt.addptr", "tt.splat", "tt.broadcast", "tt.bitcast"):
            base[names[0]] = base.get(names[1], names[1])
        elif match is not None and match.group(2) == "tt.load" and ": !tt.ptr<" in line:
            root = base.get(names[1], names[1])
            unordered[root] = unordered.get(root, 0) + 1
        elif '"tt.reduce"' in line:
            unordered.clear()
        elif " tt.store " in line and ": tensor<" in line:
            late += unordered.pop(base.get(names[0], names[0]), 0)
    return late


def _child(module: str, targets: Sequence[str], only: str, skip: int) -> None:
    """Compile the rest of a module: all for one target, or a fraction for each of several; print each begin and end."""
    tasks: list[tuple[Variant, str]] = []
    step = 8 * len(targets) if len(targets) > 1 else 1
    for first, target in enumerate(targets):
        tasks += [(v, target) for v in [v for v in variants_of(module, target) if re.search(only, v.name)][first::step]]
    for variant, target in tasks[skip:]:
        print("begin", target, variant.name, flush=True)
        try:
            result = compile_one(variant, target, module)
        except Exception as error:
            result = Compiled(module, variant.name, target, error=why(error))
        print("done", json.dumps(dataclasses.asdict(result)), flush=True)
    print("end", flush=True)


if __name__ == "__main__":
    _child(sys.argv[1], sys.argv[2].split(","), sys.argv[3], int(sys.argv[4]))

"""Compiles every kernel of the GPU rows at their real sizes for an H200, without one, and packs them.

    python benchmarks/warm_cache.py pack      # with the Triton of the target machine; takes minutes
    python benchmarks/warm_cache.py unpack    # on the target machine, before anything runs

Prints kernels that do not compile, spill or exceed shared memory. Rows run on tensors without memory; their launches
take Triton's own path with a stub driver, so that a launch on the target machine finds the kernel. Only loadable files
are packed. Triton stores the path of its cache in the files, so it is the same on both machines; if the versions of
Triton differ, kernels are compiled again.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["SEQFUSE_TUNE"] = "0"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ.pop("TRITON_INTERPRET", None)

import torch
from record import ROOT

FOLDER = Path("/tmp/seqfuse-warm-cache")
PACK = ROOT / "benchmarks" / "warm_cache.tar.xz"
PACKED = (".cubin", ".json", ".so")
TARGET = "sm_90"


def key() -> dict[str, str]:
    """The versions that must be the same on both machines."""
    import triton
    from triton.runtime.cache import triton_key

    return {"triton": triton.__version__, "key": triton_key(), "python": ".".join(map(str, sys.version_info[:2]))}


def launches(only: str, sizes: Any) -> Iterator[tuple[str, Any]]:
    """Launches of rows of single kernels, then of whole layers, with the key of the row."""
    import plain
    from gpu import blocks, rows
    from gpu.launched import of_block, of_row

    here = dataclasses.replace(sizes, device=torch.device("cpu"))
    for room in rows.OF_KERNELS:
        for case in sorted(room(here), key=lambda case: case.priority):
            if re.search(only, case.key):
                yield from ((case.key, launch) for launch in of_row(case))
    for model, tokens in itertools.product(here.models, here.tokens):
        if re.search(only, key := f"layer: {model.name} {tokens}"):
            layer = plain.fused("layer", blocks.spec_of(model, here.dropout), dtype=here.dtype)
            x = torch.empty(max(1, tokens // 2048), min(tokens, 2048), model.H, dtype=here.dtype)
            yield from ((key, launch) for launch in of_block(layer, x))


def work(only: str, stub: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Functions that compile each kernel, with the key of the row: real sizes in bfloat16, some in other dtypes."""
    from gpu import sizes

    seen: set[str] = set()
    every = sizes.real(), sizes.few(torch.float32), sizes.few(torch.float16)
    for key, launch in itertools.chain.from_iterable(launches(only, one) for one in every):
        told = f"{launch.kernel.__name__} {launch.num_warps} {launch.constexprs} {_each(_class, launch.args)}"
        if told not in seen:
            seen.add(told)
            yield f"{key}: {launch.kernel.__name__}", lambda launch=launch: compiled(launch, stub)


def compiled(launch: Any, stub: Any) -> None:
    """Compile a kernel and its launcher as a launch would; raises if it spills or exceeds shared memory."""
    from triton.runtime.jit import MockTensor

    from seqfuse.kernels._launch import keyed
    from seqfuse.testing.compile import resources
    from tools.compiled import SHARED_LIMIT

    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, **launch.options}
    options |= {name: keyed(value) for name, value in launch.constexprs.items()}
    # MockTensor has a dtype and an aligned address.
    args = _each(lambda arg: MockTensor(arg.dtype) if isinstance(arg, torch.Tensor) else arg, launch.args)
    made = launch.kernel.run(*args, grid=(launch.grid,), warmup=True, **options)
    stub.launcher(made.src, made.metadata)
    found = resources(made, TARGET)
    if found["spills"] or found["shared"] > SHARED_LIMIT[TARGET]:
        raise RuntimeError(f"{found['spills']} spilled, {found['shared']} shared")


def fill(only: str, budget: float) -> tuple[int, int]:
    """Compile the launches of rows; returns the number of kernels, and of failures, including a budget that ran out."""
    from tools.stub_driver import stub_driver

    until, failed = time.time() + budget, 0
    with stub_driver(checks=False) as stub:
        stub.launcher = launcher
        for name, compile in work(only, stub):
            if time.time() > until:
                print(f"{name}: the budget was over; its kernels and those of later rows are not packed", flush=True)
                return len(stub.compiled), failed + 1
            try:
                compile()
            except Exception as error:
                failed += 1
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
        return len(stub.compiled), failed


def launcher(source: Any, metadata: Any) -> None:
    """Compile a kernel's launcher, which Triton 3.6 writes in C for each signature; takes gcc a second."""
    from triton.backends.nvidia import driver
    from triton.runtime import build, cache

    if not hasattr(driver, "make_launcher"):
        return
    text = driver.make_launcher(source.constants, source.signature, getattr(metadata, "tensordesc_meta", None))
    kept = cache.get_cache_manager(hashlib.sha256((text + build.platform_key()).encode()).hexdigest())
    name = f"__triton_launcher{sysconfig.get_config_var('EXT_SUFFIX')}"
    if kept.get_file(name) is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        # A stand-in for the driver library, which is missing here, with the functions that the launcher calls. The
        # linker drops a library without any of them, and then the launcher could not be loaded on the target machine.
        stub, path = Path(folder, "libcuda.c"), Path(folder, "main.c")
        stub.write_text("".join(f"void {f}(void) {{}}\n" for f in sorted(set(re.findall(r"\bcu[A-Z]\w*", text)))))
        path.write_text(text)
        command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", str(stub)]
        subprocess.run(command, check=True)
        places = [driver.libdevice_dir, folder]
        built = build._build("__triton_launcher", str(path), folder, places, driver.include_dirs, driver.libraries, [])
        kept.put(Path(built).read_bytes(), name, binary=True)


def _class(arg: Any) -> Any:
    """The properties of an argument that kernels are specialized for."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype
    return ("one" if arg == 1 else (arg % 16 == 0, arg.bit_length() > 31)) if isinstance(arg, int) else type(arg)


def _each(of: Callable[[Any], Any], value: Any) -> Any:
    return tuple(_each(of, one) for one in value) if isinstance(value, tuple) else of(value)


def pack(only: str, budget: float) -> int:
    shutil.rmtree(FOLDER, ignore_errors=True)
    os.environ["TRITON_CACHE_DIR"] = str(FOLDER)
    count, failed = fill(only, budget)
    files = [file for file in sorted(FOLDER.rglob("*")) if file.suffix in PACKED]
    for group in FOLDER.rglob("__grp__*.json"):  # from Triton 3.9 on, all files in a group must exist
        named = json.loads(group.read_text())["child_paths"]
        kept = {name: path for name, path in named.items() if Path(name).suffix in PACKED}
        group.write_text(json.dumps({"child_paths": kept}))
    (FOLDER / "key.json").write_text(json.dumps(key()) + "\n")
    with tarfile.open(PACK, "w:xz") as tar:
        for file in [FOLDER / "key.json", *files]:
            tar.add(file, file.relative_to(FOLDER))
    size = PACK.stat().st_size / 2**20
    print(f"{PACK}: {count} kernels, {failed} failed, {len(files)} files, {size:.1f} MiB")
    return 1 if failed or not count else 0


def unpack() -> int:
    """Unpack to the folder of packing, and print whether the versions match; exit status 1 if not."""
    if not PACK.exists():
        print("there is no pack: kernels are compiled as they come")
        return 1
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    with tarfile.open(PACK) as tar:
        tar.extractall(FOLDER, filter="data")
    packed, here = json.loads((FOLDER / "key.json").read_text()), key()
    fits = packed == here
    print(f"export TRITON_CACHE_DIR={FOLDER}" if fits else f"packed for {packed}, this is {here}: compiled again")
    return 0 if fits else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", choices=["pack", "unpack"])
    parser.add_argument("--only", default="", help="a regular expression that a row's key contains")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds to compile in")
    arguments = parser.parse_args()
    return pack(arguments.only, arguments.budget) if arguments.what == "pack" else unpack()


if __name__ == "__main__":
    raise SystemExit(main())

"""What compiling the C kernels of a model costs on a CPU, once for a machine, and loading them in each process.

A process runs a training step with an empty cache, a second one with what the first left there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import bench_cpu
import plain
import torch
from record import write

from seqfuse import compiler
from seqfuse.run import fuser as run

ROUNDS = 5
MODELS = {
    "GPT block of 256, dropout 0.1": dataclasses.replace(bench_cpu.GPT, dropout=0.1),
    "Llama block of 256": bench_cpu.LLAMA,
}


def measured(name: str) -> dict[str, float]:
    """Kernels that a training step brings, CPU seconds of the compilers, and those of this process to load kernels."""
    torch.set_num_threads(1)
    compiler.compiler()  # which is tried with a kernel that no model has
    folder = compiler.folder()
    before, others, loading = len([*folder.iterdir()]), _children(), 0.0

    def compile_all(sources: Iterable[str]) -> int:
        nonlocal loading
        asked, begun = [*sources], time.process_time()
        compiled = compiler.compile_all(asked)
        loading += time.process_time() - begun
        return compiled

    run.compile_all = compile_all
    spec = MODELS[name]
    model = plain.fused("layer", spec).train()
    model(torch.randn(1, 1024, spec.H, requires_grad=True)).sum().backward()
    return {"kernels": len([*folder.iterdir()]) - before, "compilers": _children() - others, "loading": loading}


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--one", metavar="MODEL", help="print what one process takes as JSON")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one)))
        return
    known = compiler.compiler()
    if known is None:
        raise SystemExit(compiler.why_none())
    rows: list[dict[str, Any]] = []
    for name in MODELS:
        times: dict[str, list[float]] = {"compilers": [], "loading": []}
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                command, environment = (
                    [sys.executable, __file__, "--one", name],
                    {**os.environ, "XDG_CACHE_HOME": folder},
                )
                cold, warm = (
                    json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment).stdout)
                    for _ in range(2)
                )
            assert warm["kernels"] == 0, warm
            times["compilers"].append(cold["compilers"])
            times["loading"].append(warm["loading"])
        row = {"model": name, "kernels": cold["kernels"], **{k: statistics.median(t) for k, t in times.items()}}
        rows.append(row)
        print(f"{name}: {row['kernels']} kernels, compilers {row['compilers']:.2f} CPU s, "
              f"loading {row['loading'] * 1e3:.1f} ms", flush=True)  # fmt: skip
    print(f"wrote {write('compile', {'compiler': known.version, 'rows': rows}).name}")


if __name__ == "__main__":
    main()

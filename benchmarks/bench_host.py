"""What the engine costs on the host: instructions against `nn.Sequential`, planning, plan-cache hits.

Instructions are counted with callgrind, which repeats from run to run where times do not. Needs valgrind.
Writes `results/planning.json` and `results/host.json`; `--sizes` without a number plans only.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from host_models import H, pair
from record import write
from torch.utils.benchmark import Timer

import seqfuse as sf
from seqfuse import ops

HERE = Path(__file__).resolve().parent
STATEMENTS = {
    "forward": "{m}(x)",
    "forward+backward": "{m}(x).backward(g)",
    "no grad": "with torch.no_grad(): {m}(x)",
}


def counted(statement: str, setup: str, number: int) -> float:
    """Instructions of one run of a statement behind a set-up that imports from this folder, Python's own included."""
    # The counter starts `python`: it must be this one.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    setup = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{setup}"
    stats = Timer(statement, setup=setup).collect_callgrind(number=number, collect_baseline=False)
    return stats.counts(denoise=True) / number


def instructions(statement: str, operations: int, number: int) -> float:
    """Instructions of one call, after a warm-up."""
    setup = f"""
import torch
from host_models import HandWritten, pair
mine, theirs, x, g = pair({operations})
weights = list(theirs.parameters())
hand = lambda x: HandWritten.apply(x, *weights)
for _ in range(20):
    mine(x).backward(g); theirs(x).backward(g)
    with torch.no_grad(): mine(x); theirs(x)
"""
    return counted(statement, setup, number)


def host_cost(sizes: list[int], number: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for operations in sizes:
        pair(operations)  # a red check reports no cost
        for what, statement in STATEMENTS.items():
            mine = instructions(statement.format(m="mine"), operations, number)
            theirs = instructions(statement.format(m="theirs"), operations, number)
            row = {"operations": operations, "what": what, "seqfuse": mine, "eager": theirs, "ratio": mine / theirs}
            if operations == 6 and what == "forward+backward":
                row["hand_written_ratio"] = instructions(statement.format(m="hand"), operations, number) / theirs
            print(
                f"{operations:>3} operations, {what:<17} {mine:>12,.0f} {theirs:>12,.0f}  {row['ratio']:.3f}",
                flush=True,
            )
            rows.append(row)
    return rows


def planning() -> list[dict[str, Any]]:
    """Time to read and plan a list, and to look a plan up again."""
    rows: list[dict[str, Any]] = []
    x = torch.randn(4, H)
    for count in (10, 100, 1000, 10_000):
        make = [
            lambda: ops.LayerNorm(H),
            lambda: ops.Linear(H, H),
            ops.GeLU,
            lambda: ops.Linear(H, H, bias=False),
            ops.ReLU,
        ]
        model = sf.Sequential(*(make[i % 5]() for i in range(count)))
        began = time.perf_counter()
        model.plan(x)
        first = time.perf_counter() - began
        op_list = model._fuser.op_list()
        times = []
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(10):
                op_list.fingerprint.holds()
            times.append((time.perf_counter() - began) / 10)
        rows.append({"operations": count, "plan_seconds": first, "lookup_microseconds": statistics.median(times) * 1e6})
        print(
            f"{count:>6} operations: plan {first * 1e3:.1f} ms, look-up {rows[-1]['lookup_microseconds']:.1f} us",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 6, 24])
    parser.add_argument("--number", type=int, default=50)
    options = parser.parse_args()
    print(f"wrote {write('planning', {'planning': planning()}).name}")
    if options.sizes and shutil.which("valgrind"):
        print(f"wrote {write('host', {'host': host_cost(options.sizes, options.number)}).name}")
    else:
        print("instructions are not counted")


if __name__ == "__main__":
    main()

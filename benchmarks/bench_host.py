"""Measures the engine's CPU overhead: instructions against `nn.Sequential`, planning, plan-cache hits.

Instructions are counted with callgrind, since counts repeat between runs and times do not. Needs valgrind.
Writes `results/planning.json` and `results/host.json`.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from record import write
from torch import Tensor, nn
from torch.utils.benchmark import Timer

import seqfuse as sf
from seqfuse import ops

H, ROWS = 16, 4
STATEMENTS = {
    "forward": "{m}(x)",
    "forward+backward": "{m}(x).backward(g)",
    "no grad": "with torch.no_grad(): {m}(x)",
}
SETUP = """
import sys; sys.path.insert(0, {folder!r})
import torch
from bench_host import pair
mine, theirs, x, g = pair({operations})
for _ in range(20):
    mine(x).backward(g); theirs(x).backward(g)
    with torch.no_grad(): mine(x); theirs(x)
"""


class PlainResidual(nn.Sequential):
    """A residual branch as written by users of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def model(operations: int, room: Any, sequence: Any, residual: Any, gelu: Any) -> Any:
    """1, 6 or 24 operations: one GeLU, or blocks of LayerNorm, Linear, GeLU, Linear, residual."""
    blocks = (residual(room.LayerNorm(H), room.Linear(H, H), gelu(), room.Linear(H, H)) for _ in range(operations // 6))
    return sequence(gelu()) if operations == 1 else sequence(*blocks)


def pair(operations: int) -> tuple[sf.Sequential, nn.Sequential, Tensor, Tensor]:
    """Both models with the same weights, an input and an incoming gradient; their results are compared."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mine = model(operations, ops, sf.Sequential, ops.Residual, ops.GeLU)
    theirs = model(operations, nn, nn.Sequential, PlainResidual, nn.GELU)
    mine.load_state_dict(theirs.state_dict(), strict=True)
    x, g = torch.randn(ROWS, H, requires_grad=True), torch.randn(ROWS, H)
    results: list[list[Any]] = []
    for one in (mine, theirs):
        y = one(x)
        y.backward(g)
        results.append([y.detach(), x.grad, *(p.grad for p in one.parameters())])
        x.grad = None
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    return mine, theirs, x, g


def host_cost(number: int = 50) -> list[dict[str, Any]]:
    """Instructions of one call after a warm-up, including Python's."""
    folder, rows = str(Path(__file__).resolve().parent), list[dict[str, Any]]()
    # The counter starts `python`, which must be this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for operations in (1, 6, 24):
        pair(operations)  # raises if the results differ, so no cost is reported
        for what, statement in STATEMENTS.items():
            setup = SETUP.format(folder=folder, operations=operations)
            timers = (Timer(statement.format(m=m), setup=setup) for m in ("mine", "theirs"))
            stats = [timer.collect_callgrind(number=number, collect_baseline=False) for timer in timers]
            mine, theirs = (one.counts(denoise=True) / number for one in stats)
            row = {"operations": operations, "what": what, "seqfuse": mine, "eager": theirs, "ratio": mine / theirs}
            rows.append(row)
            print(row, flush=True)
    return rows


def planning() -> list[dict[str, Any]]:
    """Time to read and plan a sequence, and of a plan-cache hit."""
    rows: list[dict[str, Any]] = []
    x = torch.randn(4, H)
    for count in (10, 100, 1000, 10_000):
        make = (lambda: ops.LayerNorm(H), lambda: ops.Linear(H, H), ops.GeLU, lambda: ops.Linear(H, H, False), ops.ReLU)
        sequence = sf.Sequential(*(make[i % 5]() for i in range(count)))
        began = time.perf_counter()
        sequence.plan(x)
        first = time.perf_counter() - began
        op_list, times = sequence._fuser.op_list(), list[float]()
        for _ in range(20):
            began = time.perf_counter()
            for _ in range(10):
                op_list.fingerprint.holds()
            times.append((time.perf_counter() - began) / 10)
        rows.append({"operations": count, "plan_seconds": first, "lookup_microseconds": statistics.median(times) * 1e6})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    write("planning", {"planning": planning()})
    if shutil.which("valgrind"):
        write("host", {"host": host_cost()})
    else:
        print("instructions are not counted: there is no valgrind")


if __name__ == "__main__":
    main()

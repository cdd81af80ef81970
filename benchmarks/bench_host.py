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


class PlainResidual(nn.Sequential):
    """What a user of torch writes for a residual branch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def model(operations: int, room: Any, sequence: Any, residual: Any, gelu: Any) -> Any:
    """1, 6 or 24 operations: one GeLU, or blocks of LayerNorm, Linear, GeLU, Linear, residual."""
    if operations == 1:
        return sequence(gelu())
    block = (room.LayerNorm, room.Linear, lambda *_: gelu(), room.Linear)
    return sequence(*(residual(*(make(*(H, H)[: 1 + (i > 0)]) for i, make in enumerate(block)))
                      for _ in range(operations // 6)))  # fmt: skip


def pair(operations: int) -> tuple[sf.Sequential, nn.Sequential, Tensor, Tensor]:
    """Both models with the same weights, an input and an incoming gradient; checked against each other."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mine = model(operations, ops, sf.Sequential, ops.Residual, ops.GeLU)
    theirs = model(operations, nn, nn.Sequential, PlainResidual, nn.GELU)
    mine.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(ROWS, H, requires_grad=True)
    g = torch.randn(ROWS, H)
    results: list[list[Any]] = []
    for one in (mine, theirs):
        x.grad = None
        y = one(x)
        y.backward(g)
        results.append([y.detach(), x.grad, *(p.grad for p in one.parameters())])
        x.grad = None
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    return mine, theirs, x, g


def instructions(statement: str, operations: int, number: int) -> float:
    """Instructions of one call, after a warm-up, Python's own included."""
    # The counter starts `python`: it must be this one.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    setup = f"""
import sys; sys.path.insert(0, {str(Path(__file__).resolve().parent)!r})
import torch
from bench_host import pair
mine, theirs, x, g = pair({operations})
for _ in range(20):
    mine(x).backward(g); theirs(x).backward(g)
    with torch.no_grad(): mine(x); theirs(x)
"""
    stats = Timer(statement, setup=setup).collect_callgrind(number=number, collect_baseline=False)
    return stats.counts(denoise=True) / number


def host_cost(sizes: list[int], number: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for operations in sizes:
        pair(operations)  # a red check reports no cost
        for what, statement in STATEMENTS.items():
            mine, theirs = (instructions(statement.format(m=m), operations, number) for m in ("mine", "theirs"))
            rows.append(
                {"operations": operations, "what": what, "seqfuse": mine, "eager": theirs, "ratio": mine / theirs}
            )
            print(f"{operations:>3} operations, {what:<17} {mine:>12,.0f} {theirs:>12,.0f}  {mine / theirs:.3f}",
                  flush=True)  # fmt: skip
    return rows


def planning() -> list[dict[str, Any]]:
    """Time to read and plan a list, and to look a plan up again."""
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
        print(f"{count:>6} operations: plan {first * 1e3:.1f} ms, look-up {rows[-1]['lookup_microseconds']:.1f} us",
              flush=True)  # fmt: skip
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

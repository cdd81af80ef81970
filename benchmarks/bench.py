"""Runs every benchmark that needs no GPU, one after the other, each in a separate process.

Each part writes JSON into `results/`; then the tables of README.md and docs/ are drawn again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = {
    "host": ("bench_host.py",),
    "cpu": ("bench_cpu.py", "--files", "cpu", "cpu_experts"),
    "memory": ("bench_counts.py", "memory"),
    "layers": ("bench_counts.py", "layers"),
    "convert": ("bench_cpu.py", "--files", "convert"),
    "peak": ("bench_peak.py", "peak"),
    "front": ("bench_peak.py", "front"),
    "traffic": ("traffic.py",),
    "trained": ("bench_trained.py",),
}


def run(script: str, *arguments: str) -> bool:
    begun = time.perf_counter()
    # Measurements that a user has stored on this machine must not affect the comparison.
    environment = {**os.environ, "SEQFUSE_TUNE": "0", "PYTHONPATH": str(HERE.parent)}
    status = subprocess.run([sys.executable, HERE / script, *arguments], env=environment, check=False).returncode
    print(f"{script}: exit status {status}, {time.perf_counter() - begun:.0f} s\n", flush=True)
    return not status


if __name__ == "__main__":
    if unknown := [part for part in sys.argv[1:] if part not in PARTS]:
        raise SystemExit(f"there is no {', '.join(unknown)}; there are {', '.join(PARTS)}")
    failed = [part for part in sys.argv[1:] or PARTS if not run(*PARTS[part])]
    raise SystemExit(not run("report.py") or bool(failed))

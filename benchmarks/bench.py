"""Everything that can be measured without a GPU, one after the other, each in a process of its own.

CPU overhead in instructions, CPU time of steps beside eager torch, planning, bytes saved for
backward, converted models, memory and time of their training steps beside activation checkpointing, and the traffic of
each kernel counted in Triton's interpreter. Each writes its JSON into `results/`; then the tables of README.md and
docs/ are drawn anew.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = {
    "host": "bench_host.py",
    "cpu": "bench_cpu.py",
    "memory": "bench_memory.py",
    "convert": "bench_convert.py",
    "peak": "bench_peak.py",
    "front": "bench_front.py",
    "traffic": "traffic.py",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="some of them; all by default")
    chosen = parser.parse_args().parts or list(PARTS)
    # What a user has measured on this machine must not decide what is compared.
    environment = {**os.environ, "SEQFUSE_TUNE": "0", "PYTHONPATH": str(HERE.parent)}
    bad: list[str] = []
    for part in chosen:
        begun = time.perf_counter()
        status = subprocess.run([sys.executable, str(HERE / PARTS[part])], env=environment, check=False).returncode
        print(f"{part}: {'done' if status == 0 else f'exit status {status}'} in {time.perf_counter() - begun:.0f} s\n")
        bad += [part] * (status != 0)
    drawn = subprocess.run([sys.executable, str(HERE / "report.py")], env=environment, check=False).returncode
    return 1 if bad or drawn else 0


if __name__ == "__main__":
    raise SystemExit(main())

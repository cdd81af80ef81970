"""`python -m tests.versions`: the versions that the tests run with, in one line."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
import triton


def processor() -> str:
    """The processor's name on Linux, else the architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{versions}, {processor()} ({torch.backends.cpu.get_cpu_capability()})")

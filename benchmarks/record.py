"""Writes results with their origin: commit, machine, versions."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

# A benchmark may run from a copy of the tree, without installation.
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def about() -> dict[str, Any]:
    """Commit, overridden by `BENCH_COMMIT`; whether the tree has changes; device and versions."""

    def git(*arguments: str) -> str:
        with contextlib.suppress(OSError):
            return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True).stdout.strip()
        return ""

    cuda, stated = torch.cuda.is_available(), os.environ.get("BENCH_COMMIT")
    triton = version_of("triton")
    return {
        "commit": stated or git("rev-parse", "HEAD") or "unknown",
        "changed": stated is None and bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if cuda else _cpu(),
        "capability": torch.backends.cpu.get_cpu_capability(),  # instruction set of the CPU
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        **({"triton": triton} if triton else {}),
    }


def version_of(package: str) -> str | None:
    """A package's version, if it is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)", info.read_text() if info.exists() else "", re.MULTILINE)
    return found[1].strip() if found else platform.processor()


def lines(data: dict[str, Any]) -> str:
    """Results as JSON, with a line for each row."""

    def of(value: Any) -> str:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if not any(isinstance(one, dict | list) for one in inner):
            return json.dumps(value)
        names = (f"{json.dumps(name)}: " for name in value) if isinstance(value, dict) else ("" for _ in value)
        written = ",\n".join(f"  {name}{json.dumps(one)}" for name, one in zip(names, inner, strict=True))
        return f"{{\n{written}\n }}" if isinstance(value, dict) else f"[\n{written}\n ]"

    return "{\n" + ",\n".join(f" {json.dumps(name)}: {of(value)}" for name, value in data.items()) + "\n}\n"


def write(name: str, rows: dict[str, Any], by_capability: bool = False) -> Path:
    """Write `results/<name>.json`, print its name, return its path; `by_capability`: a separate file for AVX-512."""
    if by_capability and torch.backends.cpu.get_cpu_capability() == "AVX512":
        name += "_avx512"  # where float32 GEMMs differ
    path = RESULTS / f"{name}.json"
    path.write_text(lines({"about": about(), **rows}))
    print(f"wrote {path.name}")
    return path

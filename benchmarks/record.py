"""What every benchmark writes beside its rows: commit, machine, versions."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def about() -> dict[str, Any]:
    """Commit, whether the tree was changed since, device and versions."""
    root = RESULTS.parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True).stdout.strip()

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu()
    return {
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def write(name: str, rows: dict[str, Any]) -> Path:
    """Write `results/<name>.json` and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"about": about(), **rows}, indent=1) + "\n")
    return path

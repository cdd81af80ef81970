"""The machine that measurements are of: its device, and the versions of what runs on it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import platform
import re
import sys
from pathlib import Path
from typing import Any, cast

import torch

from .env import Env


@dataclasses.dataclass(frozen=True)
class Machine:
    """What measurements hold for: a device, and the versions of what runs on it."""

    device: str
    arch: str
    driver: str | None
    threads: int | None
    triton_runs: bool
    torch: str
    triton: str | None
    seqfuse: str

    @classmethod
    def of(cls, env: Env) -> Machine | None:
        """The machine of an environment; `None` where that is not here, or its devices were never used."""
        if env.device == "cuda" and not torch.cuda.is_initialized():
            return None  # planning for an architecture by name starts no device
        return _machine(env.device, env.arch, env.triton, torch.get_num_threads() if env.device == "cpu" else None)

    @property
    def file_name(self) -> str:
        """Of its measurements in the user's cache."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()[:16] + ".json"

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads and self.threads > 1 else ""
        return f"{self.device}{threads}"


@functools.lru_cache(64)
def _machine(kind: str, arch: str, triton_runs: bool, threads: int | None) -> Machine | None:
    stated = _stated("/proc/cpuinfo", r"^model name\s*:\s*(.+)$").strip()
    name, driver = stated or platform.processor() or platform.machine(), None
    if kind == "cuda":
        if not torch.cuda.is_available():
            return None
        properties = [cast(Any, torch.cuda).get_device_properties(i) for i in range(torch.cuda.device_count())]
        here = [p for i, p in enumerate(properties) if Env.of(f"cuda:{i}").arch == arch]
        if not here:
            return None
        # An Env names no index, so cards of one architecture that differ share a table of their own.
        name = " + ".join(sorted({str(p.name) for p in here}))
        stated = _stated("/proc/driver/nvidia/version", r"(\d+(?:\.\d+)+)")
        driver = f"{stated} cuda {torch.version.cuda} hip {torch.version.hip}".strip()
    elif kind != "cpu":
        return None
    own: Any = sys.modules[__package__ or "seqfuse"]
    triton = _version("triton")
    return Machine(name, arch, driver, threads, triton_runs, torch.__version__, triton, own.__version__)


def _version(distribution: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _stated(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else ""

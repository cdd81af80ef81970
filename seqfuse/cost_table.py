"""Measured times of fusions: a table for each machine, read by plans and stored in a file."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import platform
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch

from . import store
from .env import Env
from .errors import CacheWarning
from .operation import Version, config_version
from .settings import settings

MOST_NANOSECONDS = 1e15
LOCK_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine of measurements: a device, and the versions of its software.

    `seqfuse` is the version of this library with a hash of its kernels, operations and fusions.
    """

    device: str
    arch: str
    driver: str | None
    threads: int | None
    kernels: str | None
    torch: str
    triton: str | None
    seqfuse: str

    @classmethod
    def of(cls, env: Env) -> Machine | None:
        """The machine of an environment; `None` if it is another machine, or its devices were never used."""
        if env.device == "cuda" and not torch.cuda.is_initialized():
            return None  # planning by architecture name must not initialize CUDA
        return _machine(env.device, env.arch, _compiled(env), torch.get_num_threads() if env.device == "cpu" else None)

    @property
    def file_name(self) -> str:
        """Name of the file of its measurements in the user's cache."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()[:16] + ".json"

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads and self.threads > 1 else ""
        return f"{self.device}{threads}"


def _compiled(env: Env) -> str | None:
    """The compiler of the kernels, so that each compiler has its own table."""
    if env.kernels != "c":
        return env.kernels
    from . import compiler

    found = compiler.compiler()
    return None if found is None else f"c: {found.version} {' '.join(found.flags)}"


@functools.lru_cache(64)
def _machine(kind: str, arch: str, kernels: str | None, threads: int | None) -> Machine | None:
    stated = _stated("/proc/cpuinfo", r"^model name\s*:\s*(.+)$").strip()
    name, driver = stated or platform.processor() or platform.machine(), None
    if kind == "cuda":
        if not torch.cuda.is_available():
            return None
        properties = [cast(Any, torch.cuda).get_device_properties(i) for i in range(torch.cuda.device_count())]
        here = [p for i, p in enumerate(properties) if Env.of(f"cuda:{i}").arch == arch]
        if not here:
            return None
        # An Env has no device index, so different cards of one architecture share a table.
        name = " + ".join(sorted({str(p.name) for p in here}))
        driver = f"{driver_version()} cuda {torch.version.cuda} hip {torch.version.hip}".strip()
    elif kind != "cpu":
        return None
    own: Any = sys.modules[__package__ or "seqfuse"]
    triton, sources = version_of("triton"), f"{own.__version__} {_sources()}"
    return Machine(name, arch, driver, threads, kernels, torch.__version__, triton, sources)


def _stated(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else ""


def driver_version() -> str:
    """The version of NVIDIA's driver; empty without one."""
    return _stated("/proc/driver/nvidia/version", r"(\d+(?:\.\d+)+)")


def version_of(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def _sources() -> str:
    found, here = hashlib.sha256(), Path(__file__).parent
    rooms = [here / room for room in ("kernels", "ops", "fusions")]
    for path in sorted(path for room in rooms for path in room.rglob("*") if path.suffix in (".py", ".h")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """Nanoseconds of one pass by a fusion and by the operations it replaces, or why it could not be measured.

    `noise` is the uncertainty of the difference: smaller differences are ignored.

    Raises:
        ValueError: for an invalid time, or for both times and a failure.
    """

    fused: float = 0.0
    unfused: float = 0.0
    failed: str = ""
    noise: float = 0.0

    def __post_init__(self) -> None:
        times = self.fused, self.unfused, self.noise
        fits = all(type(t) in (int, float) and 0 <= t < MOST_NANOSECONDS for t in times)
        if not fits or type(self.failed) is not str or bool(self.failed) == bool(self.fused and self.unfused):
            raise ValueError("a measurement is two times in nanoseconds, or a reason")

    @property
    def saving(self) -> int:
        """Nanoseconds saved per pass."""
        return round(self.unfused - self.fused)

    @property
    def refusal(self) -> str | None:
        """Why a plan does not use the fusion; `None` if it is faster by more than the noise."""
        if self.failed:
            return f"it failed when it was measured: {self.failed[:300]}"
        if self.saving > self.noise:
            return None
        times = f"measured {self.fused / 1000:.1f} us against {self.unfused / 1000:.1f} us unfused"
        return f"{times}, within {self.noise / 1000:.1f} us of noise" if self.saving > 0 else times


_tables: dict[Machine, dict[str, Measurement]] = {}
_warned: set[Path | None] = set()


def table(machine: Machine) -> Mapping[str, Measurement]:
    """The measurements of a machine by key; the user's file is read at the first call."""
    known = _tables.get(machine)
    if known is None:
        path = user_file(machine, create=False) if settings().tune else None
        known = _tables.setdefault(machine, {} if path is None else load_own(path, machine))
    return known


def keep_measured(machine: Machine, found: Mapping[str, Measurement], *, instead: bool = False) -> None:
    """Add measurements for plans, or replace all existing ones with them."""
    known = dict(found) if instead else {**table(machine), **found}
    if known != table(machine):
        _tables[machine] = known
        config_version.measured = Version()  # existing plans become invalid
        config_version.bump()


def user_file(machine: Machine, *, create: bool) -> Path | None:
    """The file of a machine in the user's cache; `None`, with one warning, if the cache cannot be used."""
    try:
        folder = store.user_folder("tune", create=create)
    except OSError as error:
        _warn(None, f"the user's cache cannot be used: {error}")
        return None
    return None if folder is None else folder / machine.file_name


def measured_in(path: Path, machine: Machine) -> dict[str, Measurement]:
    """The measurements in a file, empty if there is no file. The file contains data only, no code.

    Raises:
        OSError: if it cannot be read.
        ValueError: if its content is invalid or from another machine.
    """
    data = store.read(path)
    if data is None:
        return {}
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from None
    try:
        given, entries = document["machine"], {key: Measurement(**one) for key, one in document["entries"].items()}
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"it is not a table of measurements: {error}") from None
    if given != dataclasses.asdict(machine):
        raise ValueError(f"it was measured on another machine or with other versions, {given}")
    return entries


def load_own(path: Path, machine: Machine) -> dict[str, Measurement]:
    """Like `measured_in`, for a file in the user's cache: a corrupt file is removed, with a warning."""
    try:
        try:
            return measured_in(path, machine)
        except ValueError as error:
            path.unlink()
            warnings.warn(f"{path} was corrupt and is removed: {error}", CacheWarning, stacklevel=2)
    except OSError as error:
        _warn(path, f"{path} cannot be read: {error}")
    return {}


def save(path: Path, machine: Machine, found: Mapping[str, Measurement]) -> None:
    """Add measurements to a file, replaced atomically; if that fails they stay in memory, with one warning."""
    from filelock import FileLock

    try:
        # A longer suffix than `.lock`, which could be the name of a user's file, such as `poetry.lock`.
        with FileLock(path.with_name(f"{path.name}.seqfuse.lock"), timeout=LOCK_SECONDS, mode=0o600):
            entries = {key: dataclasses.asdict(one) for key, one in {**measured_in(path, machine), **found}.items()}
            document = {"machine": dataclasses.asdict(machine), "entries": entries}
            store.write(path, json.dumps(document, indent=1, allow_nan=False).encode())
    except (OSError, ValueError, NotImplementedError) as error:  # an existing file is not overwritten
        _warn(path, f"measurements are kept in memory only: {error}")


def _warn(path: Path | None, message: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(message, CacheWarning, stacklevel=3)

"""Measured times of fusions: the table of one machine that plans read, and the file it is kept in."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
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

FORMAT = 2
MOST_NANOSECONDS = 1e15
_SOURCES = ("kernels", "ops", "fusions")
SHIPPED = Path(__file__).parent / "measured"
"""The folder of measurements that come with this library: a file a device, as `sf.tune(file=...)` writes it."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """The machine that measurements hold for: a device, and versions of the software on it."""

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
        """The machine of an environment; `None` where that is not here, or its devices were never used."""
        if env.device == "cuda" and not torch.cuda.is_initialized():
            return None  # planning for an architecture by name starts no device
        return _machine(env.device, env.arch, _compiled(env), torch.get_num_threads() if env.device == "cpu" else None)

    @property
    def file_name(self) -> str:
        """Name of the file of its measurements in the user's cache."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()[:16] + ".json"

    def __str__(self) -> str:
        threads = f", {self.threads} threads" if self.threads and self.threads > 1 else ""
        return f"{self.device}{threads}"


def _compiled(env: Env) -> str | None:
    """What kernels are made with, so that another compiler has a table of its own."""
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
        # An Env names no index, so cards of one architecture that differ share a table of their own.
        name = " + ".join(sorted({str(p.name) for p in here}))
        stated = _stated("/proc/driver/nvidia/version", r"(\d+(?:\.\d+)+)")
        driver = f"{stated} cuda {torch.version.cuda} hip {torch.version.hip}".strip()
    elif kind != "cpu":
        return None
    own: Any = sys.modules[__package__ or "seqfuse"]
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = None
    return Machine(name, arch, driver, threads, kernels, torch.__version__, triton, own.__version__)


def _stated(path: str, pattern: str) -> str:
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """Nanoseconds of one pass by a fusion and by the operations it replaces, or why it could not be measured.

    `noise` is what the difference may be off by: one that is no larger says nothing.
    """

    fused: float = 0.0
    unfused: float = 0.0
    failed: str = ""
    noise: float = 0.0

    @property
    def saving(self) -> int:
        """Nanoseconds saved per pass."""
        return round(self.unfused - self.fused)

    @property
    def refusal(self) -> str | None:
        """Why a plan does not use the fusion; `None` where it is faster by more than the noise."""
        if self.failed:
            return f"it failed when it was measured: {self.failed[:300]}"
        if self.saving > self.noise:
            return None
        times = f"measured {self.fused / 1000:.1f} us against {self.unfused / 1000:.1f} us unfused"
        return f"{times}, within {self.noise / 1000:.1f} us of noise" if self.saving > 0 else times


@functools.cache
def sources() -> str:
    """Hash of the sources of our own kernels, operations and fusions: measurements of others do not count."""
    found, here = hashlib.sha256(), Path(__file__).parent
    for path in sorted(path for room in _SOURCES for path in (here / room).rglob("*.py")):
        found.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


_tables: dict[Machine, dict[str, Measurement]] = {}
_warned: set[Path | None] = set()


def table(machine: Machine) -> Mapping[str, Measurement]:
    """The measurements of a machine by what they are known by; the user's file is read when first asked for."""
    known = _tables.get(machine)
    if known is None:
        path = user_file(machine, create=False) if settings().tune else None
        known = _tables.setdefault(machine, {**shipped(machine), **({} if path is None else load_own(path, machine))})
    return known


def shipped(machine: Machine) -> dict[str, Measurement]:
    """The measurements that came with this library for the same device and versions, whatever the driver."""
    path = SHIPPED / (re.sub(r"[^a-z0-9]+", "-", machine.device.lower()) + ".json")
    if not path.is_file():
        return {}
    document = json.loads(path.read_bytes())
    here = dataclasses.asdict(machine)
    same = all(document["machine"][name] == here[name] for name in here if name not in ("driver", "threads"))
    return entries(document["entries"]) if same else {}


def add(machine: Machine, found: Mapping[str, Measurement], *, instead: bool = False) -> None:
    """Add measurements for plans to use, or let them take the place of all that were known."""
    known = dict(found) if instead else {**table(machine), **found}
    if known != table(machine):
        _tables[machine] = known
        config_version.measured = Version()  # sequences planned before are planned anew
        config_version.bump()


def user_file(machine: Machine, *, create: bool) -> Path | None:
    """The file of a machine in the user's cache; `None`, with one warning, where that cannot be used."""
    try:
        folder = store.user_folder("tune", create=create)
    except OSError as error:
        _warn(None, f"the user's cache cannot be used: {error}")
        return None
    return None if folder is None else folder / machine.file_name


def load(path: Path, machine: Machine) -> dict[str, Measurement]:
    """The measurements in a file, none where there is no file.

    Raises:
        OSError, Corrupt: if it cannot be read, holds something else, or was measured on another machine.
    """
    data = store.read(path)
    return {} if data is None else parse(data, machine)


def load_own(path: Path, machine: Machine) -> dict[str, Measurement]:
    """Likewise of a file in the user's cache: a corrupt one is renamed to `*.bad`, with a warning."""
    try:
        try:
            return load(path, machine)
        except store.Corrupt as error:
            os.replace(path, path.with_name(f"{path.name}.bad"))
            warnings.warn(f"{path} was corrupt and is now {path.name}.bad: {error}", CacheWarning, stacklevel=2)
    except OSError as error:
        _warn(path, f"{path} cannot be read: {error}")
    return {}


def save(path: Path, machine: Machine, found: Mapping[str, Measurement]) -> None:
    """Add measurements to a file; where that fails they stay in memory, with one warning."""
    try:
        with store.locked(path):
            known = {**load(path, machine), **found}
            document = {"format": FORMAT, "machine": dataclasses.asdict(machine), "sources": sources()}
            store.write(path, json.dumps({**document, "entries": stated(known)}, indent=1, allow_nan=False).encode())
    except (OSError, store.Corrupt) as error:  # what is there is not written over
        _warn(path, f"measurements are kept in memory only: {error}")


def _warn(path: Path | None, message: str) -> None:
    if path not in _warned:
        _warned.add(path)
        warnings.warn(message, CacheWarning, stacklevel=3)


def stated(found: Mapping[str, Measurement]) -> dict[str, dict[str, Any]]:
    """Measurements as plain data; `entries` reads them."""
    return {key: dataclasses.asdict(m) for key, m in found.items()}


def entries(data: Mapping[str, Any]) -> dict[str, Measurement]:
    """The measurements that plain data state.

    Raises:
        Corrupt: if an entry is of another form, or holds a time that is none.
    """
    return {key: _entry(key, entry) for key, entry in data.items()}


def parse(data: bytes, machine: Machine) -> dict[str, Measurement]:
    """The measurements that a file's bytes state; nothing in them is code.

    Raises:
        Corrupt: if they are of another form or of another machine, or hold a time that is none.
    """
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise store.Corrupt(f"it is no JSON: {error}") from None
    if not isinstance(document, dict) or cast(dict[str, Any], document).get("format") != FORMAT:
        raise store.Corrupt(f"it is not of format {FORMAT}")
    given = cast(dict[str, Any], document)
    if not isinstance(given.get("entries"), dict) or not isinstance(given.get("machine"), dict):
        raise store.Corrupt("it has no machine or no entries")
    if given["machine"] != dataclasses.asdict(machine):
        raise store.Corrupt(f"it was measured on another machine or with other versions, {given['machine']}")
    return entries(given["entries"]) if given.get("sources") == sources() else {}


def _entry(key: str, given: Any) -> Measurement:
    try:
        made = Measurement(**given)
        times = made.fused, made.unfused, made.noise
        fits = all(type(t) in (int, float) and 0 <= t < MOST_NANOSECONDS for t in times)
        fits = fits and type(made.failed) is str and bool(made.failed) != bool(made.fused and made.unfused)
    except TypeError:  # it has other fields, or none
        fits, made = False, Measurement()
    if not fits:
        raise store.Corrupt(f"the entry of {key[:60]!r} holds no two times")
    return made

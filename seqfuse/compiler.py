"""The C compiler for CPU kernels: found and tested once; compiled kernels are cached for the user.

A kernel is C source that defines a function `k`. It may also define `python`, which returns a Python function that
calls `k` faster than `ctypes` can. The cache key consists of source, compiler, version, flags and processor. Each file
ends with its checksum: a truncated file is never loaded but compiled again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from . import store
from .errors import CacheWarning
from .settings import settings

SECONDS = 120.0
"""Time limit of a compilation."""

# Floating-point traps and errno are off; NaN, infinities and signed zeros stay exact: never -ffast-math.
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fPIC", "-shared")
_DECLARED = "-Werror=implicit-function-declaration"  # head.h declares what kernels call
_MACHO = (
    ("-Wl,-undefined,dynamic_lookup",) if sys.platform == "darwin" else ()
)  # Python's symbols are resolved at load time
# A linker that does not read the C library takes less than half the time; the process has loaded it.
_FEW = ("-nostdlib", "-lgomp", "-lm", "-lgcc")
_PROBE = """
extern void *malloc(__SIZE_TYPE__);
extern void free(void *);
extern double log(double);
int k(int n) {
  int sum = 0;
  void *memory = malloc(n + 1);
#pragma omp parallel for reduction(+ : sum)
  for (int i = 0; i < n; i++) sum += memory && log(n) > 0. ? i : 0;
  free(memory);
  return sum;
}
"""
_DIGEST = 32

_local = threading.local()
_lock = threading.RLock()
_loaded: dict[str, Any] = {}
_failures: list[str] = []


def _fresh_lock() -> None:
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # a forked child would wait for a thread it does not have
    os.register_at_fork(after_in_child=_fresh_lock)


class CompileError(RuntimeError):
    """The C compiler failed, or its result cannot be loaded."""


class Compiler(NamedTuple):
    """A working C compiler."""

    path: str
    version: str
    """Name and number, such as `"cc 12.2.0"`."""
    flags: tuple[str, ...]
    processor: str
    libraries: tuple[str, ...]


def compiler() -> Compiler | None:
    """The C compiler of this machine (`CC`, else `cc`), or `None`: then `why_none` returns the reason."""
    return None if _failures else _found()[0]


def why_none() -> str:
    """Why C kernels cannot run here; empty if they can."""
    return _failures[0] if _failures else _found()[1]


def give_up(error: CompileError) -> None:
    """Disables C kernels in this process after the compiler failed."""
    if not _failures:
        _failures.append(str(error))


@functools.cache
def _found() -> tuple[Compiler | None, str]:
    if not settings().c_kernels:
        return None, "C kernels are switched off by SEQFUSE_C_KERNELS=0"
    name = os.environ.get("CC") or "cc"
    path = shutil.which(name)
    if path is None:
        return None, "no C compiler: there is no cc" if name == "cc" else f"no C compiler: CC={name} is not a program"
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    about = f"{Path(name).name} does not run"
    # Without OpenMP a kernel runs on one thread.
    for threads, libraries in (("-fopenmp", _FEW), ("-fopenmp", ("-lm",)), ("-fopenmp-simd", ("-lm",))):
        if libraries is _FEW and sys.platform != "linux":
            continue
        try:
            version = _version(path, name)
            found = Compiler(path, version, (*_FLAGS, *_MACHO, native, threads), _processor(), libraries)
            _load(_PROBE, found)
        except (CompileError, OSError, subprocess.SubprocessError) as error:
            about = f"{Path(name).name} does not compile: {error}"
        else:
            return found, ""
    return None, about


def _version(path: str, name: str) -> str:
    asked = [path, "-dumpfullversion", "-dumpversion"]
    number = subprocess.run(asked, capture_output=True, text=True, timeout=SECONDS, check=True)
    return f"{Path(name).name} {number.stdout.split()[0]}"


def _processor() -> str:
    """The properties of the processor that determine `-march=native`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU implementer", "CPU part")
    return "\n".join(line for line in lines if line.partition("\t")[0].strip() in told)


def function(source: str) -> Any:
    """The function `k` of a C source, or the Python function for it; compiled unless it is cached.

    Raises:
        CompileError: if it cannot be compiled or loaded.
    """
    found = _loaded.get(source)
    if found is None:
        known = compiler()
        if known is None:
            raise CompileError(why_none())
        with _lock:
            found = _loaded.get(source) or _loaded.setdefault(source, _load(source, known))
    return found


def ask(source: str) -> None:
    """Within `collecting`, record that a kernel will be called."""
    wanted = getattr(_local, "wanted", None)
    if wanted is not None:
        wanted[source] = None


def is_collecting() -> bool:
    """Whether this thread is in a `collecting` block."""
    return getattr(_local, "wanted", None) is not None


@contextlib.contextmanager
def collecting() -> Generator[dict[str, None]]:
    """A block in which kernels that this thread requests are recorded, in order, and not compiled."""
    before = getattr(_local, "wanted", None)
    _local.wanted = wanted = dict[str, None]()
    try:
        yield wanted
    finally:
        _local.wanted = before


def compile_all(sources: Iterable[str]) -> int:
    """Compile and load kernels, one per processor at a time; returns the number of kernels that were not cached.

    Raises:
        CompileError: if one cannot be compiled or loaded.
    """
    wanted = [source for source in dict.fromkeys(sources) if source not in _loaded]
    known = compiler() if wanted else None
    if known is None:
        if wanted:
            raise CompileError(why_none())
        return 0
    with _lock:
        place = folder()
        missing = [source for source in wanted if _read(place / _file(source, known)) is None]
        if missing and sys.stderr.isatty():
            print(f"seqfuse: compiling {len(missing)} kernels with {known.version}, once for this machine",
                  file=sys.stderr)  # fmt: skip
        running: list[_Compilation] = []
        try:
            for source in missing:
                if len(running) >= (os.cpu_count() or 1):
                    running.pop(0).finish()
                running.append(_Compilation(source, known, place))
            while running:
                running.pop(0).finish()
        finally:
            for left in running:
                left.stop()
        for source in wanted:
            if source not in _loaded:
                _loaded[source] = _load(source, known)
    return len(missing)


@functools.cache
def folder() -> Path:
    """The folder of compiled kernels: in the user's cache, or a temporary one if that cannot be used."""
    try:
        kept = store.user_folder("c", create=True)
        assert kept is not None
        return kept
    except OSError as error:
        warnings.warn(f"C kernels are compiled again in each process: {error}", CacheWarning, stacklevel=2)
        return Path(_temporary().name)


@functools.cache
def _temporary() -> Any:
    """A folder that is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="seqfuse-")


def _file(source: str, by: Compiler) -> str:
    libraries = (*map(os.path.basename, _openmp()), *by.libraries)
    about = "\0".join((source, by.path, by.version, *by.flags, by.processor, *libraries))
    return f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.so"


def _read(path: Path) -> Path | None:
    """The path, if the file is complete, belongs to the user, and nobody else may write to it."""
    try:
        data = store.read(path)
        about = os.lstat(path)
    except (OSError, ValueError):
        return None
    if data is None or hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
        return None
    own = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    return path if own and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _load(source: str, by: Compiler) -> Any:
    path = _read(folder() / _file(source, by))
    if path is None:
        _Compilation(source, by, folder()).finish()
        path = _read(folder() / _file(source, by))
    if path is None:
        raise CompileError(f"the compiled kernel cannot be read from {folder()}")
    try:
        library = ctypes.PyDLL(str(path))
        if not hasattr(library, "python"):
            return library.k
        library.python.restype = ctypes.py_object
        return library.python()
    except (OSError, AttributeError) as error:
        raise CompileError(f"the compiled kernel cannot be loaded: {error}") from None


class _Compilation:
    """A running compiler process; its complete result is moved to its name in the cache."""

    def __init__(self, source: str, by: Compiler, place: Path) -> None:
        self._path, self._by = place / _file(source, by), by
        self._work = tempfile.TemporaryDirectory(prefix="seqfuse-")
        text, self._made = Path(self._work.name, "kernel.c"), Path(self._work.name, "kernel.so")
        command = [by.path, *by.flags, _DECLARED, str(text), "-o", str(self._made), *_openmp(), *by.libraries]
        try:
            text.write_text(source)
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        except OSError as error:
            self._work.cleanup()
            raise CompileError(f"{by.path} cannot be run here: {error}") from None

    def finish(self) -> None:
        try:
            _, said = self._process.communicate(timeout=SECONDS)
            if self._process.returncode:
                lines = [line for line in said.splitlines() if "error" in line] or said.splitlines()
                raise CompileError(f"{self._by.version} failed: {(lines or ['it says nothing'])[0].strip()}")
            data = self._made.read_bytes()
            if not self._path.parent.is_dir():  # removed since this process started
                folder.cache_clear()
                self._path = folder() / self._path.name
            store.write(self._path, data + hashlib.sha256(data).digest())
        except subprocess.TimeoutExpired:
            raise CompileError(f"{self._by.version} took longer than {SECONDS:.0f} s") from None
        except OSError as error:
            raise CompileError(f"the compiled kernel cannot be kept: {error}") from None
        finally:
            self.stop()

    def stop(self) -> None:
        """Kill it if it still runs, and clean up."""
        with self._process:  # waits for it and closes its pipes
            self._process.kill()
        self._work.cleanup()


@functools.cache
def _openmp() -> tuple[str, ...]:
    """The OpenMP library bundled with torch if it is not the system's, so that kernels share torch's threads."""
    import torch

    bundled = sorted(Path(torch.__file__).parent.glob("lib/libgomp*")) or sorted(
        Path(torch.__file__).parent.parent.glob("torch.libs/libgomp*")
    )
    return tuple(str(path) for path in bundled[:1] if path.name != "libgomp.so.1")

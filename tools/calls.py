"""Records which functions of the package each test calls, and its time: a pytest plugin, and a function to run it."""

from __future__ import annotations

import cProfile
import json
import lzma
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

TESTS = (
    "ops", "fusions", "kernels", "lowprecision", "fuser", "nn", "testing", "losses", "inference",
    "convert/test_plans.py", "tune/test_table.py", "test_compiler.py",
)  # fmt: skip
"""The traced part of the tests folder: tests of the rooms that are mutated, and of those directly above them."""

_TRACED = "MUTATE_TRACED"
_met: dict[str, tuple[float, list[int]]] = {}
_functions: dict[str, int] = {}
_passed: set[str] = set()


def traced(item: Any) -> Generator[None, Any, Any]:
    """Record the functions of the package that a test calls."""
    profile, begun = cProfile.Profile(subcalls=False, builtins=False), time.perf_counter()
    profile.enable()
    try:
        return (yield)
    finally:
        profile.disable()
        codes = [entry.code for entry in profile.getstats() if not isinstance(entry.code, str)]
        place = f"{os.sep}seqfuse{os.sep}"
        names = {f"{Path(c.co_filename).name} {c.co_qualname}" for c in codes if place in c.co_filename}
        numbers = [_functions.setdefault(name.replace(".<locals>", ""), len(_functions)) for name in sorted(names)]
        _met[item.nodeid] = round(time.perf_counter() - begun, 3), numbers


def write_map(path: Path) -> None:
    """Run tests in both halves, and write the functions and seconds of each that passes."""
    tests = [f"tests/{name}" for name in TESTS]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        running: list[subprocess.Popen[bytes]] = []
        for half in ("kernels", "plain"):
            environment = {**os.environ, _TRACED: f"{folder}/{half}", "PYTHONPATH": str(Path(__file__).parent)}
            environment |= {"TRITON_INTERPRET": "1"} if half == "kernels" else {}
            options = ["-q", "-p", "calls", "-p", "no:cacheprovider", "-n", "0", "--timeout", "900", "--half", half]
            running.append(subprocess.Popen([sys.executable, "-m", "pytest", *options, *tests], env=environment))
        for process, half in zip(running, ("kernels", "plain"), strict=True):
            process.wait()
            found[half] = json.loads(Path(folder, half).read_text())
    path.write_bytes(lzma.compress(json.dumps(found).encode()))


if _TRACED in os.environ:
    import pytest

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: Any) -> Generator[None, Any, Any]:
        """Trace a test, except tests of seeded mutants, which require exact lines of the source."""
        return (yield from traced(item)) if "mutant" not in getattr(item, "fixturenames", ()) else (yield)

    def pytest_runtest_logreport(report: Any) -> None:
        """Record the tests that pass."""
        if report.when == "call" and report.passed:
            _passed.add(report.nodeid)

    def pytest_sessionfinish() -> None:
        """Write the recorded functions and tests."""
        tests = {name: test for name, test in _met.items() if name in _passed}
        Path(os.environ[_TRACED]).write_text(json.dumps({"functions": [*_functions], "tests": tests}))

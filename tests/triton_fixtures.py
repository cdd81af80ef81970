"""Fixtures of the tests that run Triton kernels: in its interpreter where there is no GPU, else compiled."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import seqfuse.testing.compile as compiling
from seqfuse.testing.interpreter import corrected
from tests import interpreter_operators
from tests.processes import Script
from tools.compiled import TARGETS, Compiled, compile_variants

DEVICE = torch.device("cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu")
"""The device of kernels in this process."""


def _forked(command: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` in a process that has imported Triton and all kernels already."""
    return Script(*command[1:], environment=env, compiling=True).done()


@pytest.fixture(autouse=True)
def _compilers_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "subprocess", types.SimpleNamespace(run=_forked))


@pytest.fixture
def compiled(request: pytest.FixtureRequest) -> Callable[..., list[Compiled]]:
    """`compiled(module, only, count)`: variants of each target, in turn; under `--full` all for every target.

    `count` says how many there are for each target.
    """
    full: bool = request.config.getoption("--full")

    def compile_for_gpus(module: str, only: str, count: int) -> list[Compiled]:
        found = list(compile_variants([module], only=only, jobs=1, in_turn=not full))
        step = 1 if full else 8 * len(TARGETS)
        assert len(found) == sum(len(range(0 if full else first, count, step)) for first in range(len(TARGETS)))
        assert {one.target for one in found} == set(TARGETS)
        for one in found:
            assert one.error is None, one
            assert one.int32_multiplications == 0, one
            assert one.late_reads == 0, one
            assert not one.over_shared, one
            assert not one.dot_without_wgmma, one
        return found

    return compile_for_gpus


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def _bfloat16_as_on_a_gpu() -> Iterator[None]:
    if DEVICE.type == "cuda":
        yield
    else:
        with corrected(interpreter_operators):
            yield


@pytest.fixture
def mutant(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[[ModuleType, str, str], ModuleType]]:
    """`mutant(module, old, new)`: the module again with `old`, which must occur once, replaced in its source. If the
    module does not contain it, the imported modules in its folder are searched, and reloaded, too."""
    assert request.node.get_closest_marker("mutant") is not None
    made: list[str] = []

    def make(module: ModuleType, old: str, new: str) -> ModuleType:
        folder, again, count = Path(str(module.__file__)).parent, dict[str, str](), 0

        def beside(name: str) -> list[str]:
            source = (folder / f"{name}.py").read_text()
            imported = [] if old in source else re.findall(r"^from \.(_?\w+) import", source, re.MULTILINE)
            return [other for other in imported if (folder / f"{other}.py").exists()]

        def has_it(name: str) -> bool:
            return old in (folder / f"{name}.py").read_text() or any(map(has_it, beside(name)))

        def copied(name: str) -> str:
            nonlocal count
            if name not in again:
                source = (folder / f"{name}.py").read_text()
                count += source.count(old)
                for other in filter(has_it, beside(name)):
                    source = source.replace(f"from .{other} import", f"from .{copied(other)} import")
                again[name] = _executed(f"{module.__package__}.{name}_mutant_{len(made)}", source.replace(old, new))
            return again[name]

        def _executed(name: str, source: str) -> str:
            # Triton reads a kernel's source from the file; relative imports need the package of the original.
            path = tmp_path / f"{name}.py"
            path.write_text(source)
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            made.append(name)
            spec.loader.exec_module(sys.modules[name])
            return name.rpartition(".")[2]

        name = copied(module.__name__.rpartition(".")[2])
        assert count == 1, f"{old!r} occurs {count} times"
        return sys.modules[f"{module.__package__}.{name}"]

    yield make
    for name in made:
        del sys.modules[name]

"""Kernels on a CPU run in Triton's interpreter, in processes of their own.

Triton reads `TRITON_INTERPRET` when a kernel is decorated, so a process is interpreted or compiled, never both, and the
variable also changes what the engine plans on a CPU. Where this folder alone was asked for, the variable is set here
before Triton is imported; in a wider run each file becomes one test that runs the file in a child process. Where there
is a GPU the same tests run compiled, in place.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from seqfuse.testing.interpreter import corrected

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DEVICE = torch.device("cuda" if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1" else "cpu")
"""Where kernels run in this process."""


def pytest_configure(config: pytest.Config) -> None:
    # The interpreter computes with numpy, which reports what a GPU does not.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:seqfuse.testing.interpreter")
    asked = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    alone = all(path.is_relative_to(HERE) for path in asked)
    if alone and DEVICE.type == "cpu" and "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if DEVICE.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return Elsewhere.from_parent(parent, path=module_path)


class Elsewhere(pytest.File):
    """A file whose tests run in a child process."""

    def collect(self) -> Iterator[pytest.Item]:
        item = Interpreted.from_parent(self, name="interpreted")
        if self.config.pluginmanager.hasplugin("timeout") and not self.config.getoption("--full"):
            item.add_marker(pytest.mark.timeout(1200))  # of a whole file, which a busy machine takes minutes for
        yield item


class Interpreted(pytest.Item):
    """One run of one file with the interpreter on."""

    def runtest(self) -> None:
        if importlib.util.find_spec("triton") is None:
            pytest.skip("Triton is not installed")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(self.path)]
        if self.config.getoption("--full"):
            command.append("--full")
        if seed := self.config.getoption("--seed"):
            command += ["--seed", seed]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment["TRITON_INTERPRET"] = "1"
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise InterpretedFailure(done.stdout + done.stderr)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: str | None = None) -> str:
        if isinstance(excinfo.value, InterpretedFailure):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.path.name}, interpreted"


class InterpretedFailure(Exception):
    """What the child process printed."""


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture(autouse=True)
def _bfloat16_as_on_a_gpu() -> Iterator[None]:
    if DEVICE.type == "cuda":
        yield
    else:
        with corrected():
            yield


@pytest.fixture
def mutant(tmp_path: Path) -> Iterator[Callable[[ModuleType, str, str], ModuleType]]:
    """`mutant(module, old, new)`: the module again with `old`, which must occur once, replaced in its source."""
    made: list[str] = []

    def make(module: ModuleType, old: str, new: str) -> ModuleType:
        source = Path(str(module.__file__)).read_text()
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        # Triton reads a kernel's source from the file; relative imports need the package of the original.
        name = f"{module.__name__}_mutant_{len(made)}"
        path = tmp_path / f"{name}.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        changed = importlib.util.module_from_spec(spec)
        sys.modules[name] = changed
        made.append(name)
        spec.loader.exec_module(changed)
        return changed

    yield make
    for name in made:
        del sys.modules[name]

"""For every test: threads and seeds, the numeric selection, hypothesis profiles."""

from __future__ import annotations

import functools
import gc
import os
import random
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# One thread per process unless asked otherwise. Read when torch starts its pools; children of a test inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Measurements of this machine's user must not decide what is tested.
os.environ["SEQFUSE_TUNE"] = "0"
# Nor must the processor: plans, their peaks and bits are the same on each. Tests of oneDNN's GEMMs switch them on.
os.environ.setdefault("SEQFUSE_CPU_GEMMS", "torch")
# Kernels that tests compile, wrong ones among them, do not belong in the user's cache.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).resolve().parent.parent / ".pytest_cache" / "user")

if sys.version_info[:3] == (3, 13, 0):  # torch warns of slow guards wherever a program's output is compared
    os.environ["PYTHONWARNINGS"] = "ignore::RuntimeWarning:torch._dynamo.guards"

import hypothesis
import pytest
import torch
from _pytest import runner

from tests import processes

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
gc.disable()  # until tests are collected: imports leave no garbage

for backend in (torch.cuda, torch.xpu, torch.mtia):
    if not backend.is_available():
        # torch notes each seed with a formatted stack for a device that may start later: 1 ms per test.
        backend.manual_seed_all = lambda seed: None

# Draws are slow now and then on a loaded machine with two cores, whatever the test.
_PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "print_blob": True}
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, **_PATIENT)
hypothesis.settings.register_profile("full", max_examples=500, **_PATIENT)


HERE = Path(__file__).resolve().parent
KERNELS = tuple(HERE / folder for folder in ("kernels", "fusions/triton", "gpu"))
"""Folders of tests that run Triton kernels, in its interpreter if there is no GPU. A process runs either these or the
others: Triton reads `TRITON_INTERPRET` when a kernel is decorated, and it changes what the engine plans on a CPU."""

IN_C = tuple(
    HERE / "kernels" / name
    for name in (
        "c", "test_contract.py", "test_crossentropy.py", "test_norm.py", "test_permute.py", "test_pointwise.py",
        "test_rope.py",
    )
)  # fmt: skip
"""Files of these that the other half runs too, with C kernels: the functions under test are the same."""

IN_TURN = ("kernels", "fusions", "gpu", "losses", "lowprecision", "nn", "ops")
"""Folders with many cases that differ only in a dtype or a fusion."""


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "run the tests of Triton kernels or all others; without it, those that are named (tests/run.py runs both)"
    parser.addoption("--half", choices=["kernels", "plain"], help=help)
    parser.addoption("--full", action="store_true", help="run the whole numeric matrix, not the pairwise selection")
    help = "run tests in an order drawn from this number, so that a run that is cut off has some of each"
    parser.addoption("--shuffle", type=int, help=help)
    parser.addoption("--seed", default="", help="draw other numbers: 7, or 1-20 for every test under each of these")


class Generator(torch.Generator):
    """Shifts every seed, so that equal seeds stay equal but the numbers differ."""

    distance = 0

    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed(seed + self.distance)


def of_kernels(path: Path) -> bool:
    """Whether a file of tests runs Triton kernels."""
    return any(path.is_relative_to(folder) for folder in KERNELS) and not path.is_relative_to(IN_C[0])


@functools.cache
def in_c(path: Path) -> bool:
    """Whether a file of tests runs C kernels in the half that interprets none."""
    return any(path.is_relative_to(place) for place in IN_C)


@functools.cache
def in_turn(path: Path) -> bool:
    """Whether only one of the cases that differ in a dtype or a fusion is run."""
    return any(path.is_relative_to(HERE / folder) for folder in IN_TURN)


def interpreted() -> bool:
    """Whether this process runs kernels in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def pytest_configure(config: pytest.Config) -> None:
    asked = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    alone = config.getoption("--half") is None and all(map(of_kernels, asked))
    if alone and not torch.cuda.is_available() and "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if interpreted():  # numpy warns of what a GPU does not report
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton")
        config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:seqfuse.testing.interpreter")
    processes.FULL = bool(config.getoption("--full"))
    if limit := config.getoption("timeout", None):
        processes.SECONDS = 0.93 * limit  # so that the test itself reports what hangs
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "ci")
    if config.getoption("--seed"):
        manual_seed = torch.manual_seed
        torch.Generator = Generator
        torch.manual_seed = lambda seed: manual_seed(seed + Generator.distance)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if seeds := metafunc.config.getoption("--seed"):
        first, _, last = seeds.partition("-")
        metafunc.parametrize("_seed", range(int(first), int(last or first) + 1), ids="seed {}".format)


class Elsewhere(pytest.File):
    """A file whose tests run in the other half."""

    def collect(self) -> list[pytest.Item]:
        return []


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    belongs = (
        interpreted() == of_kernels(module_path)
        or (not interpreted() and in_c(module_path))
        or (torch.cuda.is_available() and not interpreted())
    )
    return None if belongs else Elsewhere.from_parent(parent, path=module_path)


def without_triton_alone(items: list[pytest.Item]) -> list[pytest.Item]:
    """Leaves out tests that only Triton's kernels can run, where the same file runs with C kernels, which have no
    float64."""
    return items if interpreted() else [item for item in items if not (in_c(item.path) and _of_triton_alone(item))]


def _of_triton_alone(item: pytest.Item) -> bool:
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    return item.get_closest_marker("triton") is not None or torch.float64 in [*parameters.values()]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """For a passing test, an xdist worker sends one report instead of five messages: a quarter of the time of an empty
    test."""
    if not hasattr(item.config, "workerinput"):
        return None
    for report in runner.runtestprotocol(item, nextitem=nextitem, log=False):
        if report.when == "call" or not report.passed:
            item.ihook.pytest_runtest_logreport(report=report)
    return True


def pytest_collection_finish() -> None:
    gc.collect()
    processes.lighten()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freezes what a file leaves, such as tables of graphs, so that later garbage collections do not visit it."""
    if nextitem is not None and nextitem.path != item.path and gc.get_count()[2] > 5:
        gc.collect()
        gc.freeze()


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--half") or interpreted() or torch.cuda.is_available():
        return None
    return "half: every test but those of Triton kernels, which `make test` or naming tests/kernels runs"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = without_triton_alone(items)
    skips = {}
    if not config.getoption("--full"):
        skips["full"] = pytest.mark.skip(reason="whole numeric matrix: pytest --full")
        for item in () if torch.cuda.is_available() else _left_out(items):
            item.add_marker(skips["full"])
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "mutant" in getattr(item, "fixturenames", ()):
            item.add_marker("mutant")  # before `-k "not mutant"` and `-m` are evaluated
    if config.getoption("--shuffle") is not None:
        random.Random(config.getoption("--shuffle")).shuffle(items)
    for item in items:
        for name in skips.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(skips[name])


def _left_out(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Of cases that differ in a dtype alone all but one, the next one in turn each time; where there is no dtype, the
    same of fusions, if each is then in some case. What is to be found wrong is looked for in all of them."""
    alike: dict[tuple[str, bool], dict[str, list[pytest.Item]]] = {}
    for item in items:
        given: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        test, _, case = item.name.rstrip("]").partition("[")
        words = case.split("-")
        kinds = [value for value in given.values() if isinstance(value, torch.dtype)]
        if any(kind.is_complex for kind in kinds):  # only complex numbers have conjugates
            continue
        dtypes = {name for kind in kinds for name in _names(kind)} & {*words}
        names = dtypes or {value.__name__ for value in given.values() if _is_fusion(value)} & {*words}
        everywhere = "mutant" in getattr(item, "fixturenames", ()) or "wrong" in item.name
        if not names or everywhere or not in_turn(item.path):
            continue
        if not {mark.name for mark in item.iter_markers()} & {"full", "gpu", "skip", "skipif"}:
            others = str([word for word in words if word not in names])
            alike.setdefault((f"{item.path.name} {test}", bool(dtypes)), {}).setdefault(others, []).append(item)
    for (test, of_dtypes), groups in alike.items():
        for turn, cases in enumerate(groups.values(), zlib.crc32(test.encode())):
            if of_dtypes or len(groups) >= len(cases):
                cases.pop(turn % len(cases))
                yield from cases


def _names(dtype: torch.dtype) -> tuple[str, ...]:
    """Names of a dtype in the id of a case."""
    name = str(dtype).removeprefix("torch.")
    return str(dtype), name, name.replace("bfloat", "bf").replace("float", "fp")


def _is_fusion(value: Any) -> bool:
    return isinstance(value, type) and "FusedOperation" in {base.__name__ for base in value.__mro__}


@pytest.fixture
def quick_inductor() -> Iterator[None]:
    """Inductor compiles its own few kernels only: no header for more of them and no try of each kind of vectors, which
    take seconds each, and it starts no processes, which import torch."""
    quick = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}
    with torch._inductor.config.patch(quick):
        yield


@pytest.fixture
def _seed() -> int:
    return 0


@pytest.fixture(autouse=True)
def _seeded(_seed: int, request: pytest.FixtureRequest) -> None:
    Generator.distance = 100_003 * _seed
    torch.manual_seed(0)
    if _seed and hasattr(request.function, "hypothesis"):
        hypothesis.seed(_seed)(request.function)

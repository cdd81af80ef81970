"""What every test runs under: threads and seeds, the numeric selection, hypothesis profiles."""

from __future__ import annotations

import os

# One thread per process unless asked otherwise. Read when torch starts its pools; children of a test inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a user has measured on this machine must not decide what is tested.
os.environ["SEQFUSE_TUNE"] = "0"

import hypothesis
import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# A loaded machine of two cores draws slowly now and then; that says nothing about a test.
_PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "print_blob": True}
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, **_PATIENT)
hypothesis.settings.register_profile("full", max_examples=500, **_PATIENT)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole numeric matrix, not the pairwise selection")
    parser.addoption("--seed", type=int, default=0, help="draw other numbers: moves every seed that a test sets")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "ci")
    if seed := config.getoption("--seed"):
        _move_seeds(100_003 * seed)


def _move_seeds(distance: int) -> None:
    """What is seeded alike stays alike, with other numbers. Here, because tests also draw where they are imported."""
    manual_seed = torch.manual_seed

    class Generator(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + distance)

    torch.Generator = Generator
    torch.manual_seed = lambda seed: manual_seed(seed + distance)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {}
    if not config.getoption("--full"):
        skips["full"] = pytest.mark.skip(reason="whole numeric matrix: pytest --full")
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        for name in skips.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(skips[name])
        if config.getoption("--seed") and hasattr(getattr(item, "obj", None), "hypothesis"):
            hypothesis.seed(config.getoption("--seed"))(item.obj)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)

"""What every test runs under: one thread per process, the numeric selection, hypothesis profiles."""

from __future__ import annotations

import os

# Read when torch starts its pools; children of a test inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What a user has measured on this machine must not decide what is tested.
os.environ["SEQFUSE_TUNE"] = "0"

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# A loaded machine of two cores draws slowly now and then; that says nothing about a test.
_PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "print_blob": True}
hypothesis.settings.register_profile("ci", max_examples=25, derandomize=True, **_PATIENT)
hypothesis.settings.register_profile("full", max_examples=500, **_PATIENT)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole numeric matrix, not the pairwise selection")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("full" if config.getoption("--full") else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {}
    if not config.getoption("--full"):
        skips["full"] = pytest.mark.skip(reason="whole numeric matrix: pytest --full")
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        for name in skips.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(skips[name])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)

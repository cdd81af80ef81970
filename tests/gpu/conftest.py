"""Real sizes where there is a GPU; else the same tests at tiny ones in Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import seqfuse as sf
from tests.triton_fixtures import _bfloat16_as_on_a_gpu as _bfloat16_as_on_a_gpu
from tests.triton_fixtures import device as device

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture(autouse=True)
def _failures_are_errors() -> Iterator[None]:
    """A fusion that fails must not be hidden by what takes its place."""
    with sf.fusing(on_error="raise", unmeasured=True):
        yield

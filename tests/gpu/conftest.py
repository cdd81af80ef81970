"""Real sizes on a GPU; without one, the same tests at tiny sizes in Triton's interpreter."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import seqfuse as sf
from tests.triton_fixtures import DEVICE
from tests.triton_fixtures import _bfloat16_as_on_a_gpu as _bfloat16_as_on_a_gpu
from tests.triton_fixtures import device as device

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

# cuBLAS reads it at its first use; without it, torch refuses GEMMs in deterministic mode.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _failures_are_errors() -> Iterator[None]:
    """A fusion that fails must not fall back unnoticed."""
    with sf.fusing(on_error="raise"):
        yield


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """A dozen workers share a GPU, and torch caches each one's largest test."""
    yield
    if DEVICE.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """By default torch's attention adds parts of dq in any order, as docs/numerics.md says."""
    torch.use_deterministic_algorithms(DEVICE.type == "cuda")
    yield
    torch.use_deterministic_algorithms(False)

"""Real sizes where there is a GPU; else the same tests at tiny ones in Triton's interpreter, each file in a process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import seqfuse as sf

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))

_spec = importlib.util.spec_from_file_location("interpreted", HERE.parent / "kernels" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
_shared.HERE = HERE

pytest_configure = _shared.pytest_configure
pytest_pycollect_makemodule = _shared.pytest_pycollect_makemodule
device = _shared.device
_bfloat16_as_on_a_gpu = _shared._bfloat16_as_on_a_gpu


@pytest.fixture(autouse=True)
def _failures_are_errors() -> Iterator[None]:
    """A fusion that fails must not be hidden by what takes its place."""
    with sf.fusing(on_error="raise"):
        yield

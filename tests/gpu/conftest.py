"""Real sizes where there is a GPU; else the same tests at tiny ones in Triton's interpreter, each file in a process."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
# A fusion that fails must not be hidden by what takes its place.
os.environ["SEQFUSE_ON_ERROR"] = "raise"

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

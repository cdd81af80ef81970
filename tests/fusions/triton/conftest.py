"""Fusions on Triton kernels run as the kernels' own tests do: in its interpreter where there is no GPU, and then in
processes of their own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

HERE = Path(__file__).resolve().parent

_spec = importlib.util.spec_from_file_location("interpreted", HERE.parents[1] / "kernels" / "conftest.py")
assert _spec is not None
assert _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
_shared.HERE = HERE

pytest_configure = _shared.pytest_configure
pytest_pycollect_makemodule = _shared.pytest_pycollect_makemodule
device = _shared.device
mutant = _shared.mutant
_bfloat16_as_on_a_gpu = _shared._bfloat16_as_on_a_gpu

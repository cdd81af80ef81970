"""Arguments that Triton's own launchers, in C, hand to a CUDA driver: a stub that launches nothing."""

from __future__ import annotations

import importlib
import os
import pkgutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from seqfuse import kernels
from seqfuse.kernels import _launch
from tests.processes import Script

pytestmark = pytest.mark.skipif(_launch.INTERPRETED, reason="kernels are interpreted in this process")

HERE = Path(__file__).resolve().parent


@pytest.mark.slow
def test_arguments_reach_a_driver_through_them_as_they_were_given(tmp_path: Path) -> None:
    """Launched by Triton, by a compiled kernel, and replayed: tuples, numbers, and addresses as numbers."""
    library = ["-o", str(tmp_path / "libcuda.so.1"), str(HERE / "cuda_driver.c")]
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", *library], check=True)
    environment = {**os.environ, "TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    done = Script("-m", "tests.testing.real_launcher", folder=HERE.parent.parent, environment=environment).done()
    assert done.returncode == 0, done.stderr
    launches, names = map(int, done.stdout.split())
    modules = map(
        importlib.import_module, (f"{kernels.__name__}.{m.name}" for m in pkgutil.iter_modules(kernels.__path__))
    )
    found = {name for module in modules for name, value in vars(module).items() if type(value) is JITFunction}
    assert names == len({name for name in found if "_kernel" in name})
    assert launches > 150

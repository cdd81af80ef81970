"""`tools/launches.py` launches every kernel and every tile of the tables, with the arguments of a GPU."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from seqfuse import kernels
from seqfuse.kernels import _launch, _operators
from tools.compiled import TARGETS
from tools.launches import CALLS, WITHOUT, variants
from tools.stub_driver import stub_driver

pytestmark = pytest.mark.skipif(_launch.INTERPRETED, reason="kernels are interpreted in this process")


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_is_launched_and_names_tell_configurations_apart(target: str) -> None:
    found: set[str] = set()
    for one in pkgutil.iter_modules(kernels.__path__):
        if one.name.removeprefix("_").removesuffix("_kernel") in WITHOUT.get(target, ()):
            continue
        module = importlib.import_module(f"{kernels.__name__}.{one.name}")
        found |= {name for name, value in vars(module).items() if type(value) is JITFunction and "_kernel" in name}
    made = {module: [*variants(module, target)] for module in CALLS}
    launched = {one.kernel.__name__ for every in made.values() for one in every}
    assert launched == found.difference(WITHOUT.get(target, ()))
    for module, every in made.items():
        assert bool(every) != (module in WITHOUT.get(target, ()))
        assert len(every) == len({one.name for one in every}), module


@pytest.mark.parametrize("module", CALLS)
def test_what_is_launched_is_what_its_kernel_was_compiled_for(module: str) -> None:
    with stub_driver(compiles=False) as stub:
        for _, call in CALLS[module]("sm_90"):
            before = len(stub.launched)
            call()
            assert len(stub.launched) > before
            _operators.forget()


def test_a_long_row_of_logits_has_a_processor_to_itself() -> None:
    """32 warps of at most 64 registers; AMD launches 16 warps at most."""
    (long,) = [one for one in variants("crossentropy", "sm_90") if one.name == "cross_entropy ahead bf16 262144"]
    assert (long.num_warps, long.options) == (32, {"maxnreg": 64})
    assert all(one.num_warps <= 16 and not one.options for one in variants("crossentropy", "gfx942"))

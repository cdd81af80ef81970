"""Each file's tensors are on one device: what it draws, and what its references make of that."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

import pytest
import torch

from seqfuse import kernels
from seqfuse.kernels import _launch

from . import test_crossentropy, test_decode, test_norm, test_rope


def _only_looked_at(kernel: Any, grid: int, args: tuple[Any, ...], constexprs: Any, *more: Any) -> None:
    _launch.one_device(kernel.__name__, _launch._tensors(args))
    assert {t.device.type for t in _launch._tensors(args)} == {"meta"}, kernel.__name__


@pytest.fixture(autouse=True)
def _nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory refuse to meet those of a CPU, as a GPU's would, and have gradients."""
    for one in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"{kernels.__name__}.{one.name}")
        if one.name != "_launch" and hasattr(module, "launch"):
            monkeypatch.setattr(module, "launch", _only_looked_at)
    for module in (test_norm, test_rope, test_crossentropy, test_decode):
        monkeypatch.setattr(module, "DEVICE", torch.device("meta"))


@pytest.mark.parametrize(
    ("module", "case", "shape"),
    [
        (test_norm, "layernorm_all", ((3,), 8)),
        (test_norm, "rmsnorm_around", ((2, 3), 8)),
        (test_rope, "all_interleaved", ((5,),)),
        (test_rope, "bias", ((2, 3),)),
        (test_crossentropy, "all", (5, 7)),
    ],
)
def test_kernels_and_references_take_what_is_drawn(module: ModuleType, case: str, shape: tuple[Any, ...]) -> None:
    tensors = module.drawn(module.CASES[case], *shape, torch.float32)
    ours, theirs = (of(module.CASES[case], tensors) for of in (module.run, module.in_torch))
    assert {name: (t.shape, t.device) for name, t in ours.items()} == {
        name: (t.shape, t.device) for name, t in theirs.items()
    }


@pytest.mark.parametrize("int8", [False, True], ids=["as the query", "int8"])
def test_a_cache_is_drawn_there(int8: bool) -> None:
    tensors = test_decode.drawn(4, 2, 16, torch.float32, int8)
    assert test_decode.decode.decode_attention(**tensors).device.type == "meta"


def test_a_tensor_elsewhere_is_found() -> None:
    case = test_norm.CASES["layernorm_around"]
    tensors = test_norm.drawn(case, (3,), 8, torch.float32)
    tensors["residual"] = torch.ones(3, 8)
    with pytest.raises(ValueError, match="expected all tensors on one device, got cpu and meta"):
        test_norm.run(case, tensors)

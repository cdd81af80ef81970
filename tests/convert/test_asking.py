"""Models that ask whether they are compiled take the same branches as without the conversion."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf

from .comparing import assert_same

X = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def function(code: str, name: str, **known: Any) -> Callable[[], bool]:
    """A function of another Python module."""
    module: Any = ModuleType(name)
    sys.modules[name] = module  # where Dynamo looks up names
    vars(module).update(torch=torch, **known)
    exec(code, vars(module))
    return module.asks


HELPER = function(
    "def compiling():\n    return torch.compiler.is_compiling()\ndef asks():\n    return compiling()", "asked_by_many"
)
SHARED = function("def asks():\n    return helper()", "shared_by_models", helper=HELPER)
ASKS: dict[str, Callable[[], bool]] = {
    "torch.compiler.is_compiling": torch.compiler.is_compiling,
    "torch.compiler.is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
    "torch.compiler.is_exporting": torch.compiler.is_exporting,
    "torch._dynamo.is_compiling": torch._dynamo.is_compiling,
    "torch._utils.is_compiling": torch._utils.is_compiling,
    "torch.jit.is_tracing": torch.jit.is_tracing,
    "torch.jit.is_scripting": torch.jit.is_scripting,
    "a helper": HELPER,
}


class Asking(nn.Module):
    def __init__(self, asks: Callable[[], bool]) -> None:
        super().__init__()
        self.norm, self.fc, self.asks = nn.LayerNorm(8), nn.Linear(8, 8), asks

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(self.norm(x))
        return y.exp() if self.asks() else y.sin()


@pytest.mark.filterwarnings("ignore:.*is_compiling. is deprecated")
@pytest.mark.parametrize("name", ASKS)
def test_code_of_the_model_is_told_that_it_is_not_compiled(name: str):
    conversion = assert_same(Asking(ASKS[name]).double(), X)
    assert {graph.operations for graph in conversion.graphs} == {2}
    assert "graph break" not in str(conversion)


def test_code_that_models_share_is_told_the_truth():
    model = Asking(SHARED).double()
    conversion = sf.convert(model)
    model(X)
    assert conversion.graphs[0].beside == {"exp": 1}


def test_a_compiled_model_is_told_the_truth_after_another_was_converted():
    model = Asking(torch.compiler.is_compiling).double()
    sf.convert(model)
    model(X)
    compiled = torch.compile(Asking(torch.compiler.is_compiling).double(), backend="eager")
    torch.testing.assert_close(compiled(X), compiled.fc(compiled.norm(X)).exp())


@pytest.mark.parametrize("log", [False, True])
def test_files_are_tokenized_for_a_log_that_is_on_alone(log: bool, monkeypatch: pytest.MonkeyPatch):
    names = importlib.import_module("torch._dynamo.funcname_cache")
    monkeypatch.setattr(names, "cache", {})
    monkeypatch.setattr(torch._logging._internal.log_state, "artifact_names", {"trace_call"} if log else set())
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    conversion = sf.convert(model)
    model(torch.ones(2, 4))
    assert conversion.graphs
    assert bool(names.cache) == log

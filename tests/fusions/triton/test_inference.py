"""Without gradients a forward fusion's kernel stores only y, and the fusion returns only y."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from seqfuse import ops
from seqfuse.fusions import BiasQKNorm, BiasQKNormRotary, PointwiseChain, chain
from seqfuse.testing import seeded_randn


def heads(*names: str) -> dict[str, Any]:
    rotary = ops.RotaryEmbedding(2, 1, style="half")
    made = {"bias": ops.Bias(32), "norm": ops.QKNorm(8, 2, 1), "rotary": rotary}
    return {name: made[name] for name in names}


CASES: dict[str, Any] = {
    "chain": (PointwiseChain(first=ops.Bias(32), rest=(ops.GeLU(),)), {"seeds": (None, None)}),
    "norm": (BiasQKNorm(**heads("bias", "norm")), {}),
    "rotary": (BiasQKNormRotary(**heads("bias", "norm", "rotary")), {}),
}


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a kernel stores something in addition to y."""
    found: list[bool] = []

    def seen(run: Any, *args: Any, **given: Any) -> Any:
        found.append(bool(given.get("store")))
        return run(*args, **given)

    kernels = importlib.import_module("seqfuse.kernels.rope")
    monkeypatch.setattr(kernels, "rope_fwd", functools.partial(seen, kernels.rope_fwd))
    steps = chain._forward_steps

    def watched(*args: Any) -> Any:
        made = steps(*args)
        found.append(("store",) in made[0])
        return made

    monkeypatch.setattr(chain, "_forward_steps", watched)
    return found


@pytest.mark.parametrize(("fusion", "given"), CASES.values(), ids=CASES)
def test_nothing_is_stored_where_nothing_is_needed(
    fusion: Any, given: dict[str, Any], stored: list[bool], device: torch.device
) -> None:
    for operation in fusion.operations():
        operation.to(device)
    x = seeded_randn((5, 32), 0).to(device)
    with torch.no_grad():
        y, _ = fusion.fwd(x, **given, needs=frozenset({"x"}))
        assert any(stored)
        stored.clear()
        alone = fusion.fwd(x, **given, needs=frozenset())
    assert stored
    assert not any(stored)
    assert isinstance(alone, Tensor)
    torch.testing.assert_close(alone, y)

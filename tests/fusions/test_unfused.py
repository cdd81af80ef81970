"""The records from which the operations go on where the backward pass of a joint fusion fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.compiler import compiler
from seqfuse.errors import FallbackWarning
from seqfuse.testing import seeded_randn

MODELS: dict[type[Any], Any] = {
    fusions.NormActivationJoint: lambda: [ops.LayerNorm(64), ops.GeLU(), ops.Scale(0.5)],
    fusions.BlockBoundaryActivation: lambda: [ops.Fork(), ops.Bias(64), ops.Add(), ops.RMSNorm(64), ops.GeLU()],
    fusions.BiasGatedScale: lambda: [ops.Bias(64), ops.SwiGLU(), ops.TokenScale("scales")],
    fusions.ActivationLinearJoint: lambda: [ops.Bias(64), ops.GeLU(), ops.Linear(64, 32)],
}


@pytest.mark.skipif(compiler() is None, reason="without kernels these fusions are not applied")
@pytest.mark.parametrize("fusion", MODELS, ids=lambda fusion: fusion.__name__)
def test_they_have_the_parameters_of_the_forward(fusion: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a launch failed")

    model = sf.Sequential(*MODELS[fusion](), fusions=(fusion,), memory="lean")
    x, channels = seeded_randn((128, 64), 0).requires_grad_(), dict[str, torch.Tensor]()
    if fusion is fusions.BiasGatedScale:
        channels["scales"] = seeded_randn((128,), 1)
    others = {n: seeded_randn(p.shape, i).requires_grad_() for i, (n, p) in enumerate(model.named_parameters())}

    def gradients() -> Any:
        y = torch.func.functional_call(model, others, (x,), channels)
        return torch.autograd.grad(y.square().sum(), [x, *others.values()])

    with sf.fusing(False):
        expected = gradients()
    monkeypatch.setattr(fusion, "bwd", failing)
    with pytest.warns(FallbackWarning, match="a launch failed"):
        found = gradients()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)

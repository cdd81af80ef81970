"""The records from which the operations go on where the backward pass of a joint fusion fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.compiler import compiler
from seqfuse.errors import FallbackWarning
from seqfuse.testing import seeded_randn

EXPERTS = [ops.SwiGLU, lambda: ops.GroupedLinear(4, 32, 64, bias=False), ops.Unpermute]

MODELS: dict[type[Any], Any] = {
    fusions.NormActivationJoint: lambda: [ops.LayerNorm(64), ops.GeLU(), ops.Scale(0.5), ops.Tanh()],
    fusions.BlockBoundaryActivation: lambda: [ops.Fork(), ops.Bias(64), ops.Add(), ops.RMSNorm(64), ops.GeLU()],
    fusions.BiasGatedScale: lambda: [ops.Bias(64), ops.SwiGLU(), ops.TokenScale("scales")],
    fusions.ActivationLinearJoint: lambda: [ops.Bias(64), ops.GeLU(), ops.Linear(64, 32)],
    fusions.GatedGroupedLinearUnpermute: lambda: [new() for new in EXPERTS],
    fusions.RecomputeGatedGroupedLinearUnpermute: lambda: [new() for new in EXPERTS],
    fusions.GatedGroupedLinearUnpermuteBoundary: lambda: [*[new() for new in EXPERTS], ops.Add("h"), ops.LayerNorm(64)],
}


class Doubled(nn.Module):
    """A parametrization: the operation runs with twice the parameter."""

    def forward(self, own: torch.Tensor) -> torch.Tensor:
        return 2 * own


def given_to(fusion: type[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """An input of the fusion's model, and its channels."""
    x, channels = seeded_randn((128, 64), 0), dict[str, torch.Tensor]()
    if fusion is fusions.BiasGatedScale:
        channels["scales"] = seeded_randn((128,), 1)
    elif "GroupedLinear" in fusion.__name__:
        experts = torch.randint(-1, 4, (128, 2), generator=torch.Generator().manual_seed(0))
        channels |= ops.Permute(4, 2).fwd(x, experts=experts)[1]
        channels["probs"], x = seeded_randn((128, 2), 1).requires_grad_(), seeded_randn((128, 2, 64), 0)
    if fusion is fusions.GatedGroupedLinearUnpermuteBoundary:
        channels["h"] = seeded_randn((128, 64), 2).requires_grad_()
    return x.requires_grad_(), channels


@pytest.mark.skipif(compiler() is None, reason="without kernels these fusions are not applied")
@pytest.mark.parametrize("parametrized", [False, True], ids=["plain", "parametrized"])
@pytest.mark.parametrize("fusion", MODELS, ids=lambda fusion: fusion.__name__)
def test_they_have_the_parameters_of_the_forward(
    fusion: Any, parametrized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a launch failed")

    model = sf.Sequential(*MODELS[fusion](), fusions=(fusion,), memory="lean")
    for operation in list(model) if parametrized else ():
        for name, _ in list(operation.named_parameters(recurse=False)):
            parametrize.register_parametrization(operation, name, Doubled())
    x, channels = given_to(fusion)
    others = {n: seeded_randn(p.shape, i).requires_grad_() for i, (n, p) in enumerate(model.named_parameters())}

    def gradients() -> Any:
        y = torch.func.functional_call(model, others, (x,), channels)
        reached = [x, *others.values(), *[t for t in channels.values() if t.requires_grad]]
        return torch.autograd.grad(y.square().sum(), reached)

    with sf.fusing(False):
        expected = gradients()
    monkeypatch.setattr(fusion, "bwd", failing)
    with pytest.warns(FallbackWarning, match="a launch failed"):
        found = gradients()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)

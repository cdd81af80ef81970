"""Parameters that are views of larger tensors, not contiguous."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import seeded_randn
from tests.fusions.triton.fourways import four_ways

LISTS = {
    "PointwiseChain": lambda: (ops.Bias(8), ops.GeLU()),
    "BiasGated": lambda: (ops.Bias(8), ops.SwiGLU()),
    "PointwiseChainJoint": lambda: (ops.Bias(8), ops.GeLU(), ops.Tanh()),
    "BiasDropoutAdd": lambda: (ops.Fork(), ops.Bias(8), ops.Dropout(0.5), ops.Add()),
    "NormActivationJoint": lambda: (ops.LayerNorm(8), ops.GeLU()),
    "BlockBoundary": lambda: (ops.Fork("a"), ops.Bias(8), ops.Add("a"), ops.Fork("b"), ops.LayerNorm(8), ops.Add("b")),
    "LinearBiasPointwise": lambda: (ops.Linear(8, 16), ops.GeLU(), ops.Linear(16, 8)),
    "ActivationLinearJoint": lambda: (ops.Bias(8), ops.SwiGLU(), ops.Linear(4, 8)),
    "BiasQKNormRotary": lambda: (ops.Linear(8, 24), ops.QKNorm(4, 2), ops.RotaryEmbedding(2, style="half")),
}


def strided(model: sf.Sequential) -> sf.Sequential:
    """The model with views of larger tensors as its parameters: every other number, the first half of each row."""
    for at, (name, p) in enumerate(list(model.named_parameters())):
        owner, _, own = name.rpartition(".")
        wide = seeded_randn((*p.shape[:-1], 2 * p.shape[-1]), at)
        setattr(model.get_submodule(owner), own, nn.Parameter(wide[::2] if p.ndim == 1 else wide[:, : p.shape[1]]))
    return model


@pytest.mark.parametrize("name", LISTS)
def test_fusions_take_parameters_that_are_not_in_one_piece(name: str, device: torch.device):
    lean = getattr(fusions, name).saves_memory
    model = strided(sf.Sequential(*LISTS[name](), memory="lean" if lean else "fast")).to(device)
    x = seeded_randn((2, 5, 8), 20).to(device)
    assert not any(p.is_contiguous() for p in model.parameters())
    found = [fusion for fusion in fusions.default if fusion.__name__ == name]
    assert found
    four_ways(model, x, *found)

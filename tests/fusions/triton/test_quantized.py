"""Fusions around quantized GEMMs: a schedule gives the numbers of the operations, but for codes side by side."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops, recipes
from seqfuse.recipes import Recipe
from seqfuse.testing import seeded_randn
from tests.triton_fixtures import DEVICE

RECIPES = recipes.Float8CurrentScaling(), recipes.Float8RowScaling(), recipes.Float8BlockScaling(), recipes.MXFP8()


def passes(model: sf.Sequential, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_norms_units_and_residuals_around_quantized_gemms(recipe: Recipe):
    torch.manual_seed(0)
    mlp = ops.Residual(ops.RMSNorm(32), ops.MergedLinear(32, (64, 64)), ops.SwiGLU(), ops.Linear(64, 32))
    model = sf.Sequential(ops.RMSNorm(32), ops.Linear(32, 32), ops.GeLU(), mlp, recipe=recipe).to(DEVICE)
    x = (seeded_randn((33, 32), 1) + 0.1).to(DEVICE)
    fused = passes(model, x)
    plan = model.plan(x)
    assert plan.env.triton
    assert min(plan.fused) >= 3
    with sf.fusing(False):
        unfused = passes(model, x)
    with sf.low_precision(enabled=False):
        exact = passes(model, x)
    for a, b, c in zip(fused, unfused, exact, strict=True):
        # What differs in the last bit may fall to the next code: far less than what quantizing changes.
        assert float((a - b).norm()) <= 1e-3 * float(b.norm())
        assert float((c - b).norm()) > 5e-3 * float(b.norm())

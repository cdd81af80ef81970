"""Thirty steps of training, fused and unfused, from one seed on the same data."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import seeded_randn

from .conftest import DEVICE

STEPS, ROWS, H, F = 30, 24, 16, 32


def _model(eps: float = 1e-2) -> sf.Sequential:
    torch.manual_seed(0)
    first = ops.Residual(ops.LayerNorm(H, eps=eps), ops.Linear(H, F), ops.GeLU(), ops.Linear(F, H))
    second = ops.Residual(ops.RMSNorm(H, eps=eps), ops.Linear(H, 2 * F), ops.SwiGLU(), ops.Linear(F, H))
    return sf.Sequential(first, second, fusions=fusions.default).to(DEVICE)


def _trained(model: sf.Sequential, dtype: torch.dtype, *, fused: bool, order: Tensor | None = None) -> Tensor:
    """All parameters after the last step, in float64; `order` is that of the rows, which the sums do not depend on."""
    model = copy.deepcopy(model).to(dtype)
    x, target = (seeded_randn((ROWS, H), seed).to(DEVICE, dtype) for seed in (1, 2))
    if order is not None:
        x, target = (t[order.to(DEVICE)] for t in (x, target))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with sf.fusing(fused, on_error="raise"):
            loss = (model(x) - target).double().square().mean()
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def _distances(dtype: torch.dtype, fused_model: sf.Sequential | None = None) -> tuple[float, float]:
    """From the unfused run in float64: of the fused run, and of the farthest of unfused ones, each in another order."""
    model = _model()
    exact = _trained(model, torch.float64, fused=False)
    orders = [None, *(torch.randperm(ROWS, generator=torch.Generator().manual_seed(i)) for i in range(4))]
    unfused = max((_trained(model, dtype, fused=False, order=o) - exact).norm().item() for o in orders)
    return (_trained(fused_model or model, dtype, fused=True) - exact).norm().item(), unfused


def test_the_model_is_covered_by_kernels() -> None:
    plan = _model().plan(seeded_randn((ROWS, H), 1).to(DEVICE))
    used = {fusion.__name__ for fusion in fusions.triton}
    for cover in (plan.forward, plan.backward):
        assert sum(step.name in used for step in cover) >= 3, plan


def test_what_a_plan_saves_is_that_of_its_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    x = seeded_randn((ROWS, H), 1).to(DEVICE)
    model = sf.Sequential(ops.Linear(H, F), ops.GeLU(), ops.Linear(F, H), fusions=fusions.default).to(DEVICE)
    with sf.fusing(on_error="raise"):
        memory = model.plan(x).memory
    assert memory is not None
    assert memory.saved <= memory.saved_unfused
    assert "FakeTensor" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_ends_where_the_unfused_operations_do(dtype: torch.dtype) -> None:
    fused, unfused = _distances(dtype)
    assert 0 < fused <= 1.5 * unfused


def test_a_wrong_eps_is_found() -> None:
    fused, unfused = _distances(torch.float32, _model(eps=1.001e-2))
    assert fused > 1.5 * unfused

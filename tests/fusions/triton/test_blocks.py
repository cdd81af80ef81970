"""Transformer blocks with all default fusions at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import seeded_randn
from seqfuse.testing.tensors import redrawn
from tests.judging import judge_together


def block(width: int, norm: type[sf.UnfusedOperation], act: sf.Pointwise) -> sf.Sequential:
    up, down = ops.Linear(width, 2 * width), ops.Linear(2 * width, width)
    return ops.Residual(norm(width), up, act, down, ops.Dropout(0.25))


def stack() -> sf.Sequential:
    return sf.Sequential(
        block(16, ops.LayerNorm, ops.GeLU()),
        block(16, ops.RMSNorm, ops.SquaredReLU()),  # ReLU's gradient jumps: a rounding that flips one sign is large
        ops.LayerNorm(16),
        ops.SiLU(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_train_to_the_same_gradients(dtype: torch.dtype, device: torch.device):
    model = stack().to(device, dtype)
    x, dy = (seeded_randn((3, 8, 16), i, dtype=dtype).to(device) for i in range(2))

    def run(model: sf.Sequential, enabled: bool, seed: int) -> list[Tensor]:
        torch.manual_seed(3)
        leaf = redrawn(x, seed).to(next(model.parameters()).dtype, copy=True).requires_grad_()
        with sf.fusing(enabled, on_error="raise"):
            y = model(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy.to(y.dtype))]

    exact = copy.deepcopy(model).double()
    judge_together(lambda seed: (run(model, True, seed), run(model, False, seed), run(exact, False, seed)), 0)


def test_infer_the_same(device: torch.device):
    model = stack().to(device).eval()
    exact = copy.deepcopy(model).double()

    def measure(seed: int) -> tuple[Tensor, ...]:
        x = seeded_randn((3, 8, 16), seed).to(device)
        y = model(x)
        with sf.fusing(False):
            return y, model(x), exact(x.double())

    with torch.no_grad():
        judge_together(measure, 0)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
def test_no_norm_is_left_alone_between_blocks(grad: bool):
    norms = (fusions.BlockBoundary, fusions.BlockBoundaryBackward, fusions.NormBackward)
    model = sf.Sequential(*stack(), fusions=(*norms, *fusions.aten)).bfloat16().train(grad)
    plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, grad=grad, rows=8192))
    assert plan.count("BlockBoundary") == 2
    assert plan.count("BlockBoundaryBackward") == 2 * grad
    assert plan.count("NormBackward") == grad

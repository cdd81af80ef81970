"""Plans of feed-forward blocks of transformers on a GPU: no point-wise step stays on its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import AllReduceLinearBackward

H100 = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
# Steps that may stay unfused: torch's GEMMs, and, where they compute nothing, a fork in the forward pass and a sum in
# the backward pass.
FORWARD, BACKWARD = {"Fork", "LayerNorm", "RMSNorm", "Linear"}, {"Linear", "Add"}


def block(
    act: type[sf.UnfusedOperation],
    norm: type[sf.UnfusedOperation],
    bias: bool,
    dropout: float,
    inner_dropout: float = 0.0,
    width: int = 1024,
) -> ops.Residual:
    inner = 4 * width
    up = ops.Linear(width, inner * (2 if issubclass(act, sf.Gated) else 1), bias=bias)
    before, drop = ([ops.Dropout(p)] if p else [] for p in (inner_dropout, dropout))
    return ops.Residual(norm(width), up, act(), *before, ops.Linear(inner, width, bias=bias), *drop)


@pytest.fixture(scope="module", autouse=True)
def _without_data():
    with torch.device("meta"):
        yield


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize(
    ("norm", "bias", "dropout", "inner_dropout"),
    [
        (ops.LayerNorm, True, 0.0, 0.0),
        (ops.LayerNorm, True, 0.1, 0.0),
        (ops.LayerNorm, True, 0.1, 0.2),
        (ops.RMSNorm, True, 0.0, 0.0),
        (ops.LayerNorm, False, 0.0, 0.0),
        (ops.RMSNorm, False, 0.1, 0.0),
    ],
    ids=["LayerNorm", "LayerNorm-Dropout", "two-Dropouts", "RMSNorm", "no-bias", "RMSNorm-no-bias-Dropout"],
)
@pytest.mark.parametrize("act", [ops.SwiGLU, ops.GeLU], ids=["SwiGLU", "GeLU"])
def test_of_a_feed_forward_block_no_point_wise_step_is_left(
    act: type[sf.UnfusedOperation],
    norm: type[sf.UnfusedOperation],
    bias: bool,
    dropout: float,
    inner_dropout: float,
    blocks: int,
):
    model = sf.Sequential(*(block(act, norm, bias, dropout, inner_dropout) for _ in range(blocks))).bfloat16()
    x = torch.empty(8192, 1024, dtype=torch.bfloat16, requires_grad=True)
    plan = model.plan(x, env=H100)
    # A point-wise step between two GEMMs has no neighbor to fuse with, and is one kernel of torch.
    alone = {"GeLU"} if act is ops.GeLU and not bias else {"Dropout"} if act is ops.SwiGLU and inner_dropout else set()
    assert {step.name for step in plan.forward if not step.fused} <= FORWARD | alone, plan
    assert {step.name for step in plan.backward if not step.fused} <= BACKWARD | alone, plan
    # One norm begins the sequence; each later one is fused with the end of the block before it.
    assert sum(step.name in (norm.__name__, "NormForward") for step in plan.forward) == 1
    assert plan.count("BlockBoundary") == blocks - 1
    assert plan.count("NormBackward") + plan.count("BlockBoundaryBackward") == blocks
    if act is ops.SwiGLU:
        assert plan.count("BiasGated") == plan.count("BiasGatedBackward") == blocks
    elif bias:
        assert plan.count("LinearBiasPointwise" if not inner_dropout else "PointwiseChain") == blocks
        assert plan.count("PointwiseChainBackward") == blocks
    # The last GEMM's bias, dropout and sum are in one pass, or with the next norm.
    end = "BiasDropoutAdd" if dropout else "LinearBiasAdd"
    assert plan.count(end) == 1


@pytest.mark.parametrize("act", [ops.SwiGLU, ops.GeLU], ids=["SwiGLU", "GeLU"])
def test_the_rules_of_aten_alone_leave_some(act: type[sf.UnfusedOperation]):
    model = sf.Sequential(block(act, ops.LayerNorm, True, 0.1), fusions=sf.fusions.aten).bfloat16()
    left = {step.name for step in model.plan(env=H100).backward if not step.fused}
    assert left >= {act.__name__, "Dropout"}


def test_inference_has_an_activation_in_one_pass_or_in_the_gemm():
    still = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192, grad=False)
    for act, name in ((ops.SwiGLU, "BiasGated"), (ops.GeLU, "LinearBiasPointwise"), (ops.ReLU, "LinearBiasAct")):
        model = sf.Sequential(block(act, ops.LayerNorm, True, 0.1)).bfloat16().eval()
        assert model.plan(env=still).count(name) == 1


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_a_sum_over_processes_beside_a_gradient_is_not_made_under_autocast(autocast: torch.dtype | None):
    linear, group = ops.Linear(4, 4, bias=False), SimpleNamespace(size=2)
    slots: Any = SimpleNamespace(enter=SimpleNamespace(group=group), linear=linear, bias=None)
    asked = AllReduceLinearBackward.requires(slots, sf.Env.of("cpu", autocast=autocast))
    reasons = [reason for holds, reason in asked if not holds]
    assert reasons == ["under autocast the sum is of x's dtype, not of the GEMM's"] * (autocast is not None)

"""The boundary of two residual blocks in one pass per direction, with or without the activation of its norm."""

from __future__ import annotations

import copy

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.fusions import BlockBoundary, BlockBoundaryActivation, BlockBoundaryBackward
from seqfuse.fusions.boundary import asked_around
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, seeded_randn
from tests.watching import saving

ALL = (BlockBoundary, BlockBoundaryBackward)


def on(device: torch.device, operations: list[sf.UnfusedOperation]) -> list[sf.UnfusedOperation]:
    return [operation.to(device) for operation in operations]


@pytest.mark.parametrize("autocast", [True, False])
def test_the_stream_has_the_dtype_of_the_sum(autocast: bool, device: torch.device):
    bias, add, norm = on(device, [ops.Bias(8), ops.Add("r"), ops.LayerNorm(8)])
    x, other = (seeded_randn((3, 8), i, dtype=torch.bfloat16).to(device) for i in (0, 1))
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        fusion = BlockBoundary(bias=bias, dropout=None, add=add, fork=None, norm=norm)
        record = fusion.fwd(x, add_other=other, dtype=None)[2]["norm"]
        assert record.x.dtype is (bias(x) + other).dtype


def test_the_gradient_of_the_branch_is_written_where_it_differs_from_that_of_the_stream():
    x, other, half = frozenset({"x", "add.other"}), frozenset({"add.other"}), torch.bfloat16
    for given, first, written in (
        ((x, None, False, None), "dx", False),
        ((x, None, False, torch.float32), "dx", False),
        ((x, None, True, half), "dbranch", True),
        ((other, None, True, half), None, False),
        ((x, 0.3, False, None), "dbranch", True),
        ((other, 0.3, False, None), None, False),
    ):
        result, others, around = asked_around(None, *given)
        assert (result, others) == (first, {"add.other": "dx"})
        assert around.get("dbranch", False) is written


def blocks(dtype: torch.dtype, device: torch.device, p: float = 0.25) -> sf.Sequential:
    model = sf.Sequential(
        ops.Residual(ops.LayerNorm(9), ops.Linear(9, 12), ops.ReLU(), ops.Linear(12, 9), ops.Dropout(p)),
        ops.Residual(ops.LayerNorm(9), ops.Linear(9, 9), ops.Dropout(p)),
        ops.RMSNorm(9),
        fusions=ALL,
    )
    return model.to(device, dtype)


def test_nothing_is_dropped_in_evaluation(device: torch.device):
    model = blocks(torch.float32, device).eval()
    x = seeded_randn((5, 9), 0).to(device)
    assert model.plan(x).count("BlockBoundary") == 2
    with sf.fusing(False):
        unfused = model(x).detach()
        exact = copy.deepcopy(model).double()(x.double()).detach()
    assert_fused_close(model(x).detach(), unfused, exact)


@pytest.mark.parametrize("wide", ["residual", "bias"])
def test_the_stream_takes_the_dtype_of_the_sum(wide: str, device: torch.device):
    bias = [ops.Bias(8)] if wide == "bias" else []
    model = sf.Sequential(*bias, ops.Add("other"), ops.Fork("out"), ops.LayerNorm(8), fusions=ALL).to(device)
    x, other = seeded_randn((5, 8), 0, dtype=torch.bfloat16).to(device), seeded_randn((5, 8), 1).to(device)
    other = other.bfloat16() if bias else other
    with sf.fusing(on_error="raise"):
        assert model.plan(x, other=other).count("BlockBoundary") == 1
        y, stream = model(x, other=other)
    assert y.dtype is stream.dtype is torch.float32
    assert_bitwise_equal(stream.detach(), x.float() + other)


def test_the_other_mode_of_dropout_is_refused():
    dropout = ops.Dropout(0.3, mode="downscale_in_infer")
    model = sf.Sequential(dropout, ops.Add("other"), ops.LayerNorm(8), fusions=ALL)
    plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16))
    # The operations after it still fuse.
    assert plan.count("BlockBoundary") == 1
    assert any("upscale_in_train" in refusal.reason for refusal in plan.refused)


def bias(width: int) -> ops.Bias:
    made = ops.Bias(width)
    made.bias.data.copy_(seeded_randn((width,), 7))
    return made


def test_of_pre_activation_blocks_no_point_wise_step_is_left():
    def block() -> ops.Residual:
        return ops.Residual(ops.LayerNorm(1024), ops.GeLU(), ops.Linear(1024, 1024), ops.Dropout(0.1))

    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    with torch.device("meta"):
        plan = sf.Sequential(block(), block(), block(), fusions=fusions.default).bfloat16().plan(env=env)
    assert plan.count("BlockBoundaryActivation") == 2
    assert plan.count("NormActivationJoint") == 1
    assert {step.name for step in plan.forward if not step.fused} <= {"Fork", "Linear"}
    assert {step.name for step in plan.backward if not step.fused} <= {"Fork", "Linear"}


def test_keeps_one_tensor(device: torch.device):
    list_ = bias(8), ops.Dropout(0.3), ops.Add("other"), ops.RMSNorm(8), ops.SiLU()
    model = sf.Sequential(*list_, fusions=BlockBoundaryActivation).to(device)
    x, other = (seeded_randn((5, 8), i).to(device).requires_grad_() for i in range(2))
    with saving() as kept:
        model(x, other=other)
    assert sorted(t.numel() for t in kept) == [1, 5, 8, 40]  # the seed, rstd, the weight and the stream

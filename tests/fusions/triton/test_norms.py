"""A norm with what is beside it: an activation, the boundary of two residual blocks, and whole blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.fusions import (
    BlockBoundary,
    BlockBoundaryActivation,
    BlockBoundaryBackward,
    NormActivationJoint,
    NormBackward,
    NormForward,
)
from seqfuse.fusions.boundary import asked_around
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, seeded_randn
from seqfuse.testing.tensors import redrawn
from tests.judging import judge_together
from tests.watching import saving


def test_a_batch_of_incoming_gradients_gives_what_each_of_them_gives(device: torch.device):
    model = sf.Sequential(ops.Residual(ops.LayerNorm(8), ops.Linear(8, 8)), fusions=(NormBackward,)).to(device)
    x, batch = seeded_randn((5, 8), 0).to(device).requires_grad_(), seeded_randn((3, 5, 8), 1).to(device)
    leaves = [x, *model.parameters()]
    with sf.fusing(on_error="raise"):
        y = model(x)
        assert model.plan(x).count("NormBackward") == 1
        found = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in batch]
    assert_bitwise_equal(found, [torch.stack(grads) for grads in zip(*each, strict=True)])


def test_parameters_in_another_dtype_get_their_own(device: torch.device):
    model = sf.Sequential(ops.LayerNorm(8), fusions=(NormBackward,)).to(device)
    x, dy = (seeded_randn((40, 8), i, dtype=torch.bfloat16).to(device) for i in range(2))

    def run(model: sf.Sequential, enabled: bool, dtype: torch.dtype, seed: int) -> list[Tensor]:
        leaf = redrawn(x, seed).to(dtype, copy=True).requires_grad_()
        with sf.fusing(enabled, on_error="raise"):
            y = model(leaf)
        return list(torch.autograd.grad(y, [leaf, *model.parameters()], dy.to(y.dtype)))

    wide = copy.deepcopy(model).double()

    def measure(seed: int) -> tuple[list[Tensor], ...]:
        fused = run(model, True, torch.bfloat16, seed)
        assert [gradient.dtype for gradient in fused] == [torch.bfloat16, torch.float32, torch.float32]
        return fused, run(model, False, torch.bfloat16, seed), run(wide, False, torch.float64, seed)

    judge_together(measure, 0)


def test_a_norm_without_parameters_is_left_to_the_operation():
    model = sf.Sequential(ops.Linear(8, 8), ops.LayerNorm(8, elementwise_affine=False), fusions=(NormBackward,))
    plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=4096))
    assert not plan.count("NormBackward")


def test_parameters_may_be_wider_than_the_input(device: torch.device):
    model = sf.Sequential(ops.LayerNorm(8), fusions=(NormForward,)).to(device)
    x = seeded_randn((40, 8), 0, dtype=torch.bfloat16).to(device)
    assert model.plan(x).count("NormForward") == 1
    y = model(x).detach()
    with sf.fusing(False):
        assert_fused_close(y, model(x).detach(), model.double()(x.double()).detach())


@pytest.mark.parametrize(
    ("norm", "dtype", "taken"),
    [
        (ops.RMSNorm(8), torch.float32, True),
        (ops.RMSNorm(8), torch.bfloat16, True),
        (ops.RMSNorm(5120), torch.bfloat16, True),
        (ops.LayerNorm(4096), torch.bfloat16, True),
        (ops.LayerNorm(7168), torch.float32, True),
        (ops.LayerNorm(5120), torch.bfloat16, False),
        (ops.LayerNorm(12288), torch.bfloat16, False),
    ],
)
def test_of_rows_that_leave_lanes_empty_a_gpu_leaves_a_layernorm_to_aten(
    norm: torch.nn.Module, dtype: torch.dtype, taken: bool
):
    model = sf.Sequential(norm, fusions=(NormForward,)).to(dtype)
    plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=dtype, tokens=8192))
    assert [step.name == "NormForward" for step in plan.forward] == [taken]
    assert [refusal.reason for refusal in plan.refused] == ["ATen also runs this norm in one pass"] * (not taken)


def test_of_nine_operations_x_alone_is_kept(device: torch.device):
    acts = [ops.SiLU(), ops.Scale(2.0), ops.Tanh(), ops.GeLU(), ops.Scale(0.5), ops.ReLU(), ops.Sigmoid(), ops.SiLU()]
    model = sf.Sequential(ops.LayerNorm(8, bias=False), *acts, fusions=NormActivationJoint).to(device)
    x = seeded_randn((5, 8), 0).to(device).requires_grad_()
    assert len(model.plan(x).forward) == 1
    with saving() as kept:
        y = model(x)
    assert sorted(t.numel() for t in kept) == [5, 5, 8, 40]  # the statistics, the weight and x
    model[2].factor, model[5].factor = 5.0, 7.0
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    model[2].factor, model[5].factor = 2.0, 0.5
    with sf.fusing(False):
        torch.testing.assert_close(dx, torch.autograd.grad(model(x), x, torch.ones_like(y))[0])


ABOUT_ONE = [
    ops.LayerNorm(8, zero_centered=True),
    ops.LayerNorm(8, bias=False, zero_centered=True),
    ops.RMSNorm(8, zero_centered=True),
]


@pytest.mark.parametrize("norm", ABOUT_ONE, ids=str)
def test_what_is_saved_for_a_backward_of_others_has_the_gain_about_one(norm: Any, device: torch.device):
    norm = copy.deepcopy(norm).to(device)
    for i, p in enumerate(norm.parameters()):
        p.data = seeded_randn(tuple(p.shape), i + 1).to(device)
    x, act = seeded_randn((5, 8), 0).to(device), ops.SiLU()
    with torch.no_grad():
        joint = NormActivationJoint(norm=norm, acts=(act,))
        _, saved = joint.fwd(x)
        torch.testing.assert_close(joint.unfused(saved)["acts"][0].x, norm.reference(x))


def test_a_variance_that_overflows_gives_zeros(device: torch.device):
    x = 1e30 * seeded_randn((5, 9), 0).to(device)
    model = sf.Sequential(ops.LayerNorm(9), ops.ReLU(), fusions=(NormActivationJoint,)).to(device)
    with torch.no_grad():
        y = model(x)
        with sf.fusing(False):
            assert_bitwise_equal(y, model(x))


# The boundary of two residual blocks in one pass per direction.


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


# Transformer blocks with all default fusions at once.


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

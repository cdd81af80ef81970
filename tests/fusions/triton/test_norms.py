"""A norm alone or with an activation, and its backward with the gradient of the residual stream."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import NormActivationJoint, NormBackward, NormForward
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

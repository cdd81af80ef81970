"""A norm by itself, and its backward with the gradient of the residual stream."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import NormBackward, NormForward
from seqfuse.testing import assert_bitwise_equal, assert_fused_close, check_fusion, seeded_randn
from seqfuse.testing.tensors import redrawn
from tests.judging import judge_together


@pytest.mark.parametrize("fork", [True, False], ids=["fork", "alone"])
@pytest.mark.parametrize("norm", [ops.LayerNorm, ops.RMSNorm], ids=lambda norm: norm.__name__)
def test_the_backward_takes_the_place_of_what_it_replaces(
    norm: type[sf.UnfusedOperation], fork: bool, device: torch.device
):
    operations = [*([ops.Fork("out")] if fork else []), norm(8).to(device)]
    check_fusion(NormBackward, seeded_randn((5, 8), 0).to(device), *operations)


@pytest.mark.parametrize(
    "norm",
    [
        ops.LayerNorm(8, bias=False, zero_centered=True),
        ops.LayerNorm(8, elementwise_affine=False),
        ops.RMSNorm(8, zero_centered=True),
    ],
    ids=["no bias, zero-centered", "no weight", "RMSNorm, zero-centered"],
)
def test_takes_every_form_of_norm(norm: sf.UnfusedOperation, device: torch.device):
    x = seeded_randn((2, 3, 8), 0).to(device)
    check_fusion(NormBackward, x, ops.Fork("out"), norm.to(device), dtypes=[torch.float16])


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_trains_to_the_same_gradients(dtype: torch.dtype, device: torch.device):
    model = sf.Sequential(
        ops.Residual(ops.LayerNorm(8), ops.Linear(8, 8), ops.Tanh()),
        ops.Residual(ops.RMSNorm(8), ops.Linear(8, 8)),
        fusions=(NormBackward,),
    ).to(device, dtype)
    x, dy = (seeded_randn((18, 8), i, dtype=dtype).to(device) for i in range(2))
    assert model.plan(x).count("NormBackward") == 2

    def run(model: sf.Sequential, enabled: bool, seed: int) -> list[Tensor]:
        leaf = redrawn(x, seed).to(model[0][1].weight.dtype, copy=True).requires_grad_()
        with sf.fusing(enabled, on_error="raise"):
            y = model(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy.to(y.dtype))]

    exact = copy.deepcopy(model).double()
    judge_together(lambda seed: (run(model, True, seed), run(model, False, seed), run(exact, False, seed)), 0)


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


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (ops.RMSNorm(8, zero_centered=True), torch.bfloat16),
        (ops.LayerNorm(8, zero_centered=True), torch.float16),
    ],
    ids=["RMSNorm", "LayerNorm"],
)
def test_the_forward_takes_the_place_of_what_it_replaces(
    norm: sf.UnfusedOperation, dtype: torch.dtype, device: torch.device
):
    check_fusion(NormForward, seeded_randn((5, 8), 0).to(device), norm.to(device), dtypes=[dtype])


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
    assert [refusal.reason for refusal in plan.refused] == ["ATen's kernel makes one pass as well"] * (not taken)

"""The boundary of two residual blocks and the activation of its norm in one pass each way."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.fusions import BlockBoundaryActivation
from seqfuse.testing import check_fusion, seeded_randn
from seqfuse.testing.tensors import redrawn
from tests.judging import judge_together


def bias(width: int) -> ops.Bias:
    made = ops.Bias(width)
    made.bias.data.copy_(seeded_randn((width,), 7))
    return made


@pytest.mark.parametrize(
    ("list_", "dtype"),
    [
        ((bias(7), ops.Dropout(0.3), ops.Add("other"), ops.Fork("out"), ops.LayerNorm(7), ops.SiLU()), torch.float32),
        ((bias(8), ops.Add("other"), ops.RMSNorm(8, eps=1e-5, zero_centered=True), ops.GeLU("tanh")), torch.float16),
        ((ops.Add("other"), ops.Fork("out"), ops.LayerNorm(8, elementwise_affine=False), ops.ReLU()), torch.bfloat16),
        ((ops.Dropout(0.3), ops.Add("other"), ops.LayerNorm(8, bias=False), ops.Sigmoid()), torch.float32),
        ((bias(8), ops.Add("other"), ops.LayerNorm(8), ops.GeLU(), ops.Scale(-2.0), ops.Tanh()), torch.float32),
    ],
    ids=["all", "no dropout", "no parameters", "no fork", "several activations"],
)
def test_takes_the_place_of_what_it_replaces(
    list_: tuple[sf.UnfusedOperation, ...], dtype: torch.dtype, device: torch.device
):
    operations = [operation.to(device) for operation in list_]
    width = next(o.normalized_shape[0] for o in operations if isinstance(o, ops.LayerNorm | ops.RMSNorm))
    check_fusion(BlockBoundaryActivation, seeded_randn((5, width), 0).to(device), *operations, dtypes=[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_stack_of_blocks_trains_to_the_same_gradients(dtype: torch.dtype, device: torch.device):
    def block() -> ops.Residual:
        return ops.Residual(ops.LayerNorm(9), ops.GeLU(), ops.Linear(9, 9), ops.Dropout(0.25))

    model = sf.Sequential(block(), block(), ops.RMSNorm(9), ops.Tanh(), fusions=BlockBoundaryActivation)
    model = model.to(device, dtype)
    x, dy = (seeded_randn((2, 9, 9), i, dtype=dtype).to(device) for i in range(2))
    assert model.plan(x).count("BlockBoundaryActivation") == 2

    def run(model: sf.Sequential, fuse: bool, seed: int) -> list[Tensor]:
        torch.manual_seed(5)
        leaf = redrawn(x, seed).to(model[2].weight.dtype, copy=True).requires_grad_()
        with sf.fusing(fuse, on_error="raise"):
            y = model(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy.to(y.dtype))]

    exact = copy.deepcopy(model).double()
    judge_together(lambda seed: (run(model, True, seed), run(model, False, seed), run(exact, False, seed)), 0)


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
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x, other=other)
    assert sorted(t.numel() for t in kept) == [1, 5, 8, 40]  # the seed, rstd, the weight and the stream


@pytest.mark.parametrize(
    ("list_", "reason"),
    [
        (
            (ops.Dropout(0.5, "downscale_in_infer"), ops.Add("o"), ops.LayerNorm(8), ops.ReLU()),
            "its kernel scales what dropout keeps: mode must be upscale_in_train",
        ),
        ((ops.Add("o"), ops.LayerNorm((2, 4)), ops.ReLU()), "its kernel normalizes over one dimension"),
    ],
    ids=["mode", "two dimensions"],
)
def test_says_why_not(list_: tuple[sf.UnfusedOperation, ...], reason: str):
    plan = sf.Sequential(*list_, fusions=BlockBoundaryActivation).plan(env=sf.Env(kernels="triton"))
    assert reason in [refusal.reason for refusal in plan.refused]

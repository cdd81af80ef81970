"""A residual feed-forward block of which only its input and the pre-activation are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import seqfuse as sf
from seqfuse import env, ops
from seqfuse.fusions import NormLinearActivationLinear, feedforward
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways

NAME = "NormLinearActivationLinear"


def block(
    norm: sf.UnfusedOperation, act: sf.UnfusedOperation, *after: sf.UnfusedOperation, bias: bool = True
) -> ops.Residual:
    inner = 10 if isinstance(act, sf.Gated) else 5
    return ops.Residual(norm, ops.Linear(6, inner, bias=bias), act, *after, ops.Linear(5, 6, bias=bias))


@pytest.mark.parametrize(
    ("norm", "members", "dtype"),
    [
        (ops.LayerNorm(6), (ops.GeLU("tanh"),), torch.float32),
        (ops.RMSNorm(6), (ops.SwiGLU(),), torch.bfloat16),
        (ops.RMSNorm(6, zero_centered=True), (ops.SwiGLU(), ops.Dropout(0.3)), torch.float32),
    ],
    ids=["LayerNorm", "RMSNorm, gated", "gain about one, dropout"],
)
def test_takes_the_place_of_what_it_replaces(
    norm: sf.UnfusedOperation, members: tuple[sf.UnfusedOperation, ...], dtype: torch.dtype, device: torch.device
):
    own = block(norm, *members, bias=dtype is torch.float32)
    if len(members) > 1:
        own = ops.Residual(*own, ops.Dropout(0.3))
    x = seeded_randn((5, 6), 0).to(device)
    check_fusion(NormLinearActivationLinear, x, own.to(device), dtypes=[dtype])


@pytest.mark.parametrize("norm", [ops.LayerNorm(6, zero_centered=True), ops.RMSNorm(6, zero_centered=True)], ids=str)
def test_the_saved_tensors_that_it_leaves_have_the_gain_about_one(norm: Any, device: torch.device):
    norm = copy.deepcopy(norm).to(device)
    for i, p in enumerate(norm.parameters()):
        p.data = seeded_randn(tuple(p.shape), i + 1).to(device)
    own = block(norm, ops.GeLU("tanh")).to(device)
    model = sf.Sequential(own, fusions=NormLinearActivationLinear, memory="lean")
    x, dy = (seeded_randn((5, 6), i).to(device) for i in range(2))
    x.requires_grad_()
    assert model.plan(x).count(NAME) == 1
    grads = torch.autograd.grad(model(x), [x, *model.parameters()], dy)  # the weight of the GEMM by the norm's result
    with sf.fusing(False):
        torch.testing.assert_close(grads, torch.autograd.grad(model(x), [x, *model.parameters()], dy))


def test_trains_to_the_same_gradients(device: torch.device):
    inner = (ops.LayerNorm(12), ops.Linear(12, 36), ops.GeLU("tanh"), ops.Linear(36, 12))
    model = sf.Sequential(
        ops.Residual(*inner), ops.Residual(*inner), fusions=(NormLinearActivationLinear,), memory="lean"
    )
    four_ways(model.to(device, torch.bfloat16), seeded_randn((19, 12), 0, dtype=torch.bfloat16).to(device),
              NormLinearActivationLinear, at_least=2)  # fmt: skip


@pytest.mark.parametrize("frozen", ["1.weight", "1.bias", "3.weight", "0.weight", "0.bias"])
def test_what_only_a_frozen_weight_needs_is_not_kept_and_the_others_train(frozen: str, device: torch.device):
    own = block(ops.LayerNorm(6), ops.GeLU("tanh")).to(device)
    own.get_parameter(frozen).requires_grad_(False)
    model = sf.Sequential(own, fusions=NormLinearActivationLinear, memory="lean")
    x, dy = (seeded_randn((5, 6), i).to(device) for i in range(2))
    wanted = [p for p in model.parameters() if p.requires_grad]
    grads: list[list[torch.Tensor]] = []
    for enabled in (True, False):
        with sf.fusing(enabled, on_error="raise"):
            assert model.plan(x).count(NAME) == enabled
            grads.append(list(torch.autograd.grad(model(x), wanted, dy)))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("act", "dropout", "blocks"),
    [
        (ops.GeLU, 0.1, 3),
        (ops.SwiGLU, 0.0, 1),
        pytest.param(ops.GeLU, 0.0, 1, marks=pytest.mark.full),
        pytest.param(ops.SwiGLU, 0.1, 3, marks=pytest.mark.full),
    ],
)
def test_of_every_block_the_input_and_the_pre_activation_are_kept(
    act: type[sf.UnfusedOperation], dropout: float, blocks: int, device: torch.device
):
    inner, width = (8192 if issubclass(act, sf.Gated) else 4096), 1024
    list_ = [
        ops.Residual(
            ops.LayerNorm(width), ops.Linear(width, inner), act(), ops.Linear(4096, width),
            *[ops.Dropout(dropout)] * (dropout > 0),
        )
        for _ in range(blocks)
    ]  # fmt: skip
    model = sf.Sequential(*list_, memory="lean").to(device, torch.bfloat16)
    x = torch.empty(8192, width, dtype=torch.bfloat16, device=device, requires_grad=True)
    with mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]):
        plan = model.plan(x)
        memory = plan.memory
    assert plan.count(NAME) == blocks, plan
    # Beside them statistics of rows, and seeds.
    assert 0 < memory.saved - blocks * 2 * 8192 * (width + inner) <= blocks * (2 * 4 * 8192 + 64)


def test_leaves_a_block_whose_input_is_read_elsewhere():
    list_ = [ops.Fork("r"), ops.LayerNorm(6), ops.Linear(6, 5), ops.SiLU(), ops.Linear(5, 6), ops.Add("r")]
    there = sf.Env.of("cuda:sm_90")
    assert sf.Sequential(*list_, fusions=NormLinearActivationLinear, memory="lean").plan(env=there).count(NAME) == 1
    (refusal,) = (
        sf.Sequential(*list_, ops.Add("r"), fusions=NormLinearActivationLinear, memory="lean").plan(env=there).refused
    )
    assert refusal.reason == "the extra output fork_out is read elsewhere and is not among its outputs"


MUTANTS = {
    "another eps": ("gain, bias, saved.eps,", "gain, bias, 2 * saved.eps + 0.1,"),
    "no gradient of the stream": ('stream = dy if "x" in needs else None', "stream = None"),
    "the input for the norm's result": ("weight_grad(dz, n,", "weight_grad(dz, saved.x,"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_fusion_is_found(name: str, device: torch.device, mutant: Callable[..., ModuleType]):
    changed = mutant(feedforward, *MUTANTS[name]).NormLinearActivationLinear
    own = block(ops.LayerNorm(6), ops.SiLU()).to(device)
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(changed, seeded_randn((5, 6), 0).to(device), own, dtypes=[torch.float32])

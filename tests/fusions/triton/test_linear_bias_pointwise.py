"""`LinearBiasPointwise`: torch's GEMM with the bias in it, and the activation behind it by one kernel."""

from __future__ import annotations

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import LinearBias, LinearBiasPointwise
from seqfuse.testing import check_fusion, seeded_randn


@pytest.mark.parametrize("act", [ops.GeLU(), ops.Tanh()], ids=["reads its input", "reads its output"])
def test_agrees_in_every_combination(act: sf.Pointwise, device: torch.device):
    list_ = [operation.to(device) for operation in (ops.Linear(6, 9, bias=False), ops.Bias(9), act)]
    check_fusion(LinearBiasPointwise, seeded_randn((2, 5, 6), 0).to(device), *list_)


def test_is_one_step_of_as_many_kernels_as_the_two_that_it_replaces():
    model = sf.Sequential(ops.Linear(64, 256), ops.GeLU(), fusions=(LinearBias, LinearBiasPointwise)).bfloat16()
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    assert [step.name for step in model.plan(env=there).forward] == ["LinearBiasPointwise"]


def test_applies_under_autocast_and_not_to_a_weight_of_another_dtype():
    model = sf.Sequential(ops.Linear(64, 256), ops.GeLU(), fusions=LinearBiasPointwise)
    assert model.plan(env=sf.Env.of("cuda:sm_90", autocast=torch.bfloat16)).count("LinearBiasPointwise") == 1
    assert model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)).count("LinearBiasPointwise") == 0


@pytest.mark.parametrize("other", ["weight", "bias"])
def test_does_not_apply_where_a_parameter_has_another_dtype(other: str):
    parts = ops.Linear(64, 256, bias=False), ops.Bias(256)
    model = sf.Sequential(*parts, ops.GeLU(), fusions=LinearBiasPointwise).bfloat16()
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)
    assert model.plan(env=there).count("LinearBiasPointwise") == 1
    parts[other == "bias"].float()
    assert model.plan(env=there).count("LinearBiasPointwise") == 0

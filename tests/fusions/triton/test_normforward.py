"""A norm by itself."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import _norm, normforward
from seqfuse.fusions.normforward import NormForward
from seqfuse.testing import assert_fused_close, check_fusion, seeded_randn


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (ops.RMSNorm(8, zero_centered=True), torch.bfloat16),
        (ops.LayerNorm(8, zero_centered=True), torch.float16),
    ],
    ids=["RMSNorm", "LayerNorm"],
)
def test_takes_the_place_of_what_it_replaces(norm: sf.UnfusedOperation, dtype: torch.dtype, device: torch.device):
    check_fusion(NormForward, seeded_randn((5, 8), 0).to(device), norm.to(device), dtypes=[dtype])


def test_parameters_may_be_wider_than_the_input(device: torch.device):
    model = sf.Sequential(ops.LayerNorm(8), fusions=(NormForward,)).to(device)
    x = seeded_randn((40, 8), 0, dtype=torch.bfloat16).to(device)
    assert model.plan(x).count("NormForward") == 1
    y = model(x).detach()
    with sf.fusing(False):
        assert_fused_close(y, model(x).detach(), model.double()(x.double()).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_aten_does_in_one_pass_is_left_to_it(dtype: torch.dtype):
    model = sf.Sequential(ops.RMSNorm(8), fusions=(NormForward,)).to(dtype)
    (refusal,) = model.plan(env=sf.Env.of("cuda:sm_90", dtype=dtype)).refused
    assert refusal.reason == "ATen's kernel makes one pass as well"


def test_a_mutant_is_found(
    mutant: Callable[[ModuleType, str, str], ModuleType], monkeypatch: pytest.MonkeyPatch, device: torch.device
):
    call = "rmsnorm_fwd(x, gain, eps, zero_centered=norm.zero_centered"
    changed = mutant(_norm, call, "rmsnorm_fwd(x, gain, eps, zero_centered=False")
    monkeypatch.setattr(normforward, "norm_fwd", changed.norm_fwd)
    norm = ops.RMSNorm(8, zero_centered=True).to(device)
    with pytest.raises(AssertionError):
        check_fusion(NormForward, seeded_randn((5, 8), 0).to(device), norm, dtypes=[torch.bfloat16])

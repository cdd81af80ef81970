"""Linear, Bias and an activation or a gated unit in one Triton GEMM, forward."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.fusions import ActivationLinearBackward, LinearBiasActivation, gemm
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways


def test_takes_the_place_of_what_it_replaces(device: torch.device):
    x = seeded_randn((5, 6), 0).to(device)
    # Of Inf torch's exact GeLU makes NaN in float32, so the other one is compared.
    check_fusion(
        LinearBiasActivation, x, ops.Linear(6, 8).to(device), ops.GeLU("tanh"), dtypes=[torch.float32, torch.float16]
    )


@pytest.mark.parametrize("act", [ops.ReLU(), ops.SiLU()], ids=["keeps its output", "keeps its input"])
def test_without_a_bias_and_in_three_dimensions(act: sf.Pointwise, device: torch.device):
    x = seeded_randn((2, 3, 7), 0).to(device)
    check_fusion(LinearBiasActivation, x, ops.Linear(7, 5, bias=False).to(device), act, dtypes=[torch.bfloat16])


@pytest.mark.parametrize(
    ("act", "drop", "dtype"),
    [
        (ops.GeLU("tanh"), ops.Dropout(0.3), torch.float32),
        # Not in 16 bits: 1 - y^2 of a y that was rounded near 1 is inexact either way, so that chance decides.
        (ops.Tanh(), ops.Dropout(0.3), torch.float32),
        (ops.ReLU(), ops.Dropout(0.5, "downscale_in_infer"), torch.float16),
        (ops.ReLU(), ops.Dropout(0.5).eval(), torch.bfloat16),
    ],
    ids=["keeps its input", "keeps its output", "not scaled", "evaluation"],
)
def test_with_dropout_behind_it(act: sf.Pointwise, drop: ops.Dropout, dtype: torch.dtype, device: torch.device):
    x = seeded_randn((5, 6), 0).to(device)
    check_fusion(LinearBiasActivation, x, ops.Linear(6, 7).to(device), act, drop, dtypes=[dtype])


@pytest.mark.parametrize("act", [ops.GeLU(), ops.ReLU()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_dropout_meets_the_fused_backward_in_the_records(
    act: sf.Pointwise, dtype: torch.dtype, device: torch.device
):
    both = (LinearBiasActivation, ActivationLinearBackward)
    list_ = ops.Linear(12, 36), act, ops.Dropout(0.2), ops.Linear(36, 9)
    model = sf.Sequential(*list_, fusions=both).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *both)


def test_of_a_dropout_nothing_is_kept_but_its_seed(device: torch.device):
    model = sf.Sequential(ops.Linear(6, 8), ops.ReLU(), ops.Dropout(0.5), fusions=LinearBiasActivation).to(device)
    x = seeded_randn((5, 6), 0).to(device)
    assert model.plan(x).count("LinearBiasActivation") == 1
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    sizes = {t.untyped_storage().data_ptr(): t.numel() for t in kept}
    assert sorted(sizes.values()) == [1, 30, 40]  # the seed, x and act(z)


@pytest.mark.parametrize("act", [ops.GeLU(), ops.Tanh(), ops.SquaredReLU(), ops.QuickGeLU(), ops.Sigmoid()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meets_the_fused_backward_in_the_records(act: sf.Pointwise, dtype: torch.dtype, device: torch.device):
    both = (LinearBiasActivation, ActivationLinearBackward)
    model = sf.Sequential(ops.Linear(12, 36), act, ops.Linear(36, 9), fusions=both).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *both)


@pytest.mark.parametrize("act", [ops.ReLU(), ops.SiLU()], ids=["keeps its output", "keeps its input"])
def test_saves_one_tensor_beside_the_input(act: sf.Pointwise, device: torch.device):
    model = sf.Sequential(ops.Linear(6, 8), act, fusions=LinearBiasActivation).to(device)
    x = seeded_randn((5, 6), 0).to(device)
    assert model.plan(x).count("LinearBiasActivation") == 1
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(x)
    storages = {t.untyped_storage().data_ptr() for t in kept} - {p.data_ptr() for p in model.parameters()}
    assert len(storages) == 2
    assert (y.data_ptr() in storages) == (act.reads == "output")


def test_a_scale_is_not_taken_for_a_dropout():
    drop = ops.Dropout(0.5, "downscale_in_infer").eval()
    model = sf.Sequential(ops.Linear(8, 8), ops.SiLU(), drop, fusions=LinearBiasActivation)
    plan = model.plan(env=sf.Env(kernels="triton"))
    assert plan.forward[0].covers == range(3)  # product, bias and activation
    assert "in evaluation this Dropout is a scale" in [refusal.reason for refusal in plan.refused]


def test_inference_writes_no_pre_activation():
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=4096)
    model = sf.Sequential(ops.Linear(1024, 4096), ops.GeLU(), fusions=LinearBiasActivation).to(torch.bfloat16)
    step = model.plan(env=env).forward[0]
    assert (step.name, step.inference) == ("LinearBiasActivation", False)
    still = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=4096, grad=False)
    without = model.plan(env=still).forward[0]
    assert (without.name, without.inference) == ("LinearBiasActivation", True)
    written = float(4096 * 4096 * 2)  # once to store it, and the operations read it and write it
    assert without.operation.saves(still).bytes - step.operation.saves(env).bytes == written


@pytest.mark.parametrize(("k", "chosen"), [(1024, "LinearBiasActivation"), (16384, "LinearBiasPointwise")])
def test_a_pass_saved_has_to_pay_for_the_slower_product(k: int, chosen: str):
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    model = sf.Sequential(
        ops.Linear(k, 4096, device="meta", dtype=torch.bfloat16),
        ops.GeLU(),
        fusions=fusions.default,
    )
    assert model.plan(env=env).forward[0].name == chosen


class Clipped(sf.Pointwise):
    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-1, 1)


@pytest.mark.parametrize(
    ("act", "env", "reason"),
    [
        (ops.GeLU(), sf.Env(kernels=None), "needs a Triton device"),
        (ops.GeLU(), sf.Env(kernels="triton", dtype=torch.float64), "its kernel is for float32, float16 and bfloat16"),
        (ops.GeLU(), sf.Env(kernels="triton", dtype=torch.bfloat16), "input, weight and bias must have one dtype"),
        (Clipped(), sf.Env(kernels="triton"), "Clipped has no device functions"),
    ],
)
def test_says_why_not(act: sf.Pointwise, env: sf.Env, reason: str):
    plan = sf.Sequential(ops.Linear(8, 8), act, fusions=LinearBiasActivation).plan(env=env)
    assert [refusal.reason for refusal in plan.refused] == [reason]


def test_a_gated_unit_takes_the_place_of_what_it_replaces(device: torch.device):
    x = seeded_randn((5, 6), 0).to(device)
    check_fusion(
        LinearBiasActivation, x, ops.Linear(6, 10).to(device), ops.SwiGLU(), dtypes=[torch.float32, torch.float16]
    )


def test_a_gated_unit_without_a_bias_and_in_three_dimensions(device: torch.device):
    x = seeded_randn((2, 3, 7), 0).to(device)
    check_fusion(LinearBiasActivation, x, ops.Linear(7, 6, bias=False).to(device), ops.ReGLU(), dtypes=[torch.bfloat16])


def test_a_gated_unit_with_dropout_behind_it(device: torch.device):
    x = seeded_randn((5, 6), 0).to(device)
    list_ = ops.Linear(6, 10).to(device), ops.SwiGLU(), ops.Dropout(0.3)
    check_fusion(LinearBiasActivation, x, *list_, dtypes=[torch.float32, torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gated_unit_with_dropout_meets_in_the_records(dtype: torch.dtype, device: torch.device):
    both = (LinearBiasActivation, ActivationLinearBackward)
    list_ = ops.Linear(12, 72), ops.GEGLU(), ops.Dropout(0.2, "downscale_in_infer"), ops.Linear(36, 9)
    model = sf.Sequential(*list_, fusions=both).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *both)


@pytest.mark.parametrize("unit", [ops.SwiGLU(), ops.GEGLU(), ops.GEGLU("tanh"), ops.ReGLU(), ops.GLU()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_units_meet_in_the_records(unit: sf.Gated, dtype: torch.dtype, device: torch.device):
    both = (LinearBiasActivation, ActivationLinearBackward)
    model = sf.Sequential(ops.Linear(12, 72), unit, ops.Linear(36, 9), fusions=both).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *both)


class Clamped(sf.Gated):
    unit = ops.SiLU

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return super().reference(x).clamp(-1, 1)


def test_a_gated_unit_of_another_kind_is_refused():
    fusion = LinearBiasActivation(linear=ops.Linear(8, 8, bias=False), bias=None, act=Clamped(), dropout=None)
    reasons = [sentence for holds, sentence in fusion.requires(sf.Env(kernels="triton")) if not holds]
    assert reasons == ["Clamped states a gated unit of its own"]


MUTANTS = {
    "the output for the input": ('"act": act.record(t, t)', '"act": act.record(y, y)'),
    "no bias": ("self.linear, self.bias, act, drop", "self.linear, None, act, drop"),
    "nothing dropped": ("self.bias, act, drop, saves", "self.bias, act, None, saves"),
    "another activation": ("x, self.linear, self.bias, act, drop", "x, self.linear, self.bias, Tanh(), drop"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_fusion_is_found(name: str, device: torch.device, mutant: Callable[..., ModuleType]):
    changed = mutant(gemm, *MUTANTS[name]).LinearBiasActivation
    x = seeded_randn((5, 6), 0).to(device)
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(changed, x, ops.Linear(6, 8).to(device), ops.SiLU(), ops.Dropout(0.3), dtypes=[torch.float32])


def test_the_output_after_dropout_is_not_the_one_before_it(device: torch.device, mutant: Callable[..., ModuleType]):
    changed = mutant(gemm, "saves and not before and drop is not None", "False").LinearBiasActivation
    x = seeded_randn((5, 6), 0).to(device)
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(changed, x, ops.Linear(6, 8).to(device), ops.Tanh(), ops.Dropout(0.3), dtypes=[torch.float32])


GATED_MUTANTS = {
    "halves swapped": ("act.record(t, t)", "act.record(t.flip(-1), t)"),
    "no bias": ("self.linear, self.bias, act, drop", "self.linear, None, act, drop"),
    "nothing dropped": ("self.bias, act, drop, saves", "self.bias, act, None, saves"),
}


@pytest.mark.parametrize("name", GATED_MUTANTS)
def test_a_wrong_fusion_of_a_gated_unit_is_found(name: str, device: torch.device, mutant: Callable[..., ModuleType]):
    changed = mutant(gemm, *GATED_MUTANTS[name]).LinearBiasActivation
    x = seeded_randn((5, 6), 0).to(device)
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(changed, x, ops.Linear(6, 10).to(device), ops.SwiGLU(), ops.Dropout(0.3), dtypes=[torch.float32])

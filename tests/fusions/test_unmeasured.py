"""What a GPU uses of the default fusions before anything was measured there: torch's GEMMs, and no GEMM of our own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.plan.match import UNMEASURED

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import plain
from gpu.blocks import spec_of
from gpu.sizes import MODELS

OWN_GEMM = {
    "ActivationLinearBackward", "BlockEndBackward", "LinearActivationLinear", "LinearBiasActivation",
    "LinearBiasBackwardTriton", "LinearBiasDropoutAdd", "MergedLinearGated", "NormLinearActivationLinear",
}  # fmt: skip
# What may stand unfused: torch's GEMMs and attention, a norm that begins a list, and what launches nothing.
FORWARD, BACKWARD = {"Fork", "LayerNorm", "RMSNorm", "Linear", "Attention"}, {"Linear", "Attention", "Add"}


def planned(what: str, model: Any, dropout: float, arch: str = "sm_90", rows: int = 8192, grad: bool = True) -> sf.Plan:
    layers = 2 if what == "stack" else 1
    block = plain.fused(what, spec_of(model, dropout), layers, device="meta", dtype=torch.bfloat16)
    x = torch.empty(4, rows // 4, model.H, dtype=torch.bfloat16, device="meta", requires_grad=grad)
    return block.plan(x, env=sf.Env.of(f"cuda:{arch}", dtype=torch.bfloat16, rows=rows, grad=grad))


def test_a_fusion_that_needs_a_measurement_is_one_with_a_gemm_of_our_own():
    assert {fusion.__name__ for fusion in fusions.default if fusion.needs_measurement} == OWN_GEMM
    assert not any(fusion.needs_measurement for fusion in fusions.aten)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("what", ["feedforward", "attention", "layer", "stack"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_no_block_has_a_gemm_of_our_own_or_a_lone_point_wise_step(model: Any, what: str, dropout: float):
    for rows, grad in ((512, True), (8192, True), (8192, False)):
        plan = planned(what, model, dropout, rows=rows, grad=grad)
        steps = (*plan.forward, *plan.backward)
        assert not OWN_GEMM & {step.name for step in steps}, plan
        assert {step.name for step in plan.forward if not step.fused} <= FORWARD, plan
        assert {step.name for step in plan.backward if not step.fused} <= BACKWARD, plan


def test_the_reason_says_how_to_measure():
    plan = planned("feedforward", MODELS[0], 0.0)
    assert UNMEASURED == "not measured on this device; sf.tune(model, x)"
    refused = {refusal.fusion for refusal in plan.refused if refusal.reason == UNMEASURED}
    assert refused == {"LinearBiasActivation", "LinearBiasDropoutAdd", "LinearBiasBackwardTriton",
                       "ActivationLinearBackward", "BlockEndBackward"}  # fmt: skip
    assert str(plan).count("sf.tune") == 1


def test_whoever_asks_for_them_unmeasured_has_them():
    with sf.fusing(unmeasured=True):
        assert planned("feedforward", MODELS[0], 0.0).count("LinearBiasActivation") == 1
        with sf.fusing(unmeasured=False):
            assert planned("feedforward", MODELS[0], 0.0).count("LinearBiasActivation") == 0
    with pytest.raises(sf.InputError, match="SF106"), sf.fusing(unmeasured="yes"):  # pyright: ignore[reportArgumentType]
        pass


def test_a_cpu_whose_kernels_are_interpreted_measures_nothing_first():
    model = sf.Sequential(ops.Linear(64, 256), ops.GeLU(), fusions=fusions.LinearBiasActivation).bfloat16()
    assert model.plan(env=sf.Env(kernels="triton", rows=64, dtype=torch.bfloat16)).count("LinearBiasActivation") == 1


class Widened(sf.Pointwise):
    """Keeps its result, which autocast has in float32."""

    reads, autocast = "output", "float32"
    value, derivative = ops.Tanh.value, ops.Tanh.derivative

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def derivative_reference(self, y: torch.Tensor) -> torch.Tensor:
        return 1 - y * y


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_an_activation_that_keeps_a_wide_result_is_no_epilogue_under_autocast(autocast: torch.dtype | None) -> None:
    model = sf.Sequential(ops.Linear(16, 16), Widened(), fusions=fusions.LinearBiasActivation)
    with sf.fusing(unmeasured=True):
        plan = model.plan(env=sf.Env.of("cuda:sm_90", autocast=autocast, rows=4096))
    reasons = [refusal.reason for refusal in plan.refused]
    assert reasons == ["Widened keeps its result, which is float32 under autocast"] * (autocast is not None)


@pytest.mark.parametrize("act", [ops.Tanh, ops.SiLU])
def test_an_activation_that_keeps_its_result_is_not_behind_a_norm_where_that_is_cast(act: Any) -> None:
    model = sf.Sequential(ops.LayerNorm(16), act(), ops.Linear(16, 16), fusions=fusions.NormActivation)
    plan = model.plan(env=sf.Env.of("cuda:sm_90", autocast=torch.bfloat16, rows=4096))
    refused = {refusal.reason for refusal in plan.refused if not refusal.superseded}
    assert refused == ({"Tanh keeps y, which is cast for what comes next"} if act is ops.Tanh else set())

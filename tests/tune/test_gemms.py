"""GEMMs of our own on a GPU: used where they were measured to be faster, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import cost_table, ops
from seqfuse.cost_table import Machine, Measurement
from seqfuse.plan import plan as planning
from seqfuse.plan.cost_lookup import Known

HERE = Machine("NVIDIA H200", "sm_90", "580.1", None, "triton", "2.13.0", "3.7.1", "0.1.0")
ENV = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
EPILOGUES = {"LinearBiasActivation", "LinearBiasDropoutAdd", "ActivationLinearBackward", "BlockEndBackward"}


@pytest.fixture
def model() -> sf.Sequential:
    block = ops.Residual(ops.LayerNorm(1024), ops.Linear(1024, 4096), ops.GeLU(), ops.Linear(4096, 1024))
    return sf.Sequential(block).to("meta", torch.bfloat16)


Plant = Callable[[float], None]


@pytest.fixture
def plant(model: sf.Sequential, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Measurements in which each candidate of the model takes a part of its operations' time."""
    monkeypatch.setattr(Machine, "of", classmethod(lambda cls, env: HERE))

    def write(part: float) -> None:
        found: dict[str, Measurement] = {}

        class Recording(Known):
            def __call__(self, fusion: Any, a: int, b: int) -> None:
                found[str(self.key(fusion, a, b))] = Measurement(1e5 * part * (b - a), 1e5 * (b - a))

        with monkeypatch.context() as recording, sf.fusing(unmeasured=True):
            recording.setattr(planning, "Known", Recording)
            model.plan(env=ENV)
        cost_table.add(HERE, found)

    return write


def used(model: sf.Sequential) -> set[str]:
    plan = model.plan(env=ENV)
    return {step.name for step in (*plan.forward, *plan.backward) if step.fused}


def test_without_measurements_no_gemm_of_our_own_is_used(model: sf.Sequential) -> None:
    assert not used(model) & EPILOGUES


def test_measurements_bring_the_epilogues_back(model: sf.Sequential, plant: Plant) -> None:
    plant(0.5)
    assert used(model) & EPILOGUES >= {"LinearBiasActivation", "LinearBiasDropoutAdd"}
    assert used(model) & {"ActivationLinearBackward", "BlockEndBackward"}


def test_those_that_say_they_are_slower_do_not(model: sf.Sequential, plant: Plant) -> None:
    plant(1.5)
    assert not used(model)
    reasons = {r.reason for r in model.plan(env=ENV).refused if r.fusion == "LinearBiasActivation"}
    assert reasons == {"measured 450.0 us against 300.0 us unfused"}

"""Plans of blocks of known models on a GPU with the default fusions: torch's GEMMs, and no lone point-wise step."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import seqfuse as sf

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import plain
from gpu.blocks import spec_of
from gpu.sizes import MODELS

# May stay unfused: torch's GEMMs and attention, a norm at the start of a sequence, and steps without a launch.
FORWARD, BACKWARD = {"Fork", "LayerNorm", "RMSNorm", "Linear", "Attention"}, {"Linear", "Attention", "Add"}


def planned(what: str, model: Any, dropout: float, arch: str = "sm_90", rows: int = 8192, grad: bool = True) -> sf.Plan:
    layers = 2 if what == "stack" else 1
    block = plain.fused(what, spec_of(model, dropout), layers, device="meta", dtype=torch.bfloat16)
    x = torch.empty(4, rows // 4, model.H, dtype=torch.bfloat16, device="meta", requires_grad=grad)
    return block.plan(x, env=sf.Env.of(f"cuda:{arch}", dtype=torch.bfloat16, rows=rows, grad=grad))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("what", ["feedforward", "attention", "layer", "stack"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_no_block_has_a_lone_point_wise_step(model: Any, what: str, dropout: float):
    for rows, grad in ((512, True), (8192, True), (8192, False)):
        plan = planned(what, model, dropout, rows=rows, grad=grad)
        assert {step.name for step in plan.forward if not step.fused} <= FORWARD, plan
        assert {step.name for step in plan.backward if not step.fused} <= BACKWARD, plan

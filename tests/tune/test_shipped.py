"""Measurements that come with the library: used for the device and the versions that they are of, and nowhere else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import cost_table, ops
from seqfuse.cost_table import Machine
from seqfuse.plan import plan as planning
from seqfuse.plan.cost_lookup import Known

HERE = Machine("NVIDIA H200", "sm_90", "580.1", None, True, "2.13.0", "3.7.1", "0.1.0")
ENV = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
EPILOGUES = {"LinearBiasActivation", "LinearBiasDropoutAdd", "ActivationLinearBackward", "BlockEndBackward"}


@pytest.fixture
def model() -> sf.Sequential:
    block = ops.Residual(ops.LayerNorm(1024), ops.Linear(1024, 4096), ops.GeLU(), ops.Linear(4096, 1024))
    return sf.Sequential(block).to("meta", torch.bfloat16)


Plant = Callable[..., Path]


@pytest.fixture
def plant(model: sf.Sequential, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """Write a table in which each candidate of the model takes a part of its operations' time."""
    monkeypatch.setattr(Machine, "of", classmethod(lambda cls, env: HERE))
    monkeypatch.setattr(cost_table, "SHIPPED", tmp_path)

    def write(part: float = 0.5, **about: Any) -> Path:
        keys: dict[str, Any] = {}

        class Recording(Known):
            def __call__(self, fusion: Any, a: int, b: int) -> None:
                keys[str(self.key(fusion, a, b))] = {"fused": 1e5 * part * (b - a), "unfused": 1e5 * (b - a)}

        with monkeypatch.context() as recording, sf.fusing(unmeasured=True):
            recording.setattr(planning, "Known", Recording)
            model.plan(env=ENV)
        path = tmp_path / "nvidia-h200.json"
        machine = {**dataclasses.asdict(HERE), "driver": "570.2", **about}
        path.write_text(json.dumps({"format": 2, "machine": machine, "sources": "of its time", "entries": keys}))
        return path

    return write


def used(model: sf.Sequential) -> set[str]:
    plan = model.plan(env=ENV)
    return {step.name for step in (*plan.forward, *plan.backward) if step.fused}


def test_none_is_there_yet_and_so_no_gemm_of_our_own_is_used(model: sf.Sequential) -> None:
    assert not cost_table.SHIPPED.exists()
    assert not used(model) & EPILOGUES


def test_a_planted_table_brings_the_epilogues_back(model: sf.Sequential, plant: Plant) -> None:
    plant()
    assert used(model) & EPILOGUES >= {"LinearBiasActivation", "LinearBiasDropoutAdd"}
    assert used(model) & {"ActivationLinearBackward", "BlockEndBackward"}


def test_one_that_says_they_are_slower_does_not(model: sf.Sequential, plant: Plant) -> None:
    plant(1.5)
    assert not used(model)
    reasons = {r.reason for r in model.plan(env=ENV).refused if r.fusion == "LinearBiasActivation"}
    assert reasons == {"measured 450.0 us against 300.0 us unfused"}


@pytest.mark.parametrize(
    "about",
    [{"device": "NVIDIA H100"}, {"torch": "2.14.0"}, {"triton": "3.6.0"}, {"seqfuse": "0.0.9"}, {"arch": "sm_100"}],
    ids=str,
)
def test_a_table_of_another_device_or_version_is_not_used(
    model: sf.Sequential, plant: Plant, about: dict[str, Any]
) -> None:
    plant(**about)
    assert not used(model) & EPILOGUES


def test_what_the_user_measured_is_used_before_it(model: sf.Sequential, plant: Plant) -> None:
    keys = json.loads(plant().read_text())["entries"]
    slow = {key: cost_table.Measurement(2e5, 1e5) for key in keys}
    path = cost_table.user_file(HERE, create=True)
    assert path is not None
    cost_table.save(path, HERE, slow)
    assert not used(model)

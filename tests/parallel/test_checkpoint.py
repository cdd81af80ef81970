"""`torch.distributed.checkpoint`: saved by two ranks that shard a model in some way, loaded by one and by four."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import seqfuse as sf
from seqfuse.parallel import pipeline
from tests.processes import failures

from . import test_ddp
from .test_ddp import loss_of, tokens
from .test_fsdp import full, own_share, shard

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
FOLDER, OF_ONE = "CHECKPOINTS_OF_TEST", "WAYS_OF_ONE_RANK"
STEPS = 3
# A parameter's moments are keyed by its name, not by its index in a list that no rank has in full.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def language_model() -> sf.Sequential:
    return test_ddp.language_model(2)  # each tensor is an entry of a file, and is read by itself


def staged(model: sf.Sequential) -> sf.Sequential:
    return pipeline(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",)))


def whole(model: sf.Sequential) -> sf.Sequential:
    return model


WAYS: dict[str, Any] = {"sharded": shard, "staged": staged}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # A bias of keys has no gradient but rounding, from which a smaller eps would compute steps.
    return torch.optim.AdamW([p for p in model.parameters() if not p.is_meta], lr=0.01, eps=1e-4)


def trained(model: nn.Module, share: Any) -> torch.optim.Optimizer:
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, share(tokens(step, 8))).backward()
        optimizer.step()
    return optimizer


def save() -> None:
    for name, way in WAYS.items():
        model = way(language_model())
        optimizer = trained(model, own_share if name == "sharded" else lambda t: t)
        state, moments = get_state_dict(model, optimizer, options=BY_NAME)
        folder = Path(os.environ[FOLDER]) / name
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)


def load() -> None:
    """Every way of saving into every way of sharding; then a step, which uses the loaded moments."""
    alone = language_model()
    reference = trained(alone, lambda t: t)
    expected = {name: p.detach().clone() for name, p in alone.state_dict().items()}
    reference.zero_grad()
    loss_of(alone, tokens(STEPS, 8)).backward()
    reference.step()
    for saved in WAYS:
        for name in os.environ[OF_ONE].split() if dist.get_world_size() == 1 else WAYS:
            way = WAYS.get(name, whole)
            torch.manual_seed(9)
            model = way(language_model().apply(scrambled))
            optimizer = optimizer_of(model)
            state, moments = get_state_dict(model, optimizer, options=BY_NAME)
            dcp.load({"model": state, "optimizer": moments}, checkpoint_id=Path(os.environ[FOLDER]) / saved)
            set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments, options=BY_NAME)
            own = {key: full(value) for key, value in model.state_dict().items()}
            assert own
            assert name == "staged" or own.keys() == expected.keys()
            for key, value in own.items():
                torch.testing.assert_close(value, expected[key], rtol=1e-3, atol=2e-3, msg=lambda m, k=key: f"{k}: {m}")
                if saved == "staged":
                    assert torch.equal(value, expected[key]), key
            optimizer.zero_grad()
            loss_of(model, own_share(tokens(STEPS, 8)) if name == "sharded" else tokens(STEPS, 8)).backward()
            optimizer.step()
            after = alone.state_dict()
            for key, value in model.state_dict().items():
                torch.testing.assert_close(
                    full(value), after[key], rtol=1e-3, atol=4e-3, msg=lambda m, k=key: f"{k}: {m}"
                )


def scrambled(module: nn.Module) -> None:
    for p in module.parameters(recurse=False):
        nn.init.normal_(p)


# One rank that shards a model holds all of it.
@pytest.mark.parametrize("of_one", ["whole", pytest.param("whole sharded staged", marks=pytest.mark.full)])
def test_saved_by_two_ranks_and_loaded_by_one_and_by_four(of_one: str, monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv(FOLDER, folder)
        monkeypatch.setenv(OF_ONE, of_one)
        assert failures(2, [save]) == {}
        for world in (1, 4):
            assert failures(world, [load]) == {}, world


def test_the_names_of_a_state_are_those_of_the_whole_model(tmp_path: Path):
    from torch.nn.parallel import DistributedDataParallel

    names = list(language_model().state_dict())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        for way in WAYS.values():
            assert list(way(language_model()).state_dict()) == names
        assert list(DistributedDataParallel(language_model()).module.state_dict()) == names
    finally:
        dist.destroy_process_group()

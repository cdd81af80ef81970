"""`DistributedDataParallel` and FSDP2, also within the stages of a pipeline, and `torch.distributed.checkpoint`."""

# No postponed annotations here: DDP reads those of a communication hook.

import copy
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import seqfuse as sf
from seqfuse import ops
from seqfuse.nn import TransformerStack
from seqfuse.parallel import clip_grad_norm_, everywhere, pipeline
from seqfuse.plan import search as segments
from tests.parallel.sharded import in_the_first
from tests.processes import Facts, failures
from tests.watching import Calls, name_of

# DDP: gradients arrive segment by segment, so that buckets are reduced during the backward.


pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
WORLD = 2


def language_model(layers: int = 4) -> sf.Sequential:
    torch.manual_seed(3)
    stack = TransformerStack(layers, 8, 2, causal=True)
    return sf.Sequential(ops.Embedding(11, 8), ops.PositionEmbedding(6, 8), stack, ops.Linear(8, 11))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tokens(step: int, rows: int = 4) -> Tensor:
    return torch.randint(11, (rows, 7), generator=torch.Generator().manual_seed(step))


def buckets_ready() -> list[float]:
    """When buckets are ready, as fractions of the GEMMs of a backward."""
    from torch.nn.parallel import DistributedDataParallel

    # A clock that ticks with GEMMs: the progress of a backward, whatever else the machine does.
    clock, ready = Calls(lambda func, *_: name_of(func) in ("mm", "bmm", "addmm") or None), list[int]()

    segments.SEGMENT_BYTES = 0  # the model is small

    def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        ready.append(len(clock.names))
        future = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    wrapped = DistributedDataParallel(language_model(), bucket_cap_mb=0.001)
    wrapped.register_comm_hook(None, reduce)
    for step in range(2):  # buckets are rebuilt after the first step
        ready.clear()
        loss = loss_of(wrapped, tokens(step))
        clock.names.clear()
        with clock:
            loss.backward()
    return [at / len(clock.names) for at in ready]


def buckets_are_ready_all_along_the_backward() -> None:
    found = buckets_ready()
    assert len(found) > 4
    assert found[0] < 0.25, found
    assert max(b - a for a, b in zip([0.0, *found], found, strict=False)) < 0.3, found


def in_one_segment_they_would_be_ready_at_its_end() -> None:
    segments.SEGMENT = 1 << 30
    found = buckets_ready()
    assert min(found) > 0.9, found


def the_losses_are_those_of_one_process() -> None:
    from torch.nn.parallel import DistributedDataParallel

    alone, wrapped = language_model(), DistributedDataParallel(language_model())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (alone, wrapped)]
    for step in range(4):
        both = tokens(step, 8)
        losses = [loss_of(alone, both), loss_of(wrapped, both.chunk(WORLD)[dist.get_rank()])]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        mean = losses[1].detach().clone()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / WORLD, losses[0].detach())
    assert [name for name, _ in wrapped.module.named_parameters()] == [name for name, _ in alone.named_parameters()]
    assert list(wrapped.module.state_dict()) == list(alone.state_dict())


TWO = [
    the_losses_are_those_of_one_process,
    buckets_are_ready_all_along_the_backward,
    in_one_segment_they_would_be_ready_at_its_end,
]


test_ddp = Facts({WORLD: TWO}).test


# FSDP2 on blocks and on the whole, by itself and within the stages of a pipeline.


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def shard(model: sf.Sequential) -> sf.Sequential:
    """`fully_shard` on each layer and on the whole."""
    from torch.distributed.fsdp import fully_shard

    for layer in model[2].children():
        fully_shard(layer)
    return fully_shard(model)


def trained(model: nn.Module, share: Any, clip: Any = None, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, share(tokens(step, 8)))
        loss.backward()
        (clip or (lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5)))(model)
        optimizer.step()
        losses.append(loss.detach())
    return losses


def own_share(t: Tensor) -> Tensor:
    return t.chunk(dist.get_world_size())[dist.get_rank()]


@functools.cache
def by_one_process() -> tuple[Tensor, dict[str, Tensor], list[str]]:
    """The losses of a model, its parameters after them, and the names of its state."""

    def run() -> tuple[Tensor, dict[str, Tensor], list[str]]:
        alone = language_model()
        losses = torch.stack(trained(alone, lambda t: t))
        return losses, {name: p.detach() for name, p in alone.named_parameters()}, list(alone.state_dict())

    return in_the_first(run)


def same_as_alone(make: Any, rtol: float | None = None) -> nn.Module:
    expected, parameters, state = by_one_process()
    model = make(language_model())
    losses = torch.stack(trained(model, own_share))
    dist.all_reduce(losses)
    atol = None if rtol is None else 0
    torch.testing.assert_close(losses / dist.get_world_size(), expected, rtol=rtol, atol=atol)
    assert [name for name, _ in model.named_parameters()] == list(parameters)
    assert list(model.state_dict()) == state
    if rtol is None:
        for (name, p), q in zip(model.named_parameters(), parameters.values(), strict=True):
            # Adam divides by what is near 0 for the key bias, whose gradient is 0.
            torch.testing.assert_close(full(p), q, rtol=1e-3, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}")
    return model


def on_layers_and_the_whole() -> None:
    model = same_as_alone(shard)
    assert all(hasattr(p, "full_tensor") for p in model.parameters())


def on_the_whole() -> None:
    from torch.distributed.fsdp import fully_shard

    same_as_alone(fully_shard)


def in_mixed_precision() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    types = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

    def make(model: sf.Sequential) -> nn.Module:
        for layer in model[2].children():
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(**types))
        return fully_shard(model, mp_policy=MixedPrecisionPolicy(**types, output_dtype=torch.float32))

    model = same_as_alone(make, rtol=0.02)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


SHARDED = [on_layers_and_the_whole, on_the_whole, in_mixed_precision]


def within_stages() -> None:
    """Two stages, each on two ranks that shard its layers and the batch."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    expected, _, _ = by_one_process()
    model = pipeline(copy.deepcopy(language_model()), mesh["pp"], stages=("2.2",))
    for layer in model[2].children():
        if any(True for _ in layer.parameters()) and not next(layer.parameters()).is_meta:
            fully_shard(layer, mesh=mesh["dp"])
    own = [p for p in model.parameters() if not p.is_meta]
    dp = mesh["dp"].get_group()

    def clip(staged: Any) -> None:
        for p in own:  # parameters outside of fully_shard are this rank's own
            if not hasattr(p, "full_tensor"):
                dist.all_reduce(p.grad, group=dp)
                p.grad /= 2
        clip_grad_norm_(staged, 0.5)

    losses = trained(model, lambda t: t.chunk(2)[mesh["dp"].get_local_rank()], clip)
    found = torch.stack([everywhere(loss, model) for loss in losses])
    dist.all_reduce(found, group=dp)
    torch.testing.assert_close(found / 2, expected)
    assert sum(hasattr(p, "full_tensor") for p in own) == len(own) - 2
    assert all(p.grad is None for p in model.parameters() if p.is_meta)


IN_STAGES = [within_stages]


test_fsdp2 = Facts({2: SHARDED, 4: IN_STAGES}).test


# Saved by two ranks that shard a model in some way, loaded by one and by four.


FOLDER, OF_ONE = "CHECKPOINTS_OF_TEST", "WAYS_OF_ONE_RANK"
STEPS = 3
# A parameter's moments are keyed by its name, not by its index in a list that no rank has in full.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def shallow() -> sf.Sequential:
    return language_model(2)  # each tensor is an entry of a file, and is read by itself


def staged(model: sf.Sequential) -> sf.Sequential:
    return pipeline(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",)))


def whole(model: sf.Sequential) -> sf.Sequential:
    return model


WAYS: dict[str, Any] = {"sharded": shard, "staged": staged}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # A bias of keys has no gradient but rounding, from which a smaller eps would compute steps.
    return torch.optim.AdamW([p for p in model.parameters() if not p.is_meta], lr=0.01, eps=1e-4)


def trained_for_a_checkpoint(model: nn.Module, share: Any) -> torch.optim.Optimizer:
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, share(tokens(step, 8))).backward()
        optimizer.step()
    return optimizer


def save() -> None:
    for name, way in WAYS.items():
        model = way(shallow())
        optimizer = trained_for_a_checkpoint(model, own_share if name == "sharded" else lambda t: t)
        state, moments = get_state_dict(model, optimizer, options=BY_NAME)
        folder = Path(os.environ[FOLDER]) / name
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)


def load() -> None:
    """Every way of saving into every way of sharding; then a step, which uses the loaded moments."""

    def by_one() -> list[dict[str, Tensor]]:
        alone = shallow()
        reference = trained_for_a_checkpoint(alone, lambda t: t)
        before = {name: p.detach().clone() for name, p in alone.state_dict().items()}
        reference.zero_grad()
        loss_of(alone, tokens(STEPS, 8)).backward()
        reference.step()
        return [before, dict(alone.state_dict())]

    expected, after = in_the_first(by_one)
    for saved in WAYS:
        for name in os.environ[OF_ONE].split() if dist.get_world_size() == 1 else WAYS:
            way = WAYS.get(name, whole)
            torch.manual_seed(9)
            model = way(shallow().apply(scrambled))
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

    names = list(shallow().state_dict())
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        for way in WAYS.values():
            assert list(way(shallow()).state_dict()) == names
        assert list(DistributedDataParallel(shallow()).module.state_dict()) == names
    finally:
        dist.destroy_process_group()

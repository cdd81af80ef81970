"""FSDP2 on blocks and on the whole, by itself and within the stages of a pipeline."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import seqfuse as sf
from seqfuse.parallel import clip_grad_norm_, everywhere, pipeline
from tests.processes import Facts

from .test_ddp import language_model, loss_of, tokens

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


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


def same_as_alone(make: Any, rtol: float | None = None) -> nn.Module:
    alone = language_model()
    expected = torch.stack(trained(alone, lambda t: t))
    model = make(language_model())
    losses = torch.stack(trained(model, own_share))
    dist.all_reduce(losses)
    atol = None if rtol is None else 0
    torch.testing.assert_close(losses / dist.get_world_size(), expected, rtol=rtol, atol=atol)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in alone.named_parameters()]
    assert list(model.state_dict()) == list(alone.state_dict())
    if rtol is None:
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
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


TWO = [on_layers_and_the_whole, on_the_whole, in_mixed_precision]


def within_stages() -> None:
    """Two stages, each on two ranks that shard its layers and the batch."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    alone = language_model()
    expected = torch.stack(trained(alone, lambda t: t))
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


FOUR = [within_stages]


test_ranks = Facts({2: TWO, 4: FOUR}).test

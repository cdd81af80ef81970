"""A model in stages: on every rank what one process computes."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import seqfuse as sf
from seqfuse import ops
from seqfuse.parallel import pipeline

from .processes_pp import failures

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
STEPS = 3


def block(dim: int = 6, dropout: float = 0.0) -> ops.Residual:
    return ops.Residual(
        ops.LayerNorm(dim), ops.Linear(dim, 10), ops.Tanh(), ops.Dropout(dropout), ops.Linear(10, dim, bias=False)
    )


def model_of(dropout: float = 0.0) -> sf.Sequential:
    """Two skip connections that cross boundaries: one of a residual, one of a fork that is read far behind."""
    torch.manual_seed(1)
    model = sf.Sequential(
        ops.Linear(4, 6), ops.Fork("skip"), block(dropout=dropout), block(dropout=dropout), ops.Add("skip"),
        ops.LayerNorm(6), ops.Linear(6, 3),
    )  # fmt: skip
    return model.double()


def batch(step: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def mesh(dims: tuple[int, ...] | None = None, names: tuple[str, ...] = ("pp",)) -> Any:
    return init_device_mesh("cpu", dims or (dist.get_world_size(),), mesh_dim_names=names)


def own(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not p.is_meta}


def same_as_alone(staged: sf.Sequential, alone: sf.Sequential, **how: Any) -> None:
    """Loss, gradients and parameters of some steps, bit for bit those of one process, on the ranks that have them."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (staged, alone)]
    for step in range(STEPS):
        x, target = batch(step, rows=5 + step)
        losses = []
        for model, optimizer in zip((staged, alone), optimizers, strict=True):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        here, there = losses
        assert here.shape == there.shape
        assert here.dtype == there.dtype
        if not here.is_meta:
            assert torch.equal(here, there)
        expected = dict(alone.named_parameters())
        for name, p in own(staged).items():
            assert p.grad is not None, name
            assert p.grad.abs().max() > 0, name
            torch.testing.assert_close(p.grad, expected[name].grad, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
            assert torch.equal(p, expected[name]), name
        assert all(p.grad is None for p in staged.parameters() if p.is_meta)


def three_ranks_give_the_gradients_of_one_process() -> None:
    alone = model_of()
    staged = pipeline(copy.deepcopy(alone), mesh(), stages=("2.1", "3.4"))
    same_as_alone(staged, alone)


THREE = [three_ranks_give_the_gradients_of_one_process]


@pytest.fixture(scope="module")
def three() -> dict[str, str]:
    return failures(3, THREE)


@pytest.mark.parametrize("work", [w.__name__ for w in THREE])
def test_three_ranks(three: dict[str, str], work: str):
    if work in three:
        pytest.fail(three[work], pytrace=False)

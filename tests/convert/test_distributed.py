"""Converted models under DDP and FSDP2, in two processes: wrapped or sharded before the conversion, and after it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.testing import seeded_randn
from tests.processes import Facts

from .residual import Net, chains

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
Change = Callable[[nn.Module], Any]


def whole(t: Any) -> Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def ddp(model: nn.Module) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model)


def fsdp(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def trained(model: nn.Module) -> list[Tensor]:
    """Losses and gradients of two steps, and the parameters after them; each rank has its own tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    found: list[Tensor] = []
    for step in range(2):
        y = model(seeded_randn((3, 8), 10 * step + dist.get_rank()).double())
        loss = (y * seeded_randn((3, 8), 5)).sum()
        optimizer.zero_grad()
        loss.backward()
        found += [loss.detach(), *(whole(p.grad) for p in model.parameters())]
        optimizer.step()
    return found + [whole(p) for p in model.parameters()]


def same_as_unconverted(wrap: Change, before: bool) -> None:
    torch._dynamo.reset()
    model = Net(depth=1)
    plain = wrap(copy.deepcopy(model))
    wanted = trained(plain)
    if before:
        wrapped = wrap(model)
        conversion = sf.convert(wrapped)
    else:
        conversion = sf.convert(model)
        wrapped = wrap(model)
    for got, want in zip(trained(wrapped), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-7, atol=1e-7)
    assert chains(conversion)
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]


def within_ddp() -> None:
    same_as_unconverted(ddp, before=False)


def around_ddp() -> None:
    same_as_unconverted(ddp, before=True)


def cut_at_buckets() -> None:
    """Dynamo makes a graph of each bucket, and gives the last one a graph break as its end, too."""
    from torch.nn.parallel import DistributedDataParallel

    conversion = sf.convert(model := Net(depth=2, width=256))
    wrapped, plain = DistributedDataParallel(model, bucket_cap_mb=1.1), copy.deepcopy(model)
    x = seeded_randn((3, 256), 1).double()
    for one in (wrapped, plain):
        one(x).sum().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-7, atol=1e-7)
    assert len(conversion.graphs) > 1
    assert str(conversion).count("a graph of one of the buckets of DistributedDataParallel") == len(conversion.graphs)
    assert "ends at" not in str(conversion)


def sharded_and_converted() -> None:
    same_as_unconverted(fsdp, before=True)


def converted_and_sharded() -> None:
    same_as_unconverted(fsdp, before=False)


FACTS = Facts({2: [within_ddp, around_ddp, cut_at_buckets, sharded_and_converted, converted_and_sharded]})


test_training_equals_that_of_the_unconverted_model = FACTS.test

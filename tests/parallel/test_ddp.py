"""`DistributedDataParallel`: gradients arrive segment by segment, so that buckets are reduced during the backward."""

# No postponed annotations here: DDP reads those of a communication hook.

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.nn import TransformerStack
from seqfuse.plan import search as segments
from tests.processes import Facts
from tests.watching import Calls, name_of

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


test_two_ranks = Facts({WORLD: TWO}).test

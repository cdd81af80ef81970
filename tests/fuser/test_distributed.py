"""DDP and FSDP2 over gloo on CPU: two processes train as one does."""

# No postponed annotations here: DDP reads those of a communication hook.

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import seqfuse as sf
from seqfuse import ops
from tests.processes import Facts
from tests.watching import saving

from .conftest import planning
from .fusions import BiasTanhBackward, BiasTanhForward, BiasTanhJoint
from .kit import counting_plans, draw, randomize

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
WORLD, STEPS, ROWS = 2, 2, 4


def model_of(
    fusions: Any = (BiasTanhForward, BiasTanhBackward), blocks: int = 3, dropout: float = 0.0
) -> sf.Sequential:
    planning.SEGMENT_BYTES = 0  # in a process that no fixture knows
    model = sf.Sequential(
        *(
            ops.Residual(
                ops.LayerNorm(6), ops.Linear(6, 10), ops.Tanh(), ops.Dropout(dropout), ops.Linear(10, 6, bias=False)
            )
            for _ in range(blocks)
        ),
        ops.Linear(6, 4),
        fusions=fusions,
    )
    randomize(model)
    return model.double()


def batch(step: int) -> Tensor:
    return draw(WORLD * ROWS, 6, seed=step)


def share(step: int) -> Tensor:
    rank = dist.get_rank()
    return batch(step)[rank * ROWS : (rank + 1) * ROWS]


def loss_of(y: Tensor) -> Tensor:
    return y.square().mean()


@functools.cache
def alone() -> tuple[list[float], list[dict[str, Tensor]], dict[str, Tensor]]:
    """Losses, gradients of every step and final parameters of one process."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, gradients = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(batch(step)))
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, {n: p.detach().clone() for n, p in model.named_parameters()}


def full(t: Tensor) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def train(model: nn.Module, prefix: str = "") -> None:
    """Trains on this rank's shard of the batch and compares with one process: loss, every gradient, final
    parameters."""
    losses, gradients, last = alone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(share(step)))
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total.item() / WORLD, losses[step])
        named = {n.removeprefix(prefix): p for n, p in model.named_parameters()}
        assert named.keys() == gradients[step].keys()
        for name, p in named.items():
            assert p.grad is not None, name
            assert gradients[step][name].abs().max() > 0
            torch.testing.assert_close(full(p.grad), gradients[step][name], msg=lambda m, n=name: f"{n}: {m}")
        optimizer.step()
    assert len(set(losses)) == STEPS
    for name, p in model.named_parameters():
        torch.testing.assert_close(full(p).detach(), last[name.removeprefix(prefix)])


def sharded(model: sf.Sequential, **how: Any) -> sf.Sequential:
    """With FSDP2, each block and the whole."""
    from torch.distributed.fsdp import fully_shard

    for block in model[:-1]:
        fully_shard(block, **how)
    return fully_shard(model, **{k: v for k, v in how.items() if k != "reshard_after_forward"})


# What each of the two processes does ----------------------------------------------------------------------------------


def ddp() -> None:
    train(DistributedDataParallel(model_of()), "module.")
    train(
        DistributedDataParallel(model_of((BiasTanhJoint,)), gradient_as_bucket_view=True, static_graph=True), "module."
    )


def recomputing() -> sf.Sequential:
    """A model with a segment that is recomputed."""
    model = model_of()
    model.memory = "least"
    assert model.plan(share(0)).recomputed
    return model


def ddp_recomputing() -> None:
    train(DistributedDataParallel(recomputing()), "module.")


def ddp_buckets_overlap() -> None:
    """Small buckets are reduced while the backward goes on."""
    model = model_of(blocks=8)
    events: list[str] = []

    def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        events.append("bucket")
        future = dist.all_reduce(bucket.buffer().div_(WORLD), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model[0][1].weight.register_hook(lambda g: events.append("last gradient"))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    wrapped.register_comm_hook(None, reduce)
    for step in range(2):
        events.clear()
        loss_of(wrapped(share(step))).backward()
    assert events.count("bucket") >= 4
    assert events.index("bucket") < events.index("last gradient"), events


def ddp_unused_and_accumulated() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = model_of(), ops.Linear(6, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    wrapped = DistributedDataParallel(Half(), find_unused_parameters=True)
    _, gradients, _ = alone()
    loss_of(wrapped(share(0))).backward()
    for name, p in wrapped.module.used.named_parameters():
        torch.testing.assert_close(p.grad, gradients[0][name])
    assert wrapped.module.unused.weight.grad is None
    wrapped.zero_grad()
    with wrapped.no_sync():
        loss_of(wrapped(share(0))).backward()
    loss_of(wrapped(share(0))).backward()
    for name, p in wrapped.module.used.named_parameters():
        torch.testing.assert_close(p.grad, 2 * gradients[0][name])


def fsdp_on_blocks_and_root() -> None:
    model = sharded(model_of())
    assert all(hasattr(p, "full_tensor") for p in model.parameters())
    plan = model.plan(share(0))
    assert {a.name for a in plan.eager} == {"Residual"}
    train(model)


def fsdp_on_root_only() -> None:
    from torch.distributed.fsdp import fully_shard

    model = model_of((BiasTanhJoint,))
    fully_shard(model)
    train(model)
    assert not model.plan(share(0)).eager


def fsdp_without_resharding_after_forward() -> None:
    train(sharded(model_of(), reshard_after_forward=False))


def fsdp_on_operations() -> None:
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    for block in model[:-1]:
        fully_shard(block[1])
        fully_shard(block[4])
    fully_shard(model)
    train(model)


def fsdp_plans_once() -> None:
    model = sharded(model_of())
    for step in range(3):
        with counting_plans() as planned:
            loss_of(model(share(step))).backward()
        assert (len(planned) > 0) == (step == 0), f"step {step} made {len(planned)} plans"
        assert (planned.lists > 0) == (step == 0)


def fsdp_checkpointed() -> None:
    from torch.distributed._composable import checkpoint
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    for block in model[:-1]:
        checkpoint(block)
        fully_shard(block)
    fully_shard(model)
    train(model)


def fsdp_recomputing() -> None:
    """Parameters are gathered again for the backward pass."""
    from torch.distributed.fsdp import fully_shard

    model = recomputing()
    fully_shard(model)
    train(model)
    model = model_of()
    for block in model[:-1]:
        block.memory = "least"
    train(sharded(model))


def fsdp_in_mixed_precision() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model, plain = model_of().float(), model_of().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    y = sharded(model, mp_policy=policy)(share(0).float())
    assert y.dtype == torch.bfloat16
    loss_of(y.float()).backward()
    loss_of(plain(batch(0).float())).backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = full(p.grad)
        assert found.dtype == torch.float32
        error = (found - q.grad).norm() / q.grad.norm()
        assert error < 0.05, f"{name}: {error}"


def fsdp_frees_what_it_gathered() -> None:
    """The engine holds the parameter itself and no copy: its storage is empty between the passes."""
    model = sharded(model_of())
    with saving() as keep:
        y = model(share(0))
    gathered = [t for t in keep if isinstance(t, nn.Parameter)]
    assert len(gathered) >= 3 * 2
    empty = [t for t in gathered if t.untyped_storage().size() == 0]
    assert len(empty) >= 3 * 2, "weights of the blocks are resharded after the forward"
    loss_of(y).backward()


def dropout_differs_per_rank_and_is_replayed() -> None:
    model = sharded(model_of(dropout=0.5))
    torch.manual_seed(dist.get_rank())
    y = model(torch.ones(ROWS, 6, dtype=torch.float64))
    both = [torch.empty_like(y) for _ in range(WORLD)]
    dist.all_gather(both, y.detach())
    assert not torch.equal(both[0], both[1])
    y.sum().backward()
    torch.manual_seed(5)
    first = model(torch.ones(ROWS, 6, dtype=torch.float64))
    torch.manual_seed(5)
    assert torch.equal(model(torch.ones(ROWS, 6, dtype=torch.float64)), first)


def plans_are_equal_on_every_rank() -> None:
    model = model_of((BiasTanhJoint, BiasTanhForward))
    texts: list[Any] = [None] * WORLD
    dist.all_gather_object(texts, str(model.plan(share(0))))
    assert texts[0] == texts[1]


DDP = [ddp, ddp_recomputing, ddp_buckets_overlap, ddp_unused_and_accumulated, plans_are_equal_on_every_rank]
FSDP2 = [
    fsdp_on_blocks_and_root, fsdp_on_root_only, fsdp_without_resharding_after_forward, fsdp_on_operations,
    fsdp_plans_once, fsdp_checkpointed, fsdp_recomputing, fsdp_in_mixed_precision, fsdp_frees_what_it_gathered,
    dropout_differs_per_rank_and_is_replayed,
]  # fmt: skip
test_ddp, test_fsdp2 = Facts({WORLD: DDP}).test, Facts({WORLD: FSDP2}).test

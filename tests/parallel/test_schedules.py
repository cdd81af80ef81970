"""Micro-batches: torch's schedules run the stages of a model, also with tensor-parallel stages."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.parallel import clip_grad_norm_, everywhere, parallelize, pipeline, shard, stages
from tests.parallel import kit
from tests.parallel.kit import (
    InBFloat16,
    assert_near,
    batch,
    mesh,
    model_of,
    own,
    same_as_alone,
    same_gradients,
    staged_of,
    with_bfloat16,
)
from tests.parallel.sharded import in_the_first
from tests.processes import Facts

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
KINDS = 2.0, float("inf")  # of norms by which gradients are clipped, by step


def microbatched(schedule_of: Any, staged: sf.Sequential, alone: sf.Sequential, count: int, **channels: Tensor) -> None:
    """A schedule gives the results of one process that sums the gradients of the micro-batches, bit for bit."""
    whole, target = batch(0, rows=12)
    own_stages = stages(staged, whole, microbatches=count, **channels)
    schedule = schedule_of(own_stages)
    first, last = (any(s.stage_index == at for s in own_stages) for at in (0, own_stages[0].num_stages - 1))
    for step in range(2):
        x, target = batch(step, rows=12)
        torch.manual_seed(step)
        found: list[Tensor] = []
        goals = {"target": target, "losses": found} if last else {}
        schedule.step(*((x,) if first else ()), **goals, **channels)

        def by_one_process(x: Tensor = x, target: Tensor = target, step: int = step) -> tuple[list[Tensor], Any]:
            torch.manual_seed(step)
            expected: list[Tensor] = []
            for part, goal in zip(x.chunk(count), target.chunk(count), strict=True):
                given = {name: c.chunk(count)[len(expected)] for name, c in channels.items()}
                loss = nn.functional.mse_loss(alone(part, **given), goal)
                (loss / count).backward()
                expected.append(loss.detach())
            return expected, {name: p.grad for name, p in alone.named_parameters()}

        expected, grads = in_the_first(by_one_process)
        for name, p in alone.named_parameters():
            p.grad = grads[name]
        if last:
            assert torch.equal(torch.stack(found), torch.stack(expected))
        same_gradients(staged, alone, same=partial(assert_near, rtol=1e-12, atol=1e-15))
        assert all(p.grad.abs().max() > 0 for p in own(staged).values())
        for model in (staged, alone):
            model.zero_grad()


def schedules_take_our_stages() -> None:
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

    for kind in (ScheduleGPipe, Schedule1F1B):
        alone = model_of(dropout=0.3)
        microbatched(lambda s, k=kind: k(s[0], 4, nn.functional.mse_loss), staged_of(alone), alone, 4)


def schedules_take_several_stages_of_a_rank() -> None:
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    alone = model_of(dropout=0.3)
    staged = staged_of(alone, ("2", "2.2", "3.1"))
    microbatched(lambda s: ScheduleInterleaved1F1B(s, 4, nn.functional.mse_loss), staged, alone, 4)
    same_as_alone(staged_of(alone, ("2", "2.2", "3.1")), alone)


def schedules_take_shapes_that_are_told() -> None:
    from torch.distributed.pipelining import ScheduleGPipe

    alone = model_of()
    staged = staged_of(alone, ("3.1",), shapes="broadcast")
    microbatched(lambda s: ScheduleGPipe(s[0], 3, nn.functional.mse_loss), staged, alone, 3)


def schedules_take_public_channels() -> None:
    from torch.distributed.pipelining import ScheduleGPipe

    alone = sf.Sequential(ops.Linear(4, 6), ops.Add("early"), ops.Linear(6, 3), ops.Add("late")).to(kit.DTYPE)
    channels = {"early": batch(2, 12)[0] @ torch.ones(4, 6, dtype=kit.DTYPE), "late": batch(3, 12)[1]}
    microbatched(
        lambda s: ScheduleGPipe(s[0], 3, nn.functional.mse_loss), staged_of(alone, ("2",)), alone, 3, **channels
    )


def stages_of_shares_give_the_gradients_of_one_process() -> None:
    """Two stages, each sharded over two ranks; dropout outside of shards is common to all."""
    from seqfuse.nn import TransformerStack

    torch.manual_seed(1)
    alone = sf.Sequential(ops.Linear(4, 8), TransformerStack(2, 8, 2, dropout=0.2), ops.Linear(8, 3)).to(kit.DTYPE)
    both = mesh((2, 2), ("pp", "tp"))
    plan = {"*attention.mixer": "heads", "*feedforward.mixer": "features"}
    divided = parallelize(copy.deepcopy(alone), both["tp"], plan)

    def stepped(model: nn.Module, step: int) -> Tensor:
        x, target = batch(step, rows=4)
        torch.manual_seed(step)
        model.zero_grad()
        loss = nn.functional.mse_loss(model(x[None])[0], target) * (1.0, 0.01)[step]
        loss.backward()
        return loss

    def by_one_process() -> list[tuple[Tensor, Tensor, dict[str, Tensor]]]:
        found: list[Any] = []
        for step in range(2):
            loss = stepped(alone, step).detach()
            norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1, KINDS[step])
            found.append((loss, norm, {name: p.grad for name, p in alone.named_parameters()}))
        return found

    by_one = in_the_first(by_one_process)
    for stages_asked in (("1.1",), ("1.0.feedforward.mixer",), ("1.0.attention.mixer.attention",)):
        staged = pipeline(copy.deepcopy(divided), both["pp"], stages=stages_asked)
        for step, (loss, norm, gradients) in enumerate(by_one):
            assert_near(everywhere(stepped(staged, step), staged), loss, "loss")
            assert_near(clip_grad_norm_(staged, 0.1, KINDS[step]), norm, "norm")
            expected = shard(divided, gradients)
            for name, p in own(staged).items():
                assert_near(p.grad, expected[name], name)


def schedules_run_in_one_dimension_of_a_mesh() -> None:
    from torch.distributed.pipelining import ScheduleGPipe

    alone = model_of()
    staged = pipeline(copy.deepcopy(alone), mesh((2, 2), ("pp", "dp"))["pp"], stages=("3.1",))
    microbatched(lambda s: ScheduleGPipe(s[0], 3, nn.functional.mse_loss), staged, alone, 3)


TWO: list[Any] = [
    schedules_take_several_stages_of_a_rank, schedules_take_shapes_that_are_told, schedules_take_public_channels,
]  # fmt: skip
FOUR: list[Any] = [stages_of_shares_give_the_gradients_of_one_process, schedules_run_in_one_dimension_of_a_mesh]
FOUR.append(InBFloat16(FOUR[0]))


test_in_several_processes = Facts({3: [schedules_take_our_stages], 2: with_bfloat16(TWO), 4: FOUR}).test

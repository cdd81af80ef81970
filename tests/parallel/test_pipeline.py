"""A model in pipeline stages: every rank computes the results of one process."""

import copy
import os
import time
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import seqfuse as sf
from seqfuse import ops
from seqfuse.parallel import clip_grad_norm_, everywhere, parallelize, pipeline, shard, stages
from seqfuse.parallel.remote_tensor import Elsewhere
from tests import processes
from tests.processes import Facts, raised
from tests.watching import Calls, name_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
STEPS = 3
LIMIT = 2.0  # of the norm of all gradients
DTYPE = torch.float64  # of models and batches; InBFloat16 changes it


def block(dim: int = 6, dropout: float = 0.0) -> ops.Residual:
    return ops.Residual(
        ops.LayerNorm(dim), ops.Linear(dim, 10), ops.Tanh(), ops.Dropout(dropout), ops.Linear(10, dim, bias=False)
    )


def model_of(dropout: float = 0.0) -> sf.Sequential:
    """Two skip connections across boundaries: a residual, and a fork that is read far behind."""
    torch.manual_seed(1)
    model = sf.Sequential(
        ops.Linear(4, 6), ops.Fork("skip"), block(dropout=dropout), block(dropout=dropout), ops.Add("skip"),
        ops.RMSNorm(6), ops.Linear(6, 3),
    )  # fmt: skip
    return model.to(DTYPE)


def batch(step: int, rows: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 4, generator=generator, dtype=torch.float64).to(DTYPE)
    return x, torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(DTYPE)


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


def losses_of(staged: sf.Sequential, alone: sf.Sequential, loss: Any = lambda y: y.square().sum()) -> None:
    """Backward of the loss of one batch in both."""
    for model in (staged, alone):
        loss(model(batch(0)[0])).backward()


def bitwise(got: Tensor, expected: Tensor, name: str) -> None:
    assert torch.equal(got, expected), name


def same_gradients(staged: sf.Sequential, alone: sf.Sequential, of: Any = None, same: Any = bitwise) -> None:
    """On the ranks that have them."""
    expected = dict(alone.named_parameters())
    for name, p in own(staged).items():
        wanted = expected[name].grad
        assert (p.grad is None) == (wanted is None), (of, name)
        if wanted is not None:
            same(p.grad, wanted, f"{of}: {name}")


def staged_of(alone: sf.Sequential, stages: Any = ("2.1", "3.4"), **how: Any) -> sf.Sequential:
    return pipeline(copy.deepcopy(alone), mesh(), stages=stages, **how)


# What each of the processes does --------------------------------------------------------------------------------------


def gradients_are_those_of_one_process() -> None:
    alone = model_of()
    same_as_alone(staged_of(alone), alone)


def dropout_is_that_of_one_process() -> None:
    alone = model_of(dropout=0.5)
    staged = staged_of(alone)
    same_as_alone(staged, alone)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def stages_of_other_ranks_hold_and_launch_nothing() -> None:
    torch.manual_seed(1)
    alone = sf.Sequential(
        ops.Linear(4, 6), ops.Tanh(), ops.Linear(6, 6), ops.Sigmoid(), ops.Linear(6, 3), ops.Dropout(0.1), ops.ReLU()
    )
    staged = staged_of(alone, ("2", "4"))
    held = sum(p.untyped_storage().nbytes() for p in staged.parameters() if not p.is_meta)
    assert held == [(4 * 6 + 6) * 4, (6 * 6 + 6) * 4, (6 * 3 + 3) * 4][dist.get_rank()]
    assert all(p.data_ptr() == 0 for p in staged.parameters() if p.is_meta)

    def here(func: Any, args: Any, out: Any) -> str | None:
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
        return name_of(func) if any(not t.is_meta for t in tensors) else None

    with Calls(here) as ran:
        nn.functional.mse_loss(staged(batch(0)[0].float()), batch(0)[1].float()).backward()
    for rank, names in enumerate(({"tanh"}, {"sigmoid"}, {"relu", "mse_loss", "mse_loss_backward"})):
        for name in names:
            ran_here = any(name == found.strip("_") for found in ran.names)
            assert ran_here == (rank == dist.get_rank()), (name, ran.names)
    assert ran.count("mm", "addmm") == [2, 3, 3][dist.get_rank()], ran.names  # y, dweight, and dx where one is wanted


def outputs_say_what_they_are_everywhere() -> None:
    alone = model_of()
    staged = staged_of(alone)
    last = dist.get_rank() == 2
    for rows in (5, 1, 7):
        x, _ = batch(0, rows)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                y, expected = staged(x), alone(x)
            assert y.is_meta is not last
            assert (y.shape, y.dtype, y.requires_grad) == (expected.shape, expected.dtype, grad)
            numbers = everywhere(y, staged)
            assert torch.equal(numbers, expected)
            assert torch.equal(everywhere(y.t(), staged), expected.t())
            numbers += 1  # they are a copy
            assert not last or torch.equal(y, expected)
    with torch.inference_mode():
        assert torch.equal(everywhere(staged(x), staged), alone(x))
    y = staged(torch.empty(0, 4, dtype=DTYPE))
    assert y.shape == (0, 3)
    y.sum().backward()
    y, expected = staged.float()(x.float()), alone.float()(x.float())
    assert y.dtype is torch.float32
    assert torch.equal(everywhere(y, staged), expected)


def without_a_gradient_before_a_boundary() -> None:
    """Frozen stages send no gradients, on either side of the boundary."""
    alone = model_of()
    for frozen in (slice(0, 2), slice(0, 4), slice(2, 6), slice(5, 7)):
        for index, module in enumerate(alone):
            module.requires_grad_(not frozen.start <= index < frozen.stop)
        staged = staged_of(alone)
        with torch.no_grad():
            assert not staged(batch(0)[0]).requires_grad
        losses_of(staged, alone)
        expected = dict(alone.named_parameters())
        assert all(p.requires_grad == expected[name].requires_grad for name, p in staged.named_parameters())
        same_gradients(staged, alone, frozen)
        alone.zero_grad()


def freezing_between_calls_is_seen_on_every_rank() -> None:
    alone = model_of()
    staged = staged_of(alone)
    names = [{}, {"0"}, {}, {"2", "3"}, {"0", "2", "3", "5", "6"}, {"5", "6"}]
    for frozen in map(set, names):
        for model in (staged, alone):
            model.zero_grad()
            for name, p in model.named_parameters():
                p.requires_grad_(name.partition(".")[0] not in frozen)
            y = model(batch(0)[0])
            assert y.requires_grad == (len(frozen) < 5)
            if y.requires_grad:
                y.square().sum().backward()
        same_gradients(staged, alone, frozen)


def complex_numbers_have_gradients_too() -> None:
    alone = sf.Sequential(ops.Linear(4, 6), ops.Linear(6, 6), ops.Linear(6, 3)).to(torch.complex128)
    staged = staged_of(alone, ("1", "2"))
    for model in (staged, alone):
        model(batch(0)[0].to(torch.complex128)).abs().sum().backward()
    same_gradients(staged, alone, same=lambda got, expected, _: torch.testing.assert_close(got, expected))


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def gradients_that_end_in_a_stage_are_not_waited_for() -> None:
    alone = sf.Sequential(ops.Linear(4, 6), ops.Tanh(), Detach(), ops.Tanh(), ops.Linear(6, 3)).to(DTYPE)
    staged = staged_of(alone, ("1", "4"))
    losses_of(staged, alone, Tensor.sum)
    for name, p in own(staged).items():
        assert (p.grad is None) == (name.startswith("0")), name


def a_channel_may_pass_a_stage_in_which_the_chain_ends() -> None:
    for shapes in ("infer", "broadcast"):
        alone = sf.Sequential(
            ops.Linear(4, 6), ops.Fork("skip"), Detach(), ops.Linear(6, 6), ops.Add("skip"), ops.Linear(6, 3)
        ).to(DTYPE)
        staged = staged_of(alone, ("2", "4"), shapes=shapes)
        losses_of(staged, alone, Tensor.sum)
        same_gradients(staged, alone, shapes)


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).long()


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).to(DTYPE)


def integers_may_leave_a_stage_beside_a_channel() -> None:
    for shapes in ("infer", "broadcast"):
        alone = sf.Sequential(
            ops.Linear(4, 6), ops.Fork("skip"), Signs(), Doubled(), ops.Add("skip"), ops.Linear(6, 3)
        ).to(DTYPE)
        same_as_alone(staged_of(alone, ("3", "5"), shapes=shapes), alone)


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def tensors_are_sent_however_they_lie_in_memory() -> None:
    """One tensor is sent transposed, and so is the gradient that comes back."""
    alone = sf.Sequential(ops.Linear(4, 6), Turned(), Turned(), ops.Linear(6, 6), ops.Linear(6, 3)).to(DTYPE)
    staged = staged_of(alone, ("2", "4"))
    losses_of(staged, alone)
    same_gradients(staged, alone, same=assert_near)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        return None


class GivesNone(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(x)


def a_stage_may_give_back_no_gradient_at_all() -> None:
    alone = sf.Sequential(
        ops.Linear(4, 6), ops.Fork("skip"), ops.Tanh(), ops.Add("skip"), GivesNone(), ops.Linear(6, 3)
    ).to(DTYPE)
    staged = staged_of(alone, ("2", "5"), shapes="broadcast")
    losses_of(staged, alone, Tensor.sum)
    expected = dict(alone.named_parameters())
    for name, p in own(staged).items():
        if name.startswith("0"):
            assert p.grad is None or not p.grad.any()
        else:
            assert torch.equal(p.grad, expected[name].grad)
    of_one_tensor = staged_of(sf.Sequential(ops.Linear(4, 6), GivesNone(), ops.Linear(6, 3)).to(DTYPE), ("1", "2"))
    of_one_tensor(batch(0)[0]).sum().backward()
    assert all(p.grad is None or p.grad.any() == name.startswith("2") for name, p in own(of_one_tensor).items())


def public_channels_go_with_the_chain() -> None:
    torch.manual_seed(1)
    alone = sf.Sequential(
        ops.Linear(4, 6), ops.Fork("early"), ops.Tanh(), ops.Add("given"), ops.Linear(6, 6), ops.Fork("late"),
        ops.Tanh(),
    ).to(DTYPE)  # fmt: skip
    staged = staged_of(alone, ("3", "5"))
    given = torch.randn(5, 6, dtype=DTYPE)
    results = [model(batch(0)[0], given=given) for model in (staged, alone)]
    for use in (slice(0, 3), slice(1, 2), slice(2, 3)):
        staged.zero_grad()
        alone.zero_grad()
        for out in results:
            sum(t.square().sum() for t in out[use]).backward(retain_graph=True)
        same_gradients(staged, alone, use)


def several_forwards_before_one_backward() -> None:
    alone = model_of()
    staged = staged_of(alone)
    for model in (staged, alone):
        losses = [nn.functional.mse_loss(model(x), t) for x, t in (batch(0), batch(1, 3))]
        (losses[0] + 2 * losses[1]).backward()
    same_gradients(staged, alone, same=lambda got, expected, _: torch.testing.assert_close(got, expected))


def reading_the_loss_elsewhere_raises() -> None:
    staged = staged_of(model_of())
    x, target = batch(0)
    loss = nn.functional.mse_loss(staged(x), target)
    if dist.get_rank() == 2:
        loss.item()
        return
    for read in (
        lambda: loss.item(), lambda: float(loss), lambda: f"{loss:.3f}", lambda: bool(loss > 0), lambda: loss.tolist(),
        lambda: loss.numpy(), lambda: loss.cpu(), lambda: torch.zeros(()).copy_(loss),
        lambda: torch.zeros(1).add_(loss),
    ):  # fmt: skip
        with pytest.raises(sf.errors.StateError, match=r"(?s)SF508.*in stage 2 on rank 2.*everywhere"):
            read()
    assert "in stage 2 on rank 2" in repr(loss)


def a_tensor_of_this_rank_gets_no_gradient_from_the_loss() -> None:
    staged = staged_of(model_of())
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    y = staged(batch(0)[0])
    if dist.get_rank() < 2:
        with pytest.raises(sf.errors.StateError, match=r"SF508.*gradient of a tensor of this rank"):
            (y.detach() * scale).sum().backward()
        for ask in (
            lambda: torch.autograd.grad(y.sum(), [scale]),
            lambda: y.sum().backward(inputs=[scale]),
            lambda: y.sum().backward(inputs=scale * 0),
            lambda: y.sum().backward(None, None, None, [scale]),
        ):
            with pytest.raises(sf.errors.StateError, match=r"(?s)SF508.*backward"):
                ask()


def training_goes_as_in_one_process() -> None:
    """AdamW, the norm of all gradients, and state dicts."""
    alone = model_of(dropout=0.2)
    staged = staged_of(alone, stages=None)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.1)) for m in (staged, alone)]
    norms = []
    for step in range(4):
        for model, optimizer in pairs:
            torch.manual_seed(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
            clip = clip_grad_norm_ if model is staged else lambda m, n: nn.utils.clip_grad_norm_(m.parameters(), n)
            norms.append(clip(model, LIMIT))
            optimizer.step()
    assert torch.equal(torch.stack(norms[::2]), torch.stack(norms[1::2]))
    assert min(norms) < LIMIT < max(norms), norms
    expected = dict(alone.named_parameters())
    for name, p in own(staged).items():
        assert torch.equal(p, expected[name]), name

    state = staged.state_dict()
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, sorted(state))
    assert sorted(name for several in names for name in several) == sorted(alone.state_dict())
    assert set(state) == set(own(staged))

    fresh = staged_of(model_of(), stages=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh.load_state_dict(state)
        fresh.load_state_dict(alone.state_dict())
    assert all(torch.equal(p, expected[name]) for name, p in own(fresh).items())
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict({})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fresh.load_state_dict({**state, "more": torch.zeros(1)})
    holder = nn.ModuleDict({"inner": fresh})
    assert set(holder.state_dict()) == {f"inner.{name}" for name in state}
    holder.load_state_dict({f"inner.{name}": value for name, value in alone.state_dict().items()})


def the_plan_is_equal_on_every_rank() -> None:
    staged = staged_of(model_of(dropout=0.1))
    x, _ = batch(0)
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, [str(staged.plan(x)), str(staged.plan(env=sf.Env.of("cuda:sm_90")))])
    assert texts[0] == texts[1] == texts[2]
    assert "runs eagerly: Boundary at 5: stage 1 begins here; rank 0 sends, rank 1 receives" in texts[0][0]
    plan = staged.plan(x)
    for at in (a.at for a in plan.eager):
        assert not any(
            step.fused and step.covers.start < at < step.covers.stop for step in plan.forward + plan.backward
        )


def a_wrong_input_is_an_error_on_every_rank() -> None:
    staged = staged_of(model_of())
    with pytest.raises(sf.errors.InputError, match=r"SF101 .*position 0 \(Linear\): expects last dimension 4, got 3"):
        staged(torch.zeros(5, 3, dtype=DTYPE))
    with pytest.raises(sf.errors.InputError, match=r"(?s)SF105.*plain tensors.*got Tensor on meta.*on every rank"):
        staged(torch.zeros(5, 4, device="meta"))
    with pytest.raises((sf.errors.PlanError, sf.errors.InputError), match=r"SF202|on meta, where its weight is"):
        staged[:4](torch.zeros(5, 4, dtype=DTYPE))


class Positive(nn.Module):
    """Keeps the rows whose sum is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0]


def shapes_that_depend_on_numbers_are_told() -> None:
    torch.manual_seed(1)
    alone = sf.Sequential(ops.Linear(4, 6), ops.Tanh(), Positive(), ops.Tanh(), ops.Linear(6, 3)).to(DTYPE)
    staged = staged_of(alone, ("1", "2"))
    if dist.get_rank() == 2:
        staged(batch(0, 1)[0])
    else:
        with pytest.raises(sf.errors.StateError, match=r'(?s)SF508 .*position 5 \(Positive\).*shapes="broadcast"'):
            staged(batch(0, 1)[0])
    told = staged_of(alone, ("1", "4"), shapes="broadcast")
    rows = set()
    for step in range(5):
        results = [model(batch(step, 9)[0]) for model in (told, alone)]
        assert results[0].shape == results[1].shape
        assert results[0].requires_grad
        rows.add(len(results[0]))
        for model, y in zip((told, alone), results, strict=True):
            model.zero_grad()
            y.square().sum().backward()
        same_gradients(told, alone)
    assert len(rows) > 1


def under_autocast() -> None:
    alone = model_of().float()
    staged = staged_of(alone)
    for model in (staged, alone):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch(0)[0].float())
        assert y.dtype == torch.bfloat16
        y.float().square().sum().backward()
    same_gradients(staged, alone)


def a_bias_that_is_not_there_is_not_one_that_is_elsewhere() -> None:
    staged = staged_of(model_of())
    for name, module in staged.named_modules():
        if isinstance(module, ops.Linear):
            assert (module.bias is None) == name.endswith((".4",)), name
    text = str(staged.plan(batch(0)[0]))
    assert text.count("Bias") == str(model_of().plan(batch(0)[0])).count("Bias")


def other_modules_and_parametrizations_take_part() -> None:
    torch.manual_seed(1)
    alone = sf.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), ops.Tanh(), nn.utils.parametrizations.weight_norm(ops.Linear(6, 6)),
        nn.GELU(), nn.utils.parametrizations.weight_norm(ops.Linear(6, 3)),
    ).to(DTYPE)  # fmt: skip
    same_as_alone(staged_of(alone, ("3", "4")), alone)
    staged = staged_of(alone, ("3", "4"))
    assert ("1.running_mean" in staged.state_dict()) == (dist.get_rank() == 0)


def every_loss_is_written_once() -> None:
    staged = staged_of(model_of())
    x, target = batch(0)
    labels = torch.tensor([0, 1, 2, 0, 1])
    for loss_of in (
        lambda y: nn.functional.cross_entropy(y, labels),
        lambda y: nn.CrossEntropyLoss(label_smoothing=0.1)(y, labels),
        lambda y: nn.functional.cross_entropy(y, labels, weight=torch.ones(3, dtype=DTYPE)),
        lambda y: (y - target).abs().mean() + 0.1 * torch.stack([y.sum(), y.sum()]).norm(),
        lambda y: torch.where(target > 0, y, 0.0).sum() / target.numel(),
        lambda y: y.log_softmax(-1).gather(1, labels[:, None]).mean(),
        lambda y: y[torch.arange(5), labels].sum(),
    ):
        staged.zero_grad()
        loss_of(staged(x)).backward()
        assert all(p.grad is not None for p in own(staged).values())


def assert_near(got: Tensor, expected: Tensor, name: str, **float64: float) -> None:
    """In 16 bits parts of a sum are rounded before they are added; the float64 run shows whether the parts are
    right."""
    half = {"rtol": 0.0, "atol": 16 * torch.finfo(DTYPE).eps * expected.abs().max().item()}
    how = float64 if DTYPE is torch.float64 else half
    torch.testing.assert_close(got, expected, msg=lambda m: f"{name}: {m}", **how)


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
        torch.manual_seed(step)
        expected: list[Tensor] = []
        for part, goal in zip(x.chunk(count), target.chunk(count), strict=True):
            given = {name: c.chunk(count)[len(expected)] for name, c in channels.items()}
            loss = nn.functional.mse_loss(alone(part, **given), goal)
            (loss / count).backward()
            expected.append(loss.detach())
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

    alone = sf.Sequential(ops.Linear(4, 6), ops.Add("early"), ops.Linear(6, 3), ops.Add("late")).to(DTYPE)
    channels = {"early": batch(2, 12)[0] @ torch.ones(4, 6, dtype=DTYPE), "late": batch(3, 12)[1]}
    microbatched(
        lambda s: ScheduleGPipe(s[0], 3, nn.functional.mse_loss), staged_of(alone, ("2",)), alone, 3, **channels
    )


def a_batch_that_has_no_equal_parts_is_refused() -> None:
    staged = staged_of(model_of(), ("3.1",))
    for parts in (2, 0, -1):
        with pytest.raises(sf.errors.InputError, match=rf"SF101.*shape \(5, 4\) has no {parts} equal parts"):
            stages(staged, batch(0)[0], microbatches=parts)


THREE = [
    gradients_are_those_of_one_process, dropout_is_that_of_one_process,
    stages_of_other_ranks_hold_and_launch_nothing, outputs_say_what_they_are_everywhere,
    without_a_gradient_before_a_boundary, freezing_between_calls_is_seen_on_every_rank,
    complex_numbers_have_gradients_too, gradients_that_end_in_a_stage_are_not_waited_for,
    a_channel_may_pass_a_stage_in_which_the_chain_ends, integers_may_leave_a_stage_beside_a_channel,
    tensors_are_sent_however_they_lie_in_memory, a_stage_may_give_back_no_gradient_at_all,
    public_channels_go_with_the_chain, several_forwards_before_one_backward, reading_the_loss_elsewhere_raises,
    a_tensor_of_this_rank_gets_no_gradient_from_the_loss, training_goes_as_in_one_process,
    the_plan_is_equal_on_every_rank, a_wrong_input_is_an_error_on_every_rank, shapes_that_depend_on_numbers_are_told,
    under_autocast, a_bias_that_is_not_there_is_not_one_that_is_elsewhere,
    other_modules_and_parametrizations_take_part, every_loss_is_written_once, schedules_take_our_stages,
]  # fmt: skip


def a_parameter_on_two_ranks_is_refused() -> None:
    model = model_of()
    model[2][4].weight = model[3][4].weight
    with pytest.raises(sf.errors.PlanError, match=r"SF202.*Linear.*weight is in stages 0 and 1"):
        pipeline(model, mesh(), stages=("3",))
    assert not any("boundary" in name for name, _ in model.named_modules())
    assert not any(p.is_meta for p in model.parameters())


TWO = [
    schedules_take_several_stages_of_a_rank, schedules_take_shapes_that_are_told, schedules_take_public_channels,
    a_batch_that_has_no_equal_parts_is_refused, a_parameter_on_two_ranks_is_refused,
]  # fmt: skip


def stages_of_shares_give_the_gradients_of_one_process() -> None:
    """Two stages, each sharded over two ranks; dropout outside of shards is common to all."""
    from seqfuse.nn import TransformerStack

    torch.manual_seed(1)
    alone = sf.Sequential(ops.Linear(4, 8), TransformerStack(2, 8, 2, dropout=0.2), ops.Linear(8, 3)).to(DTYPE)
    both = mesh((2, 2), ("pp", "tp"))
    plan = {"*attention.mixer": "heads", "*feedforward.mixer": "features"}
    divided = parallelize(copy.deepcopy(alone), both["tp"], plan)
    for stages_asked in (("1.1",), ("1.0.feedforward.mixer",), ("1.0.attention.mixer.attention",)):
        staged = pipeline(copy.deepcopy(divided), both["pp"], stages=stages_asked)
        for step in range(2):
            x, target = batch(step, rows=4)
            losses = []
            for model in (staged, alone):
                torch.manual_seed(step)
                model.zero_grad()
                loss = nn.functional.mse_loss(model(x[None])[0], target) * (1.0, 0.01)[step]
                loss.backward()
                losses.append(everywhere(loss, staged) if model is staged else loss.detach())
            assert_near(*losses, "loss")
            kind = (2.0, float("inf"))[step]
            norms = [clip_grad_norm_(staged, 0.1, kind), nn.utils.clip_grad_norm_(alone.parameters(), 0.1, kind)]
            assert_near(*norms, "norm")
            gradients = {name: p.grad for name, p in alone.named_parameters()}
            expected = shard(divided, gradients)
            for name, p in own(staged).items():
                assert_near(p.grad, expected[name], name)


def schedules_run_in_one_dimension_of_a_mesh() -> None:
    from torch.distributed.pipelining import ScheduleGPipe

    alone = model_of()
    staged = pipeline(copy.deepcopy(alone), mesh((2, 2), ("pp", "dp"))["pp"], stages=("3.1",))
    microbatched(lambda s: ScheduleGPipe(s[0], 3, nn.functional.mse_loss), staged, alone, 3)


def a_cache_of_keys_is_refused_on_every_rank() -> None:
    from seqfuse.inference import KVCache
    from seqfuse.nn import TransformerStack

    torch.manual_seed(1)
    staged = pipeline(TransformerStack(2, 8, 2, causal=True).to(DTYPE), mesh())
    cache, x = KVCache(2, 8), torch.zeros(2, 3, 8, dtype=DTYPE)
    with pytest.raises(sf.errors.StateError, match=r"SF505.*stages"):
        cache.feed(staged, x)
    assert not cache.lengths.any()
    assert staged(x).shape == x.shape


TWO.append(a_cache_of_keys_is_refused_on_every_rank)


def what_is_no_tensor_of_the_last_stage_is_refused_on_every_rank() -> None:
    staged = staged_of(model_of(), stages=("2.1",))
    loss = staged(batch(0)[0]).sum()
    last = dist.get_rank() == 1
    wrong: list[tuple[Any, str]] = [
        (torch.zeros((), dtype=DTYPE), "rank 0"), (loss if last else 0.5, "rank 0"), (None, "ranks 0 and 1"),
        (0.5 if last else loss, "rank 1"), (loss if last else loss.reshape(1), "rank 0"),
        (loss if last else loss.float(), "rank 0"),
    ]  # fmt: skip
    for given, ranks in wrong:
        expected = f"SF105 everywhere: takes a tensor of the last stage.*other rank; that of {ranks} is not"
        with pytest.raises(sf.errors.InputError, match=expected):
            everywhere(given, staged)
    assert everywhere(loss, staged).shape == ()


TWO.append(what_is_no_tensor_of_the_last_stage_is_refused_on_every_rank)


class InBFloat16:
    """The same in bfloat16."""

    def __init__(self, work: Any) -> None:
        self.work, self.__name__ = work, f"{work.__name__}_in_bfloat16"

    def __call__(self) -> None:
        global DTYPE
        before, DTYPE = DTYPE, torch.bfloat16
        try:
            self.work()
        finally:
            DTYPE = before


_OF_ONE_DTYPE = (
    stages_of_other_ranks_hold_and_launch_nothing, under_autocast, a_parameter_on_two_ranks_is_refused,
    freezing_between_calls_is_seen_on_every_rank, a_channel_may_pass_a_stage_in_which_the_chain_ends,
    a_stage_may_give_back_no_gradient_at_all,
)  # fmt: skip
for works in (THREE, TWO):
    both = [work for work in works if work not in _OF_ONE_DTYPE]
    works += [InBFloat16(work) for work in (both if processes.FULL else both[::3])]

FOUR: list[Any] = [stages_of_shares_give_the_gradients_of_one_process, schedules_run_in_one_dimension_of_a_mesh]
FOUR.append(InBFloat16(FOUR[0]))


test_in_several_processes = Facts({3: THREE, 2: TWO, 4: FOUR}).test


def a_rank_that_dies() -> None:
    staged = staged_of(model_of())
    same = nn.functional.mse_loss(staged(batch(0)[0]), batch(0)[1])
    if dist.get_rank() == 1:
        os._exit(7)
    same.backward()


def a_rank_that_sleeps() -> None:
    staged = staged_of(model_of())
    if dist.get_rank() == 0:
        time.sleep(7)
        return
    staged(batch(0)[0])


def test_a_rank_that_dies_is_an_error_of_the_others():
    found = raised(3, [a_rank_that_dies], patience=15)
    assert found.pop(("a_rank_that_dies", 1)) == "it exited with 7"
    text = found["a_rank_that_dies", 0]
    assert "SF509: Boundary before stage 1: receiving from stage 1 on rank 1 in group 'pp' failed: " in text


def test_a_rank_that_sleeps_is_an_error_of_the_others_after_the_timeout():
    found = raised(3, [a_rank_that_sleeps], patience=5)
    assert set(found) == {("a_rank_that_sleeps", 1), ("a_rank_that_sleeps", 2)}
    text = found["a_rank_that_sleeps", 1]
    assert "SF509: Boundary before stage 1: receiving from stage 0 on rank 0 in group 'pp' failed: " in text


@pytest.fixture
def one(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield mesh()
    dist.destroy_process_group()


def test_one_rank_has_all_stages_and_sends_nothing(one: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dist, "batch_isend_irecv", None)
    alone = model_of(dropout=0.2)
    same_as_alone(pipeline(copy.deepcopy(alone), one), alone)
    staged = pipeline(copy.deepcopy(alone), one, stages=("2.1", "3.4"))
    same_as_alone(staged, alone)
    assert set(staged.state_dict()) == set(alone.state_dict())
    again = copy.deepcopy(staged)
    same_as_alone(again, alone)


@pytest.fixture
def two_pretended() -> Iterator[Any]:
    """Two ranks, of which this is the first and the other one sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield mesh()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("stages_asked", "sentence"),
    [
        (("nowhere",), r"no stage can begin at 'nowhere'"),
        (("2.5",), r"no stage can begin at '2.5'\nHint: did you mean '2.[0-4]'\?"),
        (("3", "2"), r"position 3 \(Fork\): stages begin in the order of the sequence"),
        (("2", "2"), r"stages begin in the order of the sequence"),
        (("0",), r"stages begin in the order of the sequence"),
        (9, r".*cannot be cut into 9 stages\nHint: name the modules"),
        (0, r"stages must be at least 1, got 0"),
        (-2, r"stages must be at least 1, got -2"),
        (
            ("1.net",),
            r"no stage can begin at '1.net': '1' runs through its own call \(not an operation of this library\)",
        ),
    ],
    ids=str,
)
def test_refuses_cuts_that_cannot_be(one: Any, stages_asked: Any, sentence: str):
    model = model_of()
    if stages_asked == ("1.net",):
        model = sf.Sequential(ops.Linear(4, 6), nn.ModuleDict({"net": nn.Linear(6, 6)}), ops.Linear(6, 3))
    with pytest.raises(sf.errors.PlanError, match=r"SF202.*" + sentence):
        pipeline(model, one, stages=stages_asked)
    assert not any("boundary" in name for name, _ in model.named_modules())


def test_a_model_in_stages_is_not_divided(one: Any):
    staged = pipeline(model_of(), one, stages=2)
    text, before = str(staged), {name: p.clone() for name, p in staged.named_parameters()}
    for model in (staged, nn.Sequential(staged)):
        with pytest.raises(
            sf.errors.PlanError, match=r"SF202: parallelize comes before pipeline, .*\nHint: pipeline\(par"
        ):
            parallelize(model, one, {"*.1": "column"})
    assert str(staged) == text
    assert all(torch.equal(p, before[name]) for name, p in staged.named_parameters())


def test_refuses_a_model_that_is_in_stages_and_other_settings(one: Any):
    staged = pipeline(model_of(), one, stages=2)
    with pytest.raises(sf.errors.PlanError, match="SF202: the model is in stages already"):
        pipeline(staged, one)
    unknown: Any = "guess"
    with pytest.raises(sf.errors.InputError, match=r"SF106.*guess"):
        pipeline(model_of(), one, shapes=unknown)
    with pytest.raises(sf.errors.InputError, match="SF106: takes a model that"):
        everywhere(torch.zeros(()), model_of())


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"model": nn.Sequential(nn.Linear(4, 4), nn.ReLU())},
            r"pipeline cuts a seqfuse\.Sequential, got Sequential\nHint: ",
        ),
        ({"mesh": object()}, r"pipeline takes a DeviceMesh, got object\nHint: such as init_device_mesh"),
        ({"stages": "12"}, r"stages must be a number, or a list of the names .*, got '12'\nHint: such as"),
        ({"stages": 2.5}, r"stages must be a number, .*, got 2\.5"),
        ({"stages": [1, 2]}, r"stages must be a number, .*, got \[1, 2\]"),
    ],
    ids=["model", "mesh", "stages of text", "a half stage", "stages by number"],
)
def test_refuses_arguments_of_another_kind(one: Any, given: dict[str, Any], sentence: str):
    arguments: dict[str, Any] = {"model": model_of(), "mesh": one} | given
    with pytest.raises(sf.errors.InputError, match=f"SF106: {sentence}"):
        pipeline(arguments.pop("model"), arguments.pop("mesh"), **arguments)


def test_refuses_meshes_stages_and_names_that_do_not_fit(two_pretended: Any):
    with pytest.raises(sf.errors.PlanError, match="SF202: a pipeline takes one dimension of a mesh, not 2"):
        pipeline(model_of(), mesh((1, 2), ("pp", "tp")))
    with pytest.raises(sf.errors.PlanError, match="SF202: 3 stages cannot be dealt evenly to 2 ranks"):
        pipeline(model_of(), two_pretended, stages=3)
    model = model_of()
    model[3].register_module("boundary1", ops.Tanh())
    with pytest.raises(sf.errors.PlanError, match=r"SF202: modules are called \['boundary1'\], as boundaries are"):
        pipeline(model, two_pretended, stages=("3.2",))
    norms = [nn.BatchNorm1d(6, affine=False) for _ in range(2)]
    norms[1].running_var = norms[0].running_var
    with pytest.raises(sf.errors.PlanError, match=r"BatchNorm1d\): its running_var is in stages 0 and 1, which are on"):
        pipeline(sf.Sequential(ops.Linear(4, 6), norms[0], ops.Tanh(), norms[1]), two_pretended, stages=("2",))


def test_only_a_tensor_of_the_last_stage_is_taken_everywhere(two_pretended: Any):
    staged = pipeline(model_of(), two_pretended, stages=2)
    with pytest.raises(sf.errors.InputError, match="SF105 everywhere: takes a tensor of the last stage"):
        everywhere(torch.zeros(()), staged)


def test_what_has_two_names_on_another_rank_is_in_no_state_under_either(two_pretended: Any):
    norm = nn.BatchNorm1d(6)
    alone = sf.Sequential(ops.Linear(4, 6), norm, ops.Tanh(), norm)
    staged = pipeline(copy.deepcopy(alone), two_pretended, stages=("1",))
    assert set(staged.state_dict()) == {"0.weight", "0.bias"}
    staged.load_state_dict(alone.state_dict())


def test_a_state_that_is_assigned_to_what_holds_a_model_in_stages_makes_nothing_of_other_ranks(two_pretended: Any):
    alone = sf.Sequential(ops.Linear(4, 6), ops.Tanh(), ops.Linear(6, 3))
    holder = nn.ModuleDict({"inner": pipeline(copy.deepcopy(alone), two_pretended, stages=("2",))})
    holder.load_state_dict({f"inner.{name}": t for name, t in alone.state_dict().items()}, assign=True)
    assert [p.is_meta for p in holder.parameters()] == [False, False, True, True]


def test_the_shapes_of_few_inputs_are_kept(one: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sf.parallel.staged, "KEPT_LOWERINGS", 3)
    staged = pipeline(model_of(), one, stages=("3",))
    fuser = staged._fuser
    for rows in range(1, 9):
        fuser.infer(batch(0, rows)[0], {})
        assert all(0 < len(stage.clipped) <= 3 for stage in fuser.stages(fuser.op_list()))


def test_stages_of_a_count_are_balanced_where_a_single_tensor_crosses(one: Any):
    model = sf.Sequential(*(block() for _ in range(6)), ops.Linear(6, 200))
    staged = pipeline(model, one, stages=2)
    names = [name for name, module in staged.named_modules() if type(module).__name__ == "Boundary"]
    assert names == ["boundary1"]
    assert [*staged._modules].index("boundary1") == 6  # the last operation has most of the parameters


def test_operations_without_parameters_are_balanced_by_their_number(one: Any):
    staged = pipeline(sf.Sequential(*(ops.Tanh() for _ in range(6))), one, stages=2)
    assert [*staged._modules].index("boundary1") == 3


def test_a_stage_may_begin_where_a_module_is_met_again(one: Any):
    tanh = ops.Tanh()
    alone = sf.Sequential(ops.Linear(4, 6), tanh, ops.Linear(6, 6), tanh, ops.Linear(6, 3)).double()
    same_as_alone(pipeline(copy.deepcopy(alone), one, stages=("3",)), alone)


@pytest.mark.parametrize("p", [0, -1.0, -torch.inf, torch.nan])
def test_gradients_are_clipped_by_positive_norms_alone(p: float):
    message = rf"SF106 clip_grad_norm_: norm_type must be positive, got {p}"
    with pytest.raises(sf.errors.InputError, match=message):
        clip_grad_norm_(ops.Linear(2, 2), 1.0, p)


def test_a_public_output_crosses_every_boundary_behind_it(one: Any):
    model = sf.Sequential(ops.Linear(4, 6), ops.Fork("out"), ops.Linear(6, 6), ops.Linear(6, 3))
    with pytest.raises(
        sf.errors.PlanError, match="a sequence of 2 parts that a single tensor leaves cannot be cut into 3"
    ):
        pipeline(model, one, stages=3)


def test_numbers_of_another_rank_cannot_be_written_into_a_tensor_of_this_one():
    there, here = Elsewhere.of(torch.empty(3, device="meta"), "on rank 1"), torch.zeros(2, 3)
    with pytest.raises(sf.errors.StateError, match="SF508"):
        here[0] = there
    with pytest.raises(sf.errors.StateError, match="SF508: add into a tensor of this rank"):
        torch.add(there, 1, out=here)


def test_gradients_of_some_tensors_of_another_rank_are_refused_however_they_are_asked_for():
    there = Elsewhere.of(torch.empty(3, device="meta", requires_grad=True), "on rank 1")
    asks = [
        lambda: torch.autograd.grad(there.sum(), [there]),
        lambda: there.sum().backward(inputs=[there]),
        lambda: there.sum().backward(None, None, None, [there]),
    ]
    if "has_torch_function" in torch.autograd.backward.__code__.co_names:  # not in every version
        asks.append(lambda: torch.autograd.backward(there.sum(), inputs=[there]))
    for ask in asks:
        with pytest.raises(sf.errors.StateError, match=r"(?s)SF508.*backward"):
            ask()
    there.sum().backward()


def total(inputs: Tensor) -> Tensor:
    if torch.overrides.has_torch_function((inputs,)):
        return torch.overrides.handle_torch_function(total, (inputs,), inputs=inputs)
    return inputs.sum()


def test_other_functions_may_have_inputs_of_another_rank():
    there = Elsewhere.of(torch.empty(3, device="meta", requires_grad=True), "on rank 1")
    assert isinstance(total(inputs=there), Elsewhere)


def test_stages_of_one_rank_may_share_a_parameter(one: Any):
    model = model_of()
    model[2][4].weight = model[3][4].weight
    staged = pipeline(model, one, stages=("3",))
    assert staged[2][4].weight is staged.get_parameter("3.4.weight")


def test_channels_are_cut_into_micro_batches_as_the_batch_is(one: Any):
    staged = pipeline(sf.Sequential(ops.Linear(4, 6), ops.Tanh(), ops.Add("given")).double(), one, stages=("1",))
    made = stages(staged, batch(0, 4)[0], microbatches=2, given=torch.ones(4, 6, dtype=torch.float64))
    assert len(made) == 2


def test_stages_that_are_made_again_begin_with_the_first_micro_batch(one: Any):
    alone, x = model_of(dropout=0.5), batch(0, 4)[0]
    staged = pipeline(copy.deepcopy(alone), one, stages=("3",))
    for cut_off in (True, False):
        first, second = (made.submod for made in stages(staged, x, microbatches=2))
        torch.manual_seed(3 + cut_off)
        crossing = first(x[:2])
    torch.manual_seed(3)
    assert torch.equal(second(*crossing), alone(x[:2]))
    assert not staged._fuser._drawn  # each is freed with the last stage that reads it


def test_what_stands_for_a_stage_has_a_gradient_only_where_gradients_are_recorded(one: Any):
    staged, x = pipeline(model_of(), one, stages=("2.1",)), batch(0)[0].requires_grad_()
    for recorded in (False, True, False):
        with torch.set_grad_enabled(recorded):
            leaving = [t for tensors in staged._fuser.infer(x, {})[1:] for t in tensors]
        assert {t.requires_grad for t in leaving} == {recorded}


def test_the_norm_of_nothing_is_zero():
    assert clip_grad_norm_(nn.Tanh(), 1.0) == 0


def test_norms_of_two_dtypes_are_added_in_the_wider_one():
    model = nn.Sequential(nn.Linear(64, 1, bias=False).bfloat16(), nn.Linear(64, 1, bias=False))
    for i, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, 1.0 if i else 0.03125)
    assert clip_grad_norm_(model, 1e9).item() == pytest.approx((64 + 0.0625) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_a_norm_that_is_not_finite_is_an_error_where_that_is_asked_for(wrong: float):
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[1.0, wrong]])
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0"):
        clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert not clip_grad_norm_(model, 1.0).isfinite()


def test_parameters_of_other_modules_count_where_stages_are_balanced(one: Any):
    staged = pipeline(sf.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 200)), one, stages=2)
    assert [*staged._modules].index("boundary1") == 3

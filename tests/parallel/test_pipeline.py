"""A model in pipeline stages: every rank computes the results of one process."""

import os
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.parallel import clip_grad_norm_, everywhere, pipeline
from tests.parallel import kit
from tests.parallel.kit import (
    assert_near,
    batch,
    losses_of,
    mesh,
    model_of,
    own,
    same_as_alone,
    same_gradients,
    staged_of,
    with_bfloat16,
)
from tests.processes import Facts, raised
from tests.watching import Calls, name_of

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


LIMIT = 2.0  # of the norm of all gradients


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
    y = staged(torch.empty(0, 4, dtype=kit.DTYPE))
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
    alone = sf.Sequential(ops.Linear(4, 6), ops.Tanh(), Detach(), ops.Tanh(), ops.Linear(6, 3)).to(kit.DTYPE)
    staged = staged_of(alone, ("1", "4"))
    losses_of(staged, alone, Tensor.sum)
    for name, p in own(staged).items():
        assert (p.grad is None) == (name.startswith("0")), name


def a_channel_may_pass_a_stage_in_which_the_chain_ends() -> None:
    for shapes in ("infer", "broadcast"):
        alone = sf.Sequential(
            ops.Linear(4, 6), ops.Fork("skip"), Detach(), ops.Linear(6, 6), ops.Add("skip"), ops.Linear(6, 3)
        ).to(kit.DTYPE)
        staged = staged_of(alone, ("2", "4"), shapes=shapes)
        losses_of(staged, alone, Tensor.sum)
        same_gradients(staged, alone, shapes)


class Signs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x > 0).long()


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 2).to(kit.DTYPE)


def integers_may_leave_a_stage_beside_a_channel() -> None:
    for shapes in ("infer", "broadcast"):
        alone = sf.Sequential(
            ops.Linear(4, 6), ops.Fork("skip"), Signs(), Doubled(), ops.Add("skip"), ops.Linear(6, 3)
        ).to(kit.DTYPE)
        same_as_alone(staged_of(alone, ("3", "5"), shapes=shapes), alone)


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def tensors_are_sent_however_they_lie_in_memory() -> None:
    """One tensor is sent transposed, and so is the gradient that comes back."""
    alone = sf.Sequential(ops.Linear(4, 6), Turned(), Turned(), ops.Linear(6, 6), ops.Linear(6, 3)).to(kit.DTYPE)
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


def first_stage_has_none(staged: Any, alone: nn.Module) -> None:
    """The gradients are those of one process, and of the operation at 0 there are none."""
    expected = dict(alone.named_parameters())
    for name, p in own(staged).items():
        if name.startswith("0"):
            assert p.grad is None or not p.grad.any()
        else:
            assert torch.equal(p.grad, expected[name].grad)


def a_stage_may_give_back_no_gradient_at_all() -> None:
    alone = sf.Sequential(
        ops.Linear(4, 6), ops.Fork("skip"), ops.Tanh(), ops.Add("skip"), GivesNone(), ops.Linear(6, 3)
    ).to(kit.DTYPE)
    staged = staged_of(alone, ("2", "5"), shapes="broadcast")
    losses_of(staged, alone, Tensor.sum)
    first_stage_has_none(staged, alone)
    of_one_tensor = staged_of(sf.Sequential(ops.Linear(4, 6), GivesNone(), ops.Linear(6, 3)).to(kit.DTYPE), ("1", "2"))
    of_one_tensor(batch(0)[0]).sum().backward()
    assert all(p.grad is None or p.grad.any() == name.startswith("2") for name, p in own(of_one_tensor).items())


def public_channels_go_with_the_chain() -> None:
    torch.manual_seed(1)
    alone = sf.Sequential(
        ops.Linear(4, 6), ops.Fork("early"), ops.Tanh(), ops.Add("given"), ops.Linear(6, 6), ops.Fork("late"),
        ops.Tanh(),
    ).to(kit.DTYPE)  # fmt: skip
    staged = staged_of(alone, ("3", "5"))
    given = torch.randn(5, 6, dtype=kit.DTYPE)
    results = [model(batch(0)[0], given=given) for model in (staged, alone)]
    for use in (slice(0, 3), slice(1, 2), slice(2, 3)):
        staged.zero_grad()
        alone.zero_grad()
        for out in results:
            sum(t.square().sum() for t in out[use]).backward(retain_graph=True)
        same_gradients(staged, alone, use)


def a_loss_of_an_output_that_needs_no_other_rank_reaches_all() -> None:
    alone = sf.Sequential(ops.Linear(4, 6), ops.Fork("kept"), Detach(), ops.Linear(6, 3)).to(kit.DTYPE)
    staged = staged_of(alone, ("1",))
    for model in (staged, alone):
        y, _ = model(batch(0)[0])
        y.sum().backward()
    first_stage_has_none(staged, alone)


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
        lambda: loss.numpy(), lambda: loss.cpu(), lambda: torch.zeros(()).copy_(loss), lambda: np.asarray(loss),
        lambda: int(loss), lambda: complex(loss), lambda: range(loss.long()),
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
    assert torch.equal(*(clip_grad_norm_(m, 1e9) for m in (staged, nn.ModuleDict({"inner": staged}))))
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
        staged(torch.zeros(5, 3, dtype=kit.DTYPE))
    with pytest.raises(sf.errors.InputError, match=r"(?s)SF105.*plain tensors.*got Tensor on meta.*on every rank"):
        staged(torch.zeros(5, 4, device="meta"))
    with pytest.raises((sf.errors.PlanError, sf.errors.InputError), match=r"SF202|on meta, where its weight is"):
        staged[:4](torch.zeros(5, 4, dtype=kit.DTYPE))


class Positive(nn.Module):
    """Keeps the rows whose sum is positive."""

    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(-1) > 0]


def shapes_that_depend_on_numbers_are_told() -> None:
    torch.manual_seed(1)
    alone = sf.Sequential(ops.Linear(4, 6), ops.Tanh(), Positive(), ops.Tanh(), ops.Linear(6, 3)).to(kit.DTYPE)
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
    ).to(kit.DTYPE)  # fmt: skip
    same_as_alone(staged_of(alone, ("3", "4")), alone)
    staged = staged_of(alone, ("3", "4"))
    assert ("1.running_mean" in staged.state_dict()) == (dist.get_rank() == 0)


def the_default_device_of_torch_makes_no_difference() -> None:
    alone = model_of(dropout=0.5)
    staged = staged_of(alone)
    x, target = batch(0)

    def stepped(model: nn.Module) -> Tensor:
        torch.manual_seed(2)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        return loss

    expected = stepped(alone)
    with torch.device("meta"):
        loss = stepped(staged)
        told = everywhere(loss, staged)
        assert torch.equal(told, expected)
        assert not told.requires_grad
        norm = clip_grad_norm_(staged, 1e9)
    same_gradients(staged, alone)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(p.grad for p in alone.parameters()))


def every_loss_is_written_once() -> None:
    staged = staged_of(model_of())
    x, target = batch(0)
    labels = torch.tensor([0, 1, 2, 0, 1])
    for loss_of in (
        lambda y: nn.functional.cross_entropy(y, labels),
        lambda y: nn.CrossEntropyLoss(label_smoothing=0.1)(y, labels),
        lambda y: nn.functional.cross_entropy(y, labels, weight=torch.ones(3, dtype=kit.DTYPE)),
        lambda y: (y - target).abs().mean() + 0.1 * torch.stack([y.sum(), y.sum()]).norm(),
        lambda y: torch.where(target > 0, y, 0.0).sum() / target.numel(),
        lambda y: y.log_softmax(-1).gather(1, labels[:, None]).mean(),
        lambda y: y[torch.arange(5), labels].sum(),
    ):
        staged.zero_grad()
        loss_of(staged(x)).backward()
        assert all(p.grad is not None for p in own(staged).values())


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
    other_modules_and_parametrizations_take_part, every_loss_is_written_once,
    the_default_device_of_torch_makes_no_difference,
]  # fmt: skip


def a_parameter_on_two_ranks_is_refused() -> None:
    model = model_of()
    model[2][4].weight = model[3][4].weight
    with pytest.raises(sf.errors.PlanError, match=r"SF202.*Linear.*weight is in stages 0 and 1"):
        pipeline(model, mesh(), stages=("3",))
    assert not any("boundary" in name for name, _ in model.named_modules())
    assert not any(p.is_meta for p in model.parameters())


def a_cache_of_keys_is_refused_on_every_rank() -> None:
    from seqfuse.inference import KVCache
    from seqfuse.nn import TransformerStack

    torch.manual_seed(1)
    staged = pipeline(TransformerStack(2, 8, 2, causal=True).to(kit.DTYPE), mesh())
    cache, x = KVCache(2, 8), torch.zeros(2, 3, 8, dtype=kit.DTYPE)
    with pytest.raises(sf.errors.StateError, match=r"SF505.*stages"):
        cache.feed(staged, x)
    assert not cache.lengths.any()
    assert staged(x).shape == x.shape


def what_is_no_tensor_of_the_last_stage_is_refused_on_every_rank() -> None:
    staged = staged_of(model_of(), stages=("2.1",))
    loss = staged(batch(0)[0]).sum()
    last = dist.get_rank() == 1
    wrong: list[tuple[Any, str]] = [
        (torch.zeros((), dtype=kit.DTYPE), "rank 0"), (loss if last else 0.5, "rank 0"), (None, "ranks 0 and 1"),
        (0.5 if last else loss, "rank 1"), (loss if last else loss.reshape(1), "rank 0"),
        (loss if last else loss.float(), "rank 0"),
    ]  # fmt: skip
    for given, ranks in wrong:
        expected = f"SF105 everywhere: takes a tensor of the last stage.*other rank; that of {ranks} is not"
        with pytest.raises(sf.errors.InputError, match=expected):
            everywhere(given, staged)
    assert everywhere(loss, staged).shape == ()


TWO = [
    a_parameter_on_two_ranks_is_refused, a_cache_of_keys_is_refused_on_every_rank,
    what_is_no_tensor_of_the_last_stage_is_refused_on_every_rank,
    a_loss_of_an_output_that_needs_no_other_rank_reaches_all,
]  # fmt: skip
_OF_ONE_DTYPE = (
    stages_of_other_ranks_hold_and_launch_nothing, under_autocast, a_parameter_on_two_ranks_is_refused,
    freezing_between_calls_is_seen_on_every_rank, a_channel_may_pass_a_stage_in_which_the_chain_ends,
    a_stage_may_give_back_no_gradient_at_all,
)  # fmt: skip


test_in_several_processes = Facts({n: with_bfloat16(works, _OF_ONE_DTYPE) for n, works in ((3, THREE), (2, TWO))}).test


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

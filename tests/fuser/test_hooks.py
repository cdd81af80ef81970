"""Hooks fire with the real tensors, in torch's order, and the plan names operations that run eagerly because of
them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.modules.module as of_all
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import (
    PAIR,
    ForkGeLUAddForward,
    assert_like_torch,
    outcome,
    randomized,
    run,
    tensor,
)


def pair() -> tuple[sf.Sequential, nn.Sequential]:
    """Two layers of each kind, the second nested."""
    mine = sf.Sequential(
        ops.Linear(5, 4),
        ops.ReLU(),
        sf.Sequential(ops.Linear(4, 5), ops.ReLU(), fusions=PAIR),
        ops.Tanh(),
        fusions=PAIR,
    )
    its = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 5), nn.ReLU()), nn.Tanh())
    randomized(mine)
    its.load_state_dict(mine.state_dict())
    return mine, its


Log = list[tuple[Any, ...]]


def flat(value: Any) -> tuple[Tensor | None, ...]:
    return tuple(value) if isinstance(value, tuple) else (value,)


def attach(module: nn.Module, name: str, log: Log) -> list[Any]:
    """Every kind of hook, each of which logs its name and arguments."""

    def note(kind: str) -> Callable[..., None]:
        def hook(module: nn.Module, *given: Any) -> None:
            tensors = [t for value in given if not isinstance(value, dict) for t in flat(value) if t is not None]
            assert all(type(t) in (Tensor, nn.Parameter) for t in tensors), "not the real tensors"
            assert all(value == {} for value in given if isinstance(value, dict))
            log.append((name, kind, [t.detach().clone() for t in tensors]))

        return hook

    return [
        module.register_forward_pre_hook(note("pre")),
        module.register_forward_pre_hook(note("pre_kwargs"), with_kwargs=True),
        module.register_forward_hook(note("forward")),
        module.register_forward_hook(note("forward_kwargs"), with_kwargs=True),
        module.register_forward_hook(note("forward_always"), always_call=True),
        module.register_full_backward_pre_hook(note("backward_pre")),
        module.register_full_backward_hook(note("backward")),
    ]


def same_log(mine: Log, its: Log) -> None:
    assert [entry[:2] for entry in mine] == [entry[:2] for entry in its]
    for (name, kind, got), (_, _, expected) in zip(mine, its, strict=True):
        assert len(got) == len(expected), (name, kind)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, msg=lambda m, name=name, kind=kind: f"{name}, {kind}: {m}")


PLACES = ["0", "1", "2", "2.0", "2.1", "3", ""]


@pytest.mark.parametrize("place", [*PLACES, "1 and 2.0", "everywhere"])
def test_every_kind_of_hook_sees_what_it_sees_in_torch_and_in_the_same_order(place: str) -> None:
    mine, its = pair()
    x = tensor(7, 5)
    mine(x).sum().backward()  # plans without hooks first
    places = PLACES if place == "everywhere" else place.split(" and ")
    logs: list[Log] = [[], []]
    handles = [
        handle
        for model, log in zip((mine, its), logs, strict=True)
        for p in places
        for handle in attach(model.get_submodule(p), p, log)
    ]
    assert_like_torch(mine, its, x)  # two calls of each
    assert len(logs[0]) == 2 * 7 * len(places)
    same_log(*logs)
    for handle in handles:
        handle.remove()
    assert_like_torch(mine, its, x)
    assert len(logs[0]) == 2 * 7 * len(places), "a hook was called after its removal"


def test_the_plan_says_what_runs_alone_and_why_and_the_rest_stays_fused() -> None:
    mine, _ = pair()
    x = tensor(7, 5)
    assert mine.plan(x).count("BiasReLU") == 2
    handle = mine[1].register_forward_hook(lambda *_: None)
    plan = mine.plan(x)
    assert [(a.at, a.name, a.reason) for a in plan.eager] == [(2, "ReLU", "it has hooks")]
    assert "runs eagerly: ReLU at 2: it has hooks" in str(plan)
    assert plan.count("BiasReLU") == plan.count("BiasReLUBack") == 1
    assert 2 not in {p for piece in plan.segments for p in piece}
    handle.remove()
    assert mine.plan(x).eager == ()
    assert mine.plan(x).count("BiasReLU") == 2
    mine[0].register_forward_hook(lambda *_: None)
    assert mine.plan(x).names[:2] == ("Linear", "ReLU")  # its bias is not split from it


def test_a_nested_list_with_hooks_is_a_barrier_outside_and_fused_inside() -> None:
    mine, its = pair()
    seen: list[Tensor] = []
    x = tensor(7, 5)
    mine[2].register_forward_hook(lambda m, args, out: seen.append(out))
    plan = mine.plan(x)
    assert [(a.at, a.name) for a in plan.eager] == [(3, "Sequential")]
    assert plan.names == ("Linear", "Bias", "ReLU", "Sequential", "Tanh")
    assert mine[2].plan(x.detach() @ mine[0].weight.mT).count("BiasReLU") == 1
    assert_like_torch(mine, its, x)
    torch.testing.assert_close(seen[0], its[2](its[1](its[0](x))))


@pytest.mark.parametrize("hooked", ["residual", "inside"])
def test_a_residual_with_hooks_gives_the_same_numbers(hooked: str) -> None:
    rules = (ForkGeLUAddForward,)
    model = randomized(
        sf.Sequential(ops.Linear(5, 5), ops.Residual(ops.GeLU(), fusions=rules), ops.Scale(2), fusions=rules)
    )
    x = tensor(7, 5)
    assert model.plan(x).count("ForkGeLUAddForward") == 1
    expected = run(model, x)
    seen: list[Tensor] = []
    target = model[1] if hooked == "residual" else model[1][0]
    target.register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    got = run(model, x)
    for key, value in got.items():
        torch.testing.assert_close(value, expected[key])
    h = model[0](x)
    torch.testing.assert_close(seen[0], torch.nn.functional.gelu(h) + (h if hooked == "residual" else 0))
    assert model.plan(x).count("ForkGeLUAddForward") == 0
    assert (model[1].plan(x).count("ForkGeLUAddForward") == 0) == (hooked == "inside")


def test_a_hook_on_the_list_itself_costs_no_fusion() -> None:
    (mine, _), x = pair(), tensor(7, 5)
    attach(mine, "", [])
    assert mine.plan(x).eager == ()
    assert mine.plan(x).count("BiasReLU") == 2


def test_hooks_that_change_values_do_so() -> None:
    def run_with(model: nn.Sequential) -> dict[str, Tensor | None]:
        model[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        model[1].register_forward_hook(lambda m, args, out: out + 1)
        model[2][0].register_forward_pre_hook(lambda m, args, kwargs: ((args[0] - 3,), kwargs), with_kwargs=True)
        model[2].register_full_backward_hook(lambda m, gin, gout: (gin[0] * -0.5,))
        model[3].register_full_backward_pre_hook(lambda m, gout: (gout[0] * 1.5,))
        return run(model, tensor(7, 5))

    mine, its = pair()
    got, expected = run_with(mine), run_with(its)
    torch.testing.assert_close(got, expected)


def test_a_hook_that_returns_too_few_or_too_many_tensors_is_an_error_that_names_the_operation() -> None:
    model, x = sf.Sequential(ops.Tanh(), ops.Fork("skip"), ops.Linear(4, 4), ops.Add("skip")), torch.ones(2, 4)
    expected = model(x)
    given = {"tuple of 4": lambda out: out * 2, "Tensor": lambda out: out[0]}
    for got, change in given.items():
        handle = model[1].register_forward_hook(lambda _, inputs, out, change=change: change(out))
        with pytest.raises(sf.InputError, match=rf"SF105 position 1 \(Fork\): it must return \(y, out\), not a {got}"):
            model(x)
        handle.remove()
    assert torch.equal(model(x), expected)


def test_a_member_of_an_expansion_may_have_a_hook() -> None:
    linear = randomized(ops.Linear(5, 4))
    model = sf.Sequential(linear, ops.ReLU(), fusions=PAIR)
    twin = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
    x = tensor(7, 5)
    assert_like_torch(model, twin, x)
    seen: list[Tensor] = []
    handle = linear.expand()[1].register_forward_hook(lambda m, args, out: seen.append(args[0].detach()))
    assert [(a.at, a.name) for a in model.plan(x).eager] == [(1, "Bias")]
    assert_like_torch(model, twin, x)
    torch.testing.assert_close(seen[0], x.detach() @ linear.weight.mT)
    handle.remove()
    assert model.plan(x).count("BiasReLU") == 1
    assert_like_torch(model, twin, x)


def test_channels_reach_hooks_by_keyword() -> None:
    model = sf.Sequential(ops.Fork("r"), ops.Scale(2), sf.Sequential(ops.Tanh(), ops.Add("r")), ops.Add("p"))
    seen: dict[str, Any] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(m: nn.Module, args: Any, kwargs: dict[str, Tensor], out: Any) -> None:
            seen[name] = args, kwargs, out

        return hook

    model[0].register_forward_hook(note("fork"), with_kwargs=True)
    model[2].register_forward_hook(note("nested"), with_kwargs=True)
    model[3].register_forward_hook(note("add"), with_kwargs=True)
    x, p = tensor(7, 5), tensor(7, 5, seed=9)
    y = model(x, p=p)
    torch.testing.assert_close(y, torch.tanh(2 * x) + x + p)
    torch.testing.assert_close(seen["fork"][2], (x, x))
    torch.testing.assert_close(seen["nested"][1], {"r": x})
    torch.testing.assert_close(seen["add"][1], {"p": p})


def test_an_always_called_hook_fires_when_the_operation_raises() -> None:
    for model in (sf.Sequential(ops.Linear(5, 4), ops.Tanh()), nn.Sequential(nn.Linear(5, 4), nn.Tanh())):
        log: list[str] = []

        def fail(m: nn.Module, args: Any) -> None:
            raise ArithmeticError

        model[1].register_forward_hook(lambda *_, log=log: log.append("forward"))
        model[1].register_forward_hook(lambda *_, log=log: log.append("always"), always_call=True)
        model[1].register_forward_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            model(tensor(7, 5))
        assert log == ["always"]


def test_an_error_in_a_hook_comes_through_and_the_model_works_on() -> None:
    mine, its = pair()

    def fail(*_: Any) -> None:
        raise ArithmeticError("mine")

    for register in (mine[1].register_forward_hook, mine[2].register_full_backward_hook):
        handle = register(fail)
        with pytest.raises(ArithmeticError, match="mine"):
            mine(tensor(7, 5)).sum().backward()
        handle.remove()
    mine.zero_grad()
    assert_like_torch(mine, its, tensor(7, 5))


@contextlib.contextmanager
def global_hooks(log: Log | list[Any]) -> Iterator[None]:
    def note(kind: str) -> Callable[..., None]:
        return lambda module, *_: log.append((type(module).__name__, kind))

    handles = [
        of_all.register_module_forward_pre_hook(note("pre")),
        of_all.register_module_forward_hook(note("forward")),
        of_all.register_module_full_backward_pre_hook(note("backward_pre")),
        of_all.register_module_full_backward_hook(note("backward")),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def test_global_hooks_see_every_module_as_in_torch() -> None:
    mine, its = pair()
    x = tensor(7, 5)
    mine(x)
    logs: list[list[Any]] = [[], []]
    for model, log in zip((mine, its), logs, strict=True):
        with global_hooks(log):
            run(model, x)
            if model is mine:
                plan = mine.plan(x)
                assert [a.reason for a in plan.eager] == ["global module hooks are registered"] * 4
    assert logs[0] == logs[1]
    assert len(logs[0]) == 4 * 7
    assert_like_torch(mine, its, x)
    assert mine.plan(x).eager == ()
    assert len(logs[0]) == 4 * 7


def test_a_forward_put_on_an_instance_is_called_and_taking_it_away_fuses_again() -> None:
    mine, _ = pair()
    x = tensor(7, 5)
    expected = mine(x)
    calls: list[int] = []
    own = mine[1].forward

    def forward(x: Tensor) -> Tensor:
        calls.append(1)
        return own(x) * 3

    mine[1].forward = forward
    plan = mine.plan(x)
    assert [(a.at, a.reason) for a in plan.eager] == [(2, "it has an instance-level forward")]
    calls.clear()  # it was run on fake tensors, to infer its output
    y = mine(x)
    assert calls == [1]
    torch.testing.assert_close(y, torch.tanh(mine[2](3 * torch.relu(mine[0](x)))))
    del mine[1].forward
    assert mine.plan(x).eager == ()
    assert torch.equal(mine(x), expected)


def test_planning_and_printing_fire_no_hook_and_change_no_module_of_the_user() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x

    model = sf.Sequential(ops.Linear(5, 4), ops.ReLU(), Counting(), nn.BatchNorm1d(4), ops.Linear(4, 4), fusions=PAIR)
    seen: list[Any] = []
    model[1].register_forward_hook(lambda m, args, out: seen.append(out))
    model[4].register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    x = tensor(7, 5)
    plan = model.plan(x)
    assert "runs eagerly" in str(plan)
    assert plan.memory is None or plan.memory.saved > 0
    assert seen == []
    assert model[2].calls == 0
    assert int(model[3].num_batches_tracked) == 0
    model(x)
    assert model[2].calls == 1
    assert len(seen) == 2
    assert not any(isinstance(t, FakeTensor) for t in seen)


def test_a_removable_hook_that_removes_itself_leaves_the_rest_running() -> None:
    mine, its = pair()
    handles: list[Any] = []
    seen: list[int] = []

    def once(*_: Any) -> None:
        seen.append(1)
        handles.pop().remove()

    handles.append(mine[1].register_forward_hook(once))
    x = tensor(7, 5)
    assert_like_torch(mine, its, x)
    assert_like_torch(mine, its, x)
    assert seen == [1]
    assert mine.plan(x).eager == ()


def test_an_operation_called_by_itself_fires_its_hooks() -> None:
    linear = randomized(ops.Linear(5, 4))
    log: list[str] = []
    linear.register_forward_hook(lambda *_: log.append("forward"))
    linear.register_full_backward_hook(lambda *_: log.append("backward"))
    x = tensor(7, 5)
    got = outcome(linear, {"x": x}, x)
    assert log == ["forward", "backward"]
    torch.testing.assert_close(got["y0"], torch.nn.functional.linear(x, linear.weight, linear.bias).detach())

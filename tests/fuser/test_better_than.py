"""Faults that users of TransformerEngine's `te.ops` have met, one test each; none of them is here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import Untouched
from tests.fuser.fusions import (
    PAIR,
    BiasGeLUJoint,
    BiasReLU,
    Calls,
    ChainForward,
    assert_exact,
    outcome,
    randomized,
    run,
    tensor,
)


def feed_forward() -> sf.Sequential:
    return randomized(sf.Sequential(ops.LayerNorm(64), ops.Linear(64, 96), ops.SwiGLU(), ops.Linear(48, 64)))


def test_bfloat16_is_fused_in_both_passes_without_any_quantization() -> None:
    model = feed_forward().bfloat16()
    x = tensor(40, 64, dtype=torch.bfloat16)
    plan = model.plan(x)
    ahead, back = plan.fused
    assert ahead >= 2
    assert back >= 1
    assert len(plan.forward) <= 4
    model(x)  # the first call also checks what the fusions save
    with Calls() as calls:
        model(x)
    # Neither bias is a pass of its own.
    assert calls.count("add", "add_") == 0


def test_activations_fuse_with_what_is_before_them() -> None:
    for act in (ops.ReLU, ops.GeLU, ops.SiLU, ops.Sigmoid, ops.Tanh, ops.SquaredReLU, ops.QuickGeLU):
        model = sf.Sequential(ops.Bias(5), act(), fusions=(ChainForward,))
        assert model.plan(tensor(7, 5)).count("ChainForward") == 1, act


def test_a_fusion_of_both_passes_is_written_in_thirty_lines_without_a_loop_over_the_list() -> None:
    source = inspect.getsource(BiasGeLUJoint)
    assert len(source.splitlines()) <= 30
    assert "for " not in source
    assert "ctx" not in source


def test_a_rule_set_can_be_left_and_taken_back() -> None:
    model = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=PAIR)
    x = tensor(7, 5)
    for rules, count in ((PAIR, 1), ((), 0), (PAIR[:1], 1)):
        model.fusions = rules
        assert model.plan(x).count("BiasReLU") == count
    assert sf.Sequential(ops.Bias(5), ops.ReLU()).plan(x).count("BiasReLU") == 0


def test_a_refusal_is_said_in_the_words_of_its_author() -> None:
    class Picky(BiasReLU):
        def requires(self, env: sf.Env) -> sf.Requirements:
            yield env.dtype is torch.float16, "needs half precision"

    plan = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Picky,)).plan(tensor(7, 5))
    assert [(r.fusion, r.at, r.reason) for r in plan.refused] == [("Picky", 0, "needs half precision")]
    assert "not applied: Picky at 0: needs half precision" in str(plan)


def test_a_hook_inside_what_would_be_fused_fires() -> None:
    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.ReLU(), fusions=PAIR))
    x = tensor(7, 5)
    model(x)
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda m, args, out: seen.append(out))
    y = model(x)
    torch.testing.assert_close(seen[0], F.linear(x, model[0].weight, model[0].bias))
    assert torch.equal(y, torch.relu(seen[0]))


def test_parameters_are_not_cached() -> None:
    with torch.device("meta"):
        model = sf.Sequential(ops.Linear(5, 4), ops.ReLU(), fusions=PAIR)
    model(torch.empty(7, 5, device="meta"))
    randomized(model.to_empty(device="cpu"))
    x = tensor(7, 5)
    for seed in (50, 60):
        torch.testing.assert_close(model(x), torch.relu(F.linear(x, model[0].weight, model[0].bias)))
        model[0].weight = nn.Parameter(tensor(4, 5, seed=seed, grad=False))
    given = {"0.weight": tensor(4, 5, seed=70), "0.bias": tensor(4, seed=71)}
    y = torch.func.functional_call(model, given, x)
    torch.testing.assert_close(y, torch.relu(F.linear(x, given["0.weight"], given["0.bias"])))


def test_gradients_arrive_while_the_backward_goes_on() -> None:
    model = randomized(sf.Sequential(*(op for _ in range(20) for op in (ops.Linear(5, 5), ops.ReLU())), fusions=PAIR))
    order: list[int] = []
    for i in range(0, 40, 2):
        model[i].weight.register_post_accumulate_grad_hook(lambda p, i=i: order.append(i))
    steps: list[int] = []

    class Clock(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            steps.append(len(order))
            return dy

    # Half the list, a clock, the other half: when the clock ticks the later half has delivered all its gradients.
    y = model[20:](Clock.apply(model[:20](tensor(7, 5))))
    y.sum().backward()
    assert steps == [10]
    order.clear()
    model(tensor(7, 5)).sum().backward()
    assert min(order[:4]) >= 20
    assert len(order) == 20


def test_a_subclass_keeps_its_override() -> None:
    class Leaky(ops.ReLU):
        def forward(self, x: Tensor, **channels: Tensor) -> Any:
            return F.leaky_relu(x, 0.1)

    model = randomized(sf.Sequential(ops.Bias(5), Leaky(), fusions=PAIR))
    x = tensor(7, 5)
    torch.testing.assert_close(model(x), F.leaky_relu(x + model[0].bias, 0.1))


def test_a_residual_is_not_added_into_what_a_weight_gradient_reads() -> None:
    model = randomized(sf.Sequential(ops.Fork("r"), ops.Linear(5, 5), ops.Add("r"), ops.Linear(5, 3)))
    x = tensor(7, 5)
    with Untouched({"x": x}):
        got = run(model, x)
    p = {k: v.detach().requires_grad_() for k, v in model.named_parameters()}
    z = x.detach().requires_grad_()
    expected = outcome(
        lambda: F.linear(z + F.linear(z, p["1.weight"], p["1.bias"]), p["3.weight"], p["3.bias"]), {"x": z, **p}
    )
    for key, value in expected.items():
        torch.testing.assert_close(got[key], value, rtol=1e-4, atol=1e-4)


def test_the_plan_follows_the_dtype() -> None:
    class Half(BiasReLU):
        def requires(self, env: sf.Env) -> sf.Requirements:
            yield env.dtype is torch.bfloat16, "bfloat16 only"

    model = randomized(sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Half,)))
    x = tensor(7, 5)
    for dtype, used in ((torch.float32, 0), (torch.bfloat16, 1), (torch.float32, 0)):
        model.to(dtype)
        assert model.plan(x.to(dtype)).count("Half") == used
        assert model(x.to(dtype)).dtype is dtype


def test_alternating_modes_plan_once_each() -> None:
    asked: list[bool] = []

    class Counting(BiasReLU):
        def requires(self, env: sf.Env) -> sf.Requirements:
            asked.append(env.grad)
            yield True, ""

    model = randomized(sf.Sequential(ops.Bias(5), ops.ReLU(), ops.Dropout(0.1), fusions=(Counting,)))
    x = tensor(7, 5)
    for _ in range(5):
        model.train()
        model(x).sum().backward()
        model.eval()
        with torch.no_grad():
            model(x)
    assert sorted(asked) == [False, True]


def test_a_product_for_a_gradient_nobody_wants_is_not_run() -> None:
    model = randomized(sf.Sequential(ops.Linear(5, 4)))
    y = model(tensor(7, 5, grad=False))
    with Calls() as calls:
        y.sum().backward()
    assert calls.count("mm", "addmm", "matmul") == 1


def test_the_keys_of_a_state_are_parameter_names_and_those_of_torch() -> None:
    model = feed_forward()
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    twin = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.Identity(), nn.Linear(48, 64))
    assert model.load_state_dict(twin.state_dict(), strict=True) == ([], [])


def test_signed_inputs_tell_relu_from_the_identity() -> None:
    x = tensor(7, 5)
    assert (x < 0).any()
    assert (x > 0).any()
    assert not torch.equal(torch.relu(x), x)


def test_what_a_cover_holds_is_the_list_it_replaces() -> None:
    model = feed_forward()
    plan = model.plan(tensor(40, 64))
    for cover in (plan.forward, plan.backward):
        found = [op for s in cover for op in (s.operation.operations() if s.fused else (s.operation,))]
        assert [type(op).__name__ for op in found] == list(plan.names)
        assert [i for s in cover for i in s.covers] == list(range(len(plan.names)))


@pytest.mark.parametrize("training", [True, False])
def test_two_calls_give_the_same_bits(training: bool) -> None:
    model = feed_forward().train(training)
    x = tensor(40, 64)
    assert_exact(run(model, x), run(model, x))

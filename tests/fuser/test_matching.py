"""Matching: exact types, in order, within the region, with a reason for each fusion not applied; `sf.fusing`
selects."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import (
    CASES,
    PAIR,
    AddReLUForward,
    BiasActForward,
    BiasGeLUBackward,
    BiasGeLUForward,
    BiasGeLUInference,
    BiasReLU,
    ChainForward,
    LinearBiasGeLUForward,
    fused_names,
    outcome,
    randomized,
    run,
    stepwise,
    tensor,
)

# Types.


class Mine(sf.Pointwise):
    def reference(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class Derived(Mine):
    """A subclass that changes nothing."""


class Family(sf.Pointwise, open=True):
    """An open class between the two."""


class Member(Family):
    def reference(self, x: Tensor) -> Tensor:
        return x * x


class OfTheFamily(sf.ForwardFusion):
    bias: ops.Bias
    act: Family
    fwd = stepwise


# Operations, a fusion, and its positions.
TAKEN: dict[str, tuple[Callable[[], list[nn.Module]], type, list[range]]] = {
    "a final class": (lambda: [ops.Bias(5), ops.ReLU()], BiasReLU, [range(2)]),
    "another final class": (lambda: [ops.Bias(5), ops.SquaredReLU()], BiasReLU, []),
    "an open class": (lambda: [ops.Tanh(), Mine(), ops.SiLU()], ChainForward, [range(3)]),
    "no subclass of a final one": (lambda: [ops.Tanh(), ops.SiLU(), Derived()], ChainForward, [range(2)]),
    "an open class between": (lambda: [ops.Bias(5), Member()], OfTheFamily, [range(2)]),
    "an open class between, not of it": (lambda: [ops.Bias(5), Mine()], OfTheFamily, []),
    "one of a union": (lambda: [ops.Bias(5), ops.ReLU()], BiasActForward, [range(2)]),
    "the other of a union": (lambda: [ops.Bias(5), ops.Tanh()], BiasActForward, [range(2)]),
    "none of a union": (lambda: [ops.Bias(5), ops.SiLU()], BiasActForward, []),
    "an optional slot is empty": (lambda: [ops.Scale(2), ops.SiLU(), ops.Tanh()], ChainForward, [range(1, 3)]),
    "the longer match wins": (lambda: [ops.Bias(5), ops.Tanh(), ops.SiLU()], ChainForward, [range(3)]),
    "up to eight": (lambda: [ops.Tanh() for _ in range(19)], ChainForward, [range(8), range(8, 16), range(16, 19)]),
    "a barrier": (lambda: [ops.Bias(5), nn.Identity(), ops.ReLU()], BiasReLU, []),
    "containers": (lambda: [sf.Sequential(ops.Bias(5)), sf.Sequential(ops.ReLU())], BiasReLU, [range(2)]),
    "a residual": (lambda: [ops.Bias(5), ops.Residual(ops.ReLU())], BiasReLU, []),
    "a bias of a Linear": (lambda: [ops.Linear(5, 4), ops.GeLU()], LinearBiasGeLUForward, [range(3)]),
    "a Linear and a Bias": (
        lambda: [ops.Linear(5, 4, bias=False), ops.Bias(4), ops.GeLU()], LinearBiasGeLUForward, [range(3)]
    ),
    "a Linear without a bias": (lambda: [ops.Linear(5, 4, bias=False), ops.GeLU()], LinearBiasGeLUForward, []),
    "a channel": (
        lambda: [ops.Fork("r"), ops.Tanh(), ops.Add("r"), ops.ReLU()], AddReLUForward, [range(2, 4)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_a_fusion_takes_the_operations_of_its_pattern_and_gives_what_they_give(case: str) -> None:
    make, fusion, expected = TAKEN[case]
    model, x = randomized(sf.Sequential(*make(), fusions=(fusion,))), tensor(7, 5)
    assert [step.covers for step in model.plan(x).forward if step.fused] == expected
    got = run(model, x)
    with sf.fusing(False):
        for key, value in run(model, x).items():
            torch.testing.assert_close(got[key], value)


class Louder(ops.ReLU):
    """A user's subclass that changes one pass."""

    def reference(self, x: Tensor) -> Tensor:
        return 3 * torch.relu(x)

    def fwd(self, x: Tensor) -> Any:
        y = torch.relu(x)
        return 3 * y, ops.ReLU.Saved(y=3 * y)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return 3 * torch.where(saved.y > 0, dy, 0), {}


class Own(ops.ReLU):
    """A user's subclass with its own forward."""

    def forward(self, x: Tensor, **channels: Tensor) -> Any:
        return 5 * super().forward(x)


@pytest.mark.parametrize(("cls", "factor"), [(Louder, 3.0), (Own, 5.0)], ids=["passes", "forward"])
def test_a_subclass_of_the_user_is_left_alone_and_its_overrides_are_called(cls: type, factor: float) -> None:
    model = randomized(sf.Sequential(ops.Bias(5), cls(), ops.Bias(5), ops.ReLU(), fusions=(*PAIR, ChainForward)))
    x = tensor(7, 5)
    got = outcome(model, {"x": x, "a": model[0].bias, "b": model[2].bias}, x)
    z, a, b = (t.detach().double().requires_grad_() for t in (x, model[0].bias, model[2].bias))
    truth = outcome(lambda: torch.relu(factor * torch.relu(z + a) + b), {"x": z, "a": a, "b": b})
    for key, value in truth.items():
        torch.testing.assert_close(got[key].double(), value, rtol=1e-5, atol=1e-5)
    plan = model.plan(x)
    assert all(1 not in s.covers for s in (*plan.forward, *plan.backward) if s.fused)
    assert any(s.covers == range(2, 4) for s in plan.forward if s.fused)


def test_the_plan_says_why_a_subclass_was_left_alone() -> None:
    plan = sf.Sequential(ops.Bias(5), Louder(), fusions=PAIR).plan(tensor(7, 5))
    said = [r.reason for r in plan.refused] + [a.reason for a in plan.eager]
    assert any("Louder" in reason and "ReLU" in reason for reason in said)
    plan = sf.Sequential(ops.Bias(5), Own(), fusions=PAIR).plan(tensor(7, 5))
    assert [(a.at, a.reason) for a in plan.eager] == [(1, "its class overrides forward")]


def test_what_is_absent_is_none_to_the_fusion() -> None:
    seen: list[Any] = []

    class Tolerant(sf.BackwardFusion):
        bias: ops.Bias | None
        act: ops.ReLU
        last: ops.Add | None

        def bwd(self, dy: Tensor, *, bias: Any, act: Any, last: Any) -> Any:
            seen.append((self.bias, bias, self.last, last))
            dx = torch.where(act.y > 0, dy, 0)
            return dx, {} if self.last is None else {"last.other": dy}

    class Forward(sf.ForwardFusion):
        act: ops.ReLU
        last: ops.Add | None
        end: ops.Scale

        def fwd(self, x: Tensor, *, last_other: Tensor | None) -> Any:
            seen.append(last_other)
            y = torch.relu(x)
            return y * self.end.factor, {"act": ops.ReLU.Saved(y=y), "end": ops.Scale.Saved(factor=self.end.factor)}

    with sf.fusing(on_error="raise"):
        model = sf.Sequential(ops.ReLU(), ops.Scale(2), fusions=(Tolerant, Forward))
        x = tensor(7, 5)
        # Operations save nothing by default, so the backward gets a reason here.
        Tolerant.saves = lambda self, env: sf.Savings(launches=1)
        y = model(x)
        (dx,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(dx, 2.0 * (x > 0))
    assert seen == [None, (None, None, None, None)]


def test_configuration_changed_after_the_first_call_is_asked_for_again() -> None:
    class ExactOnly(BiasGeLUForward):
        def requires(self, env: sf.Env) -> sf.Requirements:
            yield self.act.approximate == "none", "made for the exact GeLU"

    model = randomized(sf.Sequential(ops.Bias(5), ops.GeLU(), fusions=(ExactOnly,)).double())
    x = tensor(7, 5, dtype=torch.float64)
    for approximate in ("none", "tanh", "none"):
        model[1].approximate = approximate
        y = torch.nn.functional.gelu(x + model[0].bias, approximate=approximate)
        torch.testing.assert_close(model(x), y, rtol=1e-12, atol=1e-12)
        plan = model.plan(x)
        assert plan.count("ExactOnly") == (approximate == "none")
        said = [(r.at, r.reason) for r in plan.refused]
        assert said == [(0, "made for the exact GeLU")] * (approximate == "tanh")


# Refusals.


def with_requires(requires: Callable[..., Any], base: type = BiasReLU) -> type:
    return type("Picky", (base,), {"requires": requires, "__annotations__": {}})


def reasons(cls: type, x: Tensor | None = None) -> list[tuple[str, int, str]]:
    model = sf.Sequential(ops.Scale(2), ops.Bias(5), ops.ReLU(), fusions=(cls,))
    plan = model.plan(tensor(7, 5) if x is None else x)
    assert not any(s.fused for s in plan.forward)
    return [(r.fusion, r.at, r.reason) for r in plan.refused]


def test_the_first_requirement_that_does_not_hold_is_the_reason() -> None:
    def requires(self: Any, env: sf.Env) -> Any:
        yield True, "not this"
        yield self.bias.size > 5, "the bias is too short"
        raise AssertionError("asked on after a refusal")

    assert reasons(with_requires(requires)) == [("Picky", 1, "the bias is too short")]


@pytest.mark.parametrize("sentence", ["", None])
def test_a_refusal_always_has_a_reason(sentence: Any) -> None:
    def requires(self: Any, env: sf.Env) -> Any:
        yield False, sentence

    ((_, _, reason),) = reasons(with_requires(requires))
    assert len(reason) > 10


def raises_at_once(self: Any, env: sf.Env) -> Any:
    raise LookupError("no table for this chip")


def raises_later(self: Any, env: sf.Env) -> Any:
    yield True, "fine"
    raise LookupError("no table for this chip")


def yields_nonsense(self: Any, env: sf.Env) -> Any:
    yield 3


def takes_no_env(self: Any) -> Any:
    yield True, "fine"


@pytest.mark.parametrize("requires", [raises_at_once, raises_later, yields_nonsense, takes_no_env])
def test_a_requirement_that_raises_refuses_with_that_and_warns_once(requires: Callable[..., Any]) -> None:
    cls = with_requires(requires)
    model = randomized(sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(cls,)))
    x = tensor(7, 5)
    with pytest.warns(UserWarning, match=r"Picky.*requires raised (LookupError|TypeError)"):
        y = model(x)
    torch.testing.assert_close(y, torch.relu(x + model[0].bias))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        model(tensor(9, 5))
        plan = model.plan(x)
    (refusal,) = plan.refused
    assert refusal.reason.startswith("requires raised ")
    if requires in (raises_at_once, raises_later):
        assert "no table for this chip" in refusal.reason


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: True, "'bool' object is not iterable; it yields pairs (condition, sentence)"),
        (lambda: [("float32 only", False)], "the condition comes first, not 'float32 only'; it yields pairs"),
        (lambda: [True], "cannot unpack non-iterable bool object; it yields pairs"),
    ],
    ids=["no pairs", "sentence first", "no pair"],
)
def test_says_what_requirements_are_made_of(given: Callable[[], Any], said: str) -> None:
    cls = with_requires(lambda self, env: given())
    model = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(cls,))
    with pytest.warns(UserWarning, match="requires raised TypeError"):
        (refusal,) = model.plan(tensor(7, 5)).refused
    assert said in refusal.reason


@pytest.mark.parametrize("bad", ["raise", "none", "text", "nan"])
def test_savings_that_cannot_be_used_refuse_with_that_and_warn_once(bad: str) -> None:
    def saves(self: Any, env: sf.Env) -> Any:
        if bad == "raise":
            raise LookupError("no measurement")
        return {"none": None, "text": "much", "nan": sf.Savings(launches=float("nan"))}[bad]

    cls = type("Vague", (BiasReLU,), {"saves": saves, "__annotations__": {}})
    model = randomized(sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(cls,)))
    x = tensor(7, 5)
    with pytest.warns(UserWarning, match=r"Vague.*saves raised"):
        torch.testing.assert_close(model(x), torch.relu(x + model[0].bias))
    (refusal,) = model.plan(x).refused
    assert refusal.reason.startswith("saves raised ")
    if bad in ("none", "text"):
        assert refusal.reason.endswith("; it returns sf.Savings")


def test_one_bad_fusion_does_not_disturb_the_others() -> None:
    bad = with_requires(raises_at_once)
    model = sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(bad, *PAIR))
    with pytest.warns(UserWarning, match="Picky"):
        plan = model.plan(tensor(7, 5))
    assert fused_names(plan) == (["BiasReLU"], ["BiasReLUBack"])
    assert [r.fusion for r in plan.refused] == ["Picky"]


def test_reasons_of_gradient_modes() -> None:
    model = sf.Sequential(ops.Bias(5), ops.GeLU(), fusions=(BiasGeLUInference, BiasGeLUBackward))
    x = tensor(7, 5, grad=False)
    assert {r.fusion: r.reason for r in model.plan(x).refused} == {"BiasGeLUInference": "inference only"}
    model.requires_grad_(False)
    assert {r.fusion: r.reason for r in model.plan(x).refused} == {"BiasGeLUBackward": "no gradient is needed here"}
    with torch.no_grad():
        plan = model.requires_grad_(True).plan(x)
    assert {r.fusion: r.reason for r in plan.refused} == {"BiasGeLUBackward": "no gradient is needed here"}
    inside = sf.Sequential(ops.Linear(5, 5), ops.GeLU(), fusions=(sf.fusions.LinearBiasGeLU,))
    inside[0].weight.requires_grad_(False)  # the first gradient is that of the bias
    assert [(r.fusion, r.reason) for r in inside.plan(x).refused] == [("LinearBiasGeLU", "inference only")]


def test_a_fusion_that_keeps_an_output_of_the_call_to_itself_is_refused() -> None:
    class ForkGeLU(sf.InferenceFusion):
        fork: ops.Fork
        act: ops.GeLU

        def fwd(self, x: Tensor) -> Any: ...

    model, x = sf.Sequential(ops.Fork("r"), ops.GeLU(), fusions=(ForkGeLU,)), tensor(7, 5)
    with torch.no_grad():
        plan = model.plan(x)
        assert fused_names(plan) == ([], [])
        assert "fork_out is read elsewhere" in plan.refused[0].reason
        torch.testing.assert_close(model(x), (nn.functional.gelu(x), x))


def test_every_match_that_is_not_used_is_among_the_refused() -> None:
    everything = tuple(dict.fromkeys(f for c in CASES for f in c.fusions))
    for case in CASES:
        model = sf.Sequential(*case.make(), fusions=everything)
        x, channels = tensor(7, 5), {c: tensor(7, 5) for c in case.channels}
        plan = model.plan(x, **channels)
        used = {(s.name, s.covers.start) for s in (*plan.forward, *plan.backward) if s.fused}
        said = {(r.fusion, r.at) for r in plan.refused}
        for cls in everything:
            with sf.fusing(only=[cls]):
                alone = model.plan(x, **channels)
            for s in (*alone.forward, *alone.backward):
                if s.fused:
                    assert (s.name, s.covers.start) in used | said, (case.name, s)
        assert all(r.reason for r in plan.refused)


# Choosing.


def test_a_fusion_without_state_is_made_anew_for_every_place() -> None:
    model = sf.Sequential(ops.Bias(5), ops.ReLU(), ops.Bias(5), ops.ReLU(), fusions=PAIR)
    first, second = (s.operation for s in model.plan(tensor(7, 5)).forward)
    assert first.bias is model[0]
    assert second.bias is model[2]
    assert not isinstance(first, nn.Module)
    assert first != second
    assert first == type(first)(bias=model[0], act=model[1])


# Near misses.


class LinearGeLU(sf.ForwardFusion):
    linear: ops.Linear
    act: ops.GeLU

    def fwd(self, x: Tensor) -> Any:
        raise NotImplementedError


class BiasMaybeReLU(sf.ForwardFusion):
    bias: ops.Bias
    act: ops.ReLU | None
    add: ops.Add

    def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
        raise NotImplementedError


class ReLUForkGeLU(sf.JointFusion):
    act: ops.ReLU
    fork: ops.Fork | None
    last: ops.GeLU

    class Saved(sf.Saved):
        """Empty."""

    outputs = ("fork_out",)

    def saves(self, env: sf.Env) -> sf.Savings:
        return sf.Savings(launches=9)

    def fwd(self, x: Tensor) -> Any:
        raise NotImplementedError

    def bwd(self, dy: Tensor, saved: Saved, *, d_fork_out: Tensor) -> Any:
        raise NotImplementedError


def linear(bias: bool = True) -> ops.Linear:
    return ops.Linear(5, 5, bias=bias)


BETWEEN = "a Bias between Linear and GeLU would let it apply"
FOLLOWS = "a {} follows {} here, and its pattern has none"
READ = "a Fork follows Bias here, so another operation reads its output"
# Operations, a fusion, and where and why it nearly applies.
NEARLY: dict[str, tuple[list[nn.Module], type, tuple[int, str] | None]] = {
    "one is missing": ([ops.Tanh(), linear(False), ops.GeLU()], LinearBiasGeLUForward, (1, BETWEEN)),
    "none is": ([ops.Tanh(), linear(), ops.GeLU()], LinearBiasGeLUForward, None),
    "the first": ([ops.Bias(5), ops.GeLU()], LinearBiasGeLUForward, None),
    "the last": ([linear()], LinearBiasGeLUForward, None),
    "two": ([linear(False), ops.Tanh()], LinearBiasGeLUForward, None),
    "a bias too many": ([ops.Tanh(), linear(), ops.GeLU()], LinearGeLU, (1, FOLLOWS.format("Bias", "Linear"))),
    "a bias too many, and another end": ([linear(), ops.Tanh()], LinearGeLU, None),
    "a bias too many, and no end": ([linear()], LinearGeLU, None),
    "a bias and no beginning": ([ops.Bias(5), ops.GeLU()], LinearGeLU, None),
    "a dropout": ([linear(), ops.Dropout(0.5), ops.ReLU()], BiasReLU, (1, FOLLOWS.format("Dropout", "Bias"))),
    "a dropout before": ([ops.Dropout(0.5), ops.Bias(5), ops.Tanh()], BiasReLU, None),
    "a fork": ([linear(), ops.Fork("side"), ops.GeLU()], LinearBiasGeLUForward, (0, READ)),
    "a fork in place of an optional one": ([ops.Bias(5), ops.Fork("side"), ops.Add("side")], BiasMaybeReLU, (0, READ)),
    "a fork behind": ([linear(), ops.GeLU(), ops.Fork("side")], LinearBiasGeLUForward, None),
    "a fork that it may hold": ([ops.ReLU(), ops.Fork("side"), ops.GeLU()], ReLUForkGeLU, None),
}


@pytest.mark.parametrize("case", NEARLY)
def test_a_short_pattern_that_nearly_applies_is_a_near_miss_with_what_is_in_the_way(case: str) -> None:
    operations, fusion, expected = NEARLY[case]
    model, x = sf.Sequential(*operations, fusions=(fusion,)), tensor(7, 5)
    plan = model.plan(x)
    found = [(expected[0], f"near miss: {expected[1]}")] if expected else []
    assert [(refusal.at, refusal.reason) for refusal in plan.refused] == found
    assert not any(refusal.superseded for refusal in plan.refused)
    for at, reason in found:
        assert f"not applied: {fusion.__name__} at {at}: {reason}" in " ".join(str(plan).split())
        with sf.fusing(exclude=[fusion]):
            assert model.plan(x).refused == ()
    assert bool(plan.count(fusion.__name__)) == (case in ("none is", "a fork behind", "a fork that it may hold"))


def test_near_misses_of_an_author_s_fusion_are_said_beside_a_set() -> None:
    operations = linear(), ops.Dropout(0.5), ops.ReLU(), ops.Fork("side"), ops.Dropout(0.5), ops.Add("side")
    plan = sf.Sequential(*operations, fusions=(BiasReLU, *sf.fusions.default)).plan(tensor(7, 5))
    assert [r.fusion for r in plan.refused if "near miss" in r.reason] == ["BiasReLU"]


def test_a_fusion_of_another_author_that_matches_nowhere_is_listed_with_its_pattern() -> None:
    class Order(sf.ForwardFusion):
        act: ops.GeLU | ops.Tanh
        biases: tuple[ops.Bias, ...]
        last: ops.ReLU | None

        def fwd(self, x: Tensor) -> Any:
            raise NotImplementedError

    first, x = (LinearBiasGeLUForward, BiasReLU), tensor(7, 5)
    model = sf.Sequential(ops.Linear(5, 5), ops.GeLU(), fusions=(*first, Order, *sf.fusions.default))
    plan = model.plan(x)
    assert plan.unmatched == ("BiasReLU (Bias, ReLU)", "Order (GeLU | Tanh, tuple[Bias, ...], ReLU | None)")
    assert "matches nowhere: Order (GeLU | Tanh, tuple[Bias, ...], ReLU | None)" in str(plan).replace("\n    ", " ")
    model.append(ops.Bias(5))
    assert model.plan(x).unmatched == ("BiasReLU (Bias, ReLU)",)
    assert sf.Sequential(ops.Linear(5, 5, bias=False), ops.GeLU(), fusions=first[:1]).plan(x).unmatched == ()


@pytest.mark.parametrize(
    "middle",
    [
        [ops.Bias | None],
        [tuple[ops.Bias, ...]],
        [ops.Bias | ops.Tanh],
        [sf.Pointwise],
        [ops.Bias, ops.Tanh, ops.SiLU],
    ],
    ids=["optional", "several", "one of two", "any of its kind", "three"],
)
def test_only_a_short_pattern_in_which_one_class_is_named_is_nearly_there(middle: list[Any]) -> None:
    def fwd(self: Any, x: Tensor) -> Any:
        raise NotImplementedError

    slots = {"linear": ops.Linear, **{f"part{i}": kind for i, kind in enumerate(middle)}, "act": ops.GeLU}
    rule: Any = type("Rule", (sf.ForwardFusion,), {"__annotations__": slots, "fwd": fwd, "__module__": __name__})
    given = [ops.Bias(5), ops.Tanh(), ops.SiLU()][: len(middle) - 1]
    model = sf.Sequential(ops.Linear(5, 5, bias=False), *given, ops.GeLU(), fusions=rule)
    said = {refusal.reason for refusal in model.plan(tensor(7, 5)).refused}
    assert not any("near miss" in reason for reason in said)


@pytest.mark.parametrize(
    ("module", "twin"),
    [
        (nn.Linear(5, 5), "ops.Linear"),
        (nn.LayerNorm(5), "ops.LayerNorm"),
        (nn.RMSNorm(5), "ops.RMSNorm"),
        (nn.GELU(), "ops.GeLU"),
        (nn.ReLU(), "ops.ReLU"),
        (nn.SiLU(), "ops.SiLU"),
        (nn.Tanh(), "ops.Tanh"),
        (nn.Sigmoid(), "ops.Sigmoid"),
        (nn.Identity(), "ops.Identity"),
        (nn.Dropout(), "ops.Dropout"),
        (nn.Sequential(nn.ReLU()), "seqfuse.Sequential"),
        (nn.TransformerEncoderLayer(5, 1, 5), "seqfuse.convert"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_a_module_of_torch_is_said_with_what_stands_for_it_here(module: nn.Module, twin: str) -> None:
    (alone,) = sf.Sequential(ops.Tanh(), module).plan(tensor(7, 5)).eager
    assert alone.reason == f"not an operation of this library; use {twin}"
    assert operator.attrgetter(twin.removeprefix("seqfuse."))(sf)


def test_a_reason_that_holds_for_a_kind_of_plan_is_marked_as_expected_and_not_printed() -> None:
    class Named(BiasGeLUForward):
        def requires(self, env: sf.Env) -> sf.Requirements:
            yield False, "no gradient is needed here"

    model = sf.Sequential(ops.Bias(5), ops.GeLU(), fusions=(Named, BiasGeLUBackward))
    with torch.no_grad():
        plan = model.plan(tensor(7, 5))
    assert {r.fusion: r.expected for r in plan.refused} == {"Named": False, "BiasGeLUBackward": True}
    assert len({r.reason for r in plan.refused}) == 1
    assert "not applied: Named at 0: no gradient is needed here" in str(plan)
    assert "BiasGeLUBackward" not in str(plan)


def test_a_module_that_nothing_stands_for_is_said_to_be_none_of_this_library() -> None:
    class Own(nn.Linear):
        pass

    for module in (nn.Softplus(), Own(5, 5)):
        (alone,) = sf.Sequential(module).plan(tensor(7, 5)).eager
        assert alone.reason == "not an operation of this library"


def test_a_list_in_which_nothing_can_be_fused_is_warned_of_but_not_a_single_module() -> None:
    x = tensor(7, 5)
    said = r"nothing in this Sequential can be fused.* use sf\.nn\.from_torch"
    for use in (lambda model: model(x), lambda model: model.plan(x)):  # pyright: ignore
        model = sf.Sequential(nn.Linear(5, 5), nn.ReLU())
        with pytest.warns(UserWarning, match=said) as told:
            use(model)
        assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for alone in ([nn.Linear(5, 5)], [nn.Linear(5, 5), ops.ReLU()], [nn.Linear(5, 5), nn.Softplus()]):
            sf.Sequential(*alone)(x)

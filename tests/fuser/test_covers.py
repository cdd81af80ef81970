"""The exact search for schedules, and the costs that it minimizes."""

from __future__ import annotations

import gc
import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.plan.schedule import Candidate, cheapest, passes_of
from seqfuse.testing import Untouched
from tests.fuser.fusions import (
    BY_NAME,
    CASES,
    WIDTH,
    BiasGeLUBackward,
    BiasGeLUForward,
    BiasGeLUJoint,
    Case,
    assert_same,
    fused_names,
    outcome,
    randomized,
    run,
    run_plain,
    stepwise,
    tensor,
)

COMBINATIONS = ["fused-fused", "fused-unfused", "unfused-fused", "unfused-unfused"]
SHAPES = [(7, WIDTH), (2, 3, WIDTH), (1, WIDTH), (WIDTH,)]


def inputs(case: Case, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
    x = tensor(*shape, dtype=dtype)
    return x, {name: tensor(*shape, seed=20 + i, dtype=dtype) for i, name in enumerate(case.channels)}


def chosen(case: Case, combination: str) -> list[type]:
    ahead, back = combination.split("-")
    return [*(case.forward if ahead == "fused" else ()), *(case.backward if back == "fused" else ())]


def unfused(model: sf.Sequential, x: Tensor, **channels: Tensor) -> dict[str, Tensor | None]:
    with sf.fusing(False):
        return run(model, x, **channels)


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("case", [c for c in CASES if c.forward], ids=lambda c: c.name)
def test_forward_and_backward_covers_are_interchangeable(case: Case, combination: str) -> None:
    model = randomized(sf.Sequential(*case.make(), fusions=case.fusions))
    for shape in SHAPES:
        x, channels = inputs(case, shape)
        with sf.fusing(only=chosen(case, combination), on_error="raise"):
            ahead, back = fused_names(model.plan(x, **channels))
            assert bool(ahead) == combination.startswith("fused")
            assert bool(back) == combination.endswith("-fused")
            with Untouched({"x": x, **channels, **dict(model.named_parameters())}):
                got = run(model, x, **channels)
        assert_same(got, unfused(model, x, **channels), run_plain(case.plain, model, x, **channels))


@pytest.mark.parametrize("case", [c for c in CASES if c.joint], ids=lambda c: c.name)
def test_a_joint_fusion_gives_what_the_pair_it_replaces_gives(case: Case) -> None:
    model = randomized(sf.Sequential(*case.make(), fusions=case.fusions))
    for shape in SHAPES:
        x, channels = inputs(case, shape)
        with sf.fusing(only=case.joint, on_error="raise"):
            ahead, back = fused_names(model.plan(x, **channels))
            assert ahead == back
            assert set(ahead) == {cls.__name__ for cls in case.joint}
            got = run(model, x, **channels)
        assert_same(got, unfused(model, x, **channels), run_plain(case.plain, model, x, **channels))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("case", [c for c in CASES if c.inference], ids=lambda c: c.name)
def test_an_inference_fusion_runs_where_nothing_wants_a_gradient(case: Case, guard: Any) -> None:
    model = randomized(sf.Sequential(*case.make(), fusions=case.fusions))
    x, channels = inputs(case, (7, WIDTH))
    truth = run_plain(case.plain, model, x, **channels)["y0"]
    with sf.fusing(only=case.inference, on_error="raise"):
        assert fused_names(model.plan(x, **channels)) == ([], [])
        with guard():
            ahead, back = fused_names(model.plan(x, **channels))
            y = model(x, **channels)
    assert set(ahead) == {cls.__name__ for cls in case.inference}
    assert back == []
    assert not y.requires_grad
    torch.testing.assert_close(y.clone(), truth.float())


@pytest.mark.parametrize("case", [c for c in CASES if c.joint or c.forward], ids=lambda c: c.name)
def test_every_fusion_serves_the_forward_pass_without_gradients_but_a_backward_one(case: Case) -> None:
    model = randomized(sf.Sequential(*case.make(), fusions=case.fusions))
    x, channels = inputs(case, (7, WIDTH))
    truth = run_plain(case.plain, model, x, **channels)
    for cls in (*case.forward, *case.joint, *case.inference):
        with torch.no_grad(), sf.fusing(only=[cls], on_error="raise"):
            assert cls.__name__ in fused_names(model.plan(x, **channels))[0]
            out = model(x, **channels)
        torch.testing.assert_close(out[0] if isinstance(out, tuple) else out, truth["y0"].float())
    for cls in case.backward:
        with torch.no_grad(), sf.fusing(only=[cls]):
            assert fused_names(model.plan(x, **channels)) == ([], [])


def test_a_joint_fusion_is_worth_both_passes_by_default() -> None:
    rules = (BiasGeLUForward, BiasGeLUBackward, BiasGeLUJoint)
    model = sf.Sequential(ops.Bias(5), ops.GeLU(), fusions=rules)
    # It ties with the pair, and one fusion is fewer than two.
    assert fused_names(model.plan(tensor(7, 5))) == (["BiasGeLUJoint"], ["BiasGeLUJoint"])


# The choice.


def candidate(kind: type, start: int, stop: int, cost: int, tag: int = 0) -> Candidate:
    fusion = type(f"{kind.__name__}{start}_{stop}_{tag}", (kind,), {}, contract=True)()
    return Candidate(fusion, start, stop, cost)


KINDS = (sf.ForwardFusion, sf.BackwardFusion, sf.JointFusion, sf.InferenceFusion)


def passes(c: Candidate, live: int) -> tuple[bool, bool]:
    """The passes of a candidate."""
    joint = isinstance(c.fusion, sf.JointFusion) and c.stop > live
    back = isinstance(c.fusion, sf.BackwardFusion)
    return not back, back or joint


def brute_force(candidates: Sequence[Candidate], live: int) -> tuple[int, int]:
    """Least (cost, number of fusions) over every set of candidates that do not overlap in a pass."""
    best = (0, 0)
    for size in range(1, len(candidates) + 1):
        for chosen in itertools.combinations(candidates, size):
            taken: set[tuple[str, int]] = set()
            wanted = [
                (side, i)
                for c in chosen
                for side, takes in zip("fb", passes(c, live), strict=True)
                if takes
                for i in range(c.start, c.stop)
            ]
            taken.update(wanted)
            if len(taken) == len(wanted):
                best = min(best, (sum(c.cost for c in chosen), size))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_cheapest_of_all_pairs_of_covers(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(25):
        n, first, live = draw.randint(1, 7), draw.choice([0, 3]), draw.randint(0, 2)
        candidates = []
        for tag in range(draw.randint(0, 8)):
            a = draw.randrange(n)
            b = draw.randint(a + 1, min(n, a + 4))
            # Few different costs: ties are common, and some gain nothing.
            candidates.append(
                candidate(draw.choice(KINDS), first + a, first + b, draw.choice([-4, -3, -2, -2, 0, 1]), tag)
            )
        live = first + min(live, n)
        ahead, back = passes_of(cheapest(first, first + n, candidates, live), live)
        for cover in (ahead, back):
            assert all(a.stop <= b.start for a, b in itertools.pairwise(cover))
            assert all(first <= c.start < c.stop <= first + n for c in cover)
        used = {id(c): c for c in (*ahead, *back)}.values()
        assert {id(c) for c in ahead} == {id(c) for c in used if passes(c, live)[0]}
        assert {id(c) for c in back} == {id(c) for c in used if passes(c, live)[1]}
        assert (sum(c.cost for c in used), len(used)) == brute_force(candidates, live)


class P(sf.ForwardFusion):
    a: ops.ReLU
    b: ops.Tanh
    fwd = stepwise


class Q(sf.ForwardFusion):
    b: ops.Tanh
    c: ops.Sigmoid
    fwd = stepwise


class Same(P):
    pass


@pytest.mark.parametrize("rules", [(P, Q), (Q, P), (P, Same), (Same, P)], ids=lambda r: "-".join(c.__name__ for c in r))
def test_between_equals_the_first_of_the_rule_set_wins(rules: tuple[type, ...]) -> None:
    model = sf.Sequential(ops.ReLU(), ops.Tanh(), ops.Sigmoid(), fusions=rules)
    plan = model.plan(tensor(7, 5))
    assert fused_names(plan)[0] == [rules[0].__name__]
    (loser,) = [r for r in plan.refused if r.fusion == rules[1].__name__]
    why = "the same estimated time, and earlier in the fusion set; state saves() if it gains more"
    assert loser.reason == f"superseded by {rules[0].__name__}: {why}"


def test_the_cheaper_cover_wins_whatever_the_order_of_the_rule_set() -> None:
    class Dear(P):
        def saves(self, env: sf.Env) -> Any:
            return sf.Savings(launches=1)

    class Cheap(Q):
        def saves(self, env: sf.Env) -> Any:
            return sf.Savings(launches=1, bytes=4096)

    for rules in ((Dear, Cheap), (Cheap, Dear)):
        model = sf.Sequential(ops.ReLU(), ops.Tanh(), ops.Sigmoid(), fusions=rules)
        plan = model.plan(tensor(7, 5))
        assert fused_names(plan)[0] == ["Cheap"]
        assert [(r.fusion, r.at, r.reason) for r in plan.refused] == [
            ("Dear", 0, "superseded by Cheap (est. 5.4 us saved, against 5.0)")
        ]


def test_an_own_fusion_that_a_cheaper_one_superseded_is_printed_once() -> None:
    class Cheap(Q):
        def saves(self, env: sf.Env) -> Any:
            return sf.Savings(launches=100)

    listed = ops.ReLU(), ops.Tanh(), ops.Sigmoid(), ops.Linear(64, 64), ops.GeLU(), ops.Linear(64, 64), ops.GeLU()
    x = tensor(512, 64).requires_grad_()
    text = str(sf.Sequential(*listed, fusions=(P, Cheap, *sf.fusions.default), memory="lean").plan(x))
    assert "superseded by cheaper fusions: " in text
    assert text.count("P at 0") == 1


def test_costs_that_differ_by_little_are_said_with_what_they_differ_by() -> None:
    class Little(P):
        def saves(self, env: sf.Env) -> Any:
            return sf.Savings(launches=1, bytes=100)

    plan = sf.Sequential(ops.ReLU(), ops.Tanh(), fusions=(P, Little)).plan(tensor(7, 5))
    (reason,) = (r.reason for r in plan.refused)
    assert reason.startswith("superseded by Little (est. 5.010 us saved, against 5.000)")


def calls_while(fn: Any) -> int:
    """Python calls made by a function, as a measure of work. Garbage of other tests is not collected meanwhile."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event == "call"

    collecting = gc.isenabled()
    gc.disable()
    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
        if collecting:
            gc.enable()
    return count


def test_planning_grows_linearly_with_the_list() -> None:
    rules = (*BY_NAME["bias_gelu"].fusions, *BY_NAME["linear_gelu"].fusions, *BY_NAME["chain"].fusions)

    def work(blocks: int) -> int:
        model = sf.Sequential(*(op for _ in range(blocks) for op in (ops.Linear(5, 5), ops.GeLU())), fusions=rules)
        x = tensor(3, 5)
        model.plan(x)
        return calls_while(lambda: model.plan(x))

    one, two, four = work(16), work(32), work(64)
    assert four - two < 2.1 * (two - one)
    assert two < 2.1 * one


def test_choosing_grows_linearly_though_both_covers_overlap_everywhere() -> None:
    def work(n: int) -> int:
        candidates = [
            candidate(KINDS[(i + length) % 3], i, i + length, -length) for i in range(n - 4) for length in (2, 3, 4)
        ]
        return calls_while(lambda: cheapest(0, n, candidates, 0))

    one, two, four = work(40), work(80), work(160)
    assert four - two < 2.1 * (two - one)
    assert two < 2.1 * one


def test_a_forward_cover_may_cross_the_borders_of_the_backward_cover() -> None:
    class Ahead(P):
        pass

    class Behind(sf.BackwardFusion):
        b: ops.Tanh
        c: ops.Sigmoid

        def bwd(self, dy: Tensor, *, b: Any, c: Any) -> Any:
            return dy * c.y * (1 - c.y) * (1 - b.y.square()), {}

    model = sf.Sequential(ops.ReLU(), ops.Tanh(), ops.Sigmoid(), fusions=(Ahead, Behind))
    x = tensor(7, 5)
    assert fused_names(model.plan(x)) == (["Ahead"], ["Behind"])
    truth = outcome(
        lambda z: torch.sigmoid(torch.tanh(torch.relu(z))), {"x": (z := x.detach().double().requires_grad_())}, z
    )
    assert_same(run(model, x), unfused(model, x), truth)


def test_a_frozen_front_is_covered_for_inference_and_the_rest_for_training() -> None:
    case = BY_NAME["bias_gelu"]
    rules = (*case.forward, *case.backward, *case.inference)
    model = randomized(sf.Sequential(ops.Bias(5), ops.GeLU(), ops.Bias(5), ops.GeLU(), fusions=rules))
    model[0].requires_grad_(False)
    x = tensor(7, 5, grad=False)

    class Dear(case.inference[0]):
        def saves(self, env: sf.Env) -> Any:
            return sf.Savings(launches=1.1)

    model.fusions = (*case.forward, *case.backward, Dear)
    assert fused_names(model.plan(x)) == (["Dear", "BiasGeLUForward"], ["BiasGeLUBackward"])

    def plain(p: dict[str, Tensor], x: Tensor) -> Tensor:
        gelu = torch.nn.functional.gelu
        return gelu(gelu(x + p["0.bias"]) + p["2.bias"])

    assert_same(run(model, x), unfused(model, x), run_plain(plain, model, x))


def test_a_joint_fusion_where_nothing_wants_a_gradient_is_worth_its_forward_only() -> None:
    case = BY_NAME["bias_gelu"]

    class Dear(case.inference[0]):
        def saves(self, env: sf.Env) -> Any:
            return sf.Savings(launches=1.5)

    model = sf.Sequential(ops.Bias(5), ops.GeLU(), ops.Bias(5), ops.GeLU(), fusions=(*case.joint, Dear))
    model[0].requires_grad_(False)
    plan = model.plan(tensor(7, 5, grad=False))
    assert fused_names(plan) == (["Dear", "BiasGeLUJoint"], ["BiasGeLUJoint"])

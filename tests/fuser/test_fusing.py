"""`sf.fusing` chooses among the fusions of a model, for a block or a function."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import (
    CASES,
    PAIR,
    BiasGeLUBackward,
    BiasGeLUForward,
    BiasReLU,
    BiasReLUBack,
    Case,
    assert_exact,
    outcome,
    randomized,
    run,
    tensor,
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_without_fusing_the_bits_are_those_of_the_operations_called_one_by_one(case: Case) -> None:
    model = randomized(sf.Sequential(*case.make(), fusions=case.fusions))
    plain = sf.Sequential(*model, fusions=())
    x, channels = tensor(7, 5), {c: tensor(7, 5, seed=8) for c in case.channels}
    with sf.fusing(False):
        plan = model.plan(x, **channels)
        assert not any(s.fused for s in (*plan.forward, *plan.backward))
        assert {r.reason for r in plan.refused} == {"fusing is off"}
        got = run(model, x, **channels)
    assert_exact(got, run(plain, x, **channels))
    if not any(isinstance(op, ops.Fork | ops.Add | ops.Residual) for op in model):

        def one_by_one(x: Tensor) -> Tensor:
            for operation in model:
                x = operation(x)
            return x

        assert_exact(got, outcome(one_by_one, {"x": x, **dict(model.named_parameters())}, x))


def names_now(model: sf.Sequential) -> list[str]:
    plan = model.plan(tensor(7, 5))
    return sorted({s.name for s in (*plan.forward, *plan.backward) if s.fused})


def choice() -> sf.Sequential:
    return sf.Sequential(
        ops.Bias(5), ops.ReLU(), ops.Bias(5), ops.GeLU(), fusions=(*PAIR, BiasGeLUForward, BiasGeLUBackward)
    )


ALL = ["BiasGeLUBackward", "BiasGeLUForward", "BiasReLU", "BiasReLUBack"]


def test_only_and_exclude_take_classes_and_names_and_say_so() -> None:
    model = choice()
    assert names_now(model) == ALL
    for only in ([BiasReLU], ["BiasReLU"], "BiasReLU", BiasReLU, {BiasReLU}):
        with sf.fusing(only=only):
            assert names_now(model) == ["BiasReLU"]
            refused = {r.fusion: r.reason for r in model.plan(tensor(7, 5)).refused}
            assert refused["BiasGeLUForward"] == "not named by sf.fusing(only=...)"
    for exclude in ([BiasReLU], ["BiasReLU"], "BiasReLU", BiasReLU):
        with sf.fusing(exclude=exclude):
            assert names_now(model) == [n for n in ALL if n != "BiasReLU"]
            refused = {r.fusion: r.reason for r in model.plan(tensor(7, 5)).refused}
            assert refused["BiasReLU"] == "excluded by sf.fusing(exclude=...)"
    with sf.fusing(only=[BiasReLU, BiasReLUBack], exclude=[BiasReLU]):
        assert names_now(model) == ["BiasReLUBack"]
    with sf.fusing(only=[]):
        assert names_now(model) == []
    assert names_now(model) == ALL


def test_regions_nest() -> None:
    model = choice()
    with sf.fusing(exclude=[BiasReLU]):
        with sf.fusing(exclude=[BiasReLUBack]):
            assert names_now(model) == ["BiasGeLUBackward", "BiasGeLUForward"]
        with sf.fusing(on_error="raise"):
            assert names_now(model) == [n for n in ALL if n != "BiasReLU"]
        with sf.fusing(False):
            assert names_now(model) == []
            with sf.fusing(on_error="raise"):
                assert names_now(model) == []
            with sf.fusing(True):
                assert names_now(model) == [n for n in ALL if n != "BiasReLU"]
            assert names_now(model) == []
        assert names_now(model) == [n for n in ALL if n != "BiasReLU"]
    with sf.fusing(only=[BiasReLU, BiasGeLUForward]), sf.fusing(only=[BiasReLU, BiasReLUBack]):
        assert names_now(model) == ["BiasReLU"]
    assert names_now(model) == ALL


def test_a_region_ends_with_an_exception_too() -> None:
    model = choice()
    for error in (ValueError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), sf.fusing(False):
            raise error
        assert names_now(model) == ALL
    with pytest.raises(sf.InputError), sf.fusing(False):
        model(tensor(7, 4))
    assert names_now(model) == ALL


def test_a_region_can_be_a_decorator() -> None:
    model = choice()

    @sf.fusing(False)
    def inside() -> list[str]:
        return names_now(model)

    assert inside() == []
    assert inside() == []
    assert names_now(model) == ALL


def test_the_backward_runs_the_cover_its_forward_was_made_under() -> None:
    ran: list[int] = []

    class Seen(BiasReLUBack):
        def bwd(self, dy: Tensor, *, bias: Any, act: Any) -> Any:
            ran.append(1)
            return super().bwd(dy, bias=bias, act=act)

    model = randomized(sf.Sequential(ops.Bias(5), ops.ReLU(), fusions=(Seen,)))
    x = tensor(7, 5)
    y = model(x)
    with sf.fusing(False):
        z = model(x)
        y.sum().backward()
    assert ran == [1]
    z.sum().backward()
    assert ran == [1]

"""Random lists: fused, unfused and their references under plain autograd give the same results."""

from __future__ import annotations

import copy
import functools
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqfuse as sf
from seqfuse.testing import ListSpec, assert_bitwise_equal
from seqfuse.testing import strategies as sfst
from seqfuse.testing.judge import judge

from .kinds import KINDS
from .listed import results

FUSIONS = (*KINDS, *sf.fusions.default)
# Said by torch of a hook on the first module where the input wants no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def assert_agreement(spec: ListSpec, seed: int, dtype: torch.dtype, **how: Any):
    hypothesis.note(str(spec))
    model = spec.build(seed=seed, dtype=dtype, fusions=FUSIONS)
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()

    def measure(seed: int):
        fused = results(model, model, spec, seed, dtype=dtype, **how)
        with sf.fusing(False):
            unfused = results(plain, plain, spec, seed, dtype=dtype, **how)
        by_reference = functools.partial(spec.reference, wide)
        return fused, unfused, results(by_reference, wide, spec, seed, wide=True, dtype=dtype, **how)

    judge(measure, seed)
    if dtype is torch.float64:
        # The rule asks no more of fused results than of unfused ones, so those have to be right first.
        _, own, exact = measure(seed)
        for name, r in exact.items():
            torch.testing.assert_close(own[name], r, rtol=1e-9, atol=1e-9 * (1 + r.abs().amax().item()), msg=name)


DTYPES = st.sampled_from([torch.float64, torch.float32])


@given(
    spec=sfst.lists(attention=False),
    rows=st.sampled_from([(3,), (2, 5), ()]),
    x_wants=st.booleans(),
    grad=st.sampled_from([True, True, False]),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_fused_unfused_and_reference_agree(
    spec: ListSpec, rows: tuple[int, ...], x_wants: bool, grad: bool, dtype: torch.dtype, seed: int
):
    assert_agreement(spec, seed, dtype, rows=rows, x_wants=x_wants, grad=grad)


@given(
    spec=sfst.lists(steps=5).filter(lambda spec: spec.attends),
    rows=st.sampled_from([(5,), (2, 3), (17,)]),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_they_agree_with_attention_in_them(spec: ListSpec, rows: tuple[int, ...], dtype: torch.dtype, seed: int):
    assert_agreement(spec, seed, dtype, rows=rows)


@given(spec=sfst.lists(), seed=st.integers(0, 99))
def test_a_run_is_repeated_bit_for_bit(spec: ListSpec, seed: int):
    hypothesis.note(str(spec))
    model = spec.build(seed=seed, fusions=FUSIONS)
    first, again = (results(model, model, spec, seed) for _ in range(2))
    assert_bitwise_equal(again, first)


@given(spec=sfst.lists(hooks=False, barriers=False))
def test_a_plan_covers_every_position_once_in_each_pass(spec: ListSpec):
    model = spec.build(fusions=FUSIONS)
    x = torch.randn(4, spec.width, requires_grad=True)
    plan = model.plan(x, **{name: torch.randn(4, width, requires_grad=True) for name, width in spec.inputs})
    for cover in (plan.forward, plan.backward):
        assert [at for step in cover for at in step.covers] == list(range(len(plan.names)))
    assert [at for piece in plan.segments for at in piece] == list(range(len(plan.names)))


@pytest.mark.parametrize("options", [{}, {"channels": False, "hooks": False, "dropout": False}], ids=["all", "plain"])
def test_lists_print_what_they_are_made_of(options: dict[str, bool]):
    spec = hypothesis.find(sfst.lists(**options), lambda _: True)
    assert str(spec).startswith("Sequential(")
    assert isinstance(spec.build(), sf.Sequential)

"""Random sequences give the same results fused, unfused, and in plain torch in float64."""

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
from seqfuse.testing import LAYOUTS, assert_bitwise_equal, seeded_randn
from tests.judging import judge_together

from . import drawn
from .kinds import KINDS
from .listed import DISTINCT, Results, results
from .lists import ListSpec
from .plain_lists import plain as plainly

FUSIONS = (*KINDS, *sf.fusions.default)
AMPLIFIED = 1e4
"""Bound on the error of a result in units of eps: norms of rows that are nearly constant amplify roundings."""
FEWER = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples * 2 // 5)
FIRST = hypothesis.settings(phases=[hypothesis.Phase.generate])
# torch warns of a hook on the first module if the input needs no gradient, and of a weight without columns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]


def assert_agreement(
    spec: ListSpec, seed: int, dtypes: tuple[torch.dtype, torch.dtype | None], checkpointed: str, **how: Any
):
    dtype, other = dtypes
    hypothesis.note(str(spec))
    model = spec.build(seed=seed, dtype=dtype, other=other, fusions=FUSIONS)
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()

    @functools.cache
    def measure(seed: int):
        with sf.fusing(on_error="raise"):
            fused = results(model, model, spec, seed, dtype=dtype, checkpointed=checkpointed, **how)
        with sf.fusing(False):
            unfused = results(plain, plain, spec, seed, dtype=dtype, checkpointed=checkpointed, **how)
        by = functools.partial(plainly, stats=torch.promote_types(dtype, torch.float32))
        by_plain_torch = functools.partial(spec.reference, wide, by=by)
        return fused, unfused, results(by_plain_torch, wide, spec, seed, wide=True, dtype=dtype, **how)

    judge_together(measure, seed)
    if dtype is not torch.bfloat16:
        _, unfused, exact = measure(seed)
        assert_right(unfused, exact, spec, torch.finfo(dtype).eps)


def assert_right(unfused: Results, exact: Results, spec: ListSpec, eps: float):
    """Fused results are bounded by the error of the unfused operations, which must be small itself."""
    # In a row that is masked whole by a large number, scores and their log-sum-exp are rounded to |mask| eps / 2, by
    # which every weight of the row is off. From |mask| eps = 1 on nothing is left of the scores: all weights are equal.
    lost = max((-float(kind) * eps for _, kind in spec.masks if kind in ("-1e9", "-1e4")), default=0.0)
    close = AMPLIFIED * eps + (lost if lost < 1 else 0)
    for name, r in exact.items():
        u = unfused[name]
        assert u.shape == r.shape
        if r.numel():
            torch.testing.assert_close(u.double(), r, rtol=close, atol=close * (1 + r.abs().amax().item()), msg=name)


HOW = st.fixed_dictionaries(
    {
        "dtypes": st.sampled_from(
            [
                *((torch.float64, None), (torch.float32, None)),
                *((torch.float32, torch.float64), (torch.bfloat16, torch.float32)),
            ]
        ),
        "dy_layout": st.sampled_from(LAYOUTS),
        "checkpointed": st.sampled_from(("", "", "", "reentrant", "non-reentrant")),
        "seed": st.integers(0, 99),
    }
)
"""Dtypes of parameters, memory layout of incoming gradients, and how the whole is checkpointed."""


@FEWER
@given(
    spec=drawn.lists(attention=False),
    rows=st.sampled_from([(3,), (2, 5), (), (0,), (2, 0)]),
    x_wants=st.booleans(),
    grad=st.sampled_from([True, True, False]),
    layout=st.sampled_from(LAYOUTS),
    how=HOW,
)
def test_fused_unfused_and_plain_torch_agree(
    spec: ListSpec, rows: tuple[int, ...], x_wants: bool, grad: bool, layout: str, how: dict[str, Any]
):
    if how["checkpointed"] == "reentrant" and not (x_wants and grad):  # it requires an input that needs a gradient
        how |= {"checkpointed": "non-reentrant"}
    assert_agreement(spec, rows=rows, x_wants=x_wants, grad=grad, layout=layout, **how)


@FEWER
@given(
    spec=drawn.lists(steps=5).filter(lambda spec: spec.attends),
    rows=st.sampled_from([(5,), (2, 3), (17,), (0,)]),
    layout=st.sampled_from(DISTINCT),
    how=HOW,
)
def test_they_agree_with_attention_in_them(spec: ListSpec, rows: tuple[int, ...], layout: str, how: dict[str, Any]):
    assert_agreement(spec, rows=rows, layout=layout, **how)


@FEWER
@given(spec=drawn.lists(), rows=st.sampled_from([(3,), (2, 5)]), seed=st.integers(0, 99))
def test_references_compute_what_plain_torch_does(spec: ListSpec, rows: tuple[int, ...], seed: int):
    hypothesis.note(str(spec))
    model = spec.build(seed=seed, dtype=torch.float64)
    again = functools.partial(spec.reference, model, by=functools.partial(plainly, stats=torch.float64))
    ours, theirs = (results(run, model, spec, seed, rows=rows, dtype=torch.float64) for run in (
        functools.partial(spec.reference, model), again,
    ))  # fmt: skip
    assert_right(ours, theirs, spec, torch.finfo(torch.float64).eps)


@FEWER
@given(spec=drawn.lists(), seed=st.integers(0, 99))
def test_a_run_is_repeated_bit_for_bit(spec: ListSpec, seed: int):
    hypothesis.note(str(spec))
    model = spec.build(seed=seed, fusions=FUSIONS)
    first, again = (results(model, model, spec, seed) for _ in range(2))
    assert_bitwise_equal(again, first)


@given(spec=drawn.lists(hooks=False, barriers=False))
def test_a_plan_covers_every_position_once_in_each_pass(spec: ListSpec):
    model = spec.build(fusions=FUSIONS)
    x = torch.randn(4, spec.width, requires_grad=True)
    inputs = {name: torch.randn(4, width, requires_grad=True) for name, width in spec.inputs}
    plan = model.plan(x, **inputs, **spec.masked(4, 0, torch.float32))
    for cover in (plan.forward, plan.backward):
        assert [at for step in cover for at in step.covers] == list(range(len(plan.names)))
    assert [at for piece in plan.segments for at in piece] == list(range(len(plan.names)))


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float64], ids=str)
def test_the_plain_attention_reads_a_mask_as_the_operation_does(kind: torch.dtype):
    op, x = sf.ops.Attention(2, 1, mask="m"), seeded_randn((2, 5, 16), 0, dtype=torch.float64)
    mask = seeded_randn((5, 5), 1, dtype=torch.float64)
    mask = mask if kind.is_floating_point else (mask > -0.5).to(kind)
    torch.testing.assert_close(plainly(op, x, None, mask, torch.float64), sf.Sequential(op)(x, m=mask))


@pytest.mark.parametrize("options", [{}, {"channels": False, "hooks": False, "dropout": False}], ids=["all", "plain"])
def test_lists_print_what_they_are_made_of(options: dict[str, bool]):
    spec = hypothesis.find(drawn.lists(**options), lambda _: True, settings=FIRST)
    assert str(spec).startswith("Sequential(")
    assert isinstance(spec.build(), sf.Sequential)

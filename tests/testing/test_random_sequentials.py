"""Random lists: fused, unfused and their references under plain autograd give the same results."""

from __future__ import annotations

import copy
import functools

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.testing import ListSpec, assert_bitwise_equal, in_regime, seeded_randn
from seqfuse.testing import strategies as sfst
from seqfuse.testing.cases import seeded
from seqfuse.testing.judge import judge

from .kinds import KINDS

Results = dict[str, Tensor | None]
FUSIONS = (*KINDS, *sf.fusions.default)
CPU = torch.device("cpu")
# Said by torch of a hook on the first module where the input wants no gradient.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")


def results(
    call,
    model: nn.Module,
    spec: ListSpec,
    seed: int,
    *,
    rows: tuple[int, ...] = (4,),
    x_wants: bool = True,
    dtype: torch.dtype = torch.float32,
    grad: bool = True,
    wide: bool = False,
) -> Results:
    """Outputs and every gradient of a run on the numbers of a seed, rounded to `dtype`, then widened to float64."""
    own = torch.float64 if wide else dtype
    given = {
        name: in_regime("normal", (*rows, width), seed + i, dtype=dtype).to(own).requires_grad_(x_wants)
        for i, (name, width) in enumerate({"x": spec.width, **dict(spec.inputs)}.items())
    }
    with seeded(seed, CPU), torch.set_grad_enabled(grad):
        out = call(**given)
    names = ("y", *spec.outputs)
    outputs = out if isinstance(out, dict) else dict(zip(names, out if spec.outputs else (out,), strict=True))
    wanted = {f"d_{name}": t for name, t in given.items() if x_wants}
    wanted |= {f"{name}.grad": p for name, p in model.named_parameters() if p.requires_grad}
    pairs = [
        (y, seeded_randn(tuple(y.shape), seed + 9 + i, dtype=dtype).to(y.dtype))
        for i, y in enumerate(outputs.values())
        if y.requires_grad
    ]
    if not pairs or not wanted:
        return {**outputs}
    ys, dys = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, tuple(wanted.values()), dys, allow_unused=True)
    return {**outputs, **{n: zeros_for_none(g, t) for (n, t), g in zip(wanted.items(), found, strict=True)}}


def zeros_for_none(g: Tensor | None, like: Tensor) -> Tensor:
    # Autograd says None where nothing leads back, and zeros where something does that adds nothing.
    return torch.zeros_like(like) if g is None else g


@given(
    spec=sfst.lists(),
    rows=st.sampled_from([(3,), (2, 5), ()]),
    x_wants=st.booleans(),
    grad=st.sampled_from([True, True, False]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_fused_unfused_and_reference_agree(
    spec: ListSpec, rows: tuple[int, ...], x_wants: bool, grad: bool, dtype: torch.dtype, seed: int
):
    hypothesis.note(str(spec))
    model = spec.build(seed=seed, dtype=dtype, fusions=FUSIONS)
    plain, wide = copy.deepcopy(model), copy.deepcopy(model).double()

    def measure(seed: int):
        given = {"rows": rows, "x_wants": x_wants, "grad": grad, "dtype": dtype}
        fused = results(model, model, spec, seed, **given)
        with sf.fusing(False):
            unfused = results(plain, plain, spec, seed, **given)
        by_reference = functools.partial(spec.reference, wide)
        return fused, unfused, results(by_reference, wide, spec, seed, wide=True, **given)

    judge(measure, seed)


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

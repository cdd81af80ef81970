"""Random sequences with attention: every fusion of one pass, and of both, against the operations."""

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
from seqfuse.ops import _attention
from seqfuse.testing import LAYOUTS
from tests.judging import judge_together
from tests.testing import drawn
from tests.testing.lists import DISTINCT, ListSpec, Results, results

# torch warns of a hook on the first module if the input needs no gradient, and of a weight without columns.
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="the lists are on the CPU"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
]
FORWARD = tuple(f for f in sf.fusions.default if issubclass(f, sf.ForwardFusion))
BACKWARD = tuple(f for f in sf.fusions.default if issubclass(f, sf.BackwardFusion))
HEADED = (
    *(sf.fusions.BiasQKNorm, sf.fusions.BiasQKNormRotary),
    *(sf.fusions.BiasQKNormBackward, sf.fusions.BiasQKNormRotaryBackward, sf.fusions.BiasQKNormRotaryAttention),
)
FEWER = hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 5)
FIRST = hypothesis.settings(max_examples=500, phases=[hypothesis.Phase.generate])
LISTS = drawn.lists(steps=3, depth=1, hooks=False).filter(lambda spec: spec.attends)


@pytest.fixture(autouse=True, scope="module")
def _by_our_kernels():
    # The same fused and unfused, as on a GPU; tests of the operation compare its kernels.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_attention, "interpreting", True)
        yield


@FEWER
@given(
    spec=LISTS,
    rows=st.sampled_from([(3,), (2, 5), (17,), (0,)]),
    grad=st.sampled_from([True, True, False]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    layouts=st.tuples(st.sampled_from(DISTINCT), st.sampled_from(LAYOUTS)),
    seed=st.integers(0, 99),
)
def test_any_two_covers_agree(
    spec: ListSpec, rows: tuple[int, ...], grad: bool, dtype: torch.dtype, layouts: tuple[str, str], seed: int
):
    hypothesis.note(str(spec))
    model = spec.build(seed=seed, dtype=dtype, other=torch.float32)
    wide = copy.deepcopy(model).double()
    how: dict[str, Any] = {"rows": rows, "dtype": dtype, "grad": grad, "layout": layouts[0], "dy_layout": layouts[1]}

    @functools.cache
    def run(fusions: tuple[type[sf.FusedOperation], ...], seed: int) -> Results:
        own = copy.deepcopy(model)
        with sf.fusing(only=fusions, on_error="raise"):
            return results(own, own, spec, seed, **how)

    @functools.cache
    def exact(seed: int) -> Results:
        by_plain_torch = functools.partial(spec.reference, wide, stats=torch.float32)
        return results(by_plain_torch, wide, spec, seed, wide=True, **how)

    for fusions in (FORWARD, BACKWARD, sf.fusions.default) if grad else (sf.fusions.default,):
        judge_together(lambda seed, fusions=fusions: (run(fusions, seed), run((), seed), exact(seed)), seed)


@pytest.mark.parametrize("fusion", HEADED, ids=lambda fusion: fusion.__name__)
def test_lists_hold_what_each_fusion_of_heads_covers(fusion: type[sf.FusedOperation]):
    grad = not issubclass(fusion, sf.InferenceFusion)

    def holds(spec: ListSpec) -> bool:
        with torch.set_grad_enabled(grad), sf.fusing(only=(fusion,)):
            inputs = {name: torch.randn(4, width) for name, width in (("x", spec.width), *spec.inputs)}
            return spec.build().plan(**inputs, **spec.masked(4, 0, torch.float32)).count(fusion.__name__) > 0

    assert holds(hypothesis.find(LISTS, holds, settings=FIRST))

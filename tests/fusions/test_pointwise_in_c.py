"""Fusions of point-wise chains in C, compared with their operations in all combinations of passes."""

import functools
from typing import Any

import pytest
import torch

from seqfuse import compiler, fusions, ops
from seqfuse.fusions import feedforward
from seqfuse.testing import check_fusion, seeded_randn

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C compiler")

BIAS, DROPOUT, ADD = (lambda: ops.Bias(8), lambda: ops.Dropout(0.3), lambda: ops.Add("other"))
LINEAR = functools.partial(ops.Linear, 8, 8, bias=False)
CASES: dict[str, tuple[Any, torch.dtype, tuple[Any, ...]]] = {
    "GEMM, bias and activation": (fusions.LinearBiasPointwise, torch.float32, (LINEAR, BIAS, ops.GeLU)),
    "GEMM and activation in 16 bits": (fusions.LinearBiasPointwise, torch.bfloat16, (LINEAR, BIAS, ops.SiLU)),
    "gated unit": (fusions.BiasGated, torch.float32, (BIAS, ops.GEGLU)),
    "gated unit, backward": (fusions.BiasGatedBackward, torch.bfloat16, (BIAS, ops.SwiGLU)),
    "gated unit in float32, backward": (fusions.BiasGatedBackward, torch.float32, (BIAS, ops.GEGLU)),
    "residual": (fusions.BiasDropoutAdd, torch.float16, (BIAS, DROPOUT, ADD)),
    "residual in float32": (fusions.BiasDropoutAdd, torch.float32, (DROPOUT, ADD)),
    "residual, backward": (fusions.BiasDropoutAddBackward, torch.float32, (BIAS, DROPOUT, ADD)),
    "chain": (fusions.PointwiseChain, torch.float32, (BIAS, ops.SiLU, lambda: ops.Scale(0.5), DROPOUT)),
    "chain, backward": (fusions.PointwiseChainBackward, torch.float32, (BIAS, ops.GeLU, DROPOUT)),
    "chain, both passes": (fusions.PointwiseChainJoint, torch.bfloat16, (ops.ReLU, ops.Tanh)),
    "chain in float32, both passes": (fusions.PointwiseChainJoint, torch.float32, (ops.SquaredReLU, ops.Sigmoid)),
    "chain of bias and output": (fusions.PointwiseChain, torch.float32, (BIAS, ops.Tanh)),
    "chain with a factor": (fusions.PointwiseChain, torch.float16, (BIAS, ops.QuickGeLU, lambda: ops.Scale(2.0))),
    "activation recomputed": (fusions.ActivationLinearJoint, torch.float32, (BIAS, ops.GeLU, LINEAR)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_takes_the_place_of_what_it_replaces(name: str):
    fusion, dtype, makers = CASES[name]
    other = {"other": seeded_randn((5, 8), 1)} if ADD in makers else {}
    found = check_fusion(fusion, seeded_randn((5, 8), 0), *(make() for make in makers), dtypes=[dtype], **other)
    assert found.cases > 8
    assert all("no gradient: it is not used" in case for case in found.skipped)  # of fusions of both passes


@pytest.mark.parametrize("act", [ops.GeLU, ops.SwiGLU])
def test_many_rows_run_part_by_part(act: Any, monkeypatch: pytest.MonkeyPatch):
    """Each gradient is that of all rows, the last part being shorter; with a main_grad they run at once."""
    sizes, whole = list[int](), feedforward._in_parts
    monkeypatch.setattr(feedforward, "PART", 2)
    monkeypatch.setattr(feedforward, "_in_parts", lambda *given: (sizes.append(len(given[1])), whole(*given))[1])
    width = 16 if act is ops.SwiGLU else 8
    list_ = ops.Bias(width), act(), ops.Linear(8, 8), ops.Add("other")
    given = {"other": seeded_randn((7, 8), 1)}
    check_fusion(fusions.ActivationLinearJoint, seeded_randn((7, width), 0), *list_, dtypes=[torch.float32], **given)
    assert 7 in sizes


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_a_sum_of_two_dtypes_has_the_one_that_torch_promotes_to(dtypes: tuple[torch.dtype, torch.dtype]):
    fusion: Any = fusions.BiasDropoutAdd(bias=None, dropout=ops.Dropout(0.3), add=ops.Add("other"))
    x, other = (seeded_randn((5, 8), i).to(dtype) for i, dtype in enumerate(dtypes))
    assert fusion.fwd(x, add_other=other, dropout_seed=torch.tensor(3))[0].dtype is torch.float32

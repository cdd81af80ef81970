"""Mish is what torch says it is, by itself and inside every fusion that takes an activation."""

import pytest
import torch
from seqfuse_mish import AddMish, Mish, fusions

import seqfuse as sf
from seqfuse import ops, testing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
X = torch.randn(5, 6, device=DEVICE)


def test_mish_is_what_its_reference_says() -> None:
    testing.check_op(Mish(), X)


def test_the_sum_and_mish_are_one() -> None:
    testing.check_fusion(AddMish, X)


@pytest.mark.parametrize(
    ("fusion", "operations"),
    [
        (sf.fusions.PointwiseChain, (ops.Bias(6), Mish())),
        (sf.fusions.PointwiseChainBackward, (ops.Bias(6), Mish())),
        (sf.fusions.LinearBiasPointwise, (ops.Linear(6, 4), Mish())),
    ],
    ids=["value", "derivative", "linear"],
)
def test_mish_fuses(fusion: type[sf.FusedOperation], operations: tuple[sf.UnfusedOperation, ...]) -> None:
    testing.check_fusion(fusion, X, *(operation.to(DEVICE) for operation in operations), dtypes=[torch.float32])


def test_the_entry_point_gives_the_fusions() -> None:
    assert "mish" in [plugin.name for plugin in sf.plugins.available()], "install the package: pip install -e ."
    assert sf.plugins.load("mish") == fusions


def test_a_plan_knows_what_is_saved() -> None:
    model = sf.Sequential(ops.Fork("skip"), ops.Scale(2.0), ops.Add("skip"), Mish(), fusions=fusions)
    plan = model.plan(torch.empty(5, 6, device="meta"), env=sf.Env.of("cuda:sm_90"))
    assert plan.count("AddMish") == 1, plan
    assert plan.memory is not None, plan.memory_unknown


def test_a_block_is_planned_with_both() -> None:
    block = ops.Residual(ops.Linear(64, 256), Mish(), ops.Linear(256, 64), ops.RMSNorm(64))
    model = sf.Sequential(block, Mish(), fusions=(*fusions, *sf.fusions.default)).bfloat16()
    plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, tokens=8192))
    assert plan.count("AddMish") == 1, plan
    assert plan.count("PointwiseChainBackward") == 1, plan

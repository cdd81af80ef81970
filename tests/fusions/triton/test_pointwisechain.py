"""Runs of point-wise operations in one kernel each way."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import pointwisechain
from seqfuse.fusions.pointwisechain import PointwiseChain, PointwiseChainBackward, PointwiseChainInference
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways

EVERY = (PointwiseChain, PointwiseChainInference, PointwiseChainBackward)
ALL = pytest.mark.parametrize("fusion", EVERY, ids=lambda fusion: fusion.__name__)


def bias(width: int) -> ops.Bias:
    made = ops.Bias(width)
    torch.nn.init.normal_(made.bias)
    return made


@ALL
@pytest.mark.parametrize(
    ("list_", "dtype"),
    [
        ((bias(8), ops.SiLU(), ops.Scale(0.5), bias(8), ops.Tanh()), torch.float32),
        ((ops.Tanh(), ops.SiLU(), ops.ReLU(), ops.Scale(-2.0)), torch.bfloat16),
    ],
    ids=["biases", "activations"],
)
def test_takes_the_place_of_what_it_replaces(
    fusion: type[sf.FusedOperation], list_: tuple[sf.UnfusedOperation, ...], dtype: torch.dtype, device: torch.device
):
    operations = [operation.to(device) for operation in list_]
    check_fusion(fusion, seeded_randn((5, 8), 0).to(device), *operations, dtypes=[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meet_in_the_records(dtype: torch.dtype, device: torch.device):
    both = (PointwiseChain, PointwiseChainBackward)
    list_ = [bias(13), ops.Sigmoid(), ops.SiLU(), ops.Scale(3.0), ops.Tanh(), bias(13), ops.ReLU(), ops.SquaredReLU()]
    model = sf.Sequential(*list_, fusions=both).to(device, dtype)
    four_ways(model, seeded_randn((19, 13), 0, dtype=dtype).to(device), *both)


@pytest.mark.parametrize("length", [2, 9, 12])
def test_of_any_length_few_kernels_are_left(length: int):
    model = sf.Sequential(*([ops.SiLU()] * length), fusions=EVERY)
    plan = model.plan(env=sf.Env.of("cuda:sm_90", rows=64, grad=False))
    assert len(plan.forward) == (length + 8) // 9
    assert all(step.fused for step in plan.forward)


def test_a_tensor_that_two_keep_is_stored_once(device: torch.device):
    model = sf.Sequential(ops.Scale(2.0), ops.Tanh(), ops.SiLU(), fusions=EVERY).to(device)
    x = seeded_randn((5, 8), 0).to(device).requires_grad_()
    assert model.plan(x).count("PointwiseChain") == 1
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x)
    assert len({t.data_ptr() for t in kept}) == 1


MUTANTS = {
    "the output for the input": (PointwiseChain, "return part.record(t, t)", "return part.record(x, t)"),
    "the factor forgotten": (PointwiseChainBackward, '("scale", record.factor)', '("scale", 1.0)'),
    "biases in another order": (PointwiseChainBackward, "zip(summed, sums", "zip(summed, sums[::-1]"),
    "a bias forgotten": (PointwiseChainInference, "biases = [part.read()", "biases = [0 * part.read()"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_fusion_is_found(name: str, device: torch.device, mutant: Callable[..., ModuleType]):
    fusion, old, new = MUTANTS[name]
    changed = getattr(mutant(pointwisechain, old, new), fusion.__name__)
    list_ = [operation.to(device) for operation in (bias(8), ops.Scale(0.5), ops.SiLU(), bias(8), ops.Tanh())]
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(changed, seeded_randn((5, 8), 0).to(device), *list_, dtypes=[torch.float32])

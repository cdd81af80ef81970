"""Bias and an activation in one pass each way."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import bias_activation
from seqfuse.fusions.bias_activation import BiasActivation, BiasActivationBackward, BiasActivationInference
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways

EACH = pytest.mark.parametrize(
    "fusion", [BiasActivation, BiasActivationInference, BiasActivationBackward], ids=lambda fusion: fusion.__name__
)


def bias(width: int) -> ops.Bias:
    made = ops.Bias(width)
    torch.nn.init.normal_(made.bias)
    return made


@EACH
def test_takes_the_place_of_what_it_replaces(fusion: type[sf.FusedOperation], device: torch.device):
    x = seeded_randn((5, 6), 0).to(device)
    check_fusion(fusion, x, bias(6).to(device), ops.GeLU("tanh"), dtypes=[torch.float32, torch.float16])


@EACH
def test_of_what_keeps_its_output(fusion: type[sf.FusedOperation], device: torch.device):
    x = seeded_randn((2, 3, 7), 0).to(device)
    check_fusion(fusion, x, bias(7).to(device), ops.ReLU(), dtypes=[torch.bfloat16])


@pytest.mark.parametrize("act", [ops.GeLU(), ops.Tanh(), ops.QuickGeLU(), ops.SquaredReLU()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meet_in_the_records(act: sf.Pointwise, dtype: torch.dtype, device: torch.device):
    fusions = (BiasActivation, BiasActivationBackward)
    model = sf.Sequential(ops.Linear(12, 36), act, ops.Linear(36, 9), fusions=fusions).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *fusions)


MUTANTS = {
    "stored after": ("BiasActivation", '("bias", "store", "act") if', '("bias", "act", "store") if'),
    "the sum of dy": ("BiasActivationBackward", '("dact", "column_sum") if', '("column_sum", "dact") if'),
    "no bias": (
        "BiasActivationInference",
        'chain(self.act, "bias", "act"), (self.bias.read(),)',
        'chain(self.act, "act")',
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_fusion_is_found(name: str, device: torch.device, mutant: Callable[..., ModuleType]):
    fusion, old, new = MUTANTS[name]
    changed = mutant(bias_activation, old, new)
    x = seeded_randn((5, 6), 0).to(device)
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(getattr(changed, fusion), x, bias(6).to(device), ops.SiLU(), dtypes=[torch.float32])

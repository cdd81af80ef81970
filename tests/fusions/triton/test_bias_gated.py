"""Bias and a gated unit in one pass each way."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, cast

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import BiasGated, BiasGatedBackward
from seqfuse.fusions import chain as module
from seqfuse.fusions.chain import chain_of, pointwise_of
from seqfuse.kernels import activations
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways

BOTH = pytest.mark.parametrize("fusion", [BiasGated, BiasGatedBackward], ids=lambda fusion: fusion.__name__)


def bias(width: int) -> ops.Bias:
    made = ops.Bias(width)
    torch.nn.init.normal_(made.bias)
    return made


@BOTH
def test_takes_the_place_of_what_it_replaces(fusion: type[sf.FusedOperation], device: torch.device):
    x = seeded_randn((5, 8), 0).to(device)
    check_fusion(fusion, x, bias(8).to(device), ops.SwiGLU(), dtypes=[torch.float32, torch.float16])


@BOTH
def test_without_a_bias(fusion: type[sf.FusedOperation], device: torch.device):
    check_fusion(fusion, seeded_randn((2, 3, 6), 0).to(device), ops.ReGLU(), dtypes=[torch.bfloat16])


@pytest.mark.parametrize("unit", [ops.SwiGLU(), ops.GEGLU(), ops.GLU()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meet_in_the_records(unit: sf.Gated, dtype: torch.dtype, device: torch.device):
    fusions = (BiasGated, BiasGatedBackward)
    model = sf.Sequential(ops.Linear(12, 72), unit, ops.Linear(36, 9), fusions=fusions).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *fusions)


def test_an_activation_with_other_numbers_is_another_one(device: torch.device):
    x, acts = seeded_randn((3, 8), 0).to(device), cast(Any, (activations.scale(1.0), activations.scale(2.0)))
    one, two = (pointwise_of()(chain_of([("gated", act)]))(x)[0] for act in acts)
    assert torch.equal(two, 2 * one)


MUTANTS = {
    "stored without the bias": ("BiasGated", '"bias", "store", "gated"', '"store", "bias", "gated"'),
    "the sum of dy": ("BiasGatedBackward", '("dgated", "column_sum") if', '("column_sum", "dgated") if'),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_fusion_is_found(name: str, device: torch.device, mutant: Callable[..., ModuleType]):
    fusion, old, new = MUTANTS[name]
    changed = mutant(module, old, new)
    x = seeded_randn((5, 8), 0).to(device)
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(getattr(changed, fusion), x, bias(8).to(device), ops.SwiGLU(), dtypes=[torch.float32])

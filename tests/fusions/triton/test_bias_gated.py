"""Bias and a gated unit in one pass each way."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import ActivationLinearJoint, BiasGated, BiasGatedBackward, BiasGatedScale
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


PACKINGS = pytest.mark.parametrize("packing", ["interleaved", "up_gate"])
OTHERS = pytest.mark.parametrize("unit", [ops.QGEGLU(), ops.SReGLU(), ops.ClampedSwiGLU(0.75, 1.25, 0.5)], ids=str)


@BOTH
@PACKINGS
def test_gate_and_up_lie_anywhere(fusion: type[sf.FusedOperation], packing: Any, device: torch.device):
    x = seeded_randn((5, 10), 0).to(device)
    check_fusion(fusion, x, bias(10).to(device), ops.GEGLU(packing=packing), dtypes=[torch.float32, torch.bfloat16])


@BOTH
@OTHERS
def test_other_units(fusion: type[sf.FusedOperation], unit: sf.Gated, device: torch.device):
    x = seeded_randn((5, 10), 0).to(device)
    check_fusion(fusion, x, bias(10).to(device), unit, dtypes=[torch.float32, torch.float16])


@PACKINGS
def test_a_unit_of_two_functions_is_made_again_from_its_input(packing: Any, device: torch.device):
    x, unit = seeded_randn((5, 12), 0).to(device), ops.ClampedSwiGLU(0.75, 1.25, packing=packing)
    after = ops.Linear(6, 9, bias=False).to(device)
    check_fusion(ActivationLinearJoint, x, bias(12).to(device), unit, after, dtypes=[torch.float32, torch.bfloat16])


@pytest.mark.parametrize("packing", ["gate_up", "interleaved", "up_gate"])
@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no bias"])
def test_a_factor_for_each_token(packing: Any, biased: bool, device: torch.device):
    x, factors = seeded_randn((5, 10), 0).to(device), seeded_randn((5, 1), 1).to(device)
    before = [bias(10).to(device)] * biased
    listed = [*before, ops.SwiGLU(packing=packing), ops.TokenScale("by")]
    check_fusion(BiasGatedScale, x, *listed, by=factors, dtypes=[torch.float32, torch.bfloat16])


def test_a_factor_for_each_token_of_a_unit_of_two_functions(device: torch.device):
    x, factors = seeded_randn((5, 10), 0).to(device), seeded_randn((5, 1), 1).to(device)
    listed = bias(10).to(device), ops.ClampedSwiGLU(0.75, 1.25), ops.TokenScale("by")
    check_fusion(BiasGatedScale, x, *listed, by=factors, dtypes=[torch.float32, torch.float16])


def test_rows_that_several_tiles_sum(device: torch.device):
    x, factors = seeded_randn((9, 2600), 0).to(device), seeded_randn((9,), 1).to(device)
    listed = bias(2600).to(device), ops.SwiGLU(), ops.TokenScale("by")
    four_ways(sf.Sequential(*listed, fusions=(BiasGatedScale,)).to(device), x, BiasGatedScale, by=factors)

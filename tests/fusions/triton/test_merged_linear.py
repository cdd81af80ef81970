"""A MergedLinear and a gated unit in one GEMM that reads both weights where they are."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import ActivationLinearBackward, MergedLinearGated, gemm
from seqfuse.testing import check_fusion, seeded_randn

from .fourways import four_ways


def apart(width: int, half: int, bias: bool) -> ops.MergedLinear:
    return ops.MergedLinear.of(*(nn.Linear(width, half, bias) for _ in range(2)))


@pytest.mark.parametrize("bias", [True, False])
def test_takes_the_place_of_what_it_replaces(bias: bool, device: torch.device):
    x = seeded_randn((5, 6), 0).to(device)
    check_fusion(
        MergedLinearGated, x, apart(6, 5, bias).to(device), ops.SwiGLU(), dtypes=[torch.float32, torch.float16]
    )


def test_of_weights_in_one_storage_and_in_three_dimensions(device: torch.device):
    x = seeded_randn((2, 3, 7), 0).to(device)
    check_fusion(
        MergedLinearGated, x, ops.MergedLinear(7, (3, 3)).to(device), ops.GEGLU("tanh"), dtypes=[torch.bfloat16]
    )


def test_with_dropout_behind_it(device: torch.device):
    x = seeded_randn((5, 6), 0).to(device)
    check_fusion(
        MergedLinearGated, x, apart(6, 5, False).to(device), ops.SwiGLU(), ops.Dropout(0.3), dtypes=[torch.bfloat16]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meets_the_fused_backward_in_the_records(dtype: torch.dtype, device: torch.device):
    both = (MergedLinearGated, ActivationLinearBackward)
    model = sf.Sequential(apart(12, 36, True), ops.SwiGLU(), ops.Linear(36, 9), fusions=both).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *both)


@pytest.mark.parametrize(
    ("linear", "reason"),
    [
        (ops.MergedLinear(8, (4, 2, 2)), "a gated unit is made of two parts of one size"),
        (ops.MergedLinear(8, (4, 6)), "a gated unit is made of two parts of one size"),
        (ops.MergedLinear(8, (4, 4), (True, False)), "its parts must both have a bias, or none"),
        (ops.MergedLinear(8, (4, 4), dtype=torch.bfloat16), "input, weights and biases must have one dtype"),
    ],
    ids=str,
)
def test_says_why_not(linear: ops.MergedLinear, reason: str):
    plan = sf.Sequential(linear, ops.SwiGLU(), fusions=MergedLinearGated).plan(env=sf.Env(kernels="triton"))
    assert [refusal.reason for refusal in plan.refused] == [reason]


def test_weights_of_two_layouts_are_refused():
    linear = ops.MergedLinear(8, (4, 4), False)
    linear.weight_1 = nn.Parameter(torch.zeros(8, 4).t())
    plan = sf.Sequential(linear, ops.SwiGLU(), fusions=MergedLinearGated).plan(env=sf.Env(kernels="triton"))
    assert plan.refused[0].reason.startswith("the weights must be of one layout")


def test_a_layer_is_planned_as_with_one_weight():
    """Gate and up, and queries, keys and values: the same steps as with packed weights, forward and backward."""
    made = {"device": "meta", "dtype": torch.bfloat16}

    def steps(qkv: ops.Linear | ops.MergedLinear, gate_up: ops.Linear | ops.MergedLinear) -> list[int]:
        model = sf.Sequential(
            ops.Residual(
                ops.RMSNorm(512, **made), qkv, ops.RotaryEmbedding(8, 2, style="half", cos="cos", sin="sin"),
                ops.Attention(8, 2, causal=True), ops.Linear(512, 512, False, **made),
            ),
            ops.Residual(ops.RMSNorm(512, **made), gate_up, ops.SwiGLU(), ops.Linear(1024, 512, False, **made)),
        )  # fmt: skip
        plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192))
        return [len(plan.forward), len(plan.backward)]

    packed = steps(ops.Linear(512, 768, False, **made), ops.Linear(512, 2048, False, **made))
    merged = steps(
        ops.MergedLinear(512, (512, 128, 128), False, **made), ops.MergedLinear(512, (1024, 1024), False, **made)
    )
    assert merged == packed


MUTANTS = {
    "the weights swapped": ("(weight, up), (bias", "(up, weight), (bias"),
    "the gate's bias for both": ("up_bias=up_bias", "up_bias=bias"),
    "one weight kept": ("weights=self.linear.weights_for(x))", "weights=(weight, weight))"),
    "no dropout": ('{"dropout": mask(self.dropout, dropout_seed)', '{"dropout": None'),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(mutant: Callable[[ModuleType, str, str], ModuleType], name: str, device: torch.device):
    changed = mutant(gemm, *MUTANTS[name]).MergedLinearGated
    x, made = seeded_randn((5, 6), 0).to(device), (apart(6, 5, True).to(device), ops.SwiGLU(), ops.Dropout(0.3))
    with pytest.raises((AssertionError, sf.SeqfuseError)):
        check_fusion(changed, x, *made, dtypes=[torch.float32])

"""Linear, Bias and a gated unit in one Triton product, each way."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import _gemm, gated_linear, linear_gated
from seqfuse.fusions.gated_linear import GatedLinearBackward
from seqfuse.fusions.linear_gated import LinearGated, LinearGatedInference
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways

FORWARD = pytest.mark.parametrize("fusion", [LinearGated, LinearGatedInference], ids=lambda fusion: fusion.__name__)


def bias(width: int) -> ops.Bias:
    made = ops.Bias(width)
    torch.nn.init.normal_(made.bias)
    return made


@FORWARD
def test_takes_the_place_of_what_it_replaces(fusion: type[sf.FusedOperation], device: torch.device):
    x = seeded_randn((5, 6), 0).to(device)
    check_fusion(fusion, x, ops.Linear(6, 10).to(device), ops.SwiGLU(), dtypes=[torch.float32, torch.float16])


@FORWARD
def test_without_a_bias_and_in_three_dimensions(fusion: type[sf.FusedOperation], device: torch.device):
    x = seeded_randn((2, 3, 7), 0).to(device)
    check_fusion(fusion, x, ops.Linear(7, 6, bias=False).to(device), ops.ReGLU(), dtypes=[torch.bfloat16])


@FORWARD
def test_with_dropout_behind_it(fusion: type[sf.FusedOperation], device: torch.device):
    x = seeded_randn((5, 6), 0).to(device)
    list_ = ops.Linear(6, 10).to(device), ops.SwiGLU(), ops.Dropout(0.3)
    check_fusion(fusion, x, *list_, dtypes=[torch.float32, torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_with_dropout_meet_in_the_records(dtype: torch.dtype, device: torch.device):
    fusions = (LinearGated, GatedLinearBackward)
    list_ = ops.Linear(12, 72), ops.GEGLU(), ops.Dropout(0.2, "downscale_in_infer"), ops.Linear(36, 9)
    model = sf.Sequential(*list_, fusions=fusions).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *fusions)


def test_the_backward_takes_the_place_of_what_it_replaces(device: torch.device):
    x = seeded_randn((5, 8), 0).to(device)
    list_ = (bias(8).to(device), ops.SwiGLU(), ops.Linear(4, 9, bias=False).to(device))
    check_fusion(GatedLinearBackward, x, *list_, dtypes=[torch.float32, torch.float16])


def test_the_backward_without_a_bias_and_in_three_dimensions(device: torch.device):
    x = seeded_randn((2, 3, 6), 0).to(device)
    check_fusion(GatedLinearBackward, x, ops.GLU(), ops.Linear(3, 5, bias=False).to(device), dtypes=[torch.bfloat16])


@pytest.mark.parametrize("unit", [ops.SwiGLU(), ops.GEGLU(), ops.GEGLU("tanh"), ops.ReGLU(), ops.GLU()], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meet_in_the_records(unit: sf.Gated, dtype: torch.dtype, device: torch.device):
    fusions = (LinearGated, GatedLinearBackward)
    model = sf.Sequential(ops.Linear(12, 72), unit, ops.Linear(36, 9), fusions=fusions).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *fusions)


class Clamped(sf.Gated):
    unit = ops.SiLU

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return super().reference(x).clamp(-1, 1)


def test_a_gated_unit_of_another_kind_is_refused():
    fusion = LinearGated(linear=ops.Linear(8, 8, bias=False), bias=None, gated=Clamped(), dropout=None)
    reasons = [sentence for holds, sentence in fusion.requires(sf.Env(triton=True)) if not holds]
    assert reasons == ["Clamped states a gated unit of its own"]


MUTANTS = {
    "halves swapped": ("LinearGated", "gated.Saved(x=packed)", "gated.Saved(x=packed.flip(-1))"),
    "no bias in inference": ("LinearGatedInference", "x, weight_of(self.linear), bias_of(self.bias)",
                             "x, weight_of(self.linear), None"),
    "nothing dropped": ("LinearGated", "store_pre=True, dropout=drop", "store_pre=True, dropout=None"),
    "the seed not kept": ("LinearGated", "self.bias, self.dropout, dropout_seed)", "self.bias, self.dropout, None)"),
    "nothing dropped in inference": ("LinearGatedInference", "act=act, dropout=drop", "act=act, dropout=None"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_forward_is_found(name: str, device: torch.device, mutant: Callable[..., ModuleType]):
    fusion, old, new = MUTANTS[name]
    changed = getattr(mutant(linear_gated, old, new), fusion)
    x = seeded_randn((5, 6), 0).to(device)
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(changed, x, ops.Linear(6, 10).to(device), ops.SwiGLU(), ops.Dropout(0.3), dtypes=[torch.float32])


@pytest.mark.parametrize("drop", [(), (ops.Dropout(0.3),)], ids=["alone", "dropout before the product"])
def test_the_gradient_takes_the_place_of_the_operations(drop: tuple[ops.Dropout, ...], device: torch.device):
    list_ = (bias(8).to(device), ops.SwiGLU(), *drop, ops.Linear(4, 9, bias=False).to(device))
    check_fusion(GatedLinearBackward, seeded_randn((5, 8), 0).to(device), *list_, dtypes=[torch.float32])


BACKWARD_MUTANTS = {
    "halves swapped": ("t=record.x, **around", "t=record.x.roll(linear.weight.shape[1], -1), **around"),
    "no mask": ("mask(dropout, dropped.seed, dropped.p)", "None"),
}


@pytest.mark.parametrize("name", BACKWARD_MUTANTS)
def test_a_wrong_backward_is_found(
    name: str, device: torch.device, mutant: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gated_linear, "unit_bwd", mutant(_gemm, *BACKWARD_MUTANTS[name]).unit_bwd)
    list_ = (bias(8).to(device), ops.SwiGLU(), ops.Dropout(0.3), ops.Linear(4, 9, bias=False).to(device))
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(GatedLinearBackward, seeded_randn((5, 8), 0).to(device), *list_, dtypes=[torch.float32])

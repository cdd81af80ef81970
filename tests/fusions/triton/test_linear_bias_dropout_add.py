"""Linear, Bias, Dropout and Add in one Triton product."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import LinearBiasDropoutAdd, gemm
from seqfuse.testing import assert_bitwise_equal, check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways


def test_takes_the_place_of_what_it_replaces(device: torch.device):
    x = seeded_randn((5, 6), 0).to(device)
    list_ = (ops.Linear(6, 8).to(device), ops.Dropout(0.3), ops.Add("other"))
    check_fusion(LinearBiasDropoutAdd, x, *list_, dtypes=[torch.float32])


@pytest.mark.parametrize(
    ("bias", "drop"),
    [
        (True, ()),
        (False, ()),
        (False, (ops.Dropout(0.2, "downscale_in_infer"),)),
        (True, (ops.Dropout(1.0),)),
        (True, (ops.Dropout(0.3).eval(),)),
    ],
    ids=["no dropout", "neither", "downscale_in_infer", "all", "evaluation"],
)
def test_in_its_other_forms(bias: bool, drop: tuple[ops.Dropout, ...], device: torch.device):
    x = seeded_randn((2, 3, 7), 0).to(device)
    list_ = (ops.Linear(7, 5, bias=bias).to(device), *drop, ops.Add("other"))
    check_fusion(LinearBiasDropoutAdd, x, *list_, dtypes=[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [36, 13])
def test_in_a_residual(dtype: torch.dtype, width: int, device: torch.device):
    inner = (ops.Linear(width, 20), ops.SiLU(), ops.Linear(20, width), ops.Dropout(0.4))
    model = sf.Sequential(ops.Residual(*inner), ops.Tanh(), fusions=LinearBiasDropoutAdd).to(device, dtype)
    four_ways(model, seeded_randn((19, width), 0, dtype=dtype).to(device), LinearBiasDropoutAdd)


def test_the_mask_is_that_of_the_operations(device: torch.device):
    model = sf.Sequential(
        ops.Linear(8, 40, bias=False), ops.Dropout(0.5), ops.Add("other"), fusions=LinearBiasDropoutAdd
    ).to(device)
    x, other = seeded_randn((70, 8), 0).to(device), torch.zeros(70, 40, device=device)
    kept = []
    for enabled in (True, False):
        torch.manual_seed(0)
        with sf.fusing(enabled):
            assert model.plan(x, other=other).count("LinearBiasDropoutAdd") == enabled
            kept.append(model(x, other=other) != 0)
    assert_bitwise_equal(*kept)


def test_a_float32_residual_stays_one(device: torch.device):
    model = sf.Sequential(ops.Linear(8, 6), ops.Add("other"), fusions=LinearBiasDropoutAdd).to(device, torch.bfloat16)
    x, other = seeded_randn((5, 8), 0, dtype=torch.bfloat16).to(device), seeded_randn((5, 6), 1).to(device)
    assert model.plan(x, other=other).count("LinearBiasDropoutAdd") == 1
    with sf.fusing(on_error="raise"):
        assert model(x, other=other).dtype == torch.float32


def test_dropout_that_is_a_scale_is_refused(device: torch.device):
    drop = ops.Dropout(0.2, "downscale_in_infer")
    model = sf.Sequential(ops.Linear(8, 6), drop, ops.Add("other"), fusions=LinearBiasDropoutAdd).to(device).eval()
    plan = model.plan(seeded_randn((5, 8), 0).to(device), other=seeded_randn((5, 6), 1).to(device))
    assert [refusal.reason for refusal in plan.refused] == ["in evaluation this Dropout is a scale"]


def test_shapes_that_do_not_fit_are_an_error_of_add(device: torch.device):
    model = sf.Sequential(ops.Linear(8, 6), ops.Add("other"), fusions=LinearBiasDropoutAdd).to(device)
    x, other = seeded_randn((5, 8), 0).to(device), seeded_randn((6,), 1).to(device)
    with pytest.raises(sf.InputError, match="adds tensors of one shape"), sf.fusing(on_error="raise"):
        model(x, other=other)


MUTANTS = {
    "no residual": ("residual=add_other, dtype=dtype", "residual=None, dtype=dtype"),
    "another mask": ("dropout = mask(self.dropout, dropout_seed)", "dropout = mask(self.dropout, dropout_seed + 1)"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_fusion_is_found(name: str, device: torch.device, mutant: Callable[..., ModuleType]):
    changed = mutant(gemm, *MUTANTS[name])
    x = seeded_randn((5, 6), 0).to(device)
    list_ = (ops.Linear(6, 8).to(device), ops.Dropout(0.3), ops.Add("other"))
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(changed.LinearBiasDropoutAdd, x, *list_, dtypes=[torch.float32])


def test_another_scale_is_found(
    device: torch.device, mutant: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
):
    changed = mutant(gemm, 'dropout.mode == "upscale_in_train")', "False)")
    monkeypatch.setattr(gemm, "mask", changed.mask)
    list_ = (ops.Linear(6, 8).to(device), ops.Dropout(0.3), ops.Add("other"))
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(LinearBiasDropoutAdd, seeded_randn((5, 6), 0).to(device), *list_, dtypes=[torch.float32])

"""Bias, Dropout and Add in one pass each way."""

from __future__ import annotations

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import BiasDropoutAdd, BiasDropoutAddBackward
from seqfuse.testing import check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways

BOTH = pytest.mark.parametrize("fusion", [BiasDropoutAdd, BiasDropoutAddBackward], ids=lambda fusion: fusion.__name__)


def bias(width: int) -> ops.Bias:
    made = ops.Bias(width)
    torch.nn.init.normal_(made.bias)
    return made


@BOTH
def test_takes_the_place_of_what_it_replaces(fusion: type[sf.FusedOperation], device: torch.device):
    x = seeded_randn((5, 8), 0).to(device)
    check_fusion(fusion, x, bias(8).to(device), ops.Dropout(0.3), ops.Add("other"), dtypes=[torch.float32])


@BOTH
@pytest.mark.parametrize(
    "list_",
    [(ops.Dropout(0.3, "downscale_in_infer"),), (ops.Dropout(0.2, "downscale_in_infer"), ops.Add("other"))],
    ids=["dropout alone", "no bias"],
)
def test_in_its_other_forms(
    fusion: type[sf.FusedOperation], list_: tuple[sf.UnfusedOperation, ...], device: torch.device
):
    check_fusion(fusion, seeded_randn((2, 3, 4), 0).to(device), *list_, dtypes=[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [36, 13])
def test_meet_in_the_records(dtype: torch.dtype, width: int, device: torch.device):
    fusions = (BiasDropoutAdd, BiasDropoutAddBackward)
    inner = (ops.Linear(width, width), ops.Dropout(0.4))
    model = sf.Sequential(ops.Residual(*inner), ops.Tanh(), fusions=fusions).to(device, dtype)
    four_ways(model, seeded_randn((19, width), 0, dtype=dtype).to(device), *fusions)


@pytest.mark.parametrize("drop", [ops.Dropout(0.3).eval(), ops.Dropout(0.0)], ids=["evaluation", "p = 0"])
def test_is_refused_where_nothing_is_dropped(drop: ops.Dropout):
    fusion = BiasDropoutAdd(bias=None, dropout=drop, add=None)
    assert [why for holds, why in fusion.requires(sf.Env(kernels="triton")) if not holds] == ["nothing is dropped here"]


@pytest.mark.parametrize("norm", [(), (ops.LayerNorm(8, dtype=torch.float64),)], ids=["", "before a norm"])
def test_a_sum_in_float64_is_left_to_the_operations(norm: tuple[ops.LayerNorm, ...], device: torch.device):
    model = sf.Sequential(bias(8), ops.Dropout(0.3), ops.Add("other"), *norm).to(device)

    def passes() -> list[torch.Tensor]:
        x, other = seeded_randn((5, 8), 0).to(device), seeded_randn((5, 8), 1, dtype=torch.float64).to(device)
        torch.manual_seed(0)
        y = model(x.requires_grad_(), other=other.requires_grad_())
        return [y, *torch.autograd.grad(y.square().sum(), (x, other, *model.parameters()))]

    x = seeded_randn((5, 8), 0).to(device)
    assert model.plan(x, other=x).forward[0].name in ("BiasDropoutAdd", "BlockBoundary")
    fused = passes()
    with sf.fusing(False):
        unfused = passes()
    torch.testing.assert_close(fused[0], unfused[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(fused[1:], unfused[1:])

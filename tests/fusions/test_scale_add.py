"""Scale and Add in one pass."""

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import check_fusion, seeded_randn


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 7)], ids=str)
def test_takes_the_place_of_what_it_replaces(shape: tuple[int, ...]):
    check_fusion(fusions.ScaleAdd, seeded_randn(shape, 0), ops.Scale(-0.3), ops.Add("other"))


@pytest.mark.parametrize(("x", "other"), [
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64),
], ids=str)  # fmt: skip
def test_dtypes_promote_as_in_torch(x: torch.dtype, other: torch.dtype):
    model = sf.Sequential(ops.Scale(0.3), ops.Add("other"))
    a, b = seeded_randn((5, 6), 0, dtype=x), seeded_randn((5, 6), 1, dtype=other)
    y = model(a, other=b)
    assert y.dtype == torch.promote_types(x, other)
    torch.testing.assert_close(y, (a * 0.3 + b), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_factor_is_not_rounded_to_16_bits(dtype: torch.dtype):
    model = sf.Sequential(ops.Residual(ops.Scale(0.7)))
    x = seeded_randn((64, 64), 0, dtype=dtype)
    assert model.plan(x).fused == (1, 0)
    error = (model(x).double() - 1.7 * x.double()) * x.sign()
    assert abs(error.mean()) < 0.05 * torch.finfo(dtype).eps  # with rounded factors 0.11 and 0.2


def test_whole_numbers_are_scaled_to_parts_of_them():
    x, other = torch.arange(4), torch.tensor([3, 0, -1, 2])
    model = sf.Sequential(ops.Scale(0.3), ops.Add("other"))
    with sf.fusing(on_error="raise"):
        torch.testing.assert_close(model(x, other=other), x * 0.3 + other)


def test_scales_the_branch_of_a_residual():
    model = sf.Sequential(ops.Residual(ops.GeLU(), ops.Scale(0.5)))
    assert model.plan(seeded_randn((5, 6), 0)).count("ScaleAdd") == 1


@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
def test_another_shape_is_the_error_of_the_add():
    model = sf.Sequential(ops.Scale(0.3), ops.Add("other"))
    with pytest.raises(sf.InputError, match="adds tensors of one shape"):
        model(seeded_randn((5, 6), 0), other=torch.ones(6))

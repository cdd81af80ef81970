"""Linear, Bias and a residual sum in place."""

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import assert_bitwise_equal, check_fusion, seeded_randn


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 7)], ids=str)
def test_takes_the_place_of_what_it_replaces(shape: tuple[int, ...], bias: bool):
    linear = ops.Linear(shape[-1], 4, bias=bias)
    check_fusion(fusions.LinearBiasAdd, seeded_randn(shape, 0), linear, ops.Add("other"))


def test_closes_a_residual():
    model = sf.Sequential(ops.Residual(ops.LayerNorm(6), ops.Linear(6, 8), ops.GeLU(), ops.Linear(8, 6)))
    x = seeded_randn((5, 6), 0)
    assert model.plan(x).count("LinearBiasAdd") == 1
    y = model(x)
    with sf.fusing(only=[fusions.LinearBias]):
        assert_bitwise_equal(y.detach(), model(x).detach())


def test_leaves_the_residual_as_it_was():
    model = sf.Sequential(ops.Linear(6, 8), ops.Add("other"))
    x, other = seeded_randn((5, 6), 0), seeded_randn((5, 8), 1)
    before = other.clone()
    model(x, other=other)
    assert_bitwise_equal(other, before)


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_keeps_the_dtype_of_the_residual(other: torch.dtype):
    model = sf.Sequential(ops.Linear(6, 8), ops.Add("other"))
    x, residual = seeded_randn((5, 6), 0), seeded_randn((5, 8), 1, dtype=other)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.plan(x, other=residual).count("LinearBiasAdd") == 1
        y = model(x, other=residual)
        with sf.fusing(only=[fusions.LinearBias]):
            expected = model(x, other=residual)
    assert y.dtype == other
    assert_bitwise_equal(y.detach(), expected.detach())


@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
def test_another_shape_is_the_error_of_the_add():
    model = sf.Sequential(ops.Linear(6, 8), ops.Add("other"))
    with pytest.raises(sf.InputError, match="adds tensors of one shape"):
        model(seeded_randn((5, 6), 0), other=torch.ones(8))

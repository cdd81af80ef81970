"""GeLU, exact and by tanh."""

import math

import pytest
import torch
from torch import nn

from seqfuse import ops
from seqfuse.testing import in_regime, seeded_randn

from .passes import check_passes, check_twin


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_is_that_of_torch_bit_for_bit(dtype: torch.dtype, approximate: str):
    check_twin(ops.GeLU(approximate), nn.GELU(approximate), seeded_randn((9, 7), 0, dtype=dtype))


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_agrees_over_a_wide_range(dtype: torch.dtype, approximate: str):
    check_passes(ops.GeLU(approximate), in_regime("heavy", (17, 19), 0, dtype=dtype))


def test_the_two_forms_differ():
    x = torch.linspace(-5, 5, 10_001, dtype=torch.float64)
    gap = (ops.GeLU().fwd(x)[0] - ops.GeLU("tanh").fwd(x)[0]).abs().max().item()
    assert 4.6e-4 < gap < 4.8e-4


def test_values_are_those_of_the_formula():
    x = torch.tensor([-2.0, -0.5, 0.0, 1.5], dtype=torch.float64)
    exact = [t * (1 + math.erf(t / math.sqrt(2))) / 2 for t in x.tolist()]
    torch.testing.assert_close(ops.GeLU().fwd(x)[0].tolist(), exact)


def test_both_spellings_are_one_class():
    assert ops.GELU is ops.GeLU
    assert repr(ops.GELU("tanh")) == "GeLU(approximate='tanh')"


def test_refuses_an_unknown_form():
    with pytest.raises(ValueError, match="approximate must be"):
        ops.GeLU("erf")

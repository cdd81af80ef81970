"""ReLU."""

import math

import pytest
import torch
from torch import nn

from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, seeded_randn

from .passes import check_twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_is_that_of_torch_bit_for_bit(dtype: torch.dtype):
    check_twin(ops.ReLU(), nn.ReLU(), seeded_randn((9, 7), 0, dtype=dtype))


def test_saves_its_output_alone():
    y, saved = ops.ReLU().fwd(seeded_randn((3, 4), 0))
    assert saved.fields == ("y",)
    assert saved.y is y


def test_nan_passes_and_zero_has_no_slope():
    x = torch.tensor([math.nan, -math.inf, -1.0, -1e-38, 0.0, 2.0, math.inf])
    op = ops.ReLU()
    y, saved = op.fwd(x)
    dx, _ = op.bwd(torch.full_like(x, 3.0), saved)
    assert_bitwise_equal({"y": y, "dx": dx}, {
        "y": torch.tensor([math.nan, 0.0, 0.0, 0.0, 0.0, 2.0, math.inf]),
        "dx": torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0, 3.0, 3.0]),
    })  # fmt: skip


def test_the_derivative_by_the_output_is_that_of_the_backward():
    op = ops.ReLU()
    y = op.fwd(torch.cat((seeded_randn((50,), 0), torch.tensor([math.nan, 0.0]))))[0]
    assert_bitwise_equal(op.derivative_reference(y), op.bwd(torch.ones_like(y), op.Saved(y=y))[0])

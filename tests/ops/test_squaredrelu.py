"""Squared ReLU."""

import math

import torch

from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal


def test_a_gradient_of_inf_is_dropped_where_it_is_off():
    x = torch.tensor([-3.0, 0.0, 0.5, math.nan])
    op = ops.SquaredReLU()
    dx, _ = op.bwd(torch.full_like(x, math.inf), op.Saved(x=x))
    assert_bitwise_equal(dx, torch.tensor([0.0, 0.0, math.inf, math.nan]))


def test_squares_what_is_positive():
    x = torch.tensor([-3.0, -0.1, 0.5, 3.0, math.nan])
    op = ops.SquaredReLU()
    y, saved = op.fwd(x)
    dx, _ = op.bwd(torch.tensor([1.0, 1.0, -2.0, 0.25, 1.0]), saved)
    assert_bitwise_equal({"y": y, "dx": dx}, {
        "y": torch.tensor([0.0, 0.0, 0.25, 9.0, math.nan]),
        "dx": torch.tensor([0.0, 0.0, -2.0, 1.5, math.nan]),
    })  # fmt: skip

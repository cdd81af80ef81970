"""Squared ReLU."""

import math

import torch

from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal


def test_squares_what_is_positive():
    x = torch.tensor([-3.0, -0.1, 0.5, 3.0, math.nan])
    op = ops.SquaredReLU()
    y, saved = op.fwd(x)
    dx, _ = op.bwd(torch.tensor([1.0, 1.0, -2.0, 0.25, 1.0]), saved)
    assert_bitwise_equal({"y": y, "dx": dx}, {
        "y": torch.tensor([0.0, 0.0, 0.25, 9.0, math.nan]),
        "dx": torch.tensor([0.0, 0.0, -2.0, 1.5, math.nan]),
    })  # fmt: skip

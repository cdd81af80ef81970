"""Scale."""

import torch

from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, seeded_randn


def test_multiplies_both_passes_by_the_factor():
    op, x = ops.Scale(-0.3), seeded_randn((3, 5), 0)
    y, saved = op.fwd(x)
    assert_bitwise_equal(y, x * -0.3)
    assert_bitwise_equal(op.bwd(x, saved)[0], x * -0.3)
    assert not op.state_dict()
    assert repr(op) == "Scale(factor=-0.3)"


def test_a_factor_changed_between_the_passes_does_no_harm():
    op, x = ops.Scale(2), seeded_randn((3, 5), 0)
    _, saved = op.fwd(x)
    op.factor = 7.0
    assert_bitwise_equal(op.bwd(x, saved)[0], 2 * x)


def test_keeps_the_dtype_of_half_inputs():
    assert ops.Scale(0.1).fwd(torch.ones(2, dtype=torch.bfloat16))[0].dtype == torch.bfloat16

"""Fork."""

import torch

from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, seeded_randn


def test_hands_on_x_twice_and_adds_the_gradients():
    op, x = ops.Fork(), seeded_randn((3, 5), 0)
    y, outputs, saved = op.fwd(x)
    assert y is x
    assert outputs == {"out": x}
    dy, d_out = seeded_randn((3, 5), 1), seeded_randn((3, 5), 2)
    dx, grads = op.bwd(dy, saved, d_out=d_out)
    assert_bitwise_equal(dx, dy + d_out)
    assert grads == {}


def test_takes_a_gradient_from_one_side_alone():
    op, d = ops.Fork(), torch.ones(2)
    assert op.bwd(d, op.Saved(), d_out=None)[0] is d
    assert op.bwd(None, op.Saved(), d_out=d)[0] is d
    assert op.bwd(None, op.Saved(), d_out=None)[0] is None


def test_its_name_is_the_channel():
    assert ops.Fork().channels == {"out": None}
    assert ops.Fork("skip").channels == {"out": "skip"}
    assert (repr(ops.Fork()), repr(ops.Fork("skip"))) == ("Fork()", "Fork('skip')")

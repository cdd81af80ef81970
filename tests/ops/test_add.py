"""Add."""

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, seeded_randn


def test_adds_and_hands_dy_to_both():
    op, x, other = ops.Add(), seeded_randn((3, 5), 0), seeded_randn((3, 5), 1)
    y, saved = op.fwd(x, other=other)
    assert_bitwise_equal(y, x + other)
    dy = torch.ones(3, 5)
    dx, grads = op.bwd(dy, saved, needs=frozenset({"x", "other"}))
    assert_bitwise_equal({"dx": dx, **grads}, {"dx": dy, "other": dy})


@pytest.mark.parametrize(("x", "other"), [((3, 5), (5,)), ((3, 5), (3, 1)), ((5,), (3, 5)), ((1, 5), (3, 5))], ids=str)
def test_broadcasts_nothing(x: tuple[int, ...], other: tuple[int, ...]):
    for call in (ops.Add().fwd, ops.Add().reference):
        with pytest.raises(sf.errors.InputError, match="SF101 Add: adds tensors of one shape, got") as caught:
            call(torch.ones(x), other=torch.ones(other))
        assert caught.value.code == "SF101"


@pytest.mark.parametrize(("x", "other"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_dtypes_promote_as_in_torch(x: torch.dtype, other: torch.dtype):
    for pair in ((x, other), (other, x)):
        assert ops.Add().fwd(torch.ones(2, dtype=pair[0]), other=torch.ones(2, dtype=pair[1]))[0].dtype == other


def test_its_name_is_the_channel():
    assert ops.Add().channels == {"other": None}
    assert ops.Add("skip").channels == {"other": "skip"}
    assert (repr(ops.Add()), repr(ops.Add("skip"))) == ("Add()", "Add('skip')")

"""Transpose."""

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import check_op, seeded_randn


@pytest.mark.parametrize("dims", [(1, 2), (-1, -2), (0, 2), (1, 1), (-3, 1)], ids=str)
def test_keeps_its_contract(dims: tuple[int, int]):
    x = seeded_randn((5, 3, 4), 0)
    check_op(ops.Transpose(*dims), x)
    assert torch.equal(ops.Transpose(*dims)(x), x.transpose(*dims))


def test_a_mixer_is_that_of_torch():
    model = sf.Sequential(
        ops.Residual(
            ops.LayerNorm(6), ops.Transpose(1, 2), ops.Linear(4, 9), ops.GeLU(), ops.Linear(9, 4), ops.Transpose(1, 2)
        ),
        ops.Residual(ops.LayerNorm(6), ops.Linear(6, 9), ops.GeLU(), ops.Linear(9, 6)),
    )
    x, (tokens, channels) = seeded_randn((2, 4, 6), 0).requires_grad_(), model
    norm, _, up, act, down, _ = tokens
    expected = x + down(act(up(norm(x).transpose(1, 2)))).transpose(1, 2)
    expected = expected + channels[3](channels[2](channels[1](channels[0](expected))))
    leaves, y, dy = [x, *model.parameters()], model(x), seeded_randn((2, 4, 6), 1)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy))


def test_a_dimension_that_is_not_there_is_refused():
    with pytest.raises(sf.InputError, match=r"position 1 \(Transpose\): swaps dimensions 1 and 2, got shape \(5, 6\)"):
        sf.Sequential(ops.ReLU(), ops.Transpose(1, 2))(torch.zeros(5, 6))
    assert repr(ops.Transpose(1, 2)) == "Transpose(1, 2)"

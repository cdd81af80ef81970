"""Reshape and Transpose."""

from __future__ import annotations

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn

from .passes import check_passes


@pytest.mark.parametrize(("op", "shape", "expected"), [
    (ops.Reshape(2, 3), (4, 6), (4, 2, 3)),
    (ops.Reshape(-1, 3), (4, 5, 6), (4, 5, 2, 3)),
    (ops.Reshape(6, dims=2), (4, 2, 3), (4, 6)),
    (ops.Reshape(-1, dims=3), (4, 2, 3), (24,)),
    (ops.Reshape(3, 2, dims=2), (5, 2, 3), (5, 3, 2)),
    (ops.Reshape(1, -1), (0, 6), (0, 1, 6)),
    (ops.Reshape(3, -1), (2, 0), (2, 3, 0)),
], ids=str)  # fmt: skip
def test_replaces_trailing_dimensions(op: ops.Reshape, shape: tuple[int, ...], expected: tuple[int, ...]):
    x = seeded_randn(shape, 0)
    assert op.infer(shape) == expected
    y, saved = op.fwd(x)
    assert_bitwise_equal(y, x.reshape(expected))
    assert_bitwise_equal(op.bwd(y, saved)[0], x)


def test_agrees_on_a_transposed_input():
    check_passes(ops.Reshape(12, dims=2), seeded_randn((5, 3, 4), 0).transpose(1, 2))


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

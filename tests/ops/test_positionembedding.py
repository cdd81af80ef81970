"""PositionEmbedding: which positions it takes."""

from __future__ import annotations

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import seeded_randn


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_positions_are_integers_of_any_kind(dtype: torch.dtype):
    op, x = ops.PositionEmbedding(6, 8, positions="at"), seeded_randn((2, 4, 8), 0)
    at = torch.tensor([1, 0, 5, 1])
    y = sf.Sequential(op)(x, at=at.to(dtype))
    torch.testing.assert_close(y, x + op.weight[at])
    dy = seeded_randn((2, 4, 8), 1)
    (got,) = torch.autograd.grad(y, op.weight, dy)
    torch.testing.assert_close(got, torch.zeros(6, 8).index_add_(0, at, dy.sum(0)))
    torch.testing.assert_close(op.reference(x, position_ids=at.to(dtype)), y)


@pytest.mark.parametrize(
    ("at", "code", "message"),
    [
        (torch.tensor([True, False, True, True]), "SF101", r"numbers, got torch\.bool"),
        (torch.tensor([0.0, 1.0, 2.0, 3.0]), "SF101", r"integer positions, got torch\.float32"),
        (torch.tensor([0, -1, 2, 3]), "SF107", r"positions from 0 to 5, got -1"),
        (torch.tensor([0, 1, 6, 3]), "SF107", r"positions from 0 to 5, got 6"),
        (torch.tensor([0, 1, 2]), "SF101", r"broadcast to \(2, 4\), got \(3,\)"),
    ],
    ids=str,
)
def test_others_are_one_error_before_anything_runs(at: torch.Tensor, code: str, message: str):
    model, x = sf.Sequential(ops.PositionEmbedding(6, 8, positions="at")), seeded_randn((2, 4, 8), 0)
    with pytest.raises(sf.InputError, match=rf"{code} position 0 \(PositionEmbedding\): expects .*{message}"):
        model(x, at=at)
    with pytest.raises(sf.InputError, match=message):
        model[0].reference(x, position_ids=at)


def test_a_rotation_s_positions_are_numbers():
    model = sf.Sequential(ops.RotaryEmbedding(1, style="half", positions="at"))
    x = seeded_randn((4, 12), 0)
    torch.testing.assert_close(model(x, at=torch.arange(4, dtype=torch.uint8)), model(x, at=torch.arange(4.0)))
    with pytest.raises(sf.InputError, match=r"SF101 position 0 \(RotaryEmbedding\): expects positions.*bool"):
        model(x, at=torch.ones(4, dtype=torch.bool))

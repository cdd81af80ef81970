"""Sigmoid."""

import pytest
import torch
from torch import nn

from seqfuse import ops
from seqfuse.testing import in_regime, seeded_randn

from .passes import check_passes, check_twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_is_that_of_torch_bit_for_bit(dtype: torch.dtype):
    check_twin(ops.Sigmoid(), nn.Sigmoid(), seeded_randn((9, 7), 0, dtype=dtype))


def test_saves_its_output_alone():
    y, saved = ops.Sigmoid().fwd(seeded_randn((3, 4), 0))
    assert saved.fields == ("y",)
    assert saved.y is y


def test_saturates_without_nan():
    check_passes(ops.Sigmoid(), 40 * in_regime("normal", (9, 7), 0))


def test_the_derivative_by_the_output_is_that_of_the_backward():
    op = ops.Sigmoid()
    y = op.fwd(seeded_randn((50,), 0))[0]
    torch.testing.assert_close(op.derivative_reference(y), op.bwd(torch.ones_like(y), op.Saved(y=y))[0])

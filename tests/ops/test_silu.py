"""SiLU."""

import pytest
import torch
from torch import nn

from seqfuse import ops
from seqfuse.testing import in_regime, seeded_randn

from .passes import check_passes, check_twin


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_is_that_of_torch_bit_for_bit(dtype: torch.dtype):
    check_twin(ops.SiLU(), nn.SiLU(), seeded_randn((9, 7), 0, dtype=dtype))


def test_saves_its_input_alone():
    x = seeded_randn((3, 4), 0)
    _, saved = ops.SiLU().fwd(x)
    assert saved.fields == ("x",)
    assert saved.x is x


def test_agrees_far_from_zero():
    check_passes(ops.SiLU(), 40 * in_regime("normal", (9, 7), 0))

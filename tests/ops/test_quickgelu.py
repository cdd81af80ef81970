"""QuickGeLU."""

import math

import pytest
import torch

from seqfuse import ops
from seqfuse.testing import in_regime

from .passes import check_passes


def test_values_are_those_of_the_formula():
    x = torch.tensor([-2.0, -0.5, 0.0, 1.5], dtype=torch.float64)
    torch.testing.assert_close(ops.QuickGeLU().fwd(x)[0].tolist(), [t / (1 + math.exp(-1.702 * t)) for t in x.tolist()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("regime", ["heavy", "offset"])
def test_agrees_over_a_wide_range(regime: str, dtype: torch.dtype):
    check_passes(ops.QuickGeLU(), in_regime(regime, (33, 19), 0, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_at_the_largest_numbers_is_a_number(dtype: torch.dtype):
    x = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype)
    act = ops.QuickGeLU()
    dx, _ = act.bwd(torch.tensor([-0.5, -0.5], dtype=dtype), act.fwd(x)[1])
    assert dx.tolist() == [-0.5, 0.0]

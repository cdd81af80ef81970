"""Permutation of tokens to experts and the router in C, beyond `tests/kernels/test_permute.py`."""

from __future__ import annotations

import pytest
import torch

from seqfuse import ops
from seqfuse.kernels.c.permute import sorted_pairs
from seqfuse.testing import assert_bitwise_equal


@pytest.mark.parametrize("shape", [(40, 3), (2, 5, 1), (0, 2), (7,)], ids=str)
def test_pairs_are_sorted_by_expert(shape: tuple[int, ...]) -> None:
    experts = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(0))
    _, rows, ends = ops.Permute(5, 2).sorted(experts)
    assert_bitwise_equal(sorted_pairs(experts, 5), (rows, ends))
    dropped = torch.where(experts == 2, torch.tensor(-7), experts * 3)  # without an expert: -7, 6, 9 and 12
    found, ends = sorted_pairs(dropped, 5)
    assert ends[-1] == int(((dropped >= 0) & (dropped < 5)).sum())
    assert sorted(found.flatten().tolist()) == list(range(experts.numel()))
    assert bool(((found < ends[-1]) == ((dropped >= 0) & (dropped < 5))).all())

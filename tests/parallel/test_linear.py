"""Column and row products over several processes: outputs and all gradients are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import seqfuse as sf
from seqfuse import ops

from .processes import Facts, assert_same, copy_shares, draw, randomize


def pair(group: Any = None, *, bias: bool = True, bias_last: bool = True, **rest: Any) -> sf.Sequential:
    """Up and down again: whole, or divided over a group."""
    column: dict[str, Any] = {} if group is None else {"parallel": "column", "group": group}
    row: dict[str, Any] = {} if group is None else {"parallel": "row", "group": group, "bias_last": bias_last}
    model = sf.Sequential(
        ops.Linear(6, 8, bias, dtype=torch.float64, **column),
        ops.GeLU(),
        ops.Linear(8, 6, bias, dtype=torch.float64, **row),
        ops.Tanh(),
        **rest,
    )
    if group is None:
        randomize(model)
    else:
        copy_shares(model, pair(bias=bias))
    return model


def divided_equals_whole() -> None:
    for bias in (True, False):
        for bias_last in (True, False):
            for shape in ((5, 6), (2, 3, 6), (6,), (1, 6)):
                assert_same(pair(dist.group.WORLD, bias=bias, bias_last=bias_last), pair(bias=bias), draw(*shape))


def unfused_equals_fused() -> None:
    for bias_last in (True, False):
        with sf.fusing(False):
            assert_same(pair(dist.group.WORLD, bias_last=bias_last), pair(), draw(5, 6))


def exact_numbers_are_exact() -> None:
    """Small integers leave no rounding: not one bit differs, wherever the bias stands."""
    for bias_last in (True, False):
        group = dist.group.WORLD
        whole, model = pair(), pair(group, bias_last=bias_last)
        whole[1], model[1] = ops.ReLU(), ops.ReLU()
        whole[3], model[3] = ops.Identity(), ops.Identity()
        for i, p in enumerate(whole.parameters()):
            p.data = draw(*p.shape, seed=i).mul(4).round()
        copy_shares(model, whole)
        x = draw(5, 6).mul(4).round()
        assert torch.equal(model(x), whole(x))


FACTS = Facts({2: [divided_equals_whole, unfused_equals_fused, exact_numbers_are_exact]})


@pytest.mark.parametrize(("world", "work"), FACTS.cases)
def test_in_several_processes(world: int, work: str) -> None:
    FACTS.check(world, work)

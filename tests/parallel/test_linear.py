"""Column- and row-parallel GEMMs over several processes: outputs and all gradients equal those of one process."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import AllReduceLinearBackward, LinearBias
from tests.processes import Facts
from tests.watching import Calls

from .sharded import assert_same, copy_shares, draw, randomize, results, share_of


def pair(group: Any = None, *, bias: bool = True, bias_last: bool = True, **rest: Any) -> sf.Sequential:
    """Up and down again: whole, or sharded over a group."""
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


def references_agree() -> None:
    for bias_last in (True, False):
        with torch.autograd.forward_ad.dual_level():
            assert_same(pair(dist.group.WORLD, bias_last=bias_last), pair(), draw(5, 6))


def a_list_by_hand_sums_gradients_where_rows_are_shares() -> None:
    def listed(group: Any = None, bias_last: bool = True) -> sf.Sequential:
        across: list[dict[str, Any]] = [{}, {}]
        if group is not None:
            across = [{"parallel": way, "group": group, "sequence_dim": 0} for way in ("column", "row")]
            across[1]["bias_last"] = bias_last
        model = sf.Sequential(
            ops.LayerNorm(6), ops.Linear(6, 8, **across[0]), ops.Tanh(), ops.Linear(8, 6, **across[1]), ops.RMSNorm(6),
        ).double()  # fmt: skip
        if group is None:
            randomize(model)
        else:
            copy_shares(model, listed())
        return model

    for enabled, bias_last in itertools.product((True, False), repeat=2):
        with sf.fusing(enabled):
            assert_same(listed(dist.group.WORLD, bias_last), listed(), draw(4, 6), dim=0)


def every_pair_of_covers_agrees() -> None:
    x, dy = draw(2, 3, 6), draw(2, 3, 6, seed=7)
    with sf.fusing(False):
        expected_y, expected = results(pair(dist.group.WORLD), x, dy)
    for only in ((AllReduceLinearBackward,), (LinearBias,), (LinearBias, AllReduceLinearBackward)):
        for bias in (True, False):
            model = pair(dist.group.WORLD, bias=bias)
            with sf.fusing(only=only):
                names = [s.name for s in model.plan(x.clone().requires_grad_()).backward]
                assert names.count("AllReduceLinearBackward") == (AllReduceLinearBackward in only)
                y, grads = results(model, x, dy)
            if bias:
                torch.testing.assert_close(y, expected_y, rtol=1e-14, atol=1e-14)
                for name, grad in expected.items():
                    torch.testing.assert_close(grads[name], grad, rtol=1e-12, atol=1e-13)


def the_sum_is_under_way_while_the_weight_gradient_is_made() -> None:
    model = pair(dist.group.WORLD)
    y = model(draw(5, 6).requires_grad_())
    with Calls() as order:
        y.sum().backward()
    sent = order.names.index("all_reduce")
    assert "mm" in order.names[sent : order.names.index("wait_tensor")]
    assert "wait_tensor" in order.names


def what_nobody_wants_is_not_sent() -> None:
    """Neither in the first layer, whose input has no gradient, nor where the weight is frozen."""
    for wants_x, wants_weight in ((False, True), (True, False)):
        model = pair(dist.group.WORLD)
        model[0].weight.requires_grad_(wants_weight)
        x = draw(5, 6).requires_grad_(wants_x)
        model(x).sum().backward()
        assert (x.grad is not None) is wants_x
        assert (model[0].weight.grad is not None) is wants_weight
        whole = pair()
        x = draw(5, 6).requires_grad_(wants_x)
        whole(x).sum().backward()
        if wants_weight:
            torch.testing.assert_close(model[0].weight.grad, share_of(model, "0.weight", whole[0].weight.grad))


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


def a_main_grad_takes_the_gradient_of_a_share() -> None:
    for rules in ((AllReduceLinearBackward,), ()):
        whole, model = pair(), pair(dist.group.WORLD)
        x, dy = draw(5, 6).requires_grad_(), draw(5, 6, seed=1)
        for p in model.parameters():
            p.main_grad = torch.ones_like(p)
        with sf.fusing(only=rules):
            assert model.plan(x).count("AllReduceLinearBackward") == len(rules)
            model(x).backward(dy)
        whole(x).backward(dy)
        assert all(p.grad is None for p in model.parameters())
        for name, p in model.named_parameters():
            expected = share_of(model, name, whole.get_parameter(name).grad) + 1
            torch.testing.assert_close(p.main_grad, expected)


test_in_several_processes = Facts({
    2: [
        divided_equals_whole, unfused_equals_fused, references_agree,
        a_list_by_hand_sums_gradients_where_rows_are_shares, every_pair_of_covers_agrees,
        the_sum_is_under_way_while_the_weight_gradient_is_made, what_nobody_wants_is_not_sent,
        exact_numbers_are_exact, a_main_grad_takes_the_gradient_of_a_share,
    ],
}).test  # fmt: skip

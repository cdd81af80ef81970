"""Dropout over several processes: one mask where they hold the same tensor, separate masks otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from tests.processes import Facts


def masks(model: sf.Sequential) -> list[Tensor]:
    """The forks' outputs for ones; the gradient must have met the same masks."""
    x = torch.ones(64, 32, requires_grad=True)
    y, *between = model(x)
    y.sum().backward()
    assert x.grad is not None
    # The map is linear: its transpose applied to ones sums to the same number.
    torch.testing.assert_close(x.grad.sum(), y.detach().sum())
    return between


def region() -> sf.Sequential:
    group = dist.group.WORLD
    return sf.Sequential(
        ops.Dropout(0.5), ops.Fork("before"),
        ops.CopyToTensorParallel(group), ops.Dropout(0.5), ops.Fork("inside"), ops.AllReduce(group),
        ops.Dropout(0.5), ops.Fork("after"),
    )  # fmt: skip


def differ(t: Tensor) -> bool:
    both = [torch.empty_like(t) for _ in range(2)]
    dist.all_gather(both, t.detach().contiguous())
    return not torch.equal(*both)


def a_region_has_masks_of_its_own() -> None:
    for enabled in (True, False):
        torch.manual_seed(5)
        with sf.fusing(enabled):
            before, inside, after = masks(region())
        assert not differ(before)
        assert differ(inside)
        assert not differ(after)
        assert not torch.equal(before != 0, after != 0)


def the_first_process_draws_what_one_process_would() -> None:
    torch.manual_seed(5)
    before, inside, _ = masks(region())
    torch.manual_seed(5)
    alone = sf.Sequential(ops.Dropout(0.5), ops.Fork("a"), ops.Dropout(0.5), ops.Fork("b"), ops.Dropout(0.5))
    _, a, b = alone(torch.ones(64, 32))
    assert torch.equal(before, a)
    if dist.get_rank() == 0:
        assert torch.equal(inside, b)


def shares_of_rows_have_masks_of_their_own() -> None:
    group = dist.group.WORLD
    model = sf.Sequential(
        ops.Dropout(0.5), ops.Fork("before"), ops.AllGather(group), ops.Dropout(0.5), ops.ReduceScatter(group),
        ops.Dropout(0.5), ops.Fork("after"),
    )  # fmt: skip
    _, before, after = model(torch.ones(64, 32))
    assert differ(before)
    assert differ(after)


def references_draw_the_same() -> None:
    """Seen by a compiler or a transform, the masks are the same."""
    torch.manual_seed(5)
    _, *planned = region()(torch.ones(8, 32))
    torch.manual_seed(5)
    with torch.autograd.forward_ad.dual_level():
        _, *by_reference = region()(torch.ones(8, 32))
    for one, other in zip(planned, by_reference, strict=True):
        assert torch.equal(one, other)


def products_that_run_by_themselves_are_seen() -> None:
    """A hook makes a Linear a barrier; the masks before, between and after it stay."""
    group = dist.group.WORLD
    for hooked in (None, 2, 5):
        model = sf.Sequential(
            ops.Dropout(0.5), ops.Fork("before"), ops.Linear(32, 32, parallel="column", group=group),
            ops.Dropout(0.5), ops.Fork("inside"), ops.Linear(32, 32, parallel="row", group=group),
            ops.Dropout(0.5), ops.Fork("after"),
        )  # fmt: skip
        for p in model.parameters():
            torch.nn.init.constant_(p, 1.0)  # what is dropped is zero, nothing else
        if hooked is not None:
            model[hooked].register_forward_hook(lambda *_: None)
        _, before, inside, after = model(torch.ones(64, 32))
        assert [differ(t == 0) for t in (before, inside, after)] == [False, True, False], hooked


def a_mask_that_would_be_the_same_everywhere_is_an_error() -> None:
    model = region()
    model[3].register_forward_hook(lambda *_: None)
    with pytest.raises(sf.PlanError, match=r"SF201 position 3 \(Dropout\): it runs by itself where each process needs"):
        model(torch.ones(4, 4))
    model.eval()(torch.ones(4, 4))


test_in_several_processes = Facts({
    2: [
        a_region_has_masks_of_its_own, the_first_process_draws_what_one_process_would,
        shares_of_rows_have_masks_of_their_own, references_draw_the_same, products_that_run_by_themselves_are_seen,
        a_mask_that_would_be_the_same_everywhere_is_an_error,
    ],
}).test  # fmt: skip

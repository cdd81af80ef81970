"""Collectives as operations: adjoint along every dimension, and under a compiler; the masks of dropout around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import seqfuse as sf
from seqfuse import ops, parallel
from tests.processes import Facts

from .sharded import draw, results
from .test_parallelize import BY_HAND, PLAN, LanguageModel, by_hand, stack

MAKERS: dict[str, Callable[[Any], sf.UnfusedOperation]] = {
    "AllReduce": ops.AllReduce,
    "CopyToTensorParallel": ops.CopyToTensorParallel,
    **{f"AllGather {dim}": lambda g, dim=dim: ops.AllGather(g, dim) for dim in (0, 1, -1)},
    **{f"ReduceScatter {dim}": lambda g, dim=dim: ops.ReduceScatter(g, dim) for dim in (0, 1, -1)},
}


def own(seed: int, *shape: int) -> Tensor:
    """This process's own signed small integers: sums are exact."""
    return draw(*shape, seed=seed + 10 * dist.get_rank()).mul(8).round()


def everyone(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def expected(name: str, x: Tensor, backward: bool) -> Tensor:
    """The result of a process, from a gather of all and plain torch; the adjoint for the backward."""
    kind, _, dim = name.partition(" ")
    every, rank = everyone(x), dist.get_rank()
    if (kind, backward) in (("AllReduce", True), ("CopyToTensorParallel", False)):
        return x
    if (kind, backward) in (("AllReduce", False), ("CopyToTensorParallel", True)):
        return functools.reduce(torch.add, every)
    if (kind == "AllGather") is not backward:
        return torch.cat(every, int(dim))
    return functools.reduce(torch.add, every).chunk(len(every), int(dim))[rank]


def passes_are_adjoint_along_every_dimension() -> None:
    for name, make in MAKERS.items():
        for shape in ((4, 6, 2), (2, 2, 2), (4, 8)):
            operation, x = make(dist.group.WORLD), own(1, *shape)
            strided = x.mT.contiguous().mT
            y = expected(name, x, False)
            dy = own(2, *y.shape)
            dx = expected(name, dy, True)
            for given in (x, strided):
                for run in (operation, operation.reference, sf.Sequential(operation)):
                    leaf = given.clone().requires_grad_()
                    out = run(leaf)
                    out.backward(dy)
                    assert torch.equal(out, y), name
                    assert torch.equal(leaf.grad, dx), name
            assert operation.infer(shape) == tuple(y.shape), name
            assert torch.equal(x, own(1, *shape)), name


def half_numbers_and_no_rows() -> None:
    for name, make in MAKERS.items():
        for dtype in (torch.bfloat16, torch.float16):
            x = own(1, 4, 4).to(dtype)
            y = make(dist.group.WORLD)(x)
            assert y.dtype is dtype
            assert torch.equal(y.double(), expected(name, x.double(), False)), name
        if name.endswith(("Reduce", "Parallel", "0")):
            empty = torch.zeros(0, 4, requires_grad=True)
            make(dist.group.WORLD)(empty).sum().backward()
            assert empty.grad is not None


def transforms_see_the_references() -> None:
    """Forward-mode AD supports them, and gradients are those of the planned sequence, also of summed parameters."""
    tokens = torch.tensor([[1, 11, 4, 6, 2, 5, 0, 9]])
    whole = sf.Sequential(ops.Linear(4, 4), ops.AllGather(dist.group.WORLD, -2)).double()
    given: dict[str, Any] = {"a whole Linear": (whole, own(1, 3, 4), own(2, 6, 4))}
    for dim in (None, -2):
        model = parallel.parallelize(LanguageModel(), dist.group.WORLD, {"body.0": "vocab", "head": "vocab", **PLAN},
                                     sequence_dim=dim)  # fmt: skip
        given[str(dim)] = model, tokens, torch.tensor(1.0)
    for of, (model, x, dy) in given.items():
        y, grads = results(model, x, dy)
        with torch.autograd.forward_ad.dual_level():
            y_plain, plain = results(model, x, dy)
        torch.testing.assert_close(y_plain, y)
        assert plain.keys() == grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(plain[name], grad, msg=lambda m, n=f"{of} {name}": f"{n}: {m}")


def a_compiler_traces_a_divided_model() -> None:
    assert_traced(by_hand, BY_HAND, 6, -2)


def a_compiler_traces_a_divided_stack() -> None:
    for dim in (None, -2):
        assert_traced(functools.partial(stack, layers=1), PLAN, 16, dim)


def assert_traced(make: Callable[[], sf.Sequential], plan: dict[str, str], width: int, dim: int | None) -> None:
    x, dy = draw(2, 8, width), draw(2, 8, width, seed=3)
    model = parallel.parallelize(make(), dist.group.WORLD, plan, sequence_dim=dim)
    y, grads = results(model, x, dy)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y_compiled, traced = results(compiled, x, dy)
    torch.testing.assert_close(y_compiled, y)
    traced = {name.removeprefix("_orig_mod."): grad for name, grad in traced.items()}
    assert traced.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(traced[name], grad, msg=lambda m, n=f"{dim} {name}": f"{n}: {m}")


def autocast_agrees() -> None:
    x, dy = draw(2, 8, 16).float(), draw(2, 8, 16, seed=3).float()
    whole = stack().float()
    model = parallel.parallelize(stack().float(), dist.group.WORLD, PLAN)
    expected_grads = parallel.shard(model, results(whole, x, dy)[1])
    with torch.autocast("cpu", torch.bfloat16):
        y, grads = results(model, x, dy)
    assert y.dtype is torch.float32
    # Together: in the four numbers of one norm's weight bfloat16 alone can be off by 10 %.
    off = torch.stack([(grad - expected_grads[name]).norm() for name, grad in grads.items()]).norm()
    assert off <= 0.05 * torch.stack([expected_grads[name].norm() for name in grads]).norm()


test_in_several_processes = Facts({
    2: [
        passes_are_adjoint_along_every_dimension, half_numbers_and_no_rows, transforms_see_the_references,
        a_compiler_traces_a_divided_model, autocast_agrees,
    ],
}).test  # fmt: skip
test_in_several_processes_at_length = pytest.mark.full(Facts({2: [a_compiler_traces_a_divided_stack]}).test)


def test_between_collectives_of_one_process_all_is_as_without_them() -> None:
    model = sf.Sequential(
        ops.CopyToTensorParallel(), ops.Linear(4, 4), ops.Dropout(0.5), ops.AllReduce(), ops.AllGather(),
        ops.LayerNorm(4), ops.ReduceScatter(),
    )  # fmt: skip
    for operation in (model[2], model[5]):
        operation.register_forward_hook(lambda *_: None)
    plan = model.plan(torch.randn(2, 4, requires_grad=True))
    assert [a.name for a in plan.eager] == ["Dropout", "LayerNorm"]
    assert "AllReduceLinearBackward" not in [step.name for step in plan.backward]
    assert model(torch.randn(2, 4)).shape == (2, 4)


@pytest.mark.parametrize(("operation", "says"), [
    (ops.AllGather(dim=2), r"gathers along dimension 2, got shape \(3, 4\)"),
    (ops.AllGather(dim=-3), r"gathers along dimension -3, got shape \(3, 4\)"),
    (ops.ReduceScatter(dim=2), r"expects a dimension 2 that 1 divides, got \(3, 4\)"),
    (ops.ReduceScatter(dim=-3), r"expects a dimension -3 that 1 divides, got \(3, 4\)"),
], ids=str)  # fmt: skip
def test_a_dimension_that_is_not_there_is_an_error(operation: sf.UnfusedOperation, says: str) -> None:
    with pytest.raises(sf.InputError, match=f"SF101 position 1 .*{says}"):
        sf.Sequential(ops.Identity(), operation)(torch.ones(3, 4))


@pytest.mark.parametrize("name", MAKERS)
def test_one_process_sends_nothing(name: str) -> None:
    x = torch.randn(4, 4, 4, requires_grad=True)
    y = sf.Sequential(MAKERS[name](None), ops.Identity())(x)
    y.sum().backward()
    assert torch.equal(y, x)
    assert torch.equal(x.grad, torch.ones(4, 4, 4))


# Dropout: one mask where processes hold the same tensor, separate masks otherwise.


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


def clipping_knows_the_shards_of_a_model_whose_wrapper_renames_them() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = sf.Sequential(ops.Linear(4, 8, parallel="column", group=dist.group.WORLD))
    for p in model.parameters():
        p.grad = torch.full_like(p, 1.0 + dist.get_rank())
    norms = [parallel.clip_grad_norm_(m, 1e9) for m in (model, checkpoint_wrapper(model))]
    assert torch.equal(*norms)
    assert torch.equal(*everyone(norms[1]))


def the_power_of_a_norm_in_float16_may_exceed_its_range() -> None:
    model = sf.Sequential(ops.Linear(4, 8, parallel="column", group=dist.group.WORLD)).half()
    for p in model.parameters():
        p.grad = torch.full_like(p, 300.0)
    assert parallel.clip_grad_norm_(model, 1.0).item() == pytest.approx(300 * 40**0.5, rel=1e-3)
    assert model[0].weight.grad[0, 0].item() == pytest.approx(40**-0.5, rel=1e-3)


test_masks = Facts({
    2: [
        a_region_has_masks_of_its_own, the_first_process_draws_what_one_process_would,
        shares_of_rows_have_masks_of_their_own, references_draw_the_same, products_that_run_by_themselves_are_seen,
        a_mask_that_would_be_the_same_everywhere_is_an_error,
        clipping_knows_the_shards_of_a_model_whose_wrapper_renames_them,
        the_power_of_a_norm_in_float16_may_exceed_its_range,
    ],
}).test  # fmt: skip

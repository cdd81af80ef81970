"""Steps as generated functions, each reported to `sf.Fuser(..., on_step=)` as it runs."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import LinearBias
from seqfuse.generated import Source
from seqfuse.saved import maker


def made(number: int) -> Any:
    source = Source("plus", "x")
    source.add(f"return x + {source.put(number)}")
    source.put("not in the text")
    return source.define()


def test_functions_of_one_shape_share_their_code_and_no_globals():
    one, two = made(1), made(2)
    assert (one(1), two(1)) == (2, 3)
    assert one.__code__ is two.__code__
    # Otherwise the interpreter would cache the globals of one of them, and look up each name of the others.
    assert one.__globals__ is two.__globals__
    assert "not in the text" in one.constants.values()


def test_each_function_of_a_name_has_its_own_lines_in_tracebacks():
    made = list[Any]()
    for text in ("1 / 0", "x[0]"):
        source = Source("fails", "x")
        source.add(f"return {text}")
        made.append(source.define())
    assert [text in inspect.getsource(f) for f, text in zip(made, ("1 / 0", "x[0]"), strict=True)] == [True, True]


class Kept(sf.Saved):
    x: Tensor
    scale: float = 2.0


def test_a_maker_leaves_the_last_fields_to_their_defaults():
    record = maker(Kept)(torch.ones(1))
    assert (record.x.item(), record.scale) == (1.0, 2.0)
    assert maker(Kept)(torch.ones(1), 3.0).scale == 3.0


def test_what_a_fusion_decided_is_no_part_of_what_it_is():
    slots: dict[str, Any] = {"linear": ops.Linear(4, 4, bias=False), "bias": ops.Bias(4)}
    one, other = LinearBias(**slots), LinearBias(**slots)
    counted: list[int] = []
    for _ in range(2):
        one.decided("key", lambda: counted.append(0) or len(counted))
    assert len(counted) == 1
    assert one == other
    assert "_decided" not in vars(one.with_operations(one.operations()))
    assert "_decided" not in vars(pickle.loads(pickle.dumps(one)))
    slots["bias"].some = 1
    one.decided("key", lambda: counted.append(0) or len(counted))
    assert len(counted) == 2


def stepped(seen: list[tuple[str, str]]) -> Any:
    def on_step(step: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((step.name, run.__name__))
        return run(*args, **kwargs)

    return on_step


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_each_step_of_both_passes_is_seen_in_the_order_in_which_it_runs(memory: Any) -> None:
    layers, x = (ops.LayerNorm(8), ops.Linear(8, 8), ops.Tanh()), torch.randn(3, 8, requires_grad=True)
    model, seen = sf.Sequential(*layers, memory=memory), list[tuple[str, str]]()
    fuser = sf.Fuser(model, model.fusions, memory=memory, on_step=stepped(seen))
    want = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    plan = model.plan(x)
    steps = [(s.name, "fwd") for s in plan.forward] + [(s.name, "bwd") for s in reversed(plan.backward)]
    for _ in range(3):  # with checks, and without
        seen.clear()
        found = torch.autograd.grad(fuser(x).square().sum(), [x, *model.parameters()])
        assert seen == steps
        assert all(map(torch.equal, found, want))


def test_what_it_returns_takes_the_place_of_the_result() -> None:
    def doubled(step: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
        y, saved = run(*args, **kwargs)
        return 2 * y, saved

    model, x = sf.Sequential(ops.Tanh(), ops.Tanh()), torch.randn(3, 8, requires_grad=True)
    got = sf.Fuser(model, (), on_step=doubled)(x)
    torch.testing.assert_close(got, 2 * torch.tanh(2 * torch.tanh(x)))


def quiet(step: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


def test_it_is_kept_by_a_copy() -> None:
    fuser = sf.Fuser(sf.Sequential(ops.Tanh()), (), on_step=quiet)
    assert pickle.loads(pickle.dumps(fuser)).on_step is quiet

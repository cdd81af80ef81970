"""`sf.Fuser(..., on_step=)` reports each step of a plan as it runs, in both passes."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import ops


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

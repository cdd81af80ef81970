"""Shallow copies and replicas run the sequence that they contain, not that of the original."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from tests.fuser.fusions import PAIR, outcome, randomized, tensor


def test_a_shallow_copy_with_a_list_of_its_own_runs_that_list() -> None:
    mine = randomized(sf.Sequential(ops.Linear(5, 4), ops.ReLU(), fusions=PAIR))
    x = tensor(7, 5)
    y = mine(x)
    twin = copy.copy(mine)
    twin._modules = dict(mine._modules)
    twin.append(ops.Scale(2.0))
    assert len(mine) == len(twin) - 1
    torch.testing.assert_close(twin(x), 2 * y)
    assert len(twin.plan(x).names) == len(mine.plan(x).names) + 1
    assert torch.equal(mine(x), y)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_shallow_copy_is_copied_without_the_original_it_was_made_from(again: Callable[[Any], Any]) -> None:
    first = randomized(sf.Sequential(ops.Linear(5, 4), ops.ReLU(), fusions=PAIR, memory="lean"))
    twin, x = copy.copy(first), tensor(7, 5)
    third = again(twin)
    y = first(x)
    del first
    for made in (third, again(twin)):
        assert torch.equal(made(x), y)
        assert (made.fusions, made.memory) == (PAIR, "lean")


def test_a_replica_for_data_parallel_runs_its_own_parameters() -> None:
    """As `nn.parallel.replicate` copies each module, on one device."""
    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.ReLU(), ops.Residual(ops.Linear(4, 4)), fusions=PAIR))
    x = tensor(7, 5)
    model(x)
    replicas = {m: m._replicate_for_data_parallel() for m in model.modules()}
    copies: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        replica = replicas[module]
        replica._modules = {k: replicas[child] for k, child in module._modules.items()}
        for key, parameter in module._parameters.items():
            copies[f"{name}.{key}"] = (2 * parameter).detach().requires_grad_()
            setattr(replica, key, copies[f"{name}.{key}"])
    twin = replicas[model]
    got = outcome(twin, {"x": x, **copies}, x)

    def plain() -> Tensor:
        h = torch.relu(F.linear(x, copies["0.weight"], copies["0.bias"]))
        return h + F.linear(h, copies["2.0.weight"], copies["2.0.bias"])

    torch.testing.assert_close(got, outcome(plain, {"x": x, **copies}))
    assert all(p.grad is None for p in model.parameters())

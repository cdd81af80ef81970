"""Under autocast a model has the same chains as without, and its error against float32 is that of torch's autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.convert import Conversion
from seqfuse.testing import seeded_randn

from .comparing import Replayed
from .families import FAMILIES, randomized, tensor_of


def passes(model: nn.Module | Replayed, inputs: dict[str, Any], autocast: bool) -> dict[str, Tensor]:
    """The output, and the gradients for each of several dy: with only one, chance decides which rounding is better."""
    found: list[dict[str, Tensor]] = []
    for seed in range(9, 13):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = tensor_of(model(**inputs))
        model.zero_grad()
        (y.float() * seeded_randn(tuple(y.shape), seed)).sum().backward()
        found.append({"y": y.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}})
    return {name: torch.stack([each[name] for each in found]) for name in found[0]}


def chains(conversion: Conversion | Replayed) -> list[list[str]]:
    return [[type(r.operation).__name__ for r in c.order.members] for g in conversion.graphs for c in g.regions]


def first(outputs: Any) -> tuple[Tensor]:
    return (tensor_of(outputs),)


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.full)], ids=["recorded", "captured"])
@pytest.mark.parametrize("name", ["llama", "bert", "mlp-mixer"])
def test_the_chains_are_those_without_autocast_and_the_numbers_those_of_autocast(name: str, captured: bool):
    family = FAMILIES[name]
    plain, inputs = randomized(family.build()).train(), family.inputs()
    models: Any = copy.deepcopy(plain), copy.deepcopy(plain)
    if captured:
        without, conversion = map(sf.convert, models)
    else:
        without = Replayed(models[0], inputs, first)
        with torch.autocast("cpu", torch.bfloat16):
            conversion = Replayed(models[1], inputs, first)
        models = without, conversion
    exact = passes(models[0], inputs, autocast=False)
    found, wanted = passes(models[1], inputs, autocast=True), passes(plain, inputs, autocast=True)
    assert chains(conversion) == chains(without) != []
    whole = max(float(t.abs().max()) for t in exact.values())
    for key, want in wanted.items():
        assert found[key].dtype is want.dtype
        error, allowed = (float((t.float() - exact[key]).norm()) for t in (found[key], want))
        assert error <= 1.5 * allowed + 1e-3 * whole, key

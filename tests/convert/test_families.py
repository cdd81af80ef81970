"""Each family converted: outputs, gradients, keys, class and parameters, also under autocast; reasons for the rest."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.convert import Conversion
from seqfuse.convert.rewrite import RewriteOptions
from seqfuse.testing import seeded_randn

from .comparing import Replayed, assert_close
from .families import FAMILIES, passes, randomized, tensor_of

# A graph that is recorded costs a tenth of one that Dynamo captures; these have what is recorded otherwise, or not at
# all: outputs beside the one looked at, and tensors that are changed in place.
CAPTURED = ("gpt2", "bert", "falcon", "torch encoder")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_of_a_model_rewritten_gives_the_outputs_and_all_gradients_of_the_model(name: str):
    family = FAMILIES[name]
    model = randomized(family.build()).train()
    wanted = passes(model, family.inputs())
    replayed = Replayed(model, family.inputs(), lambda outputs: (tensor_of(outputs),))
    for _ in range(2):  # the first call is interpreted, the second runs generated code
        assert_close(passes(replayed, family.inputs()), wanted)
    assert sum(len(graph.regions) for graph in replayed.graphs) > 0
    assert all(left.reason for graph in replayed.graphs for left in graph.left)


# Models whose queries, keys and values are GEMMs after a norm; in the first, other operations read the norm, too.
PRE_NORM = (
    "mistral", "qwen3", "llama", "llama 3.1", "gpt2", "qwen2", "gemma2", "gemma3", "phi3", "vit", "clip", "clip vision",
    "opt", "t5", "mixtral",
)  # fmt: skip


@pytest.mark.parametrize("name", [*PRE_NORM[:2], *(pytest.param(n, marks=pytest.mark.full) for n in PRE_NORM[2:])])
def test_a_lean_model_makes_queries_keys_and_values_again(name: str):
    family = FAMILIES[name]
    model = randomized(family.build()).train()
    wanted = passes(model, family.inputs())
    options = RewriteOptions(memory="lean")
    replayed = Replayed(model, family.inputs(), lambda outputs: (tensor_of(outputs),), options)
    assert_close(passes(replayed, family.inputs()), wanted)
    assert sum(region.plan.count("RecomputeHeads") for graph in replayed.graphs for region in graph.regions) > 0


@pytest.mark.parametrize("name", [n if n in CAPTURED else pytest.param(n, marks=pytest.mark.full) for n in FAMILIES])
def test_a_converted_model_gives_the_outputs_and_all_gradients_of_the_model(name: str):
    family = FAMILIES[name]
    model = randomized(family.build()).train()
    plain, kind, keys = copy.deepcopy(model), type(model), list(model.state_dict())
    parameters = list(model.parameters())
    conversion = sf.convert(model)
    wanted = passes(plain, family.inputs())
    for _ in range(2):  # the first call is interpreted, the second runs generated code
        assert_close(passes(model, family.inputs()), wanted)
    assert type(model) is kind
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert sum(len(graph.regions) for graph in conversion.graphs) > 0
    assert all(left.reason for graph in conversion.graphs for left in graph.left)
    conversion.undo()
    with torch.no_grad():
        assert torch.equal(tensor_of(model(**family.inputs())), tensor_of(plain(**family.inputs())))


def of_several(model: nn.Module | Replayed, inputs: dict[str, Any], autocast: bool) -> dict[str, Tensor]:
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
    exact = of_several(models[0], inputs, autocast=False)
    found, wanted = of_several(models[1], inputs, autocast=True), of_several(plain, inputs, autocast=True)
    assert chains(conversion) == chains(without) != []
    whole = max(float(t.abs().max()) for t in exact.values())
    for key, want in wanted.items():
        assert found[key].dtype is want.dtype
        error, allowed = (float((t.float() - exact[key]).norm()) for t in (found[key], want))
        assert error <= 1.5 * allowed + 1e-3 * whole, key

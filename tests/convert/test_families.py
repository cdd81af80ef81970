"""Each family converted: outputs, every gradient, keys, class and parameters; a reason for each call left eager."""

from __future__ import annotations

import copy

import pytest
import torch

import seqfuse as sf
from seqfuse.convert.rewrite import RewriteOptions

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

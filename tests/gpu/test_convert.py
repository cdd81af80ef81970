"""Converted models of Hugging Face in use: dropout, CUDA graphs, generation, checkpoints, `undo`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu.case import NEAR, distance
from torch import Tensor

import seqfuse as sf
from seqfuse.testing import assert_bitwise_equal, seeded_randn

from .converting import HERE, SHAPE, W, built, fused, gpt2, held_to_the_rule, inputs_of, llama, passes, tokens
from .steps import captured, step

GPU = pytest.mark.gpu
# Deprecation warnings between other packages.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Clears graphs, and their count, of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("deterministic")
def test_dropout_follows_the_seed(device: torch.device) -> None:
    dtype = torch.bfloat16 if HERE else torch.float32
    model = built(lambda: gpt2(0.1), device, dtype)
    given = inputs_of("gpt2", device)
    model.eval()
    wanted = model(**given)[0].detach()
    model.train()
    conversion = sf.convert(model)
    runs: list[dict[str, Any]] = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        runs.append({name: None if t is None else t.clone() for name, t in passes(model, given).items()})
    assert fused(conversion) or not HERE
    assert_bitwise_equal(runs[0], runs[1])
    assert not torch.equal(runs[0]["y"], runs[2]["y"])
    assert all(t is None or bool(t.isfinite().all()) for t in runs[0].values())
    model.eval()
    assert distance([model(**given)[0]], [wanted]) < NEAR[dtype]


@GPU
@pytest.mark.usefixtures("deterministic")
def test_a_graph_replays_a_step_of_a_converted_model(device: torch.device) -> None:
    model = built(llama, device, torch.bfloat16)
    sf.convert(model)
    x, dy = (seeded_randn((*SHAPE, W), seed, dtype=torch.bfloat16).to(device) for seed in (1, 2))
    static, parameters = x.clone(), [p for p in model.parameters() if p is not model.embed_tokens.weight]

    def stepped() -> list[Tensor]:
        return step(lambda x: model(inputs_embeds=x, use_cache=False)[0], parameters, static, dy)

    graph, results = captured(stepped)
    for seed in (5, 6):
        static.copy_(seeded_randn(tuple(x.shape), seed, dtype=x.dtype))
        graph.replay()
        replayed = [t.clone() for t in results]
        assert_bitwise_equal(replayed, stepped())


@pytest.mark.parametrize("cache", ["dynamic", *(pytest.param(c, marks=GPU) for c in ("static", "static, compiled"))])
def test_generation_gives_eagers_tokens(cache: str, device: torch.device) -> None:
    """transformers compiles the decoding step over a static cache on a GPU by default."""
    plain = built(lambda: llama("LlamaForCausalLM"), device).eval()
    model = copy.deepcopy(plain)
    conversion = sf.convert(model)
    prompt = tokens(device, shape=(2, 33 if HERE else 7))
    how: dict[str, Any] = {"max_new_tokens": 12 if HERE else 4, "do_sample": False}
    if cache != "dynamic":
        how["cache_implementation"] = "static"
    wanted = plain.generate(prompt, disable_compile=True, **how)
    assert torch.equal(model.generate(prompt, disable_compile=cache != "static, compiled", **how), wanted)
    assert fused(conversion) or not HERE or cache == "static, compiled", str(conversion)


@GPU
def test_undo_gives_the_model_back(device: torch.device) -> None:
    model = built(llama, device)
    given = inputs_of("llama", device)
    wanted = model(**given)[0].detach()
    conversion = sf.convert(model)
    passes(model, given)
    conversion.undo()
    assert torch.equal(model(**given)[0], wanted)


def test_a_converted_model_under_a_compiler(device: torch.device) -> None:
    model = built(llama, device)
    given = inputs_of("llama", device)
    wanted = {name: None if t is None else t.clone() for name, t in passes(model, given).items()}
    sf.convert(model)
    compiled = torch.compile(model, backend="inductor" if HERE else "aot_eager")
    model.zero_grad()
    y = compiled(**given)[0]
    y.backward(seeded_randn(tuple(y.shape), 2).to(y))
    found = [y.detach(), *(p.grad for p in model.parameters())]
    assert distance(found, [*wanted.values()]) < NEAR[torch.float32]


@pytest.mark.parametrize("memory", [pytest.param("fast", marks=GPU), "least"])
def test_checkpointed_layers(memory: str, device: torch.device) -> None:
    dtype = torch.bfloat16 if HERE else torch.float32
    eager = built(llama, device, dtype)
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sf.convert(model, memory=memory)

    def measure(seed: int) -> tuple[Any, Any, Any]:
        given = {**inputs_of("llama", device, seed), "use_cache": False}
        return passes(model, given), passes(eager, given), passes(exact, given)

    held_to_the_rule(measure)

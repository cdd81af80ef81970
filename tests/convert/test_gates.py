"""Requirements of a conversion: bytes saved relative to eager torch, steps under autocast, reasons for calls left
eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.convert.rewrite import RewriteOptions
from tests.watching import bytes_of, saving

from .comparing import Replayed
from .families import FAMILIES, randomized, tensor_of, transformers

_SIZES = {"vocab_size": 32, "num_attention_heads": 4, "hidden_size": 64, "use_cache": False, "pad_token_id": 0}


def llama(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        intermediate_size=224, num_hidden_layers=layers, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, **_SIZES
    )
    return transformers.LlamaModel(config)


def gpt2(layers: int) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=layers, n_head=4, vocab_size=32, n_positions=128, use_cache=False, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2Model(config)


def bert(layers: int) -> nn.Module:
    config = transformers.BertConfig(
        intermediate_size=256, num_hidden_layers=layers, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        **_SIZES,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


def first(outputs: Any) -> tuple[Tensor]:
    return (tensor_of(outputs),)


TOKENS = torch.arange(128).reshape(2, 64) % 32


def bytes_saved(model: nn.Module | Replayed, **inputs: Tensor) -> int:
    """Storages that the graph of a call holds for its backward pass, without parameters, each once."""
    with saving() as saved:
        out = model(**(inputs or {"input_ids": TOKENS}))
    del out
    return bytes_of(saved, model)


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.full)], ids=["recorded", "captured"])
@pytest.mark.parametrize(("build", "most"), [(llama, 0.45), (gpt2, 0.30), (bert, 0.77)], ids=["llama", "gpt2", "bert"])
def test_a_converted_layer_that_is_to_be_lean_saves_at_most_a_part_of_what_eager_torch_saves(
    build: Callable[[int], nn.Module], most: float, captured: bool
):
    totals: list[list[int]] = []
    for layers in (1, 2):
        model = build(layers).train()
        converted: Any = copy.deepcopy(model)
        if captured:
            sf.convert(converted, memory="lean")
        else:
            converted = Replayed(converted, {"input_ids": TOKENS}, first, RewriteOptions(memory="lean"))
        converted(input_ids=TOKENS)
        totals.append([bytes_saved(model), bytes_saved(converted)])
    eager, own = (second - first for first, second in zip(*totals, strict=True))
    assert 0 < own <= most * eager


def steps(model: nn.Module, inputs: dict[str, Any], captured: bool) -> list[list[str]]:
    conversion: Any = sf.convert(model) if captured else Replayed(model, inputs, first)
    run: Any = model if captured else conversion
    tensor_of(run(**inputs)).float().sum().backward()
    found = [
        [step.name for step in cover]
        for graph in conversion.graphs
        for region in graph.regions
        for plan in [region.plan]
        if plan is not None
        for cover in (plan.forward, plan.backward)
    ]
    assert [left for graph in conversion.graphs for left in graph.left] == []
    if captured:
        conversion.undo()
    assert found
    return found


@pytest.mark.parametrize("captured", [False, pytest.param(True, marks=pytest.mark.full)], ids=["recorded", "captured"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_under_autocast_a_converted_model_has_the_steps_of_the_model_in_16_bits(name: str, captured: bool):
    family = FAMILIES[name]
    model = randomized(family.build()).train()
    low = copy.deepcopy(model).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = steps(model, family.inputs(), captured)
    assert mixed == steps(low, family.inputs(), captured)
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in model.parameters())


def test_a_layer_of_llama_on_a_gpu_takes_nine_steps_each_way():
    config = transformers.LlamaConfig(
        intermediate_size=14336, num_hidden_layers=2, num_key_value_heads=8,
        **{**_SIZES, "num_attention_heads": 32, "hidden_size": 4096},
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaModel(config).bfloat16()
        conversion = sf.convert(model)
        model(input_ids=TOKENS.to("meta"))
    ((region,),) = (graph.regions for graph in conversion.graphs)
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    plan = region.model.plan(env=env)
    found = [[s.name for s in cover if s.name != "Fork"] for cover in (plan.forward, plan.backward)]
    assert conversion.graphs[0].left == ()
    attention = [op for op in region.model if isinstance(op, sf.ops.Attention)]
    assert [(op.causal, op.mask) for op in attention] == [(True, None)] * 2  # FlashAttention takes no mask
    # In addition to the norms of each layer there is the norm before the first.
    assert [len(names) for names in found] == [2 * 9 + 1] * 2
    assert found[0][1:10] == [
        "MergedLinear", "BiasQKNormRotary", "Attention", "Linear", "BlockBoundary", "MergedLinear", "BiasGated",
        "Linear", "BlockBoundary",
    ]  # fmt: skip


class Heads(nn.Module):
    """Two heads on one trunk, as in a NeRF or an actor-critic: torch saves only the narrow result."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 1)
        self.out = nn.Linear(72, 8)

    def forward(self, x: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.trunk(x))
        density = nn.functional.softplus(self.narrow(x).squeeze(-1))
        return density, self.out(torch.cat([self.wide(x), more], -1))


@pytest.mark.parametrize("captured", [False, True], ids=["recorded", "captured"])
def test_a_result_that_is_saved_keeps_no_memory_of_one_that_is_not(captured: bool):
    model, inputs = Heads(), {"x": torch.randn(32, 16), "more": torch.randn(32, 8)}
    eager = bytes_saved(model, **inputs)
    converted: nn.Module | Replayed = model
    if captured:
        conversion = sf.convert(model)
        model(**inputs)
        graphs = conversion.graphs
    else:
        converted = Replayed(model, inputs)
        graphs = converted.graphs
    assert bytes_saved(converted, **inputs) == eager
    assert sum(graph.operations for graph in graphs) >= 3


class Padded(nn.Module):
    """An MLP of the tokens that are not padding: torch saves a copy of them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, 0, 0, 64)).cumsum(1)
        return self.down(nn.functional.gelu(self.up(x[:, :8])))


def test_a_chain_that_begins_with_a_gemm_keeps_no_more_than_the_rows_that_it_reads():
    model, x = Padded(), torch.randn(4, 8, 16)
    eager = bytes_saved(model, x=x)
    conversion = sf.convert(model)
    y = model(x=x)
    assert bytes_saved(model, x=x) == eager
    conversion.undo()
    torch.testing.assert_close(y, model(x))


def test_mamba_saves_no_more_than_without_the_conversion():
    """Its scan takes another path when it is compiled, which saved 1.6 times as much."""
    model = randomized(
        transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=1, state_size=8)
        )
    )
    eager = bytes_saved(model)
    conversion = sf.convert(model)
    model(input_ids=TOKENS)
    assert bytes_saved(model) <= eager
    assert sum(graph.operations for graph in conversion.graphs) > 3

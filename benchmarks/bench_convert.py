"""Models of Hugging Face, converted and as they are: bytes saved for backward by a layer, CPU time of a training step.

The time is the process's own, on one thread, of a tiny model where little but Python and dispatch costs anything;
sides alternate, and ratios are of medians. Writes `results/convert.json`.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from record import write
from torch import Tensor, nn

import seqfuse as sf

MODES = ("save", "balanced", "lean")
ROUNDS, STEPS = 15, 20
_USUAL = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}


def llama(layers: int, width: int = 64) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, **_USUAL,
    )  # fmt: skip
    return transformers.LlamaModel(config)


def gpt2(layers: int, width: int = 64) -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=width, n_layer=layers, n_head=4, n_positions=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        **_USUAL,
    )  # fmt: skip
    return transformers.GPT2Model(config)


def bert(layers: int, width: int = 64) -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **_USUAL,
    )  # fmt: skip
    return transformers.BertModel(config, add_pooling_layer=False)


MODELS: dict[str, Callable[..., nn.Module]] = {"Llama": llama, "GPT-2": gpt2, "BERT": bert}


def saved(model: nn.Module, tokens: Tensor) -> int:
    """Bytes of the storages that a graph holds, each once, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(input_ids=tokens)
    total = sum(size for place, size in found.items() if place not in parameters)
    del out
    return total


def layer_bytes(build: Callable[..., nn.Module], memory: Any) -> int:
    """What one layer more adds, of a model as it is (`None`) or converted."""
    tokens = torch.arange(256).reshape(2, 128) % 32
    totals: list[int] = []
    for layers in (1, 2):
        torch._dynamo.reset()
        model = build(layers).train()
        if memory is not None:
            sf.convert(model, memory=memory)
        model(input_ids=tokens)
        totals.append(saved(model, tokens))
    return totals[1] - totals[0]


def step_ratio(build: Callable[..., nn.Module]) -> dict[str, float]:
    """CPU time of a training step of 2 x 16 tokens, converted, beside the model as it is."""
    torch._dynamo.reset()
    tokens = torch.arange(32).reshape(2, 16)
    plain = build(2, 16).train()
    converted = copy.deepcopy(plain)
    sf.convert(converted)

    def seconds(model: nn.Module) -> float:
        begun = time.process_time()
        for _ in range(STEPS):
            model(input_ids=tokens).last_hidden_state.sum().backward()
            model.zero_grad()
        return time.process_time() - begun

    sides = {"eager": plain, "converted": converted}
    for model in sides.values():
        seconds(model)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, model in sides.items():
            times[name].append(seconds(model))
    ratios = sorted(c / e for c, e in zip(times["converted"], times["eager"], strict=True))
    middle = statistics.median(times["converted"]) / statistics.median(times["eager"])
    return {"ratio": middle, "low": ratios[1], "high": ratios[-2]}


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, build in MODELS.items():
        eager = layer_bytes(build, None)
        kept = {memory: layer_bytes(build, memory) for memory in MODES}
        row = {"model": name, "eager": eager, "kept": kept, "step": step_ratio(build)}
        parts = ", ".join(f"{memory} {size / eager:.2f}" for memory, size in kept.items())
        print(
            f"{name}: bytes of a layer, of eager's: {parts}; CPU time of a step {row['step']['ratio']:.2f}", flush=True
        )
        rows.append(row)
    print(write("convert", {"rows": rows}))


if __name__ == "__main__":
    main()

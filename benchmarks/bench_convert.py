"""Models of Hugging Face, converted and as they are: bytes saved for backward by a layer, cost of a training step.

The step is of a tiny model where little but Python and dispatch costs anything, in CPU time and in instructions; of
Llama there is one of a longer sequence, too, where attention costs the most. The time is the process's own, on one
thread; sides alternate, and ratios are of medians. Instructions are counted with callgrind, and are left out without
valgrind. Writes `results/convert.json`.
"""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from bench_host import counted
from record import write
from torch import Tensor, nn

import seqfuse as sf

MODES = ("save", "balanced", "lean")
ROUNDS, STEPS, COUNTED = 15, 20, 10
SHORT, LONG = (2, 16), (1, 1024)
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


def step(name: str, converted: bool, shape: tuple[int, int] = SHORT, width: int = 16) -> Callable[[], None]:
    """A training step of a tiny model for tokens of a shape, as it is or converted, which has run some times."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens, model = torch.arange(math.prod(shape)).reshape(shape) % 32, MODELS[name](2, width).train()
    if converted:
        sf.convert(model)

    def run() -> None:
        model(input_ids=tokens).last_hidden_state.sum().backward()
        model.zero_grad()

    for _ in range(STEPS if shape == SHORT else 2):
        run()
    return run


def cpu_time(name: str, shape: tuple[int, int] = SHORT, width: int = 16, steps: int = STEPS) -> dict[str, float]:
    """CPU time of converted steps beside those of the model as it is."""
    torch._dynamo.reset()
    sides = {side: step(name, side == "converted", shape, width) for side in ("eager", "converted")}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, run in sides.items():
            begun = time.process_time()
            for _ in range(steps):
                run()
            times[side].append(time.process_time() - begun)
    ratios = sorted(c / e for c, e in zip(times["converted"], times["eager"], strict=True))
    middle = statistics.median(times["converted"]) / statistics.median(times["eager"])
    return {"ratio": middle, "low": ratios[1], "high": ratios[-2]}


def instructions(name: str) -> dict[str, float]:
    """Instructions of a step, counted in a process of its own for each side."""
    sides = {
        side: counted("run()", f"from bench_convert import step; run = step({name!r}, {side == 'converted'})", COUNTED)
        for side in ("eager", "converted")
    }
    return {**sides, "ratio": sides["converted"] / sides["eager"]}


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, build in MODELS.items():
        eager = layer_bytes(build, None)
        kept = {memory: layer_bytes(build, memory) for memory in MODES}
        row: dict[str, Any] = {"model": name, "eager": eager, "kept": kept, "step": cpu_time(name)}
        parts = ", ".join(f"{memory} {size / eager:.2f}" for memory, size in kept.items())
        text = f"{name}: of eager's, bytes of a layer: {parts}; CPU time of a step: {row['step']['ratio']:.2f}"
        if name == "Llama":
            row["long"] = cpu_time(name, LONG, 128, steps=1)
            text += f", of {LONG[0]} x {LONG[1]} tokens {row['long']['ratio']:.2f}"
        print(text, flush=True)
        rows.append(row)
    if shutil.which("valgrind"):  # takes some minutes, and no quiet machine as times do: at the end
        for row in rows:
            row["instructions"] = instructions(row["model"])
            print(f"{row['model']}: instructions of a step: {row['instructions']['ratio']:.3f}", flush=True)
    print(write("convert", {"rows": rows}))


if __name__ == "__main__":
    main()

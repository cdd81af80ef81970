"""Models of Hugging Face, converted and as they are: bytes saved for backward by a layer, CPU time of a training step.

The step is of a tiny model where little but Python and dispatch costs anything; of Llama there is one of a longer
sequence, too, where attention costs the most. The time is the process's own, on one thread; sides alternate, and ratios
are of medians. Writes `results/convert.json`.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import hugging
import torch
from gpu.case import counted
from record import write
from torch import Tensor, nn

import seqfuse as sf

MODES = ("save", "balanced", "lean")
ROUNDS, STEPS = 15, 20
SHORT, LONG = (2, 16), (1, 1024)
Build = Callable[..., nn.Module]


def llama(layers: int, width: int = 64) -> nn.Module:
    return hugging.model("Llama", width, layers)


def of_family(family: str, layers: int, width: int = 64) -> nn.Module:
    return hugging.model(family, width, layers, positions=256 if family == "GPT2" else 512)


MODELS: dict[str, Build] = {"Llama": llama} | {
    name: functools.partial(of_family, family) for name, family in (("GPT-2", "GPT2"), ("BERT", "Bert"))
}


def saved(model: nn.Module, tokens: Tensor) -> int:
    """Bytes of the storages that a graph holds, each once, parameters left out."""
    return counted(lambda: model(input_ids=tokens), list(model.parameters()))


def layer_bytes(build: Build, memory: Any) -> int:
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
    """A training step of a tiny model for tokens of a shape, as it is or converted, `"fast"`; it has run some times."""
    torch.manual_seed(0)
    tokens, model = torch.arange(math.prod(shape)).reshape(shape) % 32, MODELS[name](2, width).train()
    if converted:
        sf.convert(model, memory="fast")

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
    print(write("convert", {"rows": rows}))


if __name__ == "__main__":
    main()

"""Saving less beside activation checkpointing: bytes saved for backward, and CPU time of a training step.

A small Llama of Hugging Face on one thread, as it is and converted, with and without `torch.utils.checkpoint` around
each layer. Sides alternate, and ratios are of medians. Writes `results/checkpoint.json`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_convert import llama, saved
from record import write
from torch import Tensor, nn

import seqfuse as sf

LAYERS, WIDTH, TOKENS, ROUNDS = 4, 256, (2, 256), 15
# What each side is converted with, if it is, and whether its layers are checkpointed.
SIDES: dict[str, tuple[Any, bool]] = {
    "eager": (None, False),
    "eager, checkpointed": (None, True),
    "save": ("save", False),
    "lean": ("lean", False),
    "lean, checkpointed": ("lean", True),
}


def built(side: str, layers: int, tokens: Tensor, width: int = WIDTH) -> nn.Module:
    """A model of one side, which has made two training steps."""
    memory, checkpointed = SIDES[side]
    torch.manual_seed(0)
    model: Any = llama(layers, width).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if memory is not None:
        sf.convert(model, memory=memory)
    for _ in range(2):
        step(model, tokens)
    return model


def step(model: Any, tokens: Tensor) -> None:
    model(input_ids=tokens).last_hidden_state.sum().backward()
    model.zero_grad()


def bytes_of(side: str, tokens: Tensor, layers: int = LAYERS, width: int = WIDTH) -> dict[str, int]:
    """Bytes saved when the forward pass ends, and what is held in the backward pass when a layer has run again."""
    torch._dynamo.reset()
    kept = saved(built(side, layers, tokens, width), tokens)
    again = 0
    if SIDES[side][1]:  # all that a layer saves which is not checkpointed
        plain = next(name for name, how in SIDES.items() if how == (SIDES[side][0], False))
        torch._dynamo.reset()
        both = [saved(built(plain, n, tokens, width), tokens) for n in (layers - 1, layers)]
        again = both[1] - both[0]
    return {"saved": kept, "held": kept + again}


def times(tokens: Tensor) -> dict[str, dict[str, float]]:
    """CPU time of a step of each side beside that of the model as it is."""
    torch._dynamo.reset()
    models = {side: built(side, LAYERS, tokens) for side in SIDES}
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(ROUNDS):
        for side, model in models.items():
            found[side].append(_seconds(lambda model=model: step(model, tokens)))
    eager = found["eager"]
    rows: dict[str, dict[str, float]] = {}
    for side, own in found.items():
        ratios = sorted(o / e for o, e in zip(own, eager, strict=True))
        middle = statistics.median(own) / statistics.median(eager)
        rows[side] = {"ratio": middle, "low": ratios[1], "high": ratios[-2]}
    return rows


def _seconds(run: Callable[[], None]) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


def main() -> None:
    torch.set_num_threads(1)
    tokens = torch.arange(TOKENS[0] * TOKENS[1]).reshape(TOKENS) % 32
    measured = times(tokens)
    rows: list[dict[str, Any]] = []
    for side in SIDES:
        rows.append({"side": side, **bytes_of(side, tokens), "step": measured[side]})
        print(
            f"{side}: {rows[-1]['saved']:,} B, held {rows[-1]['held']:,} B, {measured[side]['ratio']:.2f}", flush=True
        )
    print(write("checkpoint", {"layers": LAYERS, "width": WIDTH, "tokens": [*TOKENS], "rows": rows}))


if __name__ == "__main__":
    main()

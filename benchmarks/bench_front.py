"""The front of memory and time of a training step: ours at many budgets, activation checkpointing, and torch.compile.

A step is forward and backward of a Llama of Hugging Face, converted, or of the same GPT of `torch.nn` with dropout, on
one thread of a CPU. The peak is measured in a process of its own for each side: the resident set beyond what it is
before the step, where each tensor returns to the system when it is freed. Time is CPU time, of one process for each
model, in which sides take turns; ratios are medians of pairs of one round. Writes `results/front.json`.

With `--quick` fewer tokens and rounds, to see that it runs.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from bench_convert import llama
from bench_peak import alone, resident
from record import write
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import seqfuse as sf

LAYERS, WIDTH, VOCABULARY = 4, 256, 32
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.55, 0.5, 0.45, 0.4, 0.36)
SIDES = (
    "eager", "checkpointed", "fast", "balanced", "lean", *map(str, BUDGETS), "least",
    "compile 1", "compile 0.5", "compile 0.2", "compile 0",
)  # fmt: skip


class GPT(nn.Module):
    """A GPT of pre-norm blocks with dropout 0.1, as one writes it in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.checkpointed = False

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.norm(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(y))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norms[1](x)))))


MODELS: dict[str, Callable[[], Any]] = {"Llama": lambda: llama(LAYERS, WIDTH), "GPT": GPT}


def training(name: str, side: str, rows: int) -> Callable[[], None]:
    """A step of one side, of which it has made two."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = MODELS[name]().train()
    tokens = torch.arange(rows * 1024).reshape(rows, 1024) % VOCABULARY
    run = model
    if side == "checkpointed":
        if name == "GPT":
            model.checkpointed = True
        else:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif side.startswith("compile"):
        functorch.activation_memory_budget = float(side.partition(" ")[2])
        run = torch.compile(model)
    elif side != "eager":
        sf.convert(model, memory=sf.Budget(part=float(side)) if side[0].isdigit() else side)

    def step() -> None:
        out = run(input_ids=tokens)
        (out if isinstance(out, Tensor) else out.last_hidden_state).sum().backward()
        model.zero_grad()

    for _ in range(2):  # the first captures and compiles
        step()
    return step


def peak_of(name: str, side: str, rows: int) -> int:
    """Bytes that a step adds at its peak."""
    torch.set_num_threads(1)
    step = training(name, side, rows)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def times(name: str, sides: list[str], rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """CPU time of a step of each side, of eager's: median and quartiles."""
    torch.set_num_threads(1)
    steps = {side: training(name, side, rows) for side in sides}
    found: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(rounds):
        for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
            begun = time.process_time()
            steps[side]()
            found[side].append(time.process_time() - begun)
    rows_of: dict[str, dict[str, float]] = {}
    for side, own in found.items():
        pairs = [mine / eager for mine, eager in zip(own, found["eager"], strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4)
        rows_of[side] = {"seconds": statistics.median(own), "ratio": middle, "low": low, "high": high}
    return rows_of


def front(name: str, rows: int, rounds: int) -> list[dict[str, Any]]:
    """The rows of a model; a side that does not run here, as torch.compile without a compiler, is left out."""
    peaks: dict[str, int] = {}
    for side in SIDES:
        try:
            peaks[side] = alone("peak", name, side, str(rows), script=__file__)
        except Exception as error:
            print(f"{name}, {side}: {type(error).__name__}")
            continue
        print(f"{name}, {side}: {peaks[side] / peaks['eager']:.3f} of eager's peak", flush=True)
    took = alone("times", name, str(rows), str(rounds), *peaks, script=__file__)
    return [{"side": side, "peak": peak, "time": took[side]} for side, peak in peaks.items()]


def main(quick: bool) -> None:
    rows, rounds = (2, 3) if quick else (12, 20)
    found = {name: front(name, rows, rounds) for name in MODELS}
    for name, several in found.items():
        whole = several[0]["peak"]
        for row in several:
            print(f"{name}, {row['side']}: peak {row['peak'] / whole:.3f}, time {row['time']['ratio']:.3f}")
    about = {"layers": LAYERS, "width": WIDTH, "tokens": [rows, 1024], "rounds": rounds}
    if not quick:
        print(write("front", {**about, "models": found}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["peak", name, side, rows]:
            print(json.dumps(peak_of(name, side, int(rows))))
        case ["times", name, rows, rounds, *sides]:
            print(json.dumps(times(name, sides, int(rows), int(rounds))))
        case given:
            main("--quick" in given)

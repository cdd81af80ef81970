"""The front of memory and time of a training step: ours at many budgets, activation checkpointing, and torch.compile.

A step is forward and backward of a Llama of Hugging Face, or of a GPT of `torch.nn` with dropout, on one thread of a
CPU. All sides of a model are in one process, and each of torch.compile in its own, beside eager. The peak is what
becomes resident beyond what was before the step, where each tensor returns to the system when it is freed. Time is CPU
time, with sides in turns, as the median of ratios to eager's of the same round. Writes `results/front.json`. Arguments:
models, rows of 1,024 tokens, and rounds.
"""

from __future__ import annotations

import ctypes
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch
from bench_convert import llama
from bench_peak import alone, resident
from record import write
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import seqfuse as sf

LAYERS, WIDTH, VOCABULARY, TOKENS = 4, 256, 32, 1024
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3)
COMPILED = "compile 0.5", "compile 0.2", "compile 0"  # by its activation_memory_budget
SIDES = "checkpointed", "selective", "fast", "balanced", "lean", *map(str, BUDGETS), "least"
LIBC = ctypes.CDLL(None)
MMAP_THRESHOLD, RETURNED, KEPT = -3, 65536, 32 * 2**20  # of mallopt: tensors go back to the system at once, or do not
ATEN = torch.ops.aten
DEAR: list[Any] = [ATEN.mm.default, ATEN.addmm.default, ATEN._scaled_dot_product_flash_attention_for_cpu.default]
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, DEAR)
"""What selective checkpointing saves: results of GEMMs and attention."""


class GPT(nn.Module):
    """A GPT of pre-norm blocks with dropout 0.1, as one writes it in torch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.run: Callable[..., Tensor] = lambda block, x: block(x)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any) -> None:
        """As models of Hugging Face do it."""
        self.run = functools.partial(checkpoint, **gradient_checkpointing_kwargs)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = self.run(block, x)
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
    torch.manual_seed(0)
    model = MODELS[name]().train()
    tokens, run = torch.arange(rows * TOKENS).reshape(rows, TOKENS) % VOCABULARY, model
    if side in ("checkpointed", "selective"):
        of = {"context_fn": SELECTIVE} if side == "selective" else {}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **of})
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


def added(step: Callable[[], None]) -> int:
    """Bytes that a step adds at its peak."""
    LIBC.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = resident("VmRSS")
    step()
    return resident("VmHWM") - before


def front(name: str, rows: int, rounds: int, sides: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a model; a side that does not run here, as torch.compile without a compiler, is left out."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    LIBC.mallopt(MMAP_THRESHOLD, RETURNED)
    steps: dict[str, Callable[[], None]] = {}
    peaks: dict[str, int] = {}
    for side in ("eager", *sides):
        try:
            steps[side] = training(name, side, rows)
            peaks[side] = added(steps[side])
            print(f"{name}, {side}: {peaks[side] / peaks['eager']:.3f} of eager's peak", file=sys.stderr, flush=True)
        except Exception as error:
            print(f"{name}, {side}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    LIBC.mallopt(MMAP_THRESHOLD, KEPT)
    found: dict[str, list[float]] = {side: [] for side in peaks}
    for turn in range(rounds + 1):
        for side in [*peaks][turn % len(peaks) :] + [*peaks][: turn % len(peaks)]:
            begun = time.process_time()
            steps[side]()
            found[side].append(time.process_time() - begun)
    made: list[dict[str, Any]] = []
    for side, own in found.items():
        pairs = [mine / eager for mine, eager in zip(own[1:], found["eager"][1:], strict=True)]  # the first warms up
        low, middle, high = statistics.quantiles(pairs, n=4)
        step = {"seconds": statistics.median(own[1:]), "ratio": middle, "low": low, "high": high}
        made.append({"model": name, "side": side, "peak": peaks[side], "step": step})
    return made


def main(names: list[str], rows: int, rounds: int) -> None:
    found = list[dict[str, Any]]()
    for name in names:
        groups = SIDES, *((side,) for side in COMPILED)  # another budget would not compile the same code again
        apart = (alone("front", name, str(rows), str(rounds), *sides, script=__file__) for sides in groups)
        found += [row for i, several in enumerate(apart) for row in several[i > 0 :]]  # of eager the first
    print(write("front", {"layers": LAYERS, "width": WIDTH, "tokens": [rows, TOKENS], "rounds": rounds, "rows": found}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["front", name, rows, rounds, *sides]:
            print(json.dumps(front(name, int(rows), int(rounds), sides)))
        case [names, rows, rounds]:
            main(names.split(","), int(rows), int(rounds))
        case _:
            main([*MODELS], 12, 20)

"""A training step as it is, converted, and with activation checkpointing: bytes saved, peak memory, and CPU time.

A step of a small Llama of Hugging Face is forward, backward and AdamW, on one thread of a CPU. Memory is measured in a
process of its own for each side: the resident set of a process that returns each tensor to the system when it is freed,
before a step that comes after some others, and its peak in that step. Time is measured in one process, where sides take
turns; ratios are medians of pairs of one round. Writes `results/peak.json`; with AVX-512, where float32 GEMMs are other
ones, `results/peak_avx512.json`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_convert import llama, saved
from record import ROOT, write

import seqfuse as sf

LAYERS, WIDTH, TOKENS, ROUNDS = 4, 256, (2, 1024), 20
# What each side is converted with, if it is, and whether its layers are checkpointed.
SIDES: dict[str, tuple[Any, bool]] = {
    "eager": (None, False),
    "eager, checkpointed": (None, True),
    "save": ("save", False),
    "balanced": ("balanced", False),
    "lean": ("lean", False),
    "least": ("least", False),
    "lean, checkpointed": ("lean", True),
}


def training(side: str) -> tuple[Any, Callable[[], None]]:
    """A model of one side, and a step of its training, of which it has made two."""
    memory, checkpointed = SIDES[side]
    torch.manual_seed(0)
    model: Any = llama(LAYERS, WIDTH).train()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if memory is not None:
        sf.convert(model, memory=memory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        model(input_ids=tokens()).last_hidden_state.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # the first captures, compiles, and makes what the optimizer keeps
        step()
    return model, step


def tokens() -> torch.Tensor:
    return torch.arange(TOKENS[0] * TOKENS[1]).reshape(TOKENS) % 32


def resident(of: str) -> int:
    """Bytes that are resident now (`VmRSS`), or that were at most (`VmHWM`)."""
    (kilobytes,) = re.findall(rf"{of}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def bytes_of(side: str) -> dict[str, int]:
    """Bytes of one side, in this process: resident before a step and at its peak, of parameters, and saved."""
    torch.set_num_threads(1)
    model, step = training(side)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = resident("VmRSS")
    step()
    peak = resident("VmHWM")
    parameters = sum(p.nbytes for p in model.parameters())
    return {"before": before, "peak": peak, "parameters": parameters, "saved": saved(model, tokens())}


def times() -> dict[str, dict[str, float]]:
    """CPU time of a step of each side relative to that of the model as it is: median and quartiles."""
    torch.set_num_threads(1)
    steps = {side: training(side)[1] for side in SIDES}
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(ROUNDS):
        order = [*SIDES][turn % len(SIDES) :] + [*SIDES][: turn % len(SIDES)]
        for side in order:
            begun = time.process_time()
            steps[side]()
            found[side].append(time.process_time() - begun)
    rows: dict[str, dict[str, float]] = {}
    for side, own in found.items():
        pairs = [mine / eager for mine, eager in zip(own, found["eager"], strict=True)]
        low, middle, high = statistics.quantiles(pairs, n=4)
        rows[side] = {"seconds": statistics.median(own), "ratio": middle, "low": low, "high": high}
    return rows


def alone(*arguments: str, script: str = __file__) -> Any:
    """What a script measures with these arguments, in a process of its own."""
    # Freed tensors go back to the system at once where memory is measured, so that what is resident is what is in use.
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536"} if arguments[0] == "bytes" else {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SEQFUSE_TUNE": "0", **returned}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    rows: list[dict[str, Any]] = []
    for side in SIDES:
        rows.append({"side": side, **alone("bytes", side)})
        sizes = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in rows[-1].items() if name != "side")
        print(f"{side}: {sizes}", flush=True)
    measured = alone("times")
    for row in rows:
        row["step"] = measured[row["side"]]
        print(f"{row['side']}: {row['step']['ratio']:.2f} of eager's CPU time", flush=True)
    name = "peak_avx512" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "peak"
    print(write(name, {"layers": LAYERS, "width": WIDTH, "tokens": [*TOKENS], "rounds": ROUNDS, "rows": rows}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["bytes", side]:
            print(json.dumps(bytes_of(side)))
        case ["times"]:
            print(json.dumps(times()))
        case _:
            main()

"""Measures training steps, eager, converted, checkpointed and compiled: peak memory, bytes saved, and CPU time.

`peak` is a step of a small Hugging Face Llama with AdamW; `front` one without, also of a GPT with dropout, with many
memory budgets. Memory is the resident set of a process per side, before a step that follows some others, and at its
peak. Times are measured in one process, with alternating sides; each side of torch.compile in another process, with
eager. Sides that do not run here are skipped. Writes `results/peak.json` and `results/front.json`.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import plain
import torch
import torch._functorch.config as functorch
from gpu.case import counted
from gpu.clock import Call, paired
from record import ROOT, write
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import seqfuse as sf

LAYERS, WIDTH, VOCABULARY, LENGTH = 4, 256, 32, 1024
BUDGETS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.45, 0.4, 0.35, 0.3)
COMPILED = "compile 0.5", "compile 0.2", "compile 0"  # with this activation_memory_budget
ATEN = torch.ops.aten
DEAR: list[Any] = [ATEN.mm.default, ATEN.addmm.default, ATEN._scaled_dot_product_flash_attention_for_cpu.default]
SELECTIVE = functools.partial(create_selective_checkpoint_contexts, DEAR)  # saves the results of these operations


class Study(NamedTuple):
    """The sides and models of one study, on sequences of 1,024 tokens."""

    models: tuple[str, ...]
    sides: tuple[str, ...]
    rows: int
    adamw: bool


STUDIES = {
    "peak": Study(
        ("Llama",), ("eager", "eager, checkpointed", "save", "balanced", "lean", "least", "lean, checkpointed"), 2, True
    ),
    "front": Study(
        ("Llama", "GPT"),
        ("eager", "checkpointed", "selective", "fast", "balanced", "lean", *map(str, BUDGETS), "least", *COMPILED),
        12, False,
    ),
}  # fmt: skip


def built(model: str) -> tuple[Any, Callable[..., Any]]:
    """A Hugging Face Llama, or a GPT of pre-norm blocks with dropout 0.1, and a function to checkpoint its layers."""
    if model == "Llama":
        llama: Any = plain.hugging("LlamaModel", WIDTH, LAYERS, 2048)
        return llama, lambda **how: llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)
    spec = plain.Spec(WIDTH, 4 * WIDTH, 4, 4, WIDTH // 4, False, dropout=0.1)
    layers: Any = plain.build("stack", spec, layers=LAYERS)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), layers), layers.checkpoint


def training(model: str, side: str, rows: int, adamw: bool) -> tuple[nn.Module, Call]:
    """A model of one side and its training step, after two warm-up steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    made, checkpoint = built(model)
    tokens, run = torch.arange(rows * LENGTH).reshape(rows, LENGTH) % VOCABULARY, made.train()
    memory = side.removesuffix(", checkpointed")
    if "checkpointed" in side or side == "selective":
        checkpoint(use_reentrant=False, **({"context_fn": SELECTIVE} if side == "selective" else {}))
    if side.startswith("compile"):
        functorch.activation_memory_budget = float(side.partition(" ")[2])
        run = torch.compile(made)
    elif memory not in ("eager", "checkpointed", "selective"):
        sf.convert(made, memory=sf.Budget(part=float(memory)) if memory[0].isdigit() else memory)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4) if adamw else None

    def step() -> None:
        out = run(tokens)
        loss = (out if isinstance(out, Tensor) else out.last_hidden_state).sum()
        del out  # backward does not need it
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        made.zero_grad()

    for _ in range(2):  # the first captures, compiles, and creates the optimizer's state
        step()
    return made, step


def bytes_of(model: nn.Module, step: Call) -> dict[str, int]:
    """Bytes of this process: resident before a step and at its peak, of parameters, and saved."""

    def resident(of: str) -> int:
        (kilobytes,) = re.findall(rf"{of}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return int(kilobytes) * 1024

    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")  # current
    step()
    peak, parameters = resident("VmHWM"), list(model.parameters())  # peak
    saved = counted(step, parameters)
    return {"before": before, "peak": peak, "parameters": sum(p.nbytes for p in parameters), "saved": saved}


def alone(*arguments: Any) -> Any:
    """The measurements of `child` with these arguments in a separate process; `None` if it fails."""
    # For memory, freed tensors are returned to the system at once, so that resident memory is memory in use.
    returned = {"MALLOC_MMAP_THRESHOLD_": "65536"} if arguments[0] is None else {}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SEQFUSE_TUNE": "0", **returned}
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    return None if done.returncode else json.loads(done.stdout.splitlines()[-1])


def child(rounds: int | None, model: str, rows: int, adamw: bool, *sides: str) -> Any:
    """Times of these sides in this many rounds; without rounds, the bytes of the only side."""
    made = {side: training(model, side, rows, adamw) for side in sides}
    if rounds is None:
        return bytes_of(*made[sides[0]])
    return paired({side: step for side, (_, step) in made.items()}, rounds, warm=1)


def measured(study: Study, model: str, rounds: int) -> list[dict[str, Any]]:
    """The rows of a model."""
    common = model, study.rows, study.adamw
    memory = {side: found for side in study.sides if (found := alone(None, *common, side))}
    times = alone(rounds, *common, *(side for side in memory if not side.startswith("compile")))
    for side in memory.keys() - times.keys():  # another budget would not recompile the same code
        times |= {side: alone(rounds, *common, "eager", side)[side]}
    for side, found in memory.items():
        added = (found["peak"] - found["before"]) / (memory["eager"]["peak"] - memory["eager"]["before"])
        print(f"{model}, {side}: {added:.2f} of eager's peak, {times[side]['ratio']:.2f} of its time", flush=True)
    return [{"model": model, "side": side, **found, "step": times[side]} for side, found in memory.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("studies", nargs="*", help="peak, front; both by default")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(*options.child)))
        return
    for name in options.studies or STUDIES:
        study = STUDIES[name]
        found = [row for model in study.models for row in measured(study, model, options.rounds)]
        if name == "front":
            for row in found:
                row["peak"] -= row.pop("before")
        sizes = {"layers": LAYERS, "width": WIDTH, "tokens": [study.rows, LENGTH], "rounds": options.rounds}
        write(name, {**sizes, "rows": found}, by_capability=name == "peak")


if __name__ == "__main__":
    main()

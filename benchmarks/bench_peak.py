"""Peak memory of a training step, of the models of bench_checkpoint.py: each in a process of its own.

A step is forward, backward and AdamW, on one thread of a CPU. Memory is the resident set of the process, which returns
each tensor to the system when it is freed: what it is before a step that comes after some others, and its peak in that
step. Writes `results/peak.json`.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from bench_checkpoint import LAYERS, SIDES, WIDTH, built
from bench_convert import saved
from record import ROOT, write

TOKENS = (12, 1024)


def resident(of: str) -> int:
    """Bytes that are resident now (`VmRSS`), or that were at most (`VmHWM`)."""
    (kilobytes,) = re.findall(rf"{of}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


def measured(side: str) -> dict[str, int]:
    """Bytes of one side, in this process: resident before a step and at its peak, of parameters, and saved."""
    torch.set_num_threads(1)
    tokens = torch.arange(TOKENS[0] * TOKENS[1]).reshape(TOKENS) % 32
    model: Any = built(side, LAYERS, tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    peak = before = 0
    for _ in range(2):  # the first makes what the optimizer keeps
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
        before = resident("VmRSS")
        model(input_ids=tokens).last_hidden_state.sum().backward()
        optimizer.step()
        peak = resident("VmHWM")
        optimizer.zero_grad()
    parameters = sum(p.nbytes for p in model.parameters())
    return {"before": before, "peak": peak, "parameters": parameters, "saved": saved(model, tokens)}


def main() -> None:
    rows: list[dict[str, Any]] = []
    # Freed tensors go back to the system at once, so that what is resident is what is in use.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_MMAP_THRESHOLD_": "65536", "SEQFUSE_TUNE": "0"}
    for side in SIDES:
        done = subprocess.run(
            [sys.executable, __file__, side], env=environment, check=True, stdout=subprocess.PIPE, text=True
        )
        rows.append({"side": side, **json.loads(done.stdout.splitlines()[-1])})
        sizes = ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in rows[-1].items() if name != "side")
        print(f"{side}: {sizes}", flush=True)
    print(write("peak", {"layers": LAYERS, "width": WIDTH, "tokens": [*TOKENS], "rows": rows}))


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(measured(sys.argv[1])))
    else:
        main()

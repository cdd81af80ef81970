"""Measures layers on this GPU: results of `sf.tune`, and kernel times, against eager torch's.

    python benchmarks/layers_gpu.py tune       # times of every candidate and its unfused operations: gpu_tune.json
    python benchmarks/layers_gpu.py profile    # times of GEMMs, attention and all other kernels: gpu_profile.json

Files are in `results/`, or the folder in `OUT`. `tune` writes after each layer, and `--resume` continues after the
layers in the file. `profile` measures the main models.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["SEQFUSE_TUNE"] = "0"  # only this run's measurements
if __name__ == "__main__" and "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from gpu import blocks, sizes
from record import RESULTS, about, lines
from torch.profiler import ProfilerActivity, profile

import seqfuse as sf

OUT = Path(os.environ.get("OUT") or RESULTS)
MOST = 90.0  # seconds to tune one layer
# Events of the profiler that are not kernels; and the kinds of kernels by name.
NO_KERNEL = r"aten::|autograd|cuda|cu[A-Z]|Seqfuse|Activity|Lazy|Command|torch|.*Backward0?$"
KINDS = {"GEMMs": "nvjet|gemm|splitK", "attention": "sdpa|flash|fmha|attention|dot_do_o|convert_dq"}


def tuned(of: sizes.Sizes, options: argparse.Namespace, rows: list[Any]) -> Iterator[list[dict[str, Any]]]:
    """Rows of each layer that is not in the file, while there is time, the main models first."""
    there, until = {(row["model"], row["tokens"]) for row in rows}, time.time() + options.budget
    models = sorted(of.models, key=lambda model: model.name not in sizes.MAIN)
    for tokens, model in ((tokens, model) for tokens in of.tokens[:2] for model in models):
        if (left := until - time.time()) > 0 and (model.name, tokens) not in there:
            layer: Any = blocks.models_of("layer", model, of).ours
            x = blocks.drawn(of, model, "x")(tokens, 0)["x"].requires_grad_()
            report = sf.tune(layer, x, budget=min(left, MOST), progress=False)
            print(f"{model.name}, {tokens} tokens\n{report}\n", flush=True)
            with torch.no_grad():
                layer(x)  # checks that the chosen fusions run
            yield [{"model": model.name, "tokens": tokens, **dataclasses.asdict(row)} for row in report.rows]


def profiled(of: sizes.Sizes, options: argparse.Namespace, _: list[Any]) -> Iterator[list[dict[str, Any]]]:
    """Microseconds of each kind of kernel, forward and backward."""
    wait: Any = (lambda: None) if options.tiny else torch.cuda.synchronize
    activities = [ProfilerActivity.CPU, *([] if options.tiny else [ProfilerActivity.CUDA])]
    for model in blocks.mains(of) or of.models:
        models, tokens = blocks.models_of("layer", model, of), of.tokens[0]
        inputs = blocks.drawn(of, model, "x", "dy")(tokens, 0)
        for name, module in (("seqfuse", models.ours), ("eager", models.torch())):
            step = blocks.trained(lambda module=module: module).prepare(inputs)
            for _ in range(1 if options.tiny else 3):
                step()
            wait()
            with profile(activities=activities) as seen:
                step()
                wait()
            yield [{"model": model.name, "tokens": tokens, "of": name, **summed(seen.key_averages())}]


def summed(events: Any) -> dict[str, int]:
    """Microseconds of each kind of kernel."""
    times = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in events:
        if not re.match(NO_KERNEL, event.key):
            kind = next((kind for kind, names in KINDS.items() if re.search(names, event.key)), "other")
            times[kind] += getattr(event, "self_device_time_total", 0.0) or event.self_cpu_time_total
    return {kind: round(time) for kind, time in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("what", choices=["tune", "profile"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU, interpreted")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds to tune everything")
    parser.add_argument("--resume", action="store_true", help="keep the layers that were tuned")
    options = parser.parse_args()
    file = OUT / f"gpu_{options.what}.json"
    rows: list[Any] = json.loads(file.read_text())[options.what] if options.resume and file.exists() else []
    rows_of = tuned if options.what == "tune" else profiled
    for more in rows_of(sizes.tiny() if options.tiny else sizes.real(), options, [*rows]):
        rows += more
        file.write_text(lines({"about": about(), options.what: rows}))


if __name__ == "__main__":
    main()

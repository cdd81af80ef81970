"""What `sf.tune` finds for layers on this GPU: every candidate's time, and that of what it replaces.

Writes `gpu_tune.json` after each layer into `results/`, or the folder that `OUT` names; `--resume` goes on behind the
layers that it has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ["SEQFUSE_TUNE"] = "0"  # this run's own measurements alone

import torch
from record import RESULTS, about, lines

import seqfuse as sf

MOST = 90.0
"""Seconds for one layer."""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for everything")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--resume", action="store_true", help="keep the layers that the file has")
    options = parser.parse_args()
    from gpu import blocks, sizes

    chosen, file = (
        sizes.tiny() if options.tiny else sizes.real(),
        Path(os.environ.get("OUT") or RESULTS, "gpu_tune.json"),
    )
    rows: list[Any] = json.loads(file.read_text())["tune"] if options.resume and file.exists() else []
    there, until = {(row["model"], row["tokens"]) for row in rows}, time.time() + options.budget
    models = sorted(chosen.models, key=lambda model: model.name not in sizes.MAIN)
    for tokens, model in ((tokens, model) for tokens in chosen.tokens[:2] for model in models):
        if (left := until - time.time()) > 0 and (model.name, tokens) not in there:
            layer: Any = blocks.Models("layer", blocks.spec_of(model), chosen).ours
            x = blocks.drawn(chosen, model, "x")(tokens, 0)["x"].requires_grad_()
            report = sf.tune(layer, x, budget=min(left, MOST), progress=False)
            print(f"{model.name}, {tokens} tokens\n{report}\n", flush=True)
            with torch.no_grad():
                layer(x)  # whatever was chosen runs
            rows += [{"model": model.name, "tokens": tokens, **dataclasses.asdict(row)} for row in report.rows]
            file.write_text(lines({"about": about(), "tune": rows}))


if __name__ == "__main__":
    main()

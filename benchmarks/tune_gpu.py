"""What `sf.tune` finds for the blocks of the main models on this GPU: every candidate's time, and that of what it
replaces.

Each layer is tuned by a process of its own, which is killed when it hangs. Writes `tune.json` beside the other results,
or into the folder that `OUT` names.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["SEQFUSE_TUNE"] = "0"  # this run's own measurements alone

import torch
from record import RESULTS, about, lines

MOST = 90.0
"""Seconds for one layer."""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for everything")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--layer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    from gpu import sizes

    chosen = sizes.tiny() if options.tiny else sizes.real()
    out = Path(os.environ.get("OUT") or RESULTS)
    if options.layer:
        name, tokens = options.layer.rsplit(" ", 1)
        (model,) = [model for model in chosen.models if model.name == name]
        return child(model, int(tokens), chosen, options.budget, out)
    from gpu.watch import GRACE, watched

    (out / "tune.json").unlink(missing_ok=True)
    until, bad = time.time() + options.budget, 0
    models = sorted(chosen.models, key=lambda model: model.name not in sizes.MAIN)
    for tokens in chosen.tokens[:2]:
        for model in models:
            left = until - time.time()
            if left > 0:
                layer = ["--layer", f"{model.name} {tokens}", "--budget", str(min(left, MOST))]
                command = [sys.executable, __file__, *layer, *(["--tiny"] if options.tiny else [])]
                _, why = watched(command, time.time() + min(left, MOST) + 3 * GRACE)
                bad += bool(why)
                print(f"{model.name}, {tokens} tokens: {why or 'done'}", flush=True)
    return 1 if bad else 0


def child(model: Any, tokens: int, chosen: Any, budget: float, out: Path) -> int:
    """Tune one layer, and add what was found to the files."""
    from gpu import blocks

    import seqfuse as sf

    models: Any = blocks.Models("layer", blocks.spec_of(model), chosen)
    x = blocks.drawn(chosen, model, "x")(tokens, 0)["x"].requires_grad_()
    report = sf.tune(models.ours, x, budget=budget, progress=False)
    print(f"{model.name}, {tokens} tokens\n{report}\n", flush=True)
    with torch.no_grad():
        models.ours(x)  # whatever was chosen runs
    file = out / "tune.json"
    rows: list[Any] = json.loads(file.read_text())["tune"] if file.exists() else []
    rows += [{"model": model.name, "tokens": tokens, **dataclasses.asdict(row)} for row in report.rows]
    file.write_text(lines({"about": about(), "tune": rows}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

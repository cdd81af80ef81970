"""What `sf.tune` finds for the blocks of the main models on this GPU: every candidate's time, and that of what it
replaces.

Writes `tune.json` beside the other results, or into the folder that `OUT` names.
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
from record import RESULTS, about

import seqfuse as sf


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for everything")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU")
    options = parser.parse_args()
    from gpu import blocks, sizes

    chosen = sizes.tiny() if options.tiny else sizes.real()
    until, rows = time.time() + options.budget, []
    out = Path(os.environ.get("OUT") or RESULTS) / "tune.json"
    models = sorted(chosen.models, key=lambda model: model.name not in sizes.MAIN)
    for tokens in chosen.tokens[:2]:
        for model in models:
            left = until - time.time()
            if left > 0:
                rows += tuned(blocks.Models("layer", blocks.spec_of(model), chosen), model, tokens, chosen, left)
                out.write_text(json.dumps({"about": about(), "tune": rows}, indent=1) + "\n")
    print(f"wrote {out}")


def tuned(models: Any, model: Any, tokens: int, sizes: Any, budget: float) -> list[dict[str, Any]]:
    """The rows of one layer."""
    from gpu.blocks import drawn

    x = drawn(sizes, model, "x")(tokens, 0)["x"].requires_grad_()
    report = sf.tune(models.ours, x, budget=budget, progress=False)
    print(f"{model.name}, {tokens} tokens\n{report}\n", flush=True)
    with torch.no_grad():
        models.ours(x)  # whatever was chosen runs
    return [{"model": model.name, "tokens": tokens, **dataclasses.asdict(row)} for row in report.rows]


if __name__ == "__main__":
    main()

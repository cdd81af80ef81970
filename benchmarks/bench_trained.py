"""Trains a small model with each recipe by `examples/low_precision.py`; writes losses to `results/trained.json`."""

from __future__ import annotations

import sys

from record import ROOT, write

if __name__ == "__main__":
    sys.path.append(str(ROOT / "examples"))
    import low_precision

    losses = {name: [round(loss, 4) for loss in found] for name, found in low_precision.main([]).items()}
    write("trained", {"losses": losses})

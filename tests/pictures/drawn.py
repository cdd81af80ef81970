"""The picture in the documentation; to draw it again, wide and narrow, run
.venv/bin/python -m tests.pictures.drawn"""

from __future__ import annotations

from pathlib import Path

import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.pictures.svg import FULL

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
FILES = {FOLDER / "drawn_plan.svg": FULL, FOLDER / "drawn_plan_narrow.svg": 430}


def picture(width: int) -> str:
    """The plan that docs/command_line.md shows as text."""
    members = ops.LayerNorm(64), ops.Linear(64, 256), ops.GeLU(), ops.Linear(256, 64), ops.Dropout(0.1)
    model = sf.Sequential(ops.Residual(*members), ops.Linear(64, 8)).bfloat16()
    x = torch.empty(512, 64, dtype=torch.bfloat16, device="meta")
    return model.to("meta").plan(x, env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=512)).svg(width) + "\n"


if __name__ == "__main__":
    for file, width in FILES.items():
        file.write_text(picture(width))

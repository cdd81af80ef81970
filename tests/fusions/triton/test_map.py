"""The map of the engine lists the files that run from a fusion to its kernel, at most six."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import seqfuse as sf
from seqfuse import fusions, ops

PACKAGE = Path(sf.__file__).parent
MAP = (PACKAGE.parent / "docs" / "dev" / "architecture.md").read_text()
MODELS: dict[str, tuple[nn.Module, ...]] = {
    "LinearBias": (ops.Linear(32, 32), ops.SquaredReLU()),  # a Linear by itself runs as calls of torch
    "LinearBiasPointwise": (ops.Linear(32, 32), ops.GeLU()),
    "NormBackward": (ops.LayerNorm(32),),
    "BlockBoundary": (ops.Residual(ops.Bias(32), ops.Dropout(0.1)), ops.LayerNorm(32)),
    "PointwiseChain": (ops.GeLU(), ops.Scale(2.0), ops.SiLU()),
}
EVERY_LAUNCH = {"kernels/_launch.py", "kernels/_operators.py", "kernels/c/call.py"}


def listed() -> dict[str, list[str]]:
    """The files of each row of the map, by fusion."""
    rows: dict[str, list[str]] = {}
    section = MAP.partition("## From a fusion to its kernel\n")[2].partition("\n## ")[0]
    for name, cell in re.findall(r"^\| [^|]*`(\w+)` \| (.*) \|$", section, re.MULTILINE):
        folder, files = "", list[str]()
        for file in re.findall(r"`([\w/]+\.py)`", cell):
            folder = file.rpartition("/")[0] or folder
            files.append(f"{folder}/{file.rpartition('/')[2]}")
        rows[name] = files
    return rows


def files_run(name: str) -> set[str]:
    """Files of fusions and kernels whose functions run in a pass of a fusion."""
    cls: Any = getattr(fusions, name)
    model = sf.Sequential(*MODELS[name], fusions=(cls,))
    x = torch.randn(8, 32, requires_grad=True)
    passes, inside, found = {f"{name}.fwd", f"{name}.bwd"}, 0, set[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal inside
        if event == "call" and (inside or frame.f_code.co_qualname in passes):
            inside += 1
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(PACKAGE):
                found.add(file.relative_to(PACKAGE).as_posix())
        elif event == "return" and inside:
            inside -= 1

    with sf.fusing(unmeasured=True):
        assert model.plan(x).count(name) == 1
        model(x).sum().backward()  # imports the kernels
        sys.setprofile(note)
        try:
            model(x).sum().backward()
        finally:
            sys.setprofile(None)
    return {file for file in found if file.startswith(("fusions/", "kernels/"))}


def test_the_map_lists_one_fusion_of_each_family() -> None:
    assert listed().keys() == MODELS.keys()


@pytest.mark.parametrize("name", MODELS)
def test_few_files_lead_from_a_fusion_to_its_kernel(name: str) -> None:
    files = listed()[name]
    assert len([file for file in files if not file.startswith("kernels/c/")]) <= 6
    assert all((PACKAGE / file).exists() for file in files)
    run = files_run(name) - EVERY_LAUNCH
    assert run
    assert run <= set(files)

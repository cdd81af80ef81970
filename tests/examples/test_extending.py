"""The examples of extending the library: what they print, how few lines they take, and the plug-in as a package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.examples.counted import lines_of

ROOT = Path(__file__).resolve().parent.parent.parent
FUSION = ROOT / "examples" / "04_write_a_fusion.py"


def run(*command: str, folder: Path, **environment: str) -> list[str]:
    """The lines that `python <command>` prints in a folder; it ends well and warns of nothing."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout.splitlines()


def test_an_activation_and_a_fusion_are_as_short_as_they_are_said_to_be() -> None:
    assert lines_of(FUSION, "HardSwish") <= 15
    assert lines_of(FUSION, "ScaleTanhScale", "chains") <= 30


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_device_the_fusion_is_planned_for_one_and_refused_here(tmp_path: Path) -> None:
    lines = run(str(FUSION), folder=tmp_path, PYTHONPATH=str(ROOT))
    assert "ScaleTanhScale: 0 cases on no list" in lines
    assert "On cpu bfloat16 ~16 rows: 0 ScaleTanhScale" in lines
    assert lines[-1] == "refused: needs a Triton device"
    assert_planned(lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_interpreted_it_is_checked_in_one_call_and_used(tmp_path: Path) -> None:
    lines = run(str(FUSION), folder=tmp_path, PYTHONPATH=str(ROOT), TRITON_INTERPRET="1")
    text = "\n".join(lines)
    for name, of in (
        ("BiasActivation", "Bias, HardSwish"),
        ("BiasActivationBackward", "Bias, HardSwish"),
        ("ScaleTanhScale", "Scale, Tanh, Scale"),
    ):
        assert re.search(rf"^{name}: [1-9]\d+ cases on \[{of}\]$", text, re.MULTILINE), text
    assert "skipped" not in text
    assert lines[-1] == "On cpu bfloat16 ~16 rows: 1 ScaleTanhScale"
    assert_planned(lines)


def assert_planned(lines: list[str]) -> None:
    """The plan for a machine that is not here holds the new operation in the library's fusions, and the new fusion."""
    begins = [name for line in lines for name in re.findall(r"\[ (\w+)", line) if re.match(r" +\d+  ", line)]
    counts = {"LinearBiasActivation": 1, "ActivationLinearBackward": 1, "ScaleTanhScale": 2}
    assert {name: begins.count(name) for name in counts} == counts

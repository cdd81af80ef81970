"""The calls on a GPU: one stage that fails costs that stage."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

import first_hour
import pytest
from gpu import rows
from gpu.sizes import tiny

from tests.processes import Script

pytest.importorskip("triton")


def test_sanitized_rows_are_there() -> None:
    keys = [case.key for case in rows.cases(tiny())]
    for only in first_hour.SANITIZED:
        assert any(re.search(f"^{only}", key) for key in keys), only


def test_a_command_that_fails_is_told_and_the_next_one_runs(tmp_path: Path) -> None:
    python = [sys.executable, "-S", "-c"]
    chosen = [
        first_hour.Stage("absent", 20, [["no-such-tool"]]),
        first_hour.Stage("hangs", 0.3, [["sleep", "99"]]),
        first_hour.Stage("a/b", 20, [[*python, "import os; os.abort()"], ["echo", "one\nlast, {left} s"]]),
        first_hour.Stage("variables", 20, [["printenv", "OWN"]]),
    ]
    first_hour.perform(chosen, time.time() + 60, tmp_path, {"PATH": os.environ["PATH"], "OWN": "its own"})
    stages = json.loads((tmp_path / "summary.json").read_text())["stages"]
    told = {name: stage["results"] for name, stage in stages.items()}
    assert told.pop("absent")[0].startswith("FileNotFoundError")
    assert told == {
        "hangs": ["the time was over: "], "a/b": ["its process ended with status -6: ", "ok: last, 4 s"],
        "variables": ["ok: its own"],
    }  # fmt: skip
    assert (tmp_path / "a_b1.log").read_text() == "one\nlast, 4 s\n"
    late = first_hour.perform([first_hour.Stage("late", 20, [["true"]])], 0.0, tmp_path, {})
    assert late["late"]["results"] == ["no time was left"]


def test_commands_take_the_options_that_they_are_given(tmp_path: Path) -> None:
    """Each script parses its own options; with --help it only parses."""
    scripts = {
        tuple(str(part).format(left=9) for part in [*command[1:], "--help"])
        for call in first_hour.SECONDS
        for stage in map(first_hour.rehearsed, first_hour.stages(call, tmp_path))
        for command in stage.commands
        if "pytest" not in command
    }
    assert len(scripts) == 5
    for command in scripts:
        done = Script(*command, folder=tmp_path, bare=True).done()
        assert done.returncode == 0, done.stderr

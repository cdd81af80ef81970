"""The calls on a GPU: one stage that fails costs that stage."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import first_hour
import pytest
from gpu import rows
from gpu.sizes import tiny

pytest.importorskip("triton")


def test_every_row_is_in_a_family_that_smoke_runs() -> None:
    for case in rows.cases(tiny()):
        found = [room for room, only in first_hour.ROOMS.items() if re.search(only, case.key)]
        assert found, case.key


def test_sanitized_rows_are_there() -> None:
    keys = [case.key for case in rows.cases(tiny())]
    for only in first_hour.SANITIZED:
        assert any(re.search(f"^{only}", key) for key in keys), only


def test_calls_fit_into_what_one_may_take() -> None:
    assert all(seconds <= 580 for _, seconds in first_hour.CALLS.values())


def test_a_stage_that_fails_is_told_and_the_next_one_runs(tmp_path: Path) -> None:
    call = first_hour.Call(tmp_path, time.time() + 60, True)

    def fails() -> None:
        raise OSError("no device")

    call.stage("fails", fails)
    call.stage("hangs", lambda: call.run(["sleep", "99"], 0.3, "log"))
    call.stage("crashes", lambda: call.run([sys.executable, "-S", "-c", "import os; os.abort()"], 20, "log"))
    call.stage("works", lambda: call.run(["echo", "here"], 20, "log"))
    told = {name: one["result"] for name, one in json.loads((tmp_path / "summary.json").read_text())["stages"].items()}
    assert told == {
        "fails": "OSError: no device", "hangs": "the time was over", "crashes": "its process ended with status -6",
        "works": "ok (0)",
    }  # fmt: skip
    assert (tmp_path / "log").read_text().endswith("here\n")
    call.until = 0
    call.stage("late", fails)
    assert call.done["late"]["result"] == "no time was left"

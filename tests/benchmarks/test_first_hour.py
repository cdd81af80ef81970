"""The calls on a GPU: one stage that fails costs that stage."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import re
import sys
import time
from pathlib import Path
from typing import Any

import first_hour
import pytest
from gpu import rows
from gpu.sizes import tiny

from seqfuse import kernels
from seqfuse.testing.compile import is_kernel

pytest.importorskip("triton")


def test_every_row_is_in_a_family_that_smoke_runs() -> None:
    for case in rows.cases(tiny()):
        found = [room for room, only in first_hour.ROOMS.items() if re.search(only, case.key)]
        assert found, case.key


def test_sanitized_rows_are_there() -> None:
    keys = [case.key for case in rows.cases(tiny())]
    for only in first_hour.SANITIZED:
        assert any(re.search(f"^{only}", key) for key in keys), only


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


def test_a_family_that_cannot_begin_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(call: first_hour.Call, command: list[str], *_: Any, **__: Any) -> str:
        out = Path(command[command.index("--out") + 1])
        if out.name == "norms_bfloat16.json":
            return "its process ended with status 1"
        rows = {} if out.name == "blocks_float16.json" else {"a: 1": {"status": "checked"}}
        out.write_text(json.dumps({"rows": rows}))
        return "ok (0)"

    monkeypatch.setattr(first_hour.Call, "run", run)
    told = first_hour.smoke(first_hour.Call(tmp_path, time.time() + 60, False)).split("; ")
    assert told == [
        "10 rows, 0 red or failed",
        "no rows of norms bfloat16: its process ended with status 1",
        "no rows of blocks float16: ok (0)",
    ]


def test_counters_are_of_our_kernels() -> None:
    names = [kernel.__name__ for kernel in kernels_there_are()]
    assert names
    assert all(re.search(first_hour.OURS, name) for name in names)
    theirs = ("vectorized_elementwise_kernel", "distribution_elementwise_grid_stride_kernel", "nvjet_hsh_256x128")
    assert not any(re.search(first_hour.OURS, name) for name in theirs)


def kernels_there_are() -> list[Any]:
    modules = [
        importlib.import_module(f"{kernels.__name__}.{one.name}") for one in pkgutil.iter_modules(kernels.__path__)
    ]
    found = [value for module in modules for name, value in vars(module).items() if name.endswith("_kernel")]
    return [kernel for kernel in found if is_kernel(kernel)]

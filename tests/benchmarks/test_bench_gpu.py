"""A benchmark run: rows in order, partial results, a child process that ends, a row that takes too long."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_gpu
import pytest
import torch
from gpu import blocks, rows, watch
from gpu.sizes import MODELS, real, tiny
from gpu.watch import Book
from targets import TARGETS

import seqfuse as sf
from tests.processes import Script

pytest.importorskip("triton")

SCRIPT = Path(bench_gpu.__file__)


def test_every_row_has_a_name_of_its_own() -> None:
    for sizes in (real(), tiny()):
        keys = [case.key for case in rows.cases(sizes)]
        assert len(keys) == len(set(keys))


def test_one_row_of_each_group_with_a_target_comes_first() -> None:
    cases = rows.cases(real())
    groups = {group for target in TARGETS if target.rows == "gpu" for group in target.groups}
    first = len(groups)
    assert {case.group for case in cases[:first]} == groups
    assert [c.priority for c in cases[first:]] == sorted(c.priority for c in cases[first:])


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("what", blocks.GROUPS)
def test_blocks_of_real_sizes_are_planned_for_an_sm_90(model: Any, what: str) -> None:
    import plain

    block = plain.fused(what, blocks.spec_of(model, 0.1), device="meta", dtype=torch.bfloat16)
    plan = block.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192))
    steps = (*plan.forward, *plan.backward)
    assert [step for step in steps if getattr(step.operation, "kernels", ())], plan
    theirs = plain.build(what, blocks.spec_of(model, 0.1), device="meta", dtype=torch.bfloat16)
    assert {k: v.shape for k, v in theirs.state_dict().items()} == {k: v.shape for k, v in block.state_dict().items()}


Child = Callable[[Sequence[str]], int]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[[Child], None]:
    """Runs a function instead of a child process."""

    def stand_in(run: Child) -> None:
        def watched(command: Sequence[str], until: float, stuck: Any) -> tuple[int, str]:
            status = run(command)
            return status, f"its process ended with status {status}" if status else ""

        monkeypatch.setattr(watch, "watched", watched)

    return stand_in


def options(**given: Any) -> argparse.Namespace:
    defaults = {
        "budget": 100.0,
        "resume": False,
        "only": "",
        "tiny": True,
        "check": True,
        "most": 9.0,
        "dtype": "float32",
    }
    return argparse.Namespace(**defaults | given)


def test_a_child_that_ends_costs_one_row(tmp_path: Path, child: Callable[[Child], None]) -> None:
    out, calls = tmp_path / "gpu.json", []

    def run(command: Sequence[str]) -> int:
        calls.append(command)
        book = Book(out)
        book.state(planned=["a: 1", "a: 2", "b: 1"])
        for key in ("a: 1", "a: 2", "b: 1"):
            if key not in book.rows:
                book.begin(key)
                if key == "a: 2":
                    return -11
                book.add(key, {"status": "ok"})
        return 0

    child(run)
    assert bench_gpu.supervise(options(), out) == 1
    found = Book(out).rows
    assert [found[key]["status"] for key in ("a: 1", "a: 2", "b: 1")] == ["ok", "failed", "ok"]
    assert found["a: 2"]["why"] == "its process ended with status -11"
    assert len(calls) == 2
    assert all(command[-2] == "--child" for command in calls)


CHILD = """
import json, os, sys, time, types
from pathlib import Path
sys.modules["torch"] = types.ModuleType("torch")  # which takes a second and is not used
sys.path.insert(0, {folder!r})
from gpu.watch import Book
book = Book(Path({out!r}))
for key, work in {{"a: crashes": os.abort, "a: hangs": lambda: time.sleep(99), "b: works": dict}}.items():
    if key not in book.rows:
        book.begin(key)
        book.add(key, {{"status": "ok", **work()}})
"""


def test_rows_that_crash_and_hang_are_marked_and_those_behind_them_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, script = tmp_path / "gpu.json", tmp_path / "child.py"
    script.write_text(CHILD.format(folder=str(SCRIPT.parent), out=str(out)))
    monkeypatch.setattr(bench_gpu, "__file__", str(script))
    assert bench_gpu.supervise(options(most=0.5), out) == 1
    found = Book(out).rows
    assert [row["status"] for row in found.values()] == ["failed", "failed", "ok"]
    assert found["a: crashes"]["why"] == "its process ended with status -6"
    assert found["a: hangs"]["why"].startswith("it was killed after")


def test_a_run_goes_on_from_committed_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, child: Callable[[Child], None]
) -> None:
    monkeypatch.setattr(bench_gpu, "RESULTS", tmp_path / "results")
    Book(tmp_path / "results" / "gpu.json").add("a: 1", {"status": "ok"})
    seen: list[set[str]] = []

    def run(command: Sequence[str]) -> int:
        seen.append(set(Book(tmp_path / "out" / "gpu.json").rows))
        return 0

    child(run)
    bench_gpu.supervise(options(resume=True), tmp_path / "out" / "gpu.json")
    bench_gpu.supervise(options(resume=False), tmp_path / "out" / "gpu.json")
    assert seen == [{"a: 1"}, set()]


def test_what_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    Book(out).begin("a: 1")
    began = time.time()
    log = tmp_path / "log"
    command = ["sh", "-c", "trap '' TERM INT ALRM; sleep 99 & echo begun; wait; sleep 99"]
    status, why = watch.watched(command, began + 60, lambda: Book(out).overdue(0.5), log=str(log))
    assert status == -9
    assert why.startswith("it was killed after")
    assert log.read_text() == "begun\n"
    assert watch.watched(["sleep", "9"], time.time() + 0.3) == (-9, "the time was over")
    assert watch.watched(["sh", "-c", "exit 3"], began + 60) == (3, "its process ended with status 3")
    assert watch.watched(["true"], began + 60) == (0, "")


def test_a_row_is_let_go_before_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row holds its models, in float64 too: those of all rows do not fit in the memory of a GPU."""
    rows_of: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def chosen(_: argparse.Namespace) -> list[Any]:
        cases = [case for case in rows.cases(tiny()) if case.group == blocks.GROUPS["feedforward"]]
        rows_of.extend(map(weakref.ref, cases))
        return cases

    class Bench:
        def row(self, case: Any, **_: Any) -> dict[str, Any]:
            alive.append(sum(row() is not None for row in rows_of))
            return {"status": "failed", "why": ""}

    monkeypatch.setattr(bench_gpu, "chosen", chosen)
    monkeypatch.setattr(bench_gpu, "_bench", lambda *_: Bench())
    monkeypatch.setattr(bench_gpu, "corrected", contextlib.nullcontext)
    given = options(on_gpu=False)
    assert bench_gpu.work(given, tmp_path / "gpu.json", time.time() + 60) == 0
    assert alive == [*range(len(rows_of), 0, -1)]
    assert len(alive) > 1


def test_a_row_that_the_end_cuts_off_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, script, begun = tmp_path / "gpu.json", tmp_path / "child.py", time.time()
    script.write_text(CHILD.format(folder=str(SCRIPT.parent), out=str(out)))
    monkeypatch.setattr(bench_gpu, "__file__", str(script))
    Book(out).add("a: crashes", {"status": "ok"})
    assert bench_gpu.supervise(options(resume=True, budget=2.0, most=99.0), out) == 0
    assert 2 <= time.time() - begun < 17
    assert Book(out).rows == {"a: crashes": {"status": "ok"}}
    assert Book(out).bury("its process ended too early") is None


def test_runs_from_the_command_line_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out, kept, new = tmp_path / "gpu.json", "norm forward: RMSNorm 24 x 40", "add + norm forward: RMSNorm 24 x 40"
    before = {"status": "ok", "times": {"of an earlier run": [1.0]}}
    Book(out).add(kept, before)
    command = [str(SCRIPT), "--tiny", "--seconds", "0", "--out", str(out), "--resume", "--only"]
    done = Script(*command, "norm forward: RMSNorm 24", folder=tmp_path, bare=True).done()
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {"commit", "device", "torch", "triton"} <= found["about"].keys()
    assert found["rows"].keys() == {kept, new} == set(found["planned"]), done.stdout + done.stderr
    assert found["rows"][kept] == before
    assert found["rows"][new]["status"] == "ok"
    assert found["rows"][new]["times"]

"""Tables and verdicts of invented results: losses are shown as well as wins, and rows that did not run are named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gpu_tables
import pytest
import record
import report
import tables
import targets

ABOUT = {
    "device": "Card", "capability": "AVX512", "torch": "2.11", "triton": "3.6", "python": "3.12",
    "commit": "0123456789ab", "changed": False,
}  # fmt: skip


def times(**medians: float) -> dict[str, Any]:
    return {name: {"median": m, "low": m - 1, "high": m + 1, "samples": 9} for name, m in medians.items()}


def row(group: str, name: str, fraction: float = 0.95, **medians: float) -> dict[str, Any]:
    return {
        "group": group, "name": name, "status": "ok", "dtype": "bfloat16", "shape": {"N": 8192, "K": 4096},
        "times": times(**medians), "fraction": {"seqfuse": fraction, "eager": 0.5},
    }  # fmt: skip


def found() -> dict[str, Any]:
    block = row("MLP block forward + backward", "llama 8192", seqfuse=100.0, eager=150.0, compile=90.0)
    block |= {
        "as_called": times(seqfuse=100.0, eager=140.0, compile=95.0),
        "memory": {"seqfuse": {"kept": 60, "peak": None}, "eager": {"kept": 100, "peak": None}},
    }
    rows = [
        row("norm forward", "RMSNorm 32768 x 8192", seqfuse=10.0, eager=15.0, liger=9.0),
        row("norm forward", "RMSNorm 32768 x 4096", 0.90, seqfuse=10.0, eager=15.0, liger=11.0),
        block,
        {"group": "norm backward", "name": "x", "status": "red", "why": "differs | here\nand there"},
    ]
    return {
        "about": ABOUT, "peers": {"liger": "0.8", "quack": "not installed"},
        "ceilings": {"copy_TB_per_s": 4.2, "cublas_TFLOP_per_s": {"bfloat16": 780.0}},
        "rows": {f"{r['group']}: {r['name']}": r for r in rows}, "planned": ["norm forward: late", "norm backward: x"],
    }  # fmt: skip


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return tmp_path


def test_a_target_is_met_only_by_every_row() -> None:
    verdicts = {v.target.what: v for v in targets.judged({"gpu": found()["rows"].values()})}
    copy = verdicts["norm and add + norm forward: fraction of copy bandwidth"]
    assert (copy.status, copy.reached, copy.worst) == ("missed", 1, ("RMSNorm 32768 x 4096", 0.90))
    assert verdicts["norm and add + norm forward, N >= 8192: time / torch eager"].status == "met"
    liger = verdicts["norm and add + norm forward: time / Liger-Kernel"]
    assert liger.worst == ("RMSNorm 32768 x 8192", pytest.approx(1 / 0.9))
    assert verdicts["norm and add + norm forward: time / quack"].status == "not run"
    assert verdicts["MLP block: time / torch.compile (best mode)"].worst[1] == pytest.approx(1 / 0.95)
    assert verdicts["MLP block: time / torch eager"].status == "met"
    assert verdicts["decode attention: fraction of copy bandwidth"].status == "not run"
    assert verdicts["norm backward (+ residual): fraction of copy bandwidth"].status == "missed"


def test_without_results_everything_is_not_run(results: Path) -> None:
    lines = report.goals().splitlines()
    assert len(lines) == 2 + len(targets.TARGETS)
    assert all("| not run |" in line for line in lines[2:])
    assert gpu_tables.gpu() == "Not run yet: no GPU was at hand.\n"
    assert report.host() is report.memory() is report.traffic() is report.kernels() is None


def test_losses_red_rows_and_what_was_not_run_are_shown(results: Path) -> None:
    (results / "gpu.json").write_text(json.dumps(found()))
    shown = gpu_tables.gpu()
    assert "| norm forward | 2 | 0.90 to 0.95 | 0.67 | 0.91 to 1.11 (RMSNorm 32768 x 8192) |" in shown
    assert "| llama 8192 | 100 | 0.67 (0.71) | 1.11 (1.05) | 0.95 | 0.60 |" in shown
    assert "- x, norm backward: wrong, differs \\| here and there" in shown
    assert "Rows for which there was no time, 1: norm forward: 1." in shown
    assert "quack was not installed" in shown
    assert "a copy of 4.20 TB/s; cuBLAS 780 TFLOP/s in bfloat16" in shown
    assert all(len(set(re.findall(r"(?<!\\)\|", line))) <= 1 for line in shown.splitlines())
    assert (
        "| norm and add + norm forward: time / Liger-Kernel | ≤ 1 | missed | 1 of 2 | 1.11 (RMSNorm 32768 x 8192) |"
        in (report.goals())
    )


def test_rows_that_lose_are_counted_and_the_worst_is_named() -> None:
    rows = [
        row("norm", "won", seqfuse=9, eager=10, liger=9),
        row("norm", "lost", seqfuse=12, eager=10, liger=9),
        row("norm", "worst", seqfuse=20, eager=10),
        {**row("block", "as called", seqfuse=5, eager=10), "as_called": times(seqfuse=15, eager=10)},
        {"group": "block", "name": "failed", "status": "wrong"},
        row("alike", "equal", seqfuse=1000, eager=1000),
    ]
    cells = gpu_tables.slower_gpu.__wrapped__({"rows": dict(enumerate(rows))})[2:]
    assert cells == [
        "| block | eager PyTorch | 1 of 1 | 1.50 (as called) |",
        "| norm | Liger | 1 of 2 | 1.33 (lost) |",
        "| norm | eager PyTorch | 2 of 3 | 2.00 (worst) |",
    ]
    sides = ({"rows": [{"name": name, "sides": {"default": {"ratio": r}}}]} for name, r in (("a", 1.14), ("b", 0.9)))
    assert report.slower_cpu.__wrapped__(*sides)[2:] == ["| a | 1.14 |"]


def test_committed_results_can_be_drawn() -> None:
    for path in record.RESULTS.glob("*.json"):
        assert path.read_text() == record.lines(json.loads(path.read_text()))
    for name, draw in report.DRAWN.items():
        shown = draw()
        assert shown is None or shown.endswith("\n"), name
    assert report.host()


def test_the_number_of_converted_models_is_that_of_the_tests() -> None:
    pytest.importorskip("transformers")
    from tests.convert.families import FAMILIES

    assert report.families() == len(FAMILIES)
    assert f"converted models | equal within rounding in {len(FAMILIES)} small models |" in str(report.claims())

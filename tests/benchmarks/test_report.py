"""Tables and verdicts of made-up results: losses stand beside wins, and what was not run is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gpu_tables
import losses
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


def test_less_is_better_where_a_target_says_so() -> None:
    kept = {"model": "one", "kept": {"seqfuse balanced": 64, "seqfuse lean": 46, "eager": 100}}
    verdicts = {v.target.what: v for v in targets.judged({"memory": [kept]})}
    assert verdicts['MLP block, `"balanced"`: saved bytes / torch eager'].status == "met"
    assert verdicts['MLP block, `"lean"`: saved bytes / torch eager'].status == "missed"


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
    assert "| llama 8192 | 100.0 | 0.67 (0.71) | 1.11 (1.05) |" in shown
    assert "| llama 8192 | 0.95 | 0.60 |" in shown
    assert "- x, norm backward: wrong, differs \\| here and there" in shown
    assert "Rows for which there was no time, 1: norm forward: 1." in shown
    assert "quack was not installed" in shown
    assert "a copy of 4.20 TB/s; cuBLAS 780 TFLOP/s in bfloat16" in shown
    assert all(len(set(re.findall(r"(?<!\\)\|", line))) <= 1 for line in shown.splitlines())
    assert (
        "| norm and add + norm forward: time / Liger-Kernel | ≤ 1 | missed | 1 of 2 | 1.11 (RMSNorm 32768 x 8192) |"
        in (report.goals())
    )


def test_what_a_page_shows_of_a_gpu_follows_from_what_ran(results: Path) -> None:
    page = "Before.\n<!-- figures: score -->\nold\n<!-- end of figures -->\nAfter.\n"
    assert report.redrawn(page) == page
    (results / "gpu.json").write_text(json.dumps(found()))
    shown = report.redrawn(page)
    assert shown.startswith("Before.\n<!-- figures: score -->\n")
    assert shown.endswith("<!-- end of figures -->\nAfter.\n")
    assert "old" not in shown
    counted = [v.status for v in report.verdicts() if v.values]
    told = [int(number) for number in re.findall(r"(\d+) of (?:\d+) for", shown)]
    assert sum(told) == counted.count("met")
    assert 0 < counted.count("met") < len(counted)


def test_rows_that_lose_are_counted_and_the_worst_is_named() -> None:
    rows = [
        row("norm", "won", seqfuse=9, eager=10, liger=9),
        row("norm", "lost", seqfuse=12, eager=10, liger=9),
        row("norm", "worst", seqfuse=20, eager=10),
        {**row("block", "as called", seqfuse=5, eager=10), "as_called": times(seqfuse=15, eager=10)},
        {"group": "block", "name": "failed", "status": "wrong"},
        row("alike", "equal", seqfuse=1000, eager=1000),
    ]
    cells = losses.slower_gpu.__wrapped__({"rows": dict(enumerate(rows))})[2:]
    assert cells == [
        "| block | eager PyTorch | 1 of 1 | 1.50 (as called) |",
        "| norm | Liger | 1 of 2 | 1.33 (lost) |",
        "| norm | eager PyTorch | 2 of 3 | 2.00 (worst) |",
    ]
    sides = ({"rows": [{"name": name, "sides": {"default": {"ratio": r}}}]} for name, r in (("a", 1.14), ("b", 0.9)))
    assert losses.slower_cpu.__wrapped__(*sides)[2:] == ["| a | 1.14 |"]


def test_results_have_a_line_for_each_row() -> None:
    data = {"about": {"torch": "2"}, "rows": [{"a": [1, {"b": 2}]}, {"a": []}], "by name": {"x": {}, "y": [1]}, "n": 1}
    written = record.lines(data)
    assert json.loads(written) == data
    assert written.count("\n") == 12
    assert '\n  {"a": [1, {"b": 2}]},\n' in written


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


def test_memory_and_time_of_a_training_step_stand_beside_checkpointing(results: Path) -> None:
    import bench_peak

    assert report.peak() is report.training() is None
    sides = [*bench_peak.SIDES]
    rows = [
        {
            "side": side, "saved": 2**20 * (10 - i), "before": 2**20, "peak": 2**20 * (21 - i), "parameters": 2**20,
            "step": {"seconds": 2.0 + i, "ratio": 1 + i / 4, "low": 1 + i / 8, "high": 1 + i / 2},
        }
        for i, side in enumerate(sides)
    ]  # fmt: skip
    made = {"about": ABOUT, "layers": 4, "width": 8, "tokens": [2, 16], "rounds": 5, "rows": rows}
    (results / "peak.json").write_text(json.dumps(made))
    (results / "peak_avx512.json").write_text(json.dumps({**made, "rows": rows[:2]}))
    (results / "front.json").write_text(json.dumps({"about": ABOUT, "tokens": [3, 7]}))
    whole, first = str(report.peak()), str(report.training())
    for shown in (whole, first):
        assert "(no output layer, no loss) with 4 layers of width 8, on 2 x 16 tokens" in " ".join(shown.split())
    assert "Picture: 3 x 7, AVX-512, without AdamW." in " ".join(first.split())
    assert [one.count("\n| ") - 2 for one in (whole, "\n" + first)] == [len(sides), len(sides) - 1]
    assert "| eager PyTorch | 10 MiB (1.00) | 20 MiB (1.00) | 2.00 s (1.00) |" in whole
    assert "checkpointed | 9 MiB (0.90) | 19 MiB (0.95) | 3.00 s (1.25, 1.12 to 1.50) |" in whole
    assert "| eager PyTorch, each layer checkpointed | 0.90 | 0.95 | 1.25 | 1.25 |" in first
    assert '| `sf.convert(model, memory="fast")` | 0.80 | 0.90 | 1.50 | - |' in first


def measured(group: str, name: str, **medians: float) -> dict[str, Any]:
    made = row(group, name, **medians)
    memory = {side: {"kept": 2**20 * i, "peak": 2**21 * i} for i, side in enumerate(medians, 1)}
    shape = {"model": name, "M": 8192, "layers": 2}
    return made | {"as_called": times(**medians), "memory": memory, "shape": shape}


def test_choices_of_memory_on_a_gpu(results: Path) -> None:
    assert report.summary() is report.front() is None
    sides = {"seqfuse": 2e3, "eager": 4e3, "checkpointed": 5e3, "seqfuse lean": 3e3, "seqfuse 0.5": 4e3}
    choice = measured("memory: layers forward + backward", "gpt", **sides)
    choice |= {"said": {"seqfuse": {"saved": 1, "peak": 3 * 2**20}}, "gradients": 2**20}
    (results / "gpu.json").write_text(json.dumps({"about": ABOUT, "rows": {"a": choice}}))
    summary = str(report.summary()).splitlines()
    assert summary[0] == (
        "| 2 layers of `seqfuse.nn` with the sizes of gpt, 8,192 tokens, same H100, forward + backward | GPU time "
        "| peak added, with parameter gradients |"
    )
    assert '| `memory="lean"` | 0.75 | 2.00 |' in summary
    front = str(report.front()).splitlines()
    assert '| `memory="fast"` | 2.0 ms (0.50) | 2 MiB (0.50) | 3 MiB |' in front
    assert "| eager PyTorch, each layer checkpointed | 5.0 ms (1.25) | 6 MiB (1.50) |  |" in front

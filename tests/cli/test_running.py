"""`seqfuse tune` and `seqfuse cache warm`: stored measurements, kernels compiled ahead of time."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from seqfuse import compiler, cost_table
from seqfuse.cli import running
from seqfuse.env import autocast_of
from seqfuse.settings import settings
from seqfuse.tune import Row, TuneReport, timing

from .conftest import Cli


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enables tuning, with its cache in a temporary home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("SEQFUSE_TUNE", "1")
    monkeypatch.setattr(cost_table, "_tables", {})
    monkeypatch.setattr(cost_table, "_warned", set())
    settings.cache_clear()
    yield tmp_path / "cache" / "seqfuse" / "tune"  # pyright: ignore[reportReturnType]
    settings.cache_clear()


def test_tuned_measurements_are_kept(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steady = itertools.cycle([1000.0, 2000.0])
    monkeypatch.setattr(timing, "clock", lambda device: lambda run: (run(), next(steady))[1])
    given = ("tune", "M:build", "--input", "64x16", "--modes", "eval", "--device", "cpu")
    report = json.loads(cli(*given, "--json").out)
    assert report["measured"] > 0
    assert report["file"] is not None
    assert report["file"].startswith(str(folder))
    assert "0 measured now" in cli(*given).out


def test_running_into_a_file(cli: Cli, tmp_path: Path) -> None:
    done = cli("tune", "M:build", "--input", "8x16", "--file", "kept.json", "--budget", "0", "--device", "cpu")
    assert done.status == 0
    assert "the budget ran out before" in done.out
    assert done.err == ""  # no progress bar outside a terminal


def test_columns_are_at_least_as_wide_as_their_heads() -> None:
    head, row = str(TuneReport((Row("Slow", "2", "train", None, None, None, False),))).splitlines()[1:3]
    assert head.index("mode") == row.index("train")


def test_running_is_under_autocast_where_that_is_asked_for(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype | None] = []
    monkeypatch.setattr(running, "tune", lambda *_, **__: seen.append(autocast_of("cpu")) or TuneReport(()))
    for asked in ((), ("--autocast", "bf16")):
        assert cli("tune", "M:build", "--input", "8x16", "--device", "cpu", *asked).status == 0
    assert seen == [None, torch.bfloat16]


def test_kernels_are_compiled_ahead(cli: Cli) -> None:
    if compiler.compiler() is None:
        assert compiler.why_none() in cli("cache", "warm", "M:build", "--input", "8x16").err
        return
    given = ("cache", "warm", "M:build", "--input", "4096x16")
    assert re.fullmatch(r"\d+ kernels compiled, \d+ kept in .+\n", cli(*given).out)
    assert cli(*given).out.startswith("0 kernels compiled, ")
    raised = cli("cache", "warm", "M:broken", "--input", "4x16")
    assert (raised.status, raised.out) == (2, "")
    assert re.fullmatch(r"seqfuse: \w+:broken called on 4x16:float32 raised RuntimeError: no luck\n", raised.err)

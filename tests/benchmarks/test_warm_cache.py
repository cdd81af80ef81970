"""A launch on a GPU finds the kernels that were compiled and packed without one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import warm_cache
from gpu import rows
from gpu.launched import of_row
from gpu.sizes import tiny

pytest.importorskip("triton")

from tools.stub_driver import stub_driver


def test_a_launch_finds_the_kernel_that_was_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm_cache, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(warm_cache, "PACK", tmp_path / "pack.tar.xz")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    assert warm_cache.unpack() == 1
    (case,) = [case for case in rows.cases(tiny(torch.bfloat16)) if case.key == "activation forward: silu 16 x 24"]
    monkeypatch.setattr(warm_cache, "launches", lambda *_: [(case.key, one) for one in of_row(case)] * 2)
    assert warm_cache.pack("", 60) == 0
    assert "1 kernels, 0 failed, " in capsys.readouterr().out
    shutil.rmtree(tmp_path / "cache")
    assert warm_cache.unpack() == 0
    with stub_driver() as stub:
        case.contenders["seqfuse"].prepare(case.make(case.rows, 1))()
    assert (stub.compiled, stub.loaded) == ([], ["_chain_kernel"])
    monkeypatch.setattr(warm_cache, "key", lambda: {"triton": "another"})
    assert warm_cache.unpack() == 1
    assert "compiled again" in capsys.readouterr().out


def test_a_pack_that_the_budget_cut_off_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(warm_cache, "work", lambda *_: [("a row", lambda: None)])
    assert warm_cache.fill("", -1.0) == (0, 1)
    assert "a row: the budget was over" in capsys.readouterr().out

"""A cache and a table of its own for each test, and a clock that only the kit moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from seqfuse.settings import settings
from seqfuse.tune import timing
from tests.tune import kit


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that holds the files of measurements."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setenv("SEQFUSE_TUNE", "1")
    kit.forget(monkeypatch)
    settings.cache_clear()
    yield home / "seqfuse" / "tune"
    settings.cache_clear()


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> kit.FakeClock:
    monkeypatch.setattr(timing, "clock", kit.CLOCK)
    monkeypatch.setattr(timing, "ROUNDS", (3, 3))
    kit.CLOCK.calls = 0
    return kit.CLOCK

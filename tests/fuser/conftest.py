"""Segments of few operations, so that small models have several."""

import importlib
from typing import Any

import pytest

planning: Any = importlib.import_module("seqfuse.plan.search")


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "SEGMENT_BYTES", 0)

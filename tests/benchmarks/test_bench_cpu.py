"""Paired CPU times: implementations run alternately, and each ratio is of two runs of one round."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

bench_cpu = pytest.importorskip("bench_cpu", reason="it measures models of transformers", exc_type=ImportError)


def test_a_ratio_is_of_two_sides_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ran = [0.0], list[str]()

    def side(name: str, took: float) -> Any:
        def run() -> None:
            ran.append(name)
            clock[0] += took * (1 + ran.count("eager") // 40)  # a machine that becomes slower

        return run

    monkeypatch.setattr(time, "thread_time", lambda: clock[0])
    monkeypatch.setattr(gc, "collect", int)  # of all that tests before have left: seconds, eight times
    made = {name: side(name, took) for name, took in (("eager", 2.0), ("fast", 1.0), ("slow", 3.0))}
    found = bench_cpu.Row("row", made.__getitem__, ("fast", "slow")).times(rounds=8, seconds=2.0)
    assert found["eager"]["ratio"] == 1.0
    assert found["slow"]["ratio"] == 1.5
    assert found["fast"]["low"] <= 0.5 <= found["fast"]["high"]
    # Each is the first in as many rounds as the others.
    timed = ran[-8 * 4 :]
    assert {name: timed.count(name) for name in ("eager", "fast", "slow")} == {"eager": 8, "fast": 16, "slow": 8}


def test_each_row_has_a_name_of_its_own() -> None:
    names = [row.name for rows in bench_cpu.FILES.values() for row in rows]
    assert len(names) == len(set(names))

"""Launches and bytes of single layers in README and docs/benchmarks.md equal those counted now."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import seqfuse as sf

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))


@pytest.mark.slow
@pytest.mark.parametrize("at", range(6))
def test_launches_are_what_is_counted_now(at: int) -> None:
    bench: Any = pytest.importorskip("bench_counts")
    found = json.loads((bench.ROOT / "benchmarks" / "results" / "layer_counts.json").read_text())
    row = found["rows"][at]
    with sf.fusing(unmeasured=False):
        assert json.loads(json.dumps(bench.planned(bench.MODELS[at]))) == row["planned"]
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ == found["transformers"]:
        assert bench.eager(bench.MODELS[at]) == row["eager"]

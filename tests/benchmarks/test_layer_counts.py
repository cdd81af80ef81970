"""Launches and bytes of single layers: what was written is what is counted now, of models that are those they name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import report

FOUND: Any = report.read("layer_counts")


def test_layers_have_as_many_parameters_as_those_of_hugging_face() -> None:
    assert len(FOUND["rows"]) == 6
    for row in FOUND["rows"]:
        assert row["planned"]["parameters"] == row["eager"]["parameters"], row["title"]


def test_launches_that_belong_to_no_step_are_none() -> None:
    for row in FOUND["rows"]:
        assert None not in row["planned"]["forward"] + row["planned"]["backward"], row["title"]


@pytest.mark.slow
@pytest.mark.parametrize("at", range(6))
def test_launches_are_what_is_counted_now(at: int) -> None:
    bench = pytest.importorskip("bench_layer_counts")
    row = FOUND["rows"][at]
    assert json.loads(json.dumps(bench.planned(bench.MODELS[at]))) == row["planned"]
    transformers = pytest.importorskip("transformers")
    if transformers.__version__ == FOUND["transformers"]:
        assert bench.eager(bench.MODELS[at]) == row["eager"]

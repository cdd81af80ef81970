"""Launches and bytes of single layers: the committed numbers equal those counted now."""

from __future__ import annotations

from typing import Any

import report

FOUND: Any = report.read("layer_counts")


def test_layers_have_as_many_parameters_as_those_of_hugging_face() -> None:
    assert len(FOUND["rows"]) == 6
    for row in FOUND["rows"]:
        assert row["planned"]["parameters"] == row["eager"]["parameters"], row["title"]


def test_launches_that_belong_to_no_step_are_none() -> None:
    for row in FOUND["rows"]:
        assert None not in row["planned"]["forward"] + row["planned"]["backward"], row["title"]

"""The record of plans and messages: the same each time, and unchanged when it is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from tools import mistakes, record


def test_a_record_is_the_same_each_time_and_differences_are_found(tmp_path: Path) -> None:
    first = record.recorded("layers feed-forward, lean", say=False)
    record.write(first, tmp_path / "record")
    _, read = record.read(tmp_path / "record")
    assert [*record.differences(read, record.recorded("layers feed-forward, lean", say=False))] == []
    key = next(key for key in first if key.endswith("H100"))
    read[key][-1] += "!"
    assert [*record.differences(read, first)] == [f"{key}:", f"  -{first[key][-1]}!", f"  +{first[key][-1]}"]


def test_a_conversion_is_recorded_with_its_schedules_and_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"bert", "gpt2, dropout"} < record.families().keys()

    def build() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    monkeypatch.setattr(record, "families", lambda: {"small": (build, lambda: {"input": torch.ones(3, 8)})})
    found = record.recorded("converted small, lean", say=False)
    assert [*found] == [
        f"converted small, lean: graph 0{chain}" for chain in ("", ", chain 0, here", ", chain 0, H100")
    ]
    text = "\n".join(line for lines in found.values() for line in lines)
    assert "forward 0-" in text
    assert "launches (" in text


def test_a_mistake_gives_its_code_and_message() -> None:
    said = mistakes.outcome(mistakes.CALLS["another width"])
    assert said[0] == "InputError SeqfuseError ValueError SF101 LayerNorm 3"
    assert record.normal("at /home/me/seqfuse/a_file.py:12: seqfuse.ops.gelu.GeLU at 0x7f0123456") == (
        "at a_file.py: GeLU at 0x"
    )

"""The table of launches in docs/kernels.md is what is counted."""

from __future__ import annotations

from tests.fusions.triton import launches


def test_the_table_is_what_is_counted():
    shown = launches.TABLE.search(launches.PAGE.read_text())
    assert shown is not None
    drawn = launches.table()
    assert shown[0] == drawn, "run: TRITON_INTERPRET=1 .venv/bin/python -m tests.fusions.triton.launches"
    for line in drawn.splitlines()[2:]:
        ahead, plain_ahead, back, plain_back = map(int, line.strip("|").split("|")[-4:])
        assert 0 < ahead < plain_ahead
        assert 0 < back < plain_back


def test_the_table_of_layers_is_what_is_counted():
    shown = launches.LAYER_TABLE.search(launches.PAGE.read_text())
    assert shown is not None
    drawn = launches.layer_table()
    assert shown[0] == drawn, "run: TRITON_INTERPRET=1 .venv/bin/python -m tests.fusions.triton.launches"
    for line in drawn.splitlines()[2:]:
        numbers = [int(cell) for cell in line.strip("|").split("|")[1:]]
        assert all(0 < fused < plain for fused, plain in zip(numbers[::2], numbers[1::2], strict=True))

"""The table of launches in docs/dev/kernels.md is what is counted."""

from __future__ import annotations

from tests.fusions.triton import launches


def test_the_table_is_what_is_counted():
    shown = launches.TABLE.search(launches.PAGE.read_text())
    assert shown is not None
    drawn = launches.table()
    assert shown[0] == drawn, "run: TRITON_INTERPRET=1 .venv/bin/python -m tests.fusions.triton.launches"
    for line in drawn.splitlines()[2:]:
        numbers = [int(cell) for cell in line.strip("|").split("|")[1:]]
        for fused, *others in (numbers[:3], numbers[3:]):
            # Eager torch takes the bias in the GEMM's epilogue as well.
            assert 0 < fused <= min(others)
        assert sum(numbers[::3]) < min(sum(numbers[1::3]), sum(numbers[2::3]))


def test_the_table_of_layers_is_what_is_counted():
    shown = launches.LAYER_TABLE.search(launches.PAGE.read_text())
    assert shown is not None
    drawn = launches.layer_table()
    assert shown[0] == drawn, "run: TRITON_INTERPRET=1 .venv/bin/python -m tests.fusions.triton.launches"
    for line in drawn.splitlines()[2:]:
        numbers = [int(cell) for cell in line.strip("|").split("|")[1:]]
        for fused, *others in (numbers[:3], numbers[3:6], numbers[6:]):
            # Eager torch takes the bias in the GEMM's epilogue as well.
            assert 0 < fused <= min(others)
        assert sum(numbers[::3]) < min(sum(numbers[1::3]), sum(numbers[2::3]))

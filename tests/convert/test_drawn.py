"""Models drawn at random give the same converted: outputs, every gradient, None where torch has None, and buffers.

Each test draws some seeds; `python -m tests.convert.drawn` draws any number.
"""

from __future__ import annotations

import warnings

import pytest

from .drawn import HOW, Use, drawn

SHARE = {"recorded": range(40), "autocast": range(20), "captured": range(3)}
MANY = {"recorded": range(40, 2040), "autocast": range(20, 520), "captured": range(3, 203)}
BLOCKS = [(how, seeds[i : i + 50]) for how, seeds in MANY.items() for i in range(0, len(seeds), 50)]


def assert_same(how: str, seeds: range) -> None:
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of drawn models
            where, _ = HOW[how](drawn(seed), Use.of(seed), seed)
        assert where is None, f"seed {seed}: {where}\n{drawn(seed).source}"


@pytest.mark.parametrize("how", SHARE)
def test_drawn_models_are_the_same_converted(how: str):
    assert_same(how, SHARE[how])


@pytest.mark.full
@pytest.mark.parametrize(("how", "seeds"), BLOCKS, ids=str)
def test_many_drawn_models_are_the_same_converted(how: str, seeds: range):
    assert_same(how, seeds)

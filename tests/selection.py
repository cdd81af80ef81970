"""Which cases a check runs by default: pairs of lists and cases instead of the product, which `--full` runs."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from seqfuse.testing import operations, probe

SHARE = 12 if os.environ.get("TRITON_INTERPRET") == "1" else 4
"""Every list gets the first case, those without gradients, and one of this many of the others, another list others."""


@pytest.fixture(autouse=True)
def some_cases(request: pytest.FixtureRequest, few_cases: None) -> None:
    """For every test of a folder."""


@pytest.fixture
def few_cases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that ask for it."""
    # What is to be found wrong is put through everything, and ends at the first case that finds it.
    if request.config.getoption("--full") or "mutant" in request.fixturenames:
        return
    turn = zlib.crc32(request.node.nodeid.encode())

    def thinned(of: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def some(*args: Any) -> Iterator[Any]:
            every: Sequence[Any] = [*of(*args)]
            for i, case in enumerate(every):
                if i in (0, len(every) - 1) or not getattr(case, "grad", True) or (i + turn) % SHARE == 0:
                    yield case

        return some

    for module in (operations, probe):
        monkeypatch.setattr(module, "cases", thinned(module.cases))
        monkeypatch.setattr(module, "subsets", thinned(module.subsets))

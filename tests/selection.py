"""Which cases a check runs by default: pairs of lists and cases instead of the product, which `--full` runs."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from seqfuse.testing import fusions, operations, probe
from tests import processes

SHARE = 12 if os.environ.get("TRITON_INTERPRET") == "1" else 4
"""Every list gets the first case, those without gradients, and one of this many of the others, in one of its dtypes in
turn; another list gets others."""


def in_turn(case: int, dtypes: Sequence[torch.dtype] = operations.DTYPES) -> Sequence[torch.dtype]:
    """One dtype for a case, the next one for the next case; all of them under --full."""
    return dtypes if processes.FULL else [dtypes[case % len(dtypes)]]


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

    dtypes: list[torch.dtype] = []

    def noting(of: Callable[..., Any], at: int) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            dtypes[:] = args[at] or operations.DTYPES
            return of(*args)

        return noted

    def thinned(of: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
        def some(*args: Any) -> Iterator[Any]:
            every: Sequence[Any] = [*of(*args)]
            for i, case in enumerate(every):
                dtype = getattr(case, "dtype", None)
                share = SHARE if dtype is None else SHARE * len(dtypes)
                other = SHARE * dtypes.index(dtype) if dtype in dtypes else 0
                if i in (0, len(every) - 1) or not getattr(case, "grad", True) or (i + turn + other) % share == 0:
                    yield case

        return some

    compare = operations.compare_device_functions

    def in_some(act: Any, x: Any, seed: int, dtypes: Sequence[torch.dtype]) -> str | None:
        # Device functions know whether a dtype has 16 bits, and no more of it.
        left_out = (torch.bfloat16, torch.float16)[turn % 2]
        return compare(act, x, seed, [dtype for dtype in dtypes if dtype is not left_out] or dtypes)

    monkeypatch.setattr(operations, "compare_device_functions", in_some)
    for module, at in ((operations, 3), (fusions, 4)):
        monkeypatch.setattr(module, "_check", noting(module._check, at))
    for module in (operations, probe):
        monkeypatch.setattr(module, "cases", thinned(module.cases))
        monkeypatch.setattr(module, "subsets", thinned(module.subsets))

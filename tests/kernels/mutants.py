"""Which mutant is looked for in which dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def in_dtypes(names: Iterable[str], only_float32: Collection[str] = ()) -> list[Any]:
    """Every mutant in one dtype, the next one in the next, and in all three where everything is run.

    What no 16-bit format can show is named by the test itself.
    """
    found: list[Any] = []
    for i, name in enumerate(names):
        dtypes = DTYPES[:1] if name in only_float32 else DTYPES
        for j, dtype in enumerate(dtypes):
            marks = () if j == i % len(dtypes) else pytest.mark.full
            found.append(pytest.param(name, dtype, marks=marks, id=f"{name}, {str(dtype)[6:]}"))
    return found

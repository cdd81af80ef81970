"""Which mutant is looked for in which dtype."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

HALVES = (torch.float16, torch.bfloat16)


def in_dtypes(names: Iterable[str], only_float32: Collection[str] = ()) -> list[Any]:
    """Every mutant in float32 and in one 16-bit format, in the other one where everything is run.

    What no 16-bit format can show is named by the test itself.
    """
    found: list[Any] = []
    for i, name in enumerate(names):
        found.append(pytest.param(name, torch.float32, id=name))
        for j, dtype in enumerate(HALVES if name not in only_float32 else ()):
            marks = () if (i + j) % 2 == 0 else pytest.mark.full
            found.append(pytest.param(name, dtype, marks=marks, id=f"{name}, {str(dtype)[6:]}"))
    return found

"""Every row of the GPU benchmark computes the right result, on a GPU at real sizes and in other dtypes, too."""

from __future__ import annotations

import pytest
import torch
from gpu import rows
from gpu.case import Case, by_the_rule, reds
from gpu.sizes import few, tiny

HERE = torch.cuda.is_available()
DTYPES = (torch.bfloat16, torch.float32, torch.float16) if HERE else (torch.bfloat16, torch.float32)

ELSEWHERE = ("converted", "memory")  # other tests have them on a GPU


def cases(dtype: torch.dtype) -> list[Case]:
    """On a GPU those of two models and of shapes of different kinds."""
    if not HERE:
        return rows.cases(tiny(dtype))
    return [case for case in rows.cases(few(dtype)) if not any(word in case.group for word in ELSEWHERE)]


# The first row of each group in one dtype, in turn: interpreted rows of the others run under --full.
FIRST = {case.group: case.key for case in reversed(cases(DTYPES[0]))}
IN_TURN = {(DTYPES[i % 2], key) for i, key in enumerate(FIRST.values())}
# By their keys: a row holds its models, and all of them together do not fit on a GPU.
ALL = [
    pytest.param(
        dtype, case.key, id=f"{case.key} {case.dtype}",
        marks=[pytest.mark.full] * (not HERE and (dtype, case.key) not in IN_TURN),
    )
    for dtype in DTYPES
    for case in cases(dtype)
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "key"), ALL)
def test_agrees_with_what_is_unfused(dtype: torch.dtype, key: str) -> None:
    (case,) = [case for case in cases(dtype) if case.key == key]
    by_the_rule(case)
    assert "seqfuse" not in (wrong := reds(case, case.make(case.rows, 1))), wrong

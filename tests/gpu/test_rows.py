"""Every row of the GPU benchmark computes the right thing, at real sizes and in other dtypes where there is a GPU."""

from __future__ import annotations

import pytest
import torch
from gpu import rows
from gpu.case import Case, by_the_rule, reds
from gpu.sizes import few, tiny

HERE = torch.cuda.is_available()
DTYPES = (torch.bfloat16, torch.float32, torch.float16) if HERE else (torch.bfloat16, torch.float32)

ELSEWHERE = ("tuned", "optimizer", "converted", "memory")  # on a GPU, where other tests have the last two


def cases(dtype: torch.dtype) -> list[Case]:
    """On a GPU those of two models and of shapes that differ in kind."""
    if not HERE:
        return rows.cases(tiny(dtype))
    return [case for case in rows.cases(few(dtype)) if not any(word in case.group for word in ELSEWHERE)]


def later(case: Case, number: int) -> bool:
    """Whether a row waits for --full where it is interpreted: all but one dtype in turn, and whole layers as they are
    tuned, whose parts are tuned in others."""
    return not HERE and (number % 2 == 1 or case.group == "layer forward + backward, tuned")


# By their keys: a row that was made holds its models, and all of them together are more than a GPU has room for.
ALL = [
    pytest.param(dtype, case.key, id=f"{case.key} {case.dtype}", marks=[pytest.mark.full] * later(case, i + at))
    for at, dtype in enumerate(DTYPES)
    for i, case in enumerate(cases(dtype))
]


@pytest.mark.parametrize(("dtype", "key"), ALL)
def test_agrees_with_what_is_unfused(dtype: torch.dtype, key: str) -> None:
    (case,) = [case for case in cases(dtype) if case.key == key]
    by_the_rule(case)
    assert "seqfuse" not in (wrong := reds(case, case.make(case.rows, 1))), wrong

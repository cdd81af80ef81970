"""Contracts of kernels of rows in C, in addition to `tests/kernels/test_contract.py`, which runs with them, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from seqfuse import compiler
from seqfuse.kernels.c import call
from seqfuse.testing import assert_bitwise_equal
from tests.kernels.test_contract import SUBJECTS, each

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = each(lambda of: of.cases)


@pytest.mark.parametrize(("kernel", "case"), CASES)
def test_threads_change_no_bit(kernel: str, case: str, by_threads: Callable[..., list[Any]]) -> None:
    tensors = SUBJECTS[kernel].drawn(case, (2, 250) if kernel == "rope" else (333,), 130, torch.float32)
    assert kernel in ("permute", "route") or max(t.numel() for t in tensors.values()) >= call.PARALLEL
    first, *others = by_threads(lambda: SUBJECTS[kernel].run(case, tensors))
    for other in others:
        assert_bitwise_equal(other, first)


@pytest.mark.parametrize(("kernel", "case"), each(lambda of: of.cases if of.check else ()))
def test_many_rows_are_summed_part_by_part(kernel: str, case: str) -> None:
    subject = SUBJECTS[kernel]
    assert subject.check is not None
    subject.check(case, subject.drawn(case, (2, 70) if kernel == "rope" else (140,), 9, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "case"), each(lambda of: of.checked if of.check else ()))
def test_a_processor_without_vectors_gives_as_good_numbers(
    kernel: str, case: str, dtype: torch.dtype, plain_c: None
) -> None:
    subject = SUBJECTS[kernel]
    assert subject.check is not None
    subject.check(case, subject.drawn(case, (9,), 131, dtype))


@pytest.mark.parametrize(
    ("kernel", "case"), [one for one in each(lambda of: of.cases if of.in_torch else ()) if "again" not in one[1]]
)
def test_kernels_are_known_before_they_run(kernel: str, case: str, sources: list[str]) -> None:
    """On fake tensors, as in planning."""
    subject = SUBJECTS[kernel]
    tensors = subject.drawn(case, (6,), 24, torch.float32)
    with compiler.collecting() as wanted, FakeTensorMode(allow_non_fake_inputs=True) as fake:
        subject.run(case, {name: fake.from_tensor(t) for name, t in tensors.items()})
    assert not sources
    subject.run(case, tensors)
    assert {*sources} == {*wanted}
    assert sources

"""Fixtures of every test of Triton kernels."""

from collections.abc import Iterator

import pytest

import seqfuse as sf
from tests.triton_fixtures import _bfloat16_as_on_a_gpu as _bfloat16_as_on_a_gpu
from tests.triton_fixtures import _compilers_are_forked as _compilers_are_forked
from tests.triton_fixtures import compiled as compiled
from tests.triton_fixtures import device as device


@pytest.fixture(autouse=True)
def _of_any_size() -> Iterator[None]:
    """C kernels are used at any size, also where they are not expected to gain."""
    with sf.fusing(unmeasured=True):
        yield

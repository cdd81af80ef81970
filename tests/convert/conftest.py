"""Fixtures of all tests of conversions."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Generator[None]:
    """Clears graphs, and their count, of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

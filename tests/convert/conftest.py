"""What every test of conversions needs."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Generator[None]:
    """No graph, and no count of graphs, of another test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()

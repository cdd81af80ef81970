"""Checks run a selection of their cases, all of them under `--full`, and compiled ones start without graphs of other
tests."""

import pytest
import torch

from tests.selection import few_cases as few_cases
from tests.selection import some_cases as some_cases


@pytest.fixture(autouse=True)
def fresh_dynamo(request: pytest.FixtureRequest) -> None:
    """All tests share the code of `Sequential.forward`, which torch compiles only so many times."""
    if "compile" in request.node.name:
        torch._dynamo.reset()

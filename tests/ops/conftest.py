"""Checks run a selection of their cases, all of them under `--full`, and compiled ones meet no code of other tests."""

import pytest
import torch

from tests.selection import few_cases as few_cases
from tests.selection import some_cases as some_cases


@pytest.fixture(autouse=True)
def fresh_dynamo(request: pytest.FixtureRequest) -> None:
    """The code of `Sequential.forward` is one for all: torch compiles it so many times and no more."""
    if "compile" in request.node.name:
        torch._dynamo.reset()

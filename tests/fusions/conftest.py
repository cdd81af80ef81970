"""Checks run a selection of their cases, all of them under `--full`."""

from tests.selection import few_cases as few_cases
from tests.selection import some_cases as some_cases

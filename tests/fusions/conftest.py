"""Checks run a selection of their cases, all of them under `--full`; mutants run all."""

from tests.selection import few_cases as few_cases
from tests.selection import some_cases as some_cases
from tests.triton_fixtures import mutant as mutant

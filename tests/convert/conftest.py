"""Fixtures of all tests of conversions."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Generator
from importlib import import_module
from typing import Any

import pytest
import torch

_errors: list[str] = []


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Generator[None]:
    """Clears graphs, and their count, of other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _noted(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def noting(*args: Any) -> Any:
        try:
            return rule(*args)
        except Exception:
            _errors.append(traceback.format_exc())
            raise

    return noting


@pytest.fixture(scope="session", autouse=True)
def noting_errors() -> Generator[None]:
    """Notes the errors of rules and matchers, after which a conversion leaves a call as it is."""
    names = ("normal", "masks", "dtensor", "rewrite")
    normal, masks, dtensor, rewrite = (import_module(f"seqfuse.convert.{name}") for name in names)
    with pytest.MonkeyPatch.context() as patch:
        for rules in (normal._RULES, masks._RULES):
            for name, rule in rules.items():
                patch.setitem(rules, name, _noted(rule))
        patch.setattr(dtensor._Localized, "_shard", _noted(dtensor._Localized._shard))
        matchers = [matcher._replace(match=_noted(matcher.match)) for matcher in rewrite.MATCHERS]
        patch.setattr(rewrite, "MATCHERS", matchers)
        yield


@pytest.fixture(autouse=True)
def no_errors() -> Generator[None]:
    """Rules and matchers know each form that a test converts, and raise at none."""
    _errors.clear()
    yield
    assert not _errors, _errors[0]

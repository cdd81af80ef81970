"""Fixtures of every test of a C kernel: a C compiler, and no interpreter."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from seqfuse import compiler
from seqfuse.kernels import _operators


@pytest.fixture(autouse=True)
def _bfloat16_as_on_a_gpu() -> None:
    if reason := compiler.why_none():
        pytest.skip(reason)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are looked up and loaded again within the test."""
    monkeypatch.setattr(_operators, "_entries", {})
    monkeypatch.setattr(compiler, "_loaded", {})


@pytest.fixture
def sources(anew: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sources of the kernels that are requested from here on."""
    found: list[str] = []
    plain = compiler.function
    monkeypatch.setattr(compiler, "function", lambda source: (found.append(source), plain(source))[1])
    return found


@pytest.fixture
def plain_c(anew: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled for a processor without AVX2."""
    known = compiler.compiler()
    assert known is not None
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("all C is plain here")
    flags = tuple(flag.replace("=native", "=x86-64") for flag in known.flags)
    assert flags != known.flags
    monkeypatch.setattr(compiler, "compiler", lambda: known._replace(flags=flags))


@pytest.fixture
def by_threads() -> Callable[[Callable[[], Any]], list[Any]]:
    """`by_threads(run)`: the results of a function with one, two and three threads."""

    def several(run: Callable[[], Any]) -> list[Any]:
        before, results = torch.get_num_threads(), list[Any]()
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(run())
        finally:
            torch.set_num_threads(before)
        return results

    return several


@pytest.fixture
def altered(anew: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """`altered(old, new)`: kernels are compiled from their source with `old`, which must occur, replaced."""
    plain, met = compiler.function, list[str]()

    def alter(old: str, new: str) -> None:
        def function(source: str) -> object:
            met.extend([old] * source.count(old))
            return plain(source.replace(old, new))

        monkeypatch.setattr(compiler, "function", function)

    yield alter
    assert met, "nothing was altered"

"""Helpers to draw tables: reading results, and Markdown."""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
MIB = 2**20
Results = dict[str, Any]
Lines = list[str]
DRAWN: dict[str, Callable[[], str | None]] = {}


def read(name: str) -> Results | None:
    """A benchmark's results; `None` if it was never run."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def drawn(name: str, *files: str) -> Callable[[Callable[..., Lines]], Callable[[], str | None]]:
    """Registers a function that draws a table from these files; no table if a file is missing or there are no lines."""

    def register(draw: Callable[..., Lines]) -> Callable[[], str | None]:
        @functools.wraps(draw)
        def of_results() -> str | None:
            found = [read(file) for file in files]
            lines = [] if None in found else draw(*found)
            return "\n".join(lines) + "\n" if lines else None

        DRAWN[name] = of_results
        return of_results

    return register


def table(head: Iterable[str], rows: Iterable[Iterable[Any]], left: int = 1) -> Lines:
    """A Markdown table whose first columns are text and whose others are numbers.

    Ratios have two decimals, counts have commas, and missing values (`None`) are dashes.
    """
    names = list(head)
    marks = ["---" if i < left else "---:" for i in range(len(names))]
    return [f"| {' | '.join(map(_cell, cells))} |" for cells in (names, marks, *rows)]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else value


def span(values: Iterable[float]) -> str:
    """The smallest and the largest value."""
    found = [*values]
    return " to ".join(dict.fromkeys(f"{edge(found):.2f}" for edge in (min, max)))


def where(found: Results) -> str:
    """Device and versions of results; the file also has the commit."""
    about = found["about"]
    parts = [about["device"], f"torch {about['torch']}"]
    return ", ".join(parts + ([f"Triton {about['triton']}"] if "triton" in about else [])) + "."


def starred(row: Mapping[str, Any], name: str) -> str:
    """A row's name, with an asterisk if it is of another run than its file."""
    return name + "*" * ("commit" in row)


def asterisk(rows: Iterable[dict[str, Any]]) -> str:
    """The note on the asterisks of these rows; empty if there are none."""
    devices: dict[str, set[str]] = {}
    for row in rows:
        if "commit" in row:
            devices.setdefault(row["device"], set()).add(row["commit"][:8])
    said = (f"an {device} with an earlier version ({', '.join(sorted(of))})" for device, of in devices.items())
    return f"With an asterisk: on {' and on '.join(said)}." if devices else ""


def wrapped(sentences: str) -> str:
    return textwrap.fill(" ".join(sentences.split()), 118, break_on_hyphens=False)


def between(m: Mapping[str, float] | None) -> str | None:
    """A ratio with its quartiles."""
    return m and f"{m['ratio']:.2f} ({m['low']:.2f} to {m['high']:.2f})"


def choice(side: str) -> str:
    """The label of a side of a memory study: eager, or a `memory=` choice."""
    if side == "eager":
        return "eager PyTorch"
    return f"`sf.Budget(part={float(side):g})`" if side[0].isdigit() else f'`memory="{side}"`'


def relative(times: Mapping[str, Any], side: str, than: str) -> float | None:
    """Time of a side divided by that of another, if both were measured."""
    return times[side]["median"] / times[than]["median"] if {side, than} <= times.keys() else None

"""What the tables of README.md and docs/ are made of: what benchmarks wrote, as Markdown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def read(name: str) -> dict[str, Any] | None:
    """What a benchmark wrote; `None` where it never ran."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(head: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> list[str]:
    """A Markdown table whose first columns are words and whose others are numbers."""
    names = list(head)
    marks = ["---" if i < left else "---:" for i in range(len(names))]
    return [f"| {' | '.join(cells)} |" for cells in (names, marks, *rows)]


def where(about: dict[str, Any]) -> str:
    """On what and with what; the file of results has the commit, too."""
    parts = [about["device"], f"torch {about['torch']}"]
    parts += [f"Triton {about['triton']}"] if "triton" in about else []
    return ", ".join(parts) + "."


def text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def paragraphs(*sentences: str) -> str:
    """Paragraphs of wrapped lines, with an empty line between two."""
    return "\n".join(textwrap.fill(" ".join(one.split()), 118, break_on_hyphens=False) + "\n" for one in sentences)

"""What commands print: lines for readers, with colors on a terminal only, and JSON for machines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from .target import Unable


def tell(text: str = "", style: str = "") -> None:
    """Print lines; a style, `"bold"` or `"yellow"`, counts on a terminal only."""
    code = {"bold": 1, "yellow": 33}.get(style)
    colored = code is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(f"\x1b[{code}m{printable(text)}\x1b[0m" if colored else printable(text))


def printable(text: str) -> str:
    """The text without characters that a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def tell_json(data: Any) -> None:
    """Print one document."""
    print(json.dumps(data, indent=2))


def write(text: str, file: Path | None) -> None:
    """Write to a file, or to the output where there is none.

    Raises:
        Unable: if it cannot be written.
    """
    if file is None:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unable(f"{file} cannot be written: {error.strerror}") from error

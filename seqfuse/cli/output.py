"""Output of commands: text, with colors only on a terminal, and JSON."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from ..pictures.markup import printable
from .target import Unable


def tell(text: str = "", style: str = "") -> None:
    """Print lines; a style, `"bold"` or `"yellow"`, has an effect only on a terminal."""
    code = {"bold": 1, "yellow": 33}.get(style)
    colored = code is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    text = "\n".join(map(printable, text.split("\n")))
    print(f"\x1b[{code}m{text}\x1b[0m" if colored else text)


def tell_json(data: Any) -> None:
    """Print data as one JSON document."""
    print(json.dumps(data, indent=2))


ENDINGS = (".svg", ".json", ".txt")


def ending_of(as_json: bool, output: Path | None) -> str:
    """The format of a plan: JSON if requested, else by the file's suffix, else text."""
    ending = ".json" if as_json else ".txt" if output is None else output.suffix or ".txt"
    if ending not in ENDINGS:
        raise Unable(f"{output} has no known ending: write one of {', '.join(ENDINGS)}, or ask for --json")
    return ending


_HEAD = re.compile(r" +at +operation +(?=forward)")


def colored(text: str) -> str:
    """Printed plans with the forward schedule in blue and the backward schedule in orange, on a terminal only."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    lines, columns = list[str](), None
    for line in text.split("\n"):
        if head := _HEAD.match(line):
            columns = head.end(), line.index("backward")
        elif columns is not None and re.match(r" +\d+  ", line):
            ahead, back = columns
            line = f"{line[:ahead]}{_painted(line[ahead:back], 33)}{_painted(line[back:], 208)}"
        lines.append(line)
    return "\n".join(lines)


def _painted(cell: str, color: int) -> str:
    return f"\x1b[38;5;{color}m{cell}\x1b[0m" if cell.startswith(("[", "|")) else cell


def write_text(text: str, file: Path | None) -> None:
    """Write to a file, or to standard output if `file` is None."""
    if file is None:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Unable(f"{file} cannot be written: {error.strerror}") from error

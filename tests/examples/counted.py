"""Definitions of a file as source text, for pages that show or count them."""

from __future__ import annotations

import ast
from pathlib import Path


def source_of(path: Path, *names: str) -> str:
    """The named top-level definitions of a file with their decorators, two empty lines between them. Raises KeyError
    for an unknown name."""
    source = path.read_text().splitlines()
    found: dict[str, str] = {}
    for node in ast.parse("\n".join(source)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n".join(source[first - 1 : node.end_lineno]) + "\n"
    return "\n\n".join(found[name] for name in names)


def lines_of(path: Path, *names: str) -> int:
    """Lines of the named definitions: decorators, docstrings and comments count, empty lines do not."""
    return sum(bool(line.strip()) for line in source_of(path, *names).splitlines())

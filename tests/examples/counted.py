"""How many lines a definition takes, so that what is said about it stays true."""

from __future__ import annotations

import ast
from pathlib import Path


def lines_of(path: Path, *names: str) -> int:
    """Lines of the named definitions of a file: decorators, docstrings and comments count, empty lines do not.

    Raises:
        KeyError: for a name that the file does not define.
    """
    source = path.read_text().splitlines()
    spans: dict[str, tuple[int, int]] = {}
    for node in ast.parse("\n".join(source)).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno is not None
            spans[node.name] = (first - 1, node.end_lineno)
    return sum(bool(line.strip()) for name in names for line in source[slice(*spans[name])])

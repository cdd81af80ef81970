"""Compiles generated code, in one place; tracebacks, debuggers and `inspect.getsource` show its lines."""

from __future__ import annotations

import functools
import keyword
import linecache
import textwrap
import zlib
from typing import Any


class Source:
    """Writes a function line by line.

    The text contains identifiers only: every other value is a constant, to which `put` assigns a numbered name.
    Functions that differ in their constants only share compiled code.
    """

    def __init__(self, name: str, parameters: str) -> None:
        self.name, self.depth = identifier(name), 1
        self.constants: dict[str, Any] = {}
        self._lines = [f"def {name}({parameters}):"]

    def put(self, value: Any) -> str:
        """Adds a constant; returns its name in the text."""
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def add(self, *lines: str) -> None:
        """Writes lines at the current indentation."""
        self._lines.extend(map(("    " * self.depth).__add__, lines))

    def define(self) -> Any:
        """Compiles the function; its attribute `constants` has the constants.

        They are in its closure. As globals, each function would have its own dictionary, and CPython's inline caches,
        which remember one dictionary per code object, would miss in code that functions share.
        """
        function = _maker(self.name, tuple(self.constants), "\n".join(self._lines))(*self.constants.values())
        function.__qualname__, function.constants = self.name, self.constants  # keeps unused constants alive
        return function


def identifier(name: str) -> str:
    """Returns the name; raises `ValueError` if it is not allowed in generated code."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is not an identifier")
    return name


@functools.lru_cache(4096)
def _maker(name: str, constants: tuple[str, ...], text: str) -> Any:
    """A factory that takes the constants and returns the function."""
    text = f"def _define({', '.join(constants)}):\n{textwrap.indent(text, '    ')}\n    return {name}"
    file = f"<seqfuse {name} {zlib.crc32(text.encode()):08x}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # so that tracebacks show the line
    scope: dict[str, Any] = {}
    exec(compile(text, file, "exec"), scope)
    return scope["_define"]

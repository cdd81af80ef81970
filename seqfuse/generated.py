"""The only place that compiles generated code; tracebacks, debuggers and `inspect.getsource` show its lines."""

from __future__ import annotations

import functools
import keyword
import linecache
import textwrap
import zlib
from typing import Any


class Source:
    """Writes a function line by line.

    The text holds no names but identifiers: every other value is a constant beside it, which `put` gives a numbered
    name. Functions that differ in constants alone share their compiled code.
    """

    def __init__(self, name: str, parameters: str) -> None:
        self.name, self.depth = identifier(name), 1
        self.constants: dict[str, Any] = {}
        self._lines = [f"def {name}({parameters}):"]

    def put(self, value: Any) -> str:
        """Keep a value beside the function; returns its name in the text."""
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def add(self, *lines: str) -> None:
        """Write lines at the current depth."""
        self._lines.extend(map(("    " * self.depth).__add__, lines))

    def define(self) -> Any:
        """The function, whose attribute `constants` they are.

        They are in its closure. As globals each function would have a dictionary of its own, and the interpreter, which
        remembers one of them for code that many share, would look each name up.
        """
        function = _maker(self.name, tuple(self.constants), "\n".join(self._lines))(*self.constants.values())
        function.__qualname__, function.constants = self.name, self.constants  # keeps what the text does not name
        return function


def identifier(name: str) -> str:
    """The name itself; a `ValueError` if it may not stand in generated code."""
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"{name!r} is not an identifier")
    return name


@functools.lru_cache(4096)
def _maker(name: str, constants: tuple[str, ...], text: str) -> Any:
    """A function of the constants that defines the function."""
    text = f"def _define({', '.join(constants)}):\n{textwrap.indent(text, '    ')}\n    return {name}"
    file = f"<seqfuse {name} {zlib.crc32(text.encode()):08x}>"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file  # so that tracebacks show the line
    scope: dict[str, Any] = {}
    exec(compile(text, file, "exec"), scope)
    return scope["_define"]

"""SVG elements as text; any text that is not `Markup` is escaped."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterator


class Markup(str):
    """Text that is already markup, and is not escaped."""

    __slots__ = ()


def tag(name: str, *inside: str, **attributes: str | float) -> Markup:
    """An element; `class_` and the like lose their trailing underscore, other underscores become hyphens."""
    parts = [f"<{name}"]
    for key, value in attributes.items():
        text = number(value) if isinstance(value, float) else str(value)
        parts.append(f' {key.rstrip("_").replace("_", "-")}="{escaped(text)}"')
    if inside:
        parts += [">", *map(escaped, inside), f"</{name}>"]
    else:
        parts.append("/>")
    return Markup("".join(parts))


def escaped(text: str) -> str:
    """Markup unchanged; other text with special characters escaped."""
    return text if isinstance(text, Markup) else html.escape(printable(text))


def number(value: float) -> str:
    """A number with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def printable(text: str) -> str:
    """The text with a question mark for each unprintable character, since XML forbids some of them."""
    return "".join(c if c.isprintable() else "?" for c in text)


def width(text: str, size: float, wide: float = 0.57) -> float:
    """The approximate length of a line of text, in the unit of `size`; `wide` is the width of a typical character."""
    return size * sum(1.0 if unicodedata.east_asian_width(c) in "WF" else wide for c in text)


def wrapped(text: str, room: float, *letters: float) -> Iterator[str]:
    """A sentence in lines of at most `room`, broken between words."""
    line = ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and width(longer, *letters) > room:
            yield line
            longer = word
        line = longer
    yield line


def cut(text: str, room: float, size: float, wide: float = 0.57) -> str:
    """The text, or as much of its beginning as fits."""
    if width(text, size, wide) <= room:
        return text
    while text and width(text + "…", size, wide) > room:
        text = text[:-1]
    return text.rstrip(" ,·.") + "…"


def cut_before(text: str, room: float, size: float, wide: float = 0.57) -> str:
    """The text, or as many of its last words as fit, or the beginning of the last word."""
    if width(text, size, wide) <= room:
        return text
    ends = [text[found.end() :] for found in re.finditer(r"[._]", text)] or [text]
    fitting = (f"…{end}" for end in ends if width(f"…{end}", size, wide) <= room)
    return next(fitting, cut(ends[-1], room, size, wide))

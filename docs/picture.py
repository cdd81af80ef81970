"""What the pictures of README.md, docs/ and benchmarks are made of: shapes in the colors of drawn plans."""

from __future__ import annotations

from collections.abc import Sequence

from seqfuse.pictures.markup import Markup, number, tag, wrapped
from seqfuse.pictures.style import COLORS, SHAPES

STYLE = (
    ".sf-plan .big{font-size:17px;font-weight:600}.sf-plan .word{font-size:12.5px}.sf-plan .soft{fill:var(--sf-faint)}"
    ".sf-plan g .tiny{font-size:10px}.sf-plan .small{font-size:11px}"
    ".sf-plan .bold{font-weight:600}.sf-plan .right{text-anchor:end}"
    ".sf-plan .arrow{stroke:var(--sf-faint);stroke-width:1.25;fill:none}"
    ".sf-plan .plain rect{fill:var(--sf-card);stroke:var(--sf-faint)}"
    ".sf-plan .kept rect{fill:var(--sf-card);stroke:var(--sf-faint);stroke-dasharray:4 3}"
    ".sf-plan .save rect,.sf-plan .balanced rect,.sf-plan .lean rect{fill:var(--sf-joint-edge);"
    "stroke:var(--sf-joint-edge)}.sf-plan .save rect{fill-opacity:.3}.sf-plan .balanced rect{fill-opacity:.6}"
    ".sf-plan .torch rect{fill:var(--sf-faint);stroke:var(--sf-faint);fill-opacity:.5}"
    + "".join(
        f".sf-plan .tick.{kind}{{fill:var(--sf-{name});stroke:none}}"
        for kind, name in (("plain", "faint"), ("forward", "forward-edge"), ("backward", "backward-edge"))
    )
)


class Picture:
    """Shapes on a plane of a given size; coordinates are those of the upper left corner."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[Markup] = []

    def head(self, titles: Sequence[str], about: Sequence[str]) -> float:
        """Titles and what is said about them, in lines that fit; returns the baseline of the last one."""
        y = 12.0
        for texts, size, wide, kind, apart in ((titles, 17.0, 0.62, "big", 22), (about, 11.0, 0.55, "small soft", 16)):
            for line in (line for text in texts for line in wrapped(text, self.width - 40, size, wide)):
                y += apart
                self.text(20, y, line, kind)
            y += 6
        return y - 6

    def text(self, x: float, y: float, words: str, kind: str = "word") -> None:
        """A line of text from x on, or around it if `kind` says middle, or up to it if it says right."""
        self.parts.append(tag("text", words, x=x, y=y, class_=kind))

    def box(
        self, x: float, y: float, width: float, height: float, kind: str, text: str = "", drop: float = 0.0
    ) -> None:
        """A rectangle with a centered line of text, `drop` below its middle."""
        rect = tag("rect", x=x, y=y, width=width, height=height, rx=5.0)
        size = "tiny" if drop or 7 * len(text) > width else "small"
        line = tag("text", text, x=x + width / 2, y=y + height / 2 + 4 + drop, class_=f"middle {size}")
        self.parts.append(tag("g", rect, line if text else Markup(), class_=kind))

    def ticks(self, x: float, y: float, count: int, kind: str, across: int = 6) -> None:
        """So many small squares, row by row."""
        for i in range(count):
            place = {"x": x + 9.0 * (i % across), "y": y + 9.0 * (i // across)}
            self.parts.append(tag("rect", **place, width=7.0, height=7.0, rx=1.5, class_=f"tick {kind}"))

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A line, level or upright, with a head at its end."""
        side = 6 if to_x > x else -6
        head = f"M{number(to_x - side)} {number(to_y - 4)}l{side} 4l{-side} 4"
        if to_x == x:
            head = f"M{number(to_x - 4)} {number(to_y - 6)}l4 6l4 -6"
        line = f"M{number(x)} {number(y)}L{number(to_x)} {number(to_y)}"
        self.parts.append(tag("path", d=line + head, class_="arrow"))

    def upright(self, x: float, top: float, bottom: float) -> None:
        """A dashed line that marks a value."""
        path = f"M{number(x)} {number(top)}V{number(bottom)}"
        self.parts.append(tag("path", d=path, class_="arrow", stroke_dasharray="4 3"))

    def svg(self) -> str:
        """The picture."""
        ground = tag("rect", width=float(self.width), height=float(self.height), rx=10.0, class_="ground")
        return tag(
            "svg",
            tag("title", self.title),
            tag("style", Markup(COLORS + SHAPES + STYLE)),
            ground,
            *self.parts,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {number(self.width)} {number(self.height)}",
            width=float(self.width),
            height=float(self.height),
            role="img",
            class_="sf-plan",
        )

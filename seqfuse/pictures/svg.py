"""The picture: the list in the middle, the forward cover above it, the backward cover below, records between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from .data import Kind, PlanData
from .markup import Markup, cut, cut_before, escaped, number, tag, width
from .score import Block, Column, Mark, columns_of, fold, lines_of
from .style import COLORS, NAMES, SHAPES, SIGNS

MOST = 10
"""Columns in a line."""

_GUTTER, _MARGIN, _GAP, _BETWEEN = 84.0, 20.0, 6.0, 14.0
_STEP, _CARD, _RECORD, _SPACE = 28.0, 42.0, 22.0, 9.0
_HEAD, _PAD, _APART = 22.0, 8.0, 22.0
_NARROWEST, _WIDEST, _LEAST = 94.0, 136.0, 620.0


def svg(plan: PlanData) -> Markup:
    """The picture of a plan as one element that needs nothing from elsewhere."""
    return _Picture(plan).draw()


class _Picture:
    def __init__(self, plan: PlanData) -> None:
        self._plan = plan
        self._backward = bool(plan["backward"])
        columns = columns_of(plan)
        self._saves = any(c.operation["saves"] or (c.forward and c.forward.saves) for c in columns)
        self._refusals = any(c.refused for c in columns)
        self._blocks = fold(columns)
        names = max((width(c.operation["name"], 12, 0.6) for c in columns), default=0.0) + 14 + 18 * self._refusals
        steps = (m for c in columns for m in (c.forward, c.backward) if m is not None and m.kind in SIGNS)
        fusions = max(((width(m.name, 12, 0.6) + 28) / m.length for m in steps), default=0.0)
        self._column = min(max(names + _GAP + 2, fusions + _GAP, _NARROWEST), _WIDEST)
        lines = (line for b in self._blocks for line in lines_of(b, MOST))
        right = max((self._places(line)[-1] + self._column for line in lines), default=0.0)
        self._width = max(right + _MARGIN, _LEAST)

    def draw(self) -> Markup:
        parts: list[Markup] = []
        first, second, *rest = self._plan["summary"]
        y = _MARGIN + 15
        parts.append(tag("text", first, x=_MARGIN, y=y, class_="title"))
        for line in (second, *rest):
            y += 18
            parts.append(tag("text", line, x=_MARGIN, y=y, class_="faint"))
        y += 20
        for block in self._blocks:
            for i, line in enumerate(lines_of(block, MOST)):
                parts += self._line(block, line, y, i == 0)
                y += self._height() + _APART
        if not self._blocks:
            parts.append(tag("text", "no operations", x=_MARGIN, y=y + 10, class_="faint"))
            y += 30
        legend = [*self._legend(y)]
        y += 26 if legend else 0
        ground = tag("rect", width=self._width, height=y, rx=10.0, class_="ground")
        return tag(
            "svg",
            tag("title", ": ".join((first, second))),
            tag("style", Markup(COLORS + SHAPES)),
            ground,
            *parts,
            *legend,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {number(self._width)} {number(y)}",
            width=self._width,
            height=y,
            role="img",
            class_="sf-plan",
        )

    def _height(self) -> float:
        height = _HEAD + _STEP + _SPACE + _CARD + 2 * _PAD
        if self._backward:
            height += (_SPACE + _RECORD if self._saves else 0) + _SPACE + _STEP
        return height

    def _line(self, block: Block, line: Sequence[Column], top: float, first: bool) -> Iterator[Markup]:
        rows = {"forward": top + _HEAD + _PAD}
        rows["operation"] = rows["forward"] + _STEP + _SPACE
        below = rows["operation"] + _CARD + _SPACE
        if self._backward and self._saves:
            rows["saved"], below = below, below + _RECORD + _SPACE
        if self._backward:
            rows["backward"] = below
        sizes = {"forward": _STEP, "operation": _CARD, "saved": _RECORD, "backward": _STEP}
        for name, y in rows.items():
            yield tag("text", name, x=_MARGIN + _GUTTER - 14, y=y + sizes[name] / 2 + 4, class_="row")
        if block.times > 1:
            yield from self._times(block, top, first)
        places = self._places(line)
        yield from self._bands(line, places, top)
        for column, x in zip(line, places, strict=True):
            yield self._card(column, x, rows["operation"])
            if "saved" in rows and column.operation["saves"] and column.backward:
                yield from self._record(x, rows, self._column - _GAP, column.operation["saves"], "unfused")
        for pass_ in ("forward", "backward"):
            if pass_ in rows:
                yield from self._steps(line, places, rows, pass_)

    def _places(self, line: Sequence[Column]) -> list[float]:
        places: list[float] = []
        x = _MARGIN + _GUTTER
        for i, column in enumerate(line):
            x += _BETWEEN if i and (column.opens or line[i - 1].closes) else 0.0
            places.append(x)
            x += self._column
        return places

    def _times(self, block: Block, top: float, first: bool) -> Iterator[Markup]:
        x, bottom = _MARGIN + 4, top + self._height()
        yield tag("path", d=f"M{number(x + 6)} {number(top)}h-6v{number(bottom - top)}h6", class_="bracket")
        if first:
            start, size = block.columns[0].operation["at"], len(block.columns)
            about = f"these {size} positions stand {block.times} times in a row, from {start} to {block.last}"
            times = tag("text", f"× {block.times}", x=x + 8, y=top + 15, class_="times")
            to = tag("text", f"to {block.last}", x=x + 8, y=top + 30, class_="faint")
            yield tag("g", tag("title", about), times, to)

    def _bands(self, line: Sequence[Column], places: Sequence[float], top: float) -> Iterator[Markup]:
        spans = [(c.segment, x) for c, x in zip(line, places, strict=True)]
        for segment, several in groupby(spans, key=lambda span: span[0]):
            xs = [x for _, x in several]
            left, right = xs[0] - _GAP / 2 - 1, xs[-1] + self._column - _GAP / 2 + 1
            if segment is None:
                continue
            start, stop = self._plan["segments"][segment]
            about = f"segment {segment + 1}: positions {start} to {stop - 1} run behind one autograd node"
            rect = tag(
                "rect", tag("title", about), x=left, y=top, width=right - left, height=self._height(), rx=7.0,
                class_="band",
            )  # fmt: skip
            yield rect
            label = f"segment {segment + 1}" + ("" if line[0].segment != segment or line[0].opens else " goes on")
            yield tag("text", label, x=left + 9, y=top + 16, class_="faint")

    def _card(self, column: Column, x: float, y: float) -> Markup:
        operation, size = column.operation, self._column - _GAP
        about = [f"{operation['at']}: {operation['name']} {operation['path']}".rstrip()]
        about += [f"runs alone: {column.alone}"] if column.alone else []
        about += [f"gradients wanted of {', '.join(operation['wants'])}"] if operation["wants"] else []
        about += [f"refused: {r['fusion']}: {r['reason']}" for r in column.refused]
        room = size - 14 - (18 if column.refused else 0)
        inside = [
            _title(about),
            tag("rect", x=x, y=y, width=size, height=_CARD, rx=5.0, class_="card"),
            tag("text", cut(operation["name"], room, 12, 0.6), x=x + 8, y=y + 18, class_="name"),
        ]
        at = str(operation["at"])
        after = width(at, 11) + 7
        inside.append(tag("text", at, x=x + 8, y=y + 33, class_="at"))
        path = cut_before(operation["path"], size - 14 - after, 10.5, 0.61)
        inside.append(tag("text", path, x=x + 8 + after, y=y + 33, class_="mono"))
        if column.refused:
            circle = tag("circle", cx=x + size - 12, cy=y + 12, r=7.5)
            count = tag("text", str(len(column.refused)), x=x + size - 12, y=y + 15.5)
            inside.append(tag("g", circle, count, class_="badge"))
        return tag("g", *inside)

    def _steps(
        self, line: Sequence[Column], places: Sequence[float], rows: dict[str, float], pass_: str
    ) -> Iterator[Markup]:
        i = 0
        while i < len(line):
            mark = line[i].forward if pass_ == "forward" else line[i].backward
            if mark is None:
                yield tag("text", "·", x=places[i] + (self._column - _GAP) / 2, y=rows[pass_] + 18, class_="row middle")
                i += 1
                continue
            count = min(mark.length - mark.offset, len(line) - i)
            x, right = places[i], places[i + count - 1] + self._column - _GAP
            yield self._step(mark, line[i], x, rows[pass_], right - x)
            if pass_ == "forward" and mark.saves and "saved" in rows:
                yield from self._record(x, rows, right - x, mark.saves, mark.kind)
            i += count

    def _step(self, mark: Mark, column: Column, x: float, y: float, size: float) -> Markup:
        start = column.operation["at"] - mark.offset
        stop = start + mark.length - 1
        where = f"position {start}" if mark.length == 1 else f"positions {start} to {stop}"
        about = [f"{mark.name}, {NAMES[mark.kind]}, {where}"]
        about += [f"keeps a record of its own: {', '.join(mark.saves)}"] if mark.saves else []
        sign = SIGNS.get(mark.kind)
        label = mark.kind if sign is None else f"{sign} {mark.name}"
        text = cut(label, size - 10, 12 if sign else 11, 0.6)
        return tag(
            "g",
            _title(about),
            tag("rect", x=x, y=y, width=size, height=_STEP, rx=5.0),
            tag("text", text, x=x + size / 2, y=y + _STEP / 2 + 4, class_="middle"),
            class_=mark.kind,
        )

    def _record(
        self, x: float, rows: dict[str, float], size: float, fields: Sequence[str], kind: Kind
    ) -> Iterator[Markup]:
        """What is saved, on the way from the forward pass to the backward pass."""
        y, middle = rows["saved"], x + size / 2
        yield tag(
            "path",
            d=f"M{number(middle)} {number(y - _SPACE)}v{number(_SPACE)}m0 {number(_RECORD)}v{number(_SPACE)}",
            class_="wire",
        )
        text = tag("text", cut(", ".join(fields), size - 8, 10.5, 0.61), x=middle, y=y + 15, class_="mono middle")
        yield tag(
            "g",
            _title([f"saved for backward: {', '.join(fields)}"]),
            tag("rect", x=x, y=y, width=size, height=_RECORD, rx=_RECORD / 2),
            text,
            class_=f"{kind} record",
        )

    def _legend(self, y: float) -> Iterator[Markup]:
        kinds = {step["kind"]: None for step in (*self._plan["forward"], *self._plan["backward"])}
        x = _MARGIN
        for kind in NAMES:
            if kind in kinds:
                sign, name = SIGNS.get(kind, ""), NAMES[kind]
                label = tag("text", name, x=x + 28, y=y + 5, class_="faint")
                inside = [tag("rect", x=x, y=y - 7, width=22, height=16, rx=4.0)]
                inside += [tag("text", sign, x=x + 11, y=y + 5, class_="middle")] if sign else []
                yield tag("g", tag("g", *inside, class_=kind), label)
                x += 28 + width(name, 11) + 18
        if self._refusals:
            circle = tag("circle", cx=x + 8, cy=y + 1, r=7.5)
            yield tag("g", circle, tag("text", "2", x=x + 8, y=y + 4.5), class_="badge")
            yield tag("text", "fusions refused here: point at it", x=x + 22, y=y + 5, class_="faint")


def _title(lines: Sequence[str]) -> Markup:
    return tag("title", Markup("&#10;".join(map(escaped, lines))))

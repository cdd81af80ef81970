"""Draws a plan: operations in the middle, forward schedule above, backward schedule below, saved tensors between."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

from .data import Kind, PlanData
from .markup import Markup, cut, cut_before, escaped, number, tag, width, wrapped
from .score import ANY, Block, Column, Mark, fold, lines_of, plan_columns
from .style import COLORS, NAMES, SHAPES, SIGNS
from .text import counted, sized

MOST = 10
"""Maximum number of columns in a line."""

_GUTTER, _MARGIN, _GAP, _BETWEEN = 70.0, 20.0, 6.0, 14.0
_STEP, _BAR, _LINE, _RECORD, _SPACE = 34.0, 8.0, 14.0, 22.0, 9.0
_HEAD, _PAD, _APART, _TIMES = 22.0, 8.0, 22.0, 20.0
_NARROWEST, _WIDEST, _LEAST = 88.0, 128.0, 640.0
FULL = 904
"""Default maximum width of a picture."""
_NAME, _LABEL, _BOLD = 12.0, 11.0, 0.66  # font sizes, and the width of a bold character


def svg(plan: PlanData, most: int = FULL) -> Markup:
    """A plan as self-contained SVG, at most `most` pixels wide."""
    return _Picture(plan, most).draw()


def headline(plan: PlanData) -> tuple[str, ...]:
    """The gains of the plan: steps against operations, and bytes saved for backward against unfused."""
    steps = [counted(len(plan["forward"]), "step") + (" forward" if plan["backward"] else "")]
    steps += [f"{len(plan['backward'])} backward"] if plan["backward"] else []
    lines = [f"{counted(len(plan['operations']), 'operation')} in {' and '.join(steps)}"]
    if (memory := plan["memory"]) is not None and memory["saved_unfused"]:
        less = 1 - memory["saved"] / memory["saved_unfused"]
        than = f", {less:.0%} less than unfused" if less >= 0.005 else ""
        lines.append(f"{sized(memory['saved'])} saved for backward{than}")
        plain = [choice for choice in plan["choices"] if choice["memory"] in ("balanced", "lean")]
        least = min(plain, key=lambda choice: choice["saved"], default=None)
        if least is not None and least["saved"] < memory["saved"]:
            lines[-1] += f"; {sized(least['saved'])} with memory={least['memory']}"
    return tuple(lines)


def looks(column: Column) -> Hashable:
    """Everything drawn of a column, apart from its position and its segment."""
    operation = column.operation
    saved = operation["name"], tuple(operation["saves"]), tuple(operation["needs"]), column.segment is None
    return saved, column.forward, column.backward, column.eager, column.refused


class _Picture:
    def __init__(self, plan: PlanData, most: int) -> None:
        self._plan, self._turns = plan, 0
        self._backward = bool(plan["backward"])
        columns = plan_columns(plan)
        self._saves = any(c.operation["saves"] or (c.forward and c.forward.saves) for c in columns)
        self._blocks = fold(columns, looks)
        names = max((_least(c.operation["name"], _NAME) for c in columns), default=0.0) + 16
        steps = (m for c in columns for m in (c.forward, c.backward) if m is not None and m.kind in SIGNS)
        fusions = max(((_least(_signed(m), _LABEL) + 14) / m.length for m in steps), default=0.0)
        self._column = min(max(names + _GAP, fusions + _GAP, _NARROWEST), _WIDEST)
        self._most = max(min(MOST, int((most - 2 * _MARGIN - _GUTTER) // self._column)), 1)
        tall = max((len(_split(c.operation["name"], self._column - _GAP - 16, _NAME)) for c in columns), default=1)
        self._card_height = 28.0 + _LINE * tall
        lines = (line for b in self._blocks for line in lines_of(b, self._most))
        right = max((self._places(line)[-1] + self._column for line in lines), default=0.0)
        self._width = max(right + _MARGIN, min(_LEAST, most))

    def draw(self) -> Markup:
        parts: list[Markup] = []
        y = _MARGIN + 15
        room = self._width - 2 * _MARGIN
        for i, whole in enumerate(headline(self._plan)):
            for line in wrapped(whole, room, 12.0 if i else 15.0, _BOLD):
                parts.append(tag("text", line, x=_MARGIN, y=y, class_="name" if i else "title"))
                y += 19
        for whole in self._plan["summary"][:2]:
            for line in wrapped(whole, room, 11.0):
                parts.append(tag("text", line, x=_MARGIN, y=y, class_="faint"))
                y += 16
        y += 6
        for block in self._blocks:
            if block.times > 1:
                parts.append(self._times(block, y))
                y += _TIMES
            for line in lines_of(block, self._most):
                parts += self._line(block, line, y)
                y += self._height() + _APART
        if not self._blocks:
            parts.append(tag("text", "no operations", x=_MARGIN, y=y + 10, class_="faint"))
            y += 30
        legend = [*self._legend(y)]
        y += 26 + 22 * self._turns if legend else 0
        ground = tag("rect", width=self._width, height=y, rx=10.0, class_="ground")
        return tag(
            "svg",
            tag("title", ": ".join(self._plan["summary"][:2])),
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
        height = _HEAD + _STEP + _SPACE + self._card_height + 2 * _PAD
        if self._backward:
            height += (_SPACE + _RECORD if self._saves else 0) + _SPACE + _STEP
        return height

    def _line(self, block: Block, line: Sequence[Column], top: float) -> Iterator[Markup]:
        rows = {"forward": top + _HEAD + _PAD}
        rows["operation"] = rows["forward"] + _STEP + _SPACE
        below = rows["operation"] + self._card_height + _SPACE
        if self._backward and self._saves:
            rows["saved"], below = below, below + _RECORD + _SPACE
        if self._backward:
            rows["backward"] = below
        sizes = {"forward": _STEP, "operation": self._card_height, "saved": _RECORD, "backward": _STEP}
        for name, y in rows.items():
            yield tag("text", name, x=_MARGIN + _GUTTER - 18, y=y + sizes[name] / 2 + 4, class_="row")
        if block.times > 1:
            x, bottom = _MARGIN - 6, top + self._height()
            yield tag("path", d=f"M{number(x + 6)} {number(top)}h-6v{number(bottom - top)}h6", class_="bracket")
        places = self._places(line)
        yield from self._bands(line, places, top)
        for column, x in zip(line, places, strict=True):
            yield self._card(column, x, rows["operation"])
            if "saved" in rows and column.operation["saves"] and column.backward:
                yield from self._record(x, rows, self._column - _GAP, column.operation["saves"], "unfused")
        for pass_ in ("forward", "backward"):
            if pass_ in rows:
                yield self._way(places, rows[pass_] + _STEP / 2, pass_)
                yield from self._steps(line, places, rows, pass_)

    def _way(self, places: Sequence[float], y: float, pass_: str) -> Markup:
        """A line behind the steps of a pass with an arrow to the right for forward, to the left for backward."""
        left, right = places[0] - 10, places[-1] + self._column - _GAP + 10
        head, turn = (right, -1) if pass_ == "forward" else (left, 1)
        line = f"M{number(left)} {number(y)}H{number(right)}"
        return tag(
            "path", d=f"{line}M{number(head + 6 * turn)} {number(y - 4)}l{-6 * turn} 4l{6 * turn} 4", class_="way"
        )

    def _places(self, line: Sequence[Column]) -> list[float]:
        places: list[float] = []
        x = _MARGIN + _GUTTER
        for i, column in enumerate(line):
            x += _BETWEEN if i and (column.opens or line[i - 1].closes) else 0.0
            places.append(x)
            x += self._column
        return places

    def _times(self, block: Block, y: float) -> Markup:
        start, size = block.columns[0].operation["at"], len(block.columns)
        about = f"the next {counted(size, 'operation')}, positions {start} to {block.last}"
        more = tag("tspan", f"  {about}", class_="faint")
        return tag("text", f"× {block.times}", more, x=_MARGIN, y=y + 10, class_="times")

    def _bands(self, line: Sequence[Column], places: Sequence[float], top: float) -> Iterator[Markup]:
        spans = [(c.segment, x) for c, x in zip(line, places, strict=True)]
        for segment, several in groupby(spans, key=lambda span: span[0]):
            xs = [x for _, x in several]
            left, right = xs[0] - _GAP / 2 - 1, xs[-1] + self._column - _GAP / 2 + 1
            if segment is None:
                continue
            about, label = "behind autograd nodes that end elsewhere in each repetition", ""
            if segment != ANY:
                start, stop = self._plan["segments"][segment]
                about = f"segment {segment + 1}: positions {start} to {stop - 1} run behind one autograd node"
                label = ("" if line[0].segment != segment or line[0].opens else "… ") + f"segment {segment + 1}"
            yield tag(
                "rect", tag("title", about), x=left, y=top, width=right - left, height=self._height(), rx=7.0,
                class_="band",
            )  # fmt: skip
            yield tag("text", cut(label, right - left - 12, 11), x=left + 9, y=top + 16, class_="faint")

    def _card(self, column: Column, x: float, y: float) -> Markup:
        operation, size = column.operation, self._column - _GAP
        about = [f"{operation['at']}: {operation['name']} {operation['path']}".rstrip()]
        about += [f"runs eagerly: {column.eager}"] if column.eager else []
        about += [f"gradients needed: {', '.join(operation['needs'])}"] if operation["needs"] else []
        about += [f"not applied: {fusion}: {reason}" for fusion, reason in column.refused]
        inside = [_title(about), tag("rect", x=x, y=y, width=size, height=self._card_height, rx=5.0, class_="card")]
        for i, text in enumerate(_split(operation["name"], size - 16, _NAME)):
            inside.append(tag("text", text, x=x + 8, y=y + 18 + _LINE * i, class_="name"))
        at, below = str(operation["at"]), y + self._card_height - 9
        after = width(at, 11) + 7
        inside.append(tag("text", at, x=x + 8, y=below, class_="at"))
        path = cut_before(operation["path"], size - 14 - after, 10.5, 0.61)
        inside.append(tag("text", path, x=x + 8 + after, y=below, class_="mono"))
        return tag("g", *inside)

    def _steps(
        self, line: Sequence[Column], places: Sequence[float], rows: dict[str, float], pass_: str
    ) -> Iterator[Markup]:
        i = 0
        while i < len(line):
            mark = line[i].forward if pass_ == "forward" else line[i].backward
            if mark is None:
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
        about += [f"saves its own tensors: {', '.join(mark.saves)}"] if mark.saves else []
        if mark.kind == "unfused":
            bar = tag("rect", x=x, y=y + (_STEP - _BAR) / 2, width=size, height=_BAR, rx=_BAR / 2)
            return tag("g", _title(about), bar, class_=mark.kind)
        lines = _split(_signed(mark) if mark.kind in SIGNS else "not fused", size - 10, _LABEL)
        first = y + _STEP / 2 + 4 - _LINE * (len(lines) - 1) / 2
        texts = (
            tag("text", text, x=x + size / 2, y=first + _LINE * i, class_="middle") for i, text in enumerate(lines)
        )
        return tag(
            "g", _title(about), tag("rect", x=x, y=y, width=size, height=_STEP, rx=5.0), *texts, class_=mark.kind
        )

    def _record(
        self, x: float, rows: dict[str, float], size: float, fields: Sequence[str], kind: Kind
    ) -> Iterator[Markup]:
        """Saved fields, drawn between the forward and the backward schedule."""
        y, middle = rows["saved"], x + size / 2
        yield tag(
            "path",
            d=f"M{number(middle)} {number(y - _SPACE)}v{number(_SPACE)}m0 {number(_RECORD)}v{number(_SPACE)}",
            class_="wire",
        )
        text = tag("text", _listed(fields, size - 12), x=middle, y=y + 15, class_="mono middle")
        yield tag(
            "g",
            _title([f"saved for backward: {', '.join(fields)}"]),
            tag("rect", x=x, y=y, width=size, height=_RECORD, rx=_RECORD / 2),
            text,
            class_=f"{kind} record",
        )

    def _legend(self, y: float) -> Iterator[Markup]:
        kinds = {step["kind"]: None for step in (*self._plan["forward"], *self._plan["backward"])}
        x, self._turns = _MARGIN, 0
        for kind in NAMES:
            if kind in kinds:
                sign, name = SIGNS.get(kind, ""), NAMES[kind]
                if x > _MARGIN and x + 28 + width(name, 11) > self._width - _MARGIN:
                    x, y, self._turns = _MARGIN, y + 22, self._turns + 1
                label = tag("text", name, x=x + 28, y=y + 5, class_="faint")
                bar = kind == "unfused"
                inside = [tag("rect", x=x, y=y - (3.0 if bar else 7.0), width=22, height=8 if bar else 16, rx=4.0)]
                inside += [tag("text", sign, x=x + 11, y=y + 5, class_="middle")] if sign else []
                yield tag("g", tag("g", *inside, class_=kind), label)
                x += 28 + width(name, 11) + 18


def _title(lines: Sequence[str]) -> Markup:
    return tag("title", Markup("&#10;".join(map(escaped, lines))))


def _signed(mark: Mark) -> str:
    return f"{SIGNS[mark.kind]} {mark.name}"


def _halves(name: str) -> list[tuple[str, str]]:
    """A name in two lines, for each place at which a word of it begins."""
    return [(name[: m.start()], name[m.start() :]) for m in re.finditer(r"(?<=[a-z0-9])(?=[A-Z])", name)]


def _least(name: str, size: float) -> float:
    """The smallest width of a name, in one or two lines."""
    wide = [max(width(a, size, _BOLD), width(b, size, _BOLD)) for a, b in _halves(name)]
    return min([width(name, size, _BOLD), *wide])


def _split(name: str, room: float, size: float) -> list[str]:
    """A name in one line if it fits, else in two, each cut if necessary."""
    if width(name, size, _BOLD) <= room or not (halves := _halves(name)):
        return [cut(name, room, size, _BOLD)]
    best = min(halves, key=lambda two: max(width(part, size, _BOLD) for part in two))
    return [cut(part, room, size, _BOLD) for part in best]


def _listed(fields: Sequence[str], room: float) -> str:
    """As many fields as fit, and the number of the others."""
    for count in range(len(fields), 0, -1):
        more = f" +{len(fields) - count}" if count < len(fields) else ""
        text = ", ".join(fields[:count]) + more
        if width(text, 10.5, 0.61) <= room:
            return text
    return cut(fields[0], room, 10.5, 0.61)

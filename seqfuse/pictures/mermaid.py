"""A plan as a Mermaid flowchart, for places that draw those: three rows, each box linked to what it covers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from .data import PlanData
from .markup import printable
from .score import Column, Mark, columns_of, fold
from .style import SIGNS

MOST = 120
"""Columns that are drawn: Mermaid refuses a chart of more than 500 links."""

_STYLES = (
    "classDef forward fill:#d9eaf7,stroke:#0072b2,color:#00395a",
    "classDef backward fill:#fbe5d6,stroke:#d55e00,color:#6b2f00",
    "classDef joint fill:#d5f0e6,stroke:#009e73,color:#004432",
    "classDef inference fill:#f7e4ee,stroke:#b3568a,color:#5c1f42",
    "classDef operation fill:none,stroke:#8b949e",
    "classDef unfused fill:none,stroke:#8b949e",
    "classDef eager fill:none,stroke:#8b949e,stroke-dasharray:4 3",
    "classDef segment fill:none,stroke:#8b949e,stroke-width:0.5px",
)


def mermaid(plan: PlanData) -> str:
    """The chart as text. Blocks that repeat themselves stand once, with the number of times."""
    columns: list[Column] = []
    times: dict[int, str] = {}
    for block in fold(columns_of(plan)):
        if block.times > 1:
            first, size = block.columns[0].operation["at"], len(block.columns)
            times[first] = f"{size} positions, {block.times} times, to {block.last}"
        columns += block.columns
    left_out, columns = columns[MOST:], columns[:MOST]
    lines = ["flowchart TB", *(f"  {line}" for line in _STYLES)]
    for segment, several in groupby(columns, key=lambda column: column.segment):
        if segment is not None:
            lines.append(f"  subgraph s{segment}[{_quoted([f'segment {segment + 1}'])}]")
        for column in several:
            operation = column.operation
            label = [operation["name"], f"{operation['at']} {operation['path']}".rstrip()]
            label += [times[operation["at"]]] if operation["at"] in times else []
            lines.append(f"  o{operation['at']}[{_quoted(label)}]:::operation")
        lines += ["  end", f"  class s{segment} segment"] if segment is not None else []
    if left_out:
        lines.append(f"  more[{_quoted([f'{len(left_out)} more'])}]")
    lines += _cover(columns, [column.forward for column in columns], "f")
    lines += _cover(columns, [column.backward for column in columns], "b")
    return "\n".join(lines) + "\n"


def _cover(columns: Sequence[Column], marks: Sequence[Mark | None], letter: str) -> list[str]:
    lines: list[str] = []
    shown = -1
    for column, mark in zip(columns, marks, strict=True):
        if mark is None:
            continue
        at = column.operation["at"]
        if mark.offset == 0 or shown < 0:
            shown = at
            sign = SIGNS.get(mark.kind)
            lines.append(f"  {letter}{shown}({_quoted([f'{sign} {mark.name}' if sign else mark.kind])}):::{mark.kind}")
        saves: Sequence[str] = column.operation["saves"]
        if mark.kind == "joint" and column.forward is not None and mark.offset == 0:
            saves = column.forward.saves
        if letter == "f":
            lines.append(f"  f{shown} --- o{at}")
        elif saves:
            lines.append(f"  o{at} -->|{_quoted([', '.join(saves)])}| b{shown}")
        else:
            lines.append(f"  o{at} --- b{shown}")
    return lines


def _quoted(lines: Sequence[str]) -> str:
    return f'"{"<br/>".join(map(_text, lines))}"'


def _text(text: str) -> str:
    """Letters, digits and what means nothing to Mermaid or HTML as they are; others by their number."""
    return "".join(c if c.isalnum() or c in " _.,:→←⇄○" else f"#{ord(c)};" for c in printable(text))

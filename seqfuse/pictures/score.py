"""Lays out a plan as lines of columns, one under the other; repeated blocks appear once."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence

from .data import Kind, OperationData, PlanData, StepData

LONG = 40
"""Up to this number of columns, nothing is folded."""

ANY = -1
"""A segment that is drawn without its ends."""

_LONGEST_BLOCK = 200
_LEAST_FOLDED = 8


@dataclasses.dataclass(frozen=True)
class Mark:
    """A step of a schedule, seen from one of its columns, at `offset` in it."""

    name: str
    kind: Kind
    offset: int
    length: int
    saves: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Column:
    """One position: its step in each pass, saved fields, the reason to run eagerly, and the fusions not applied."""

    operation: OperationData
    forward: Mark | None
    backward: Mark | None
    segment: int | None
    opens: bool  # first column of a segment
    closes: bool
    eager: str | None
    refused: tuple[tuple[str, str], ...]

    @property
    def border(self) -> bool:
        """Whether no step of either schedule continues from the previous column."""
        return not any(mark is not None and mark.offset for mark in (self.forward, self.backward))


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive columns, drawn once for `times` repetitions."""

    columns: tuple[Column, ...]
    times: int = 1

    @property
    def last(self) -> int:
        """The last position that the block represents."""
        return self.columns[0].operation["at"] + self.times * len(self.columns) - 1


def plan_columns(plan: PlanData) -> list[Column]:
    """One column for each position."""
    ahead, back = _marks(plan["forward"]), _marks(plan["backward"])
    segment: dict[int, int] = {}
    for number, (start, stop) in enumerate(plan["segments"]):
        segment.update(dict.fromkeys(range(start, stop), number))
    eager = {e["at"]: e["reason"] for e in plan["eager"]}
    refused: dict[int, list[tuple[str, str]]] = {}
    for refusal in (refusal for refusal in plan["refused"] if not refusal["expected"]):
        for fusion, places in refusal["fusions"].items():
            for at in places:
                refused.setdefault(at, []).append((fusion, refusal["reason"]))
    opens, closes = {start for start, _ in plan["segments"]}, {stop - 1 for _, stop in plan["segments"]}
    return [
        Column(
            operation, ahead.get(i), back.get(i), segment.get(i), i in opens, i in closes, eager.get(i),
            tuple(refused.get(i, ())),
        )
        for i, operation in enumerate(plan["operations"])
    ]  # fmt: skip


def _marks(steps: Sequence[StepData]) -> dict[int, Mark]:
    marks: dict[int, Mark] = {}
    for step in steps:
        length = step["stop"] - step["start"]
        for offset in range(length):
            marks[step["start"] + offset] = Mark(step["name"], step["kind"], offset, length, tuple(step["saves"]))
    return marks


def fold(columns: Sequence[Column], shown: Callable[[Column], Hashable]) -> list[Block]:
    """The blocks of a long sequence: repeated columns become one block with a number of repetitions.

    A block begins where no step continues from the previous column; of the possible blocks at a position, the one that
    saves most columns is used. Columns are equal if `shown` is equal and segments begin at the same ones. If that
    hides too many repetitions, segments are ignored and not drawn.

    Args:
        columns: the columns of a plan.
        shown: what is drawn of a column apart from its position and its segment.
    """
    exact = _folded(columns, [(shown(column), column.opens) for column in columns])
    loose = _folded(columns, [shown(column) for column in columns])
    if sum(len(block.columns) for block in exact) <= 2 * sum(len(block.columns) for block in loose):
        return exact
    return [Block(tuple(map(_without_segment, block.columns)), block.times) for block in loose]


def _without_segment(column: Column) -> Column:
    segment = None if column.segment is None else ANY
    return dataclasses.replace(column, segment=segment, opens=False, closes=False)


def _folded(columns: Sequence[Column], shown: Sequence[Hashable]) -> list[Block]:
    if len(columns) <= LONG:
        return [Block(tuple(columns))] if columns else []
    numbers: dict[Hashable, int] = {}
    looks = [numbers.setdefault(one, len(numbers)) for one in shown]
    blocks: list[Block] = []
    kept = at = 0
    while at < len(columns):
        length, times = _repeats(columns, looks, at)
        if times == 1 or _begins_later(columns, looks, at, length, times):
            at += 1
            continue
        if kept < at:
            blocks.append(Block(tuple(columns[kept:at])))
        blocks.append(Block(tuple(columns[at : at + length]), times))
        kept = at = at + length * times
    return [*blocks, Block(tuple(columns[kept:]))] if kept < len(columns) else blocks


def _begins_later(columns: Sequence[Column], looks: Sequence[int], at: int, length: int, times: int) -> bool:
    """Whether the same block repeats as often from a later column that begins a container, which this one does not."""
    paths = [column.operation["path"].split(".") for column in columns[max(at - 1, 0) : at + 2 * length]]
    here, there = paths[min(at, 1)], paths[min(at, 1) + length]
    depth = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), 0) + 1
    begins = [at == 0] + [a[:depth] != b[:depth] for a, b in itertools.pairwise(paths)]
    begins = begins[min(at, 1) :]  # of the column at `at`, and those after it
    later = [at + i for i in range(1, length) if begins[i] and columns[at + i].border]
    return not begins[0] and any(_repeats(columns, looks, i) >= (length, times) for i in later)


def _repeats(columns: Sequence[Column], looks: Sequence[int], at: int) -> tuple[int, int]:
    """Length and number of repetitions of the best block that begins here."""
    best, saved = (1, 1), _LEAST_FOLDED - 1
    if not columns[at].border:
        return best
    for length in range(1, min(_LONGEST_BLOCK, (len(looks) - at) // 2) + 1):
        if looks[at] != looks[at + length]:
            continue
        end = at + length
        while end < len(looks) and looks[end] == looks[end - length]:
            end += 1
        times = (end - at) // length
        if (times - 1) * length > saved:
            best, saved = (length, times), (times - 1) * length
    return best


def lines_of(block: Block, most: int) -> list[tuple[Column, ...]]:
    """Lines of a block, at most `most` columns each, broken between segments or else between steps if possible."""
    lines: list[tuple[Column, ...]] = []
    rest = block.columns
    while len(rest) > most:
        borders = [i for i in range(1, most + 1) if rest[i].border]
        good = [i for i in borders if i > most // 2 and (rest[i].opens or rest[i - 1].closes)]
        cut = (good or borders or [most])[-1]
        lines.append(rest[:cut])
        rest = rest[cut:]
    return [*lines, rest] if rest else lines

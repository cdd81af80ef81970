"""A plan as text for a terminal of 80 columns."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from .data import MemoryData, OperationData, PlanData, RefusalData, StepData

WIDTH = 80
FEW = 3
"""Fusions that are named, or have a line of their own, where there are more."""


def summary(plan: PlanData) -> list[str]:
    """For what a plan was made, how much of it is fused, and what it keeps for backward."""
    forward, backward = (
        sum(step["kind"] not in ("unfused", "alone") for step in plan[p]) for p in ("forward", "backward")
    )
    counts = f"{_plural(len(plan['operations']), 'operation')}, {_plural(len(plan['segments']), 'segment')}"
    lines = [f"Plan for {plan['env']['text']}", f"{counts}, {forward} fused forward, {backward} fused backward"]
    return lines if plan["memory"] is None else [*lines, _memory(plan["memory"], bool(plan["alone"]))]


def _memory(memory: MemoryData, partly: bool) -> str:
    text = f"saved for backward: {_bytes(memory['saved'])} (unfused {_bytes(memory['saved_unfused'])}); "
    return f"{text}{_number(memory['flops'])}FLOP forward" + ("; without what runs alone" if partly else "")


def render(plan: PlanData) -> str:
    """A plan as text."""
    head, counts, *memory = plan["summary"]
    lines = _wrap(f"{head}: {counts}", "  ")
    labels = [_label(o) for o in plan["operations"]]
    wide = min(max([len("operation"), *map(_width, labels)]), 30)
    column = (WIDTH - wide - 8) // 2
    lines.append(f"{'at':>4}  {'operation':<{wide}}  {'forward':<{column - 2}}  backward".rstrip())
    starts = {start for start, _ in plan["segments"] if start}
    ahead, back = _marks(plan["forward"]), _marks(plan["backward"])
    for i, label in enumerate(labels):
        if i in starts:
            lines.append(f"{'':>4}  {'-' * wide}")
        a, b = _cut(ahead.get(i, "."), column - 2), _cut(back.get(i, "."), column - 2)
        lines.append(f"{i:>4}  {_pad(_cut(label, wide), wide)}  {_pad(a, column - 2)}  {b}".rstrip())
    for alone in plan["alone"]:
        lines += _wrap(f"alone: {alone['name']} at {alone['at']}: {alone['reason']}", "    ")
    for line in (*_refusals(plan["refused"]), *memory):
        lines += _wrap(line, "    ")
    return "\n".join(lines)


def _label(operation: OperationData) -> str:
    return _printable(f"{operation['name']} {operation['path']}".rstrip())


def _marks(steps: Sequence[StepData]) -> dict[int, str]:
    marks: dict[int, str] = {}
    for step in steps:
        for i in range(step["start"], step["stop"]):
            first, last = i == step["start"], i == step["stop"] - 1
            if step["kind"] in ("alone", "unfused"):
                marks[i] = step["kind"]
            else:
                marks[i] = (
                    f"{'[' if first else '|'} {step['name'] if first else ''}{' ]' if last and not first else ''}"
                )
    return marks


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text)


def _refusals(refused: Sequence[RefusalData]) -> list[str]:
    """A line for each fusion and reason; one for a reason that many share, and one for many that were superseded."""
    groups: dict[tuple[str, str], list[RefusalData]] = {}
    for refusal in refused:
        groups.setdefault((refusal["reason"], refusal["fusion"]), []).append(refusal)
    sharing: dict[str, list[str]] = {}
    outbid: dict[str, list[int]] = {}
    for (reason, fusion), several in groups.items():
        sharing.setdefault(reason, []).append(fusion)
        if several[0]["outbid"]:
            outbid.setdefault(fusion, []).extend(refusal["at"] for refusal in several)
    many = sum(several[0]["outbid"] for several in groups.values()) > FEW
    lines: list[str] = []
    for (reason, fusion), several in groups.items():
        fusions = sharing[reason]
        if many and several[0]["outbid"]:
            continue
        if len(fusions) <= FEW:
            lines.append(f"refused: {fusion} at {_places(sorted({refusal['at'] for refusal in several}))}: {reason}")
        elif fusion == fusions[0]:
            named = f"{', '.join(fusions[:FEW])} and {len(fusions) - FEW} more"
            lines.append(f"refused: {named}: {reason}")
    if many:
        named = "; ".join(f"{fusion} at {_places(sorted(set(at)))}" for fusion, at in outbid.items())
        lines.append(f"superseded by cheaper fusions: {named}")
    return lines


def _places(at: Sequence[int]) -> str:
    return ", ".join(map(str, at[:6])) + (f" and {len(at) - 6} more" if len(at) > 6 else "")


def _plural(n: int, word: str) -> str:
    return f"{n} {word}" + ("" if n == 1 else "s")


def _cut(text: str, width: int) -> str:
    text = _printable(text)
    return _take(text, width) if _width(text) <= width else _take(text, width - 2) + ".."


def _pad(text: str, width: int) -> str:
    return text + " " * (width - _width(text))


def _width(text: str) -> int:
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _take(text: str, width: int) -> str:
    taken = ""
    for character in text:
        if _width(taken) + _columns(character) > width:
            break
        taken += character
    return taken


def _wrap(text: str, indent: str) -> list[str]:
    lines, line = list[str](), ""
    for word in _printable(text).split():
        while word:
            lead = line + " " if line.strip() else line
            fits = _take(word, WIDTH - _width(lead))
            if fits == word or (not line.strip() and fits):
                line, word = lead + fits, word[len(fits) :]
            else:
                lines.append(line)
                line = indent
    return [*lines, line]


def _number(value: float, step: float = 1000.0) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < step:
            return f"{value:.0f} {unit}" if not unit else f"{value:.1f} {unit}"
        value /= step
    return f"{value:.1f} E"


def _bytes(n: int) -> str:
    return f"{_number(n, 1024.0)}{'i' if n >= 1024 else ''}B".replace("ki", "Ki")

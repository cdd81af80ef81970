"""A plan as text for a terminal."""

from __future__ import annotations

import shutil
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from .data import CastData, ChoiceData, MemoryData, OperationData, PlanData, QuantizationData, RefusalData
from .markup import printable
from .score import Mark, fold, plan_columns

WIDTH = 80
NARROWEST = 60
LABEL = 30
"""Maximum width of an operation's column; half of it if names of fusions need the space."""
FEW = 3
"""Up to how many fusions are named, or have separate lines."""


def summary(plan: PlanData) -> list[str]:
    """A summary of a plan in lines: environment, number of fused steps, and bytes saved for backward."""
    forward, backward = (
        sum(step["kind"] not in ("unfused", "eager") for step in plan[p]) for p in ("forward", "backward")
    )
    counts = f"{counted(len(plan['operations']), 'operation')}, {counted(len(plan['segments']), 'segment')}"
    lines = [f"Plan for {plan['env']['text']}", f"{counts}, {forward} fused forward, {backward} fused backward"]
    return lines if plan["memory"] is None else [*lines, _memory(plan["memory"], bool(plan["eager"]))]


def _memory(memory: MemoryData, partly: bool) -> str:
    saved, unfused = memory["saved"], memory["saved_unfused"]
    share = f" ({saved / unfused:.2f}x unfused)" if unfused else ""
    text = f"saved for backward: {sized(saved)}{share}; "
    text += "" if memory["peak"] is None else f"peak {sized(memory['peak'])}; "
    return f"{text}{_number(memory['flops'])}FLOP forward" + ("; excluding eager modules" if partly else "")


def choices_table(choices: Sequence[ChoiceData], used: str) -> list[str]:
    """A line for each memory choice: bytes saved, peak, and estimated extra time, in common units."""
    rows = [("memory=", "saved", "peak", "time (est.)")] * bool(choices)
    saves, peaks = (max((choice[held] for choice in choices), default=0) for held in ("saved", "peak"))
    for choice in choices:
        time = extra_time(choice["microseconds"]) if choice["microseconds"] else ""
        said = f"{time} {used}".strip() if choice["used"] else time
        if choice["memory"] == "least" and any(choice["saved"] > other["saved"] for other in choices):
            said += " (lowest peak, not fewest bytes saved)"
        rows.append((choice["memory"], sized(choice["saved"], saves), sized(choice["peak"], peaks), said))
    name, saved, peak = (max((len(row[i]) for row in rows), default=0) for i in range(3))
    return [f"{a:<{name}}  {b:>{saved}}  {c:>{peak}}  {d}".rstrip() for a, b, c, d in rows]


def curve(choices: Sequence[ChoiceData], width: int | None = None) -> str:
    """The front as a chart: a line for each memory choice, its peak, and a mark whose offset is the extra time."""
    ordered = sorted(choices, key=lambda choice: (-choice["peak"], choice["microseconds"]))
    if not ordered:
        return "there is nothing to choose: no gradient is needed, all plans are one, or their bytes are not known"
    low, high = (f(choice["microseconds"] for choice in ordered) for f in (min, max))
    peaks = [sized(choice["peak"], ordered[0]["peak"]) for choice in ordered]
    wide, name = max(map(len, peaks)), max(len(choice["memory"]) for choice in ordered)
    room = (width or terminal_width()) - wide - name - 18
    lines = [f"{'peak':>{wide}}  time (est.) beyond the fastest plan, from {extra_time(low)} to {extra_time(high)}"]
    for choice, peak in zip(ordered, peaks, strict=True):
        at = round((room - 1) * (choice["microseconds"] - low) / ((high - low) or 1))
        lines.append(f"{peak:>{wide}}  |{' ' * at}o {choice['memory']}, {extra_time(choice['microseconds'])}")
    return "\n".join(lines)


def _recomputed(plan: PlanData) -> Iterator[str]:
    """A line with the segments that run again in the backward pass, and the steps in them that do not."""
    names = [operation["name"] for operation in plan["operations"]]
    said: list[str] = []
    for one in plan["recomputed"]:
        kept = [f"{names[at]} at {at}" for at in one["keeps"]]
        said.append(f"{one['start']} to {one['stop'] - 1}" + (f" without {', '.join(kept)}" if kept else ""))
    if said:
        yield f"run again in the backward pass: {'; '.join(said)}"


def render(plan: PlanData, width: int | None = None) -> str:
    """A plan as text, `width` columns wide; by default as wide as the terminal."""
    width = width or terminal_width()
    head, counts, *memory = plan["summary"]
    lines = _wrap(f"{head}: {counts}", "  ", width)
    blocks = fold(plan_columns(plan), lambda column: (column.operation["name"], column.forward, column.backward))
    rows = [(_label(c.operation), _marked(c.forward), _marked(c.backward)) for block in blocks for c in block.columns]
    wide, ahead, back = _widths([("operation", "forward", "backward"), *rows], width - 10)
    lines.append(f"{'at':>4}  {'operation':<{wide}}  {'forward':<{ahead}}  backward".rstrip())
    left = iter(rows)
    for block in blocks:
        if block.times > 1:
            first, many = block.columns[0].operation["at"], len(block.columns)
            lines.append(f"{'':>4}  x{block.times}, at {first} to {block.last}: the next {counted(many, 'line')}")
        for column in block.columns:
            at, (label, a, b) = column.operation["at"], next(left)
            if column.opens and at:
                lines.append(f"{'':>4}  {'-' * wide}")
            label, a = _pad(_cut(label, wide), wide), _pad(_cut(a, ahead), ahead)
            lines.append(f"{at:>4}  {label}  {a}  {_cut(b, back)}".rstrip())
    for one in plan["eager"]:
        lines += _wrap(f"runs eagerly: {one['name']} at {one['at']}: {one['reason']}", "    ", width)
    for line in _casts(plan["casts"]):
        lines += _wrap(line, "    ", width)
    for line in _quantizations(plan["quantizations"]):
        lines += _wrap(line, "    ", width)
    if plan["compiler"] is not None:
        lines.append(f"kernels: C, compiled by {plan['compiler']}")
    if plan["gemms"] is not None:
        own = plan["env"]["autocast"] or plan["env"]["dtype"]
        said = f"GEMMs are computed in {plan['gemms']} and rounded once: this CPU has no {own} instructions"
        lines += _wrap(said, "    ", width)
    if plan["memory_unknown"] is not None:
        known = "" if plan["memory_unknown"].startswith("unknown ") else "not known: "
        memory = [f"saved for backward: {known}{plan['memory_unknown']}"]
    elif plan["memory"] is not None and plan["memory"]["peak_unknown"] is not None:
        memory = [*memory, f"peak not known: {plan['memory']['peak_unknown']}"]
    unmatched = [f"matches nowhere: {fusion}" for fusion in plan["unmatched"]]
    for line in (*_refusals(plan["refused"]), *unmatched, *_recomputed(plan), *memory):
        lines += _wrap(line, "    ", width)
    told = [one["reason"] for one in plan["refused"] if any(name.startswith("memory=") for name in one["fusions"])]
    unfit = any(reason.startswith("does not fit") for reason in told)
    lines += choices_table(plan["choices"], "(this plan, does not fit)" if unfit else "(this plan)")
    return "\n".join(lines)


def terminal_width() -> int:
    """Width of the terminal that output goes to; 80 if it is not a terminal."""
    if sys.stdout is None or not sys.stdout.isatty():  # pyright: ignore[reportUnnecessaryComparison]
        return WIDTH
    return max(shutil.get_terminal_size((WIDTH, 24)).columns, NARROWEST)


def _widths(rows: Sequence[tuple[str, str, str]], total: int) -> tuple[int, int, int]:
    """Widths of the three columns: what each needs if they fit, else names of operations are cut first."""
    label, ahead, back = (max(_width(row[i]) for row in rows) for i in range(3))
    label = min(label, LABEL)
    if label + ahead + back > total:
        label = min(label, max(total - ahead - back, LABEL // 2))
    rest = total - label
    if ahead + back > rest:  # the wider one is cut
        ahead, back = min(ahead, max(rest - back, rest // 2)), min(back, max(rest - ahead, rest - rest // 2))
    return label, ahead, back


def _label(operation: OperationData) -> str:
    return printable(f"{operation['name']} {operation['path']}".rstrip())


def _marked(mark: Mark | None) -> str:
    if mark is None:
        return "."
    if mark.kind in ("eager", "unfused"):
        return mark.kind
    if mark.offset == 0:
        return f"[ {printable(mark.name)}"
    return "| ]" if mark.offset == mark.length - 1 else "|"


def _casts(casts: Sequence[CastData]) -> list[str]:
    """A line for each target dtype: the tensors that are cast, and where."""
    found: dict[str, dict[str, list[int]]] = {}
    for cast in casts:
        found.setdefault(cast["dtype"], {}).setdefault(cast["name"], []).append(cast["at"])
    named = {dtype: (f"{name} at {_places(at)}" for name, at in names.items()) for dtype, names in found.items()}
    return [f"cast to {dtype}: {'; '.join(places)}" for dtype, places in named.items()]


def _quantizations(quantizations: Sequence[QuantizationData]) -> list[str]:
    """A line for each format and scaling: the operands and positions, and the fused steps that quantize them."""
    found: dict[str, dict[str, list[str]]] = {}
    for one in quantizations:
        inside = f" (in {one['inside']})" if one["inside"] else ""
        operands = found.setdefault(f"{one['format']} {one['scaling']}", {})
        operands.setdefault(one["role"], []).append(f"{one['at']}{inside}")
    named = {how: (f"{role} at {few(at, 6)}" for role, at in operands.items()) for how, operands in found.items()}
    return [f"quantize {how}: {'; '.join(places)}" for how, places in named.items()]


def _refusals(refused: Sequence[RefusalData]) -> Iterator[str]:
    """A line for each reason, and one for all superseded fusions if there are many; expected reasons are not shown."""
    reasons: dict[str, dict[str, list[int]]] = {}
    superseded: dict[str, list[int]] = {}
    for refusal in refused:
        for fusion, at in refusal["fusions"].items():
            if not refusal["expected"]:
                reasons.setdefault(refusal["reason"], {}).setdefault(fusion, []).extend(at)
            if refusal["superseded"]:
                superseded.setdefault(fusion, []).extend(at)
    dearer = {refusal["reason"] for refusal in refused if refusal["superseded"]}
    many = sum(len(reasons[reason]) for reason in dearer) > FEW
    own = {fusion for refusal in refused if refusal["own"] for fusion in refusal["fusions"]}
    for reason, fusions in reasons.items():
        mine = {name: at for name, at in fusions.items() if name in own}
        if not (many and reason in dearer):
            yield f"not applied: {_few(fusions, mine)}: {reason}"
        elif mine:
            yield f"not applied: {_named(mine)}: {reason}"
    others = {name: at for name, at in superseded.items() if name not in own}
    if many and others:
        yield f"superseded by cheaper fusions: {_named(others)}"


def _few(fusions: Mapping[str, Sequence[int]], mine: Mapping[str, Sequence[int]]) -> str:
    """Names and positions; of many fusions, positions of the user's fusions, and the first names of the others."""
    if len(fusions) <= FEW:
        return _named(fusions)
    others = [name for name in fusions if name not in mine]
    return "; ".join([_named(mine)] * bool(mine) + [few(others, FEW)] * bool(others))


def _named(fusions: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(f"{fusion} at {_places(sorted(set(at)))}" for fusion, at in fusions.items())


def _places(at: Sequence[int]) -> str:
    return few([*map(str, at)], 6)


def few(names: Sequence[str], most: int) -> str:
    """The first names, and the number of the others."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(n: int, word: str) -> str:
    """A number and its noun."""
    return f"{n} {word}" + ("" if n == 1 else "s")


def _cut(text: str, width: int) -> str:
    text = printable(text)
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


def _wrap(text: str, indent: str, width: int) -> list[str]:
    lines, line = list[str](), ""
    for word in printable(text).split():
        while word:
            lead = line + " " if line.strip() else line
            fits = _take(word, width - _width(lead))
            if fits == word or (not line.strip() and fits):
                line, word = lead + fits, word[len(fits) :]
            else:
                lines.append(line)
                line = indent
    return [*lines, line]


def _number(value: float) -> str:
    for unit in ("", "k", "M", "G", "T", "P"):
        if value < 1000:
            return f"{value:.0f} {unit}" if not unit else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} E"


def sized(n: int, like: int | None = None) -> str:
    """Bytes: in MiB from 0.1 MiB on, in GiB from 10 GiB on; if `like` is given, in its unit."""
    like = n if like is None else like
    if like < 2**10:
        return f"{n} B"
    if like < 2**20 / 10:
        return f"{n / 2**10:.1f} KiB"
    scale, unit = (2**20, "MiB") if like < 10 * 2**30 else (2**30, "GiB")
    return f"{n / scale:,.{2 if like < 10 * scale else 1 if like < 100 * scale else 0}f} {unit}"


def bytes_against(n: int, **others: int) -> str:
    """Bytes, and the ratio to each of the named numbers of bytes, all in one unit."""
    most = max(n, *others.values())
    than = (
        f", {n / other:.2f}x {name.replace('_', ' ')} ({sized(other, most)})" for name, other in others.items() if other
    )
    return sized(n, most) + "".join(than)


def extra_time(microseconds: float) -> str:
    """A time difference: in milliseconds from 0.1 ms on."""
    return f"{microseconds / 1000:+,.1f} ms" if abs(microseconds) >= 100 else f"{microseconds:+,.0f} us"

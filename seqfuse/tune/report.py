"""The result of tuning: its table and text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

OUT_OF_BUDGET = "not measured: the budget ran out"
NOT_KEPT = "not kept"


@dataclasses.dataclass(frozen=True)
class Row:
    """One candidate: where it matched, in which mode, its measured times, and whether a plan uses it now.

    `noise_us` is three standard errors of the difference. `note` is the reason why it was not measured, failed, or was
    dropped as too noisy; otherwise empty.
    """

    fusion: str
    at: str
    mode: str
    fused_us: float | None
    unfused_us: float | None
    noise_us: float | None
    chosen: bool
    note: str = ""


@dataclasses.dataclass(frozen=True)
class TuneReport:
    """The result of `sf.tune`; printable.

    Attributes:
        rows: the candidates, including earlier measurements.
        measured: number of new measurements.
        skipped: parts of the model that could not be measured, with reasons.
        machine: the device and versions that the measurements are valid for.
        file: the file of the measurements; `None` if in memory only.
    """

    rows: tuple[Row, ...]
    measured: int = 0
    skipped: tuple[str, ...] = ()
    machine: str = ""
    file: Path | None = None

    def __str__(self) -> str:
        chosen, late = sum(r.chosen for r in self.rows), sum(r.note == OUT_OF_BUDGET for r in self.rows)
        on = f" on {self.machine}" if self.machine else ""
        lines = [f"{len(self.rows)} candidates{on}: {self.measured} measured now, {chosen} chosen"]
        lines[0] += f"; the budget ran out before {late}" if late else ""
        busy = sum(r.note.startswith(NOT_KEPT) for r in self.rows)
        if self.rows:
            name = max(len("candidate"), *(len(r.fusion) for r in self.rows))
            at = max(len(r.at) for r in self.rows)
            head = f"{'candidate':<{name}}  {'at':<{at}}  mode   {'fused us':>10}  {'unfused us':>10}"
            lines.append(f"{head}  {'noise us':>8}  chosen")
            for r in self.rows:
                given = (r.fused_us, 10), (r.unfused_us, 10), (r.noise_us, 8)
                times = "  ".join(f"{'-' if t is None else format(t, '.1f'):>{width}}" for t, width in given)
                end = "yes" if r.chosen else "no"
                text = f"{r.fusion:<{name}}  {r.at:<{at}}  {r.mode:<5}  {times}  {end:<6}  {r.note}"
                lines.append(text.rstrip())
        lines += [f"skipped: {what}" for what in self.skipped]
        if busy:
            were = "1 measurement was" if busy == 1 else f"{busy} measurements were"
            lines += [f"this machine is busy: {were} too noisy to keep, and plans use the estimated cost instead"]
            lines += ["Hint: tune again when nothing else runs here"]
        return "\n".join([*lines, f"kept in {self.file}" if self.file else "kept in memory"])

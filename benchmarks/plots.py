"""Plots of what a GPU measured beside others, as SVG for light and dark: the same file for the same results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs.picture import Picture

OTHERS = ("plain", "backward", "joint", "inference")
LEFT, WIDE = 200.0, 540.0


def draw(found: Mapping[str, Any] | None, folder: Path) -> list[str]:
    """What each row reaches of its floor, and how many times faster it is than each peer; the names of the files."""
    if found is None:
        return []
    seen: dict[str, int] = {}
    rows: list[Any] = []
    for row in found["rows"].values():  # two of each group, those measured first
        if row["status"] == "ok" and seen.setdefault(row["group"], 0) < 2:
            seen[row["group"]] += 1
            rows.append(row)
    rows.sort(key=lambda row: list(seen).index(row["group"]))
    labels, device = [f"{row['group']}: {row['name']}" for row in rows], found["about"]["device"]
    fractions = {name: [row["fraction"].get(name) for row in rows] for name in ("seqfuse", "eager")}
    about = f"Fraction of what {device} can do at most; more is better."
    roofline = _bars(labels, fractions, "How near to the hardware's limit", about)
    names = dict.fromkeys(name for row in rows for name in row["times"] if name != "seqfuse")

    def faster(times: Mapping[str, Any], name: str) -> float | None:
        return times[name]["median"] / times["seqfuse"]["median"] if name in times else None

    ratios = {name: [faster(row["times"], name) for row in rows] for name in names}
    about = f"Time of others over that of seqfuse on {device}; above 1 seqfuse is faster."
    drawn = {"roofline.svg": roofline, "peers.svg": _bars(labels, ratios, "Speed beside others", about)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in drawn.items():
        (folder / name).write_text(plot)
    return [*drawn]


def _bars(labels: list[str], series: Mapping[str, list[float | None]], title: str, about: str) -> str:
    """Groups of level bars, each with its number, and a line at 1."""
    kinds = {name: "forward" if name == "seqfuse" else OTHERS[i % len(OTHERS)] for i, name in enumerate(series)}
    high = 24.0 + 20.0 * len(series)
    p = Picture(840, 84 + high * len(labels), title)
    p.text(20, 34, title, "big")
    p.text(20, 56, about, "small soft")
    most = max((value for values in series.values() for value in values if value is not None), default=1.0)
    for row, label in enumerate(labels):
        top = 80 + high * row
        p.text(20, top, label, "small bold")
        for i, (name, values) in enumerate(series.items()):
            y, value = top + 6 + 20 * i, values[row]
            p.text(LEFT - 10, y + 12, name, "small right")
            if value is not None:
                p.box(LEFT, y, WIDE * value / most, 15, kinds[name])
            told = "not run" if value is None else f"{value:.2f}"
            p.text(LEFT + 8 + WIDE * (value or 0) / most, y + 12, told, "small")
    p.upright(LEFT + WIDE / most, 70, 70 + high * len(labels))
    return p.svg()

"""Plots of what a GPU measured beside others, as SVG for light and dark: the same file for the same results."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a script finds its own folder alone

from docs.picture import Picture

OURS, OTHERS = "forward", ("plain", "backward", "joint", "inference")
LEFT, WIDE = 200.0, 540.0


def draw(results: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what there are results for; the names of the files."""
    found = results.get("gpu")
    if not found:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        (folder / name).write_text(plot(found))
    return [*PLOTS]


def _bars(labels: list[str], series: Mapping[str, list[float | None]], title: str, about: str, ours: str) -> str:
    """Groups of level bars, each with its number, and a line at 1."""
    kinds = {name: OURS if name == ours else OTHERS[i % len(OTHERS)] for i, name in enumerate(series)}
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
            p.text(
                LEFT + 8 + WIDE * (value or 0) / most, y + 12, "not run" if value is None else f"{value:.2f}", "small"
            )
    p.upright(LEFT + WIDE / most, 70, 70 + high * len(labels))
    return p.svg()


def _representative(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Two rows of each group, those measured first."""
    seen: dict[str, int] = {}
    chosen = []
    for row in found["rows"].values():
        if row["status"] == "ok" and seen.setdefault(row["group"], 0) < 2:
            seen[row["group"]] += 1
            chosen.append(row)
    return sorted(chosen, key=lambda row: list(seen).index(row["group"]))


def roofline(found: dict[str, Any]) -> str:
    """What each row reaches of its floor."""
    rows = _representative(found)
    labels = [f"{row['group']}: {row['name']}" for row in rows]
    series: dict[str, list[float | None]] = {
        name: [row["fraction"].get(name) for row in rows] for name in ("seqfuse", "eager")
    }
    about = f"Fraction of what {found['about']['device']} can do at most; more is better."
    return _bars(labels, series, "How near to the hardware's limit", about, "seqfuse")


def peers(found: dict[str, Any]) -> str:
    """How many times faster than each peer."""
    rows = _representative(found)
    names = list(dict.fromkeys(name for row in rows for name in row["times"] if name != "seqfuse"))

    def ratio(row: dict[str, Any], name: str) -> float | None:
        times = row["times"]
        return times[name]["median"] / times["seqfuse"]["median"] if name in times else None

    series = {name: [ratio(row, name) for row in rows] for name in names}
    labels = [f"{row['group']}: {row['name']}" for row in rows]
    about = f"Time of others over that of seqfuse on {found['about']['device']}; above 1 seqfuse is faster."
    return _bars(labels, series, "Speed beside others", about, "")


PLOTS = {"roofline.svg": roofline, "peers.svg": peers}

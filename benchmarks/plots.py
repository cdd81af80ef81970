"""Plots of what was measured, as SVG: the same file for the same results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS, OTHERS = "#0b6e4f", ("#7a8794", "#c98a2b", "#5b6fb5", "#a05c7b", "#3f8fa8")
GOAL = "#b03a2e"


def draw(results: Mapping[str, Any], folder: Path) -> list[str]:
    """Draw what there are results for; the names of the files, none where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    style = {
        "svg.hashsalt": "seqfuse", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False,
        "axes.spines.right": False, "axes.axisbelow": True, "figure.constrained_layout.use": True,
    }  # fmt: skip
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    made: list[str] = []
    with matplotlib.rc_context(style):
        for name, needs, plot in PLOTS:
            if all(results.get(need) for need in needs):
                figure = plot(pyplot, *(results[need] for need in needs))
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                pyplot.close(figure)
                made.append(f"{name}.svg")
    return made


def _bars(
    pyplot: Any,
    labels: list[str],
    series: Mapping[str, list[float | None]],
    title: str,
    *,
    ours: str,
    goal: float | None,
) -> Any:
    """Groups of horizontal bars, each with its number; a line where the target or 1 is."""
    count = len(series)
    figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.2 * len(labels) * (count + 0.6)))
    colors = iter(OTHERS * 4)
    for i, (name, values) in enumerate(series.items()):
        places = [row * (count + 0.6) + i for row in range(len(labels))]
        bars = axes.barh(
            places, [v or 0 for v in values], 0.85, label=name, color=OURS if name == ours else next(colors)
        )
        axes.bar_label(bars, [f"{v:.2f}" if v is not None else "not run" for v in values], padding=2, fontsize=7)
    axes.set_yticks([row * (count + 0.6) + (count - 1) / 2 for row in range(len(labels))], labels)
    axes.margins(y=0.02)
    axes.invert_yaxis()
    if goal is not None:
        axes.axvline(goal, color=GOAL, linewidth=1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_title(title, loc="left", fontsize=9)
    if count > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _representative(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Two rows of each group, those measured first."""
    seen: dict[str, int] = {}
    chosen = []
    for row in found["rows"].values():
        if row["status"] == "ok" and seen.setdefault(row["group"], 0) < 2:
            seen[row["group"]] += 1
            chosen.append(row)
    return sorted(chosen, key=lambda row: list(seen).index(row["group"]))


def roofline(pyplot: Any, found: dict[str, Any]) -> Any:
    """What each row reaches of its floor."""
    rows = _representative(found)
    labels = [f"{row['group']}: {row['name']}" for row in rows]
    series: dict[str, list[float | None]] = {
        name: [row["fraction"].get(name) for row in rows] for name in ("seqfuse", "eager")
    }
    title = f"Fraction of what {found['about']['device']} can do at most (more is better)"
    return _bars(pyplot, labels, series, title, ours="seqfuse", goal=1.0)


def peers(pyplot: Any, found: dict[str, Any]) -> Any:
    """How many times faster than each peer."""
    rows = _representative(found)
    names = list(dict.fromkeys(name for row in rows for name in row["times"] if name != "seqfuse"))

    def ratio(row: dict[str, Any], name: str) -> float | None:
        times = row["times"]
        return times[name]["median"] / times["seqfuse"]["median"] if name in times else None

    series = {name: [ratio(row, name) for row in rows] for name in names}
    labels = [f"{row['group']}: {row['name']}" for row in rows]
    title = f"Time of others over ours on {found['about']['device']}: above 1 ours is faster"
    return _bars(pyplot, labels, series, title, ours="", goal=1.0)


PLOTS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("roofline", ("gpu",), roofline),
    ("peers", ("gpu",), peers),
)

"""The targets, and whether results meet them: met, missed, or not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tables import starred

Row = Mapping[str, Any]
Value = Callable[[Row], float | None]  # the value that a target bounds; `None` for a row that does not count
CALLED = "as_called"
COMPILED = ("compile", "compile max-autotune")


def fraction(row: Row) -> float | None:
    """Fraction of the machine's limit: the minimum bytes at the speed of a copy, or the FLOPs at that of cuBLAS."""
    return row["fraction"].get("seqfuse")


def over(*peers: str, by: str = "times", of: str = "seqfuse", columns: int = 0) -> Value:
    """Time relative to the fastest of these peers in the row, for rows with at least `columns` columns."""

    def value(row: Row) -> float | None:
        times = {name: time["median"] for name, time in row.get(by, {}).items()}
        if of not in times or times.keys().isdisjoint(peers) or row["shape"].get("N", 0) < columns:
            return None
        return times[of] / min(times[peer] for peer in peers if peer in times)

    return value


def kept(name: str) -> Value:
    """Saved bytes relative to eager torch."""
    return lambda row: row["kept"][name] / row["kept"]["eager"] if name in row["kept"] else None


def planned(name: str, least: int, most: int, per: bool = False) -> Value:
    """A value of sequences with `least` to `most` operations, if `per`, divided by their number."""
    return lambda row: row[name] / (row["operations"] if per else 1) if least <= row["operations"] <= most else None


def of_six(row: Row) -> float | None:
    return row["ratio"] if (row["operations"], row["what"]) == (6, "forward+backward") else None


class Target(NamedTuple):
    """A bound, `least` or `most`, on the rows of some groups; `rows`: the file and list that has them."""

    what: str
    groups: tuple[str, ...]
    value: Value
    least: float | None = None
    most: float | None = None
    rows: str = "gpu"

    @property
    def wanted(self) -> str:
        """The bound as text."""
        return f"≤ {self.most:.3g}" if self.least is None else f"≥ {self.least:.3g}"

    def holds(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


class Verdict(NamedTuple):
    """A target, and the value of each row that it applies to."""

    target: Target
    values: tuple[tuple[str, float], ...]

    @property
    def status(self) -> str:
        """`met` only if every row meets it."""
        return "not run" if not self.values else "met" if self.reached == len(self.values) else "missed"

    @property
    def reached(self) -> int:
        return sum(self.target.holds(value) for _, value in self.values)

    @property
    def worst(self) -> tuple[str, float]:
        return (max if self.target.least is None else min)(self.values, key=lambda entry: entry[1])


NORMS, BACK = ("norm forward", "add + norm forward"), ("norm backward", "norm backward + residual")
ACTIVATIONS = tuple(f"{kind} {way}" for kind in ("activation", "gated activation") for way in ("forward", "backward"))
MLP, LAYER = ("MLP block forward + backward",), ("layer forward + backward",)
SUMS, DECODE, HOST = ("dact + dbias", "dropout + add + norm"), ("decode attention",), ("host",)
MEMORY, PLANNING = ({"groups": (name,), "rows": name} for name in ("memory", "planning"))
TARGETS = (
    Target("norm and add + norm forward: fraction of copy bandwidth", NORMS, fraction, 0.92),
    Target("norm and add + norm forward: time / Liger-Kernel", NORMS, over("liger"), most=1),
    Target("norm and add + norm forward: time / quack", NORMS, over("quack"), most=1 / 0.97),
    Target("norm and add + norm forward, N >= 8192: time / torch eager", NORMS, over("eager", columns=8192),
           most=1 / 1.4),
    Target("norm backward (+ residual): fraction of copy bandwidth", BACK, fraction, 0.80),
    Target("norm backward (+ residual): time / Liger-Kernel", BACK, over("liger"), most=1 / 2.0),
    Target("norm backward (+ residual): time / torch eager", BACK, over("eager"), most=1 / 2.0),
    Target("activations and gated activations, both passes: fraction of copy bandwidth", ACTIVATIONS, fraction, 0.90),
    Target("dact + dbias; dropout + add + norm: fraction of copy bandwidth", SUMS, fraction, 0.85),
    Target("MLP block: time / torch.compile (best mode)", MLP, over(*COMPILED, by=CALLED), most=1 / 1.10),
    Target("MLP block: time / torch eager", MLP, over("eager", by=CALLED), most=1 / 1.25),
    Target("layer: time / torch.compile", LAYER, over(*COMPILED, by=CALLED), most=1 / 1.05),
    Target("layer: time / torch eager", LAYER, over("eager", by=CALLED), most=1 / 1.3),
    Target('MLP block, `"balanced"`: saved bytes / torch eager', value=kept("seqfuse balanced"), most=0.65, **MEMORY),
    Target('MLP block, `"lean"`: saved bytes / torch eager', value=kept("seqfuse lean"), most=0.45, **MEMORY),
    Target('MLP block, `"lean"`: time / `"fast"`', MLP, over("seqfuse", by=CALLED, of="seqfuse lean"), most=1.03),
    Target("decode attention: fraction of copy bandwidth", DECODE, fraction, 0.75),
    Target("decode attention, GQA: time / SDPA", DECODE, over("eager"), most=1 / 1.2),
    Target("CPU overhead of six operations: instructions / torch eager", HOST, of_six, most=1.15, rows="host"),
    Target("CPU overhead on a GPU: time / torch eager", HOST, over("eager", by=CALLED), most=0.5),
    Target("planning 10,000 operations: seconds", value=planned("plan_seconds", 10_000, 10_000), most=1.0, **PLANNING),
    Target("plan-cache hit, 10 operations: µs", value=planned("lookup_microseconds", 10, 10), most=10.0, **PLANNING),
    Target("plan-cache hit: µs for each further operation", value=planned("lookup_microseconds", 11, 10_000, True),
           most=2.0, **PLANNING),
)  # fmt: skip


def judged(files: Mapping[str, Iterable[Row]]) -> list[Verdict]:
    """A verdict on every target from the rows of each file; red or failed rows have no times and count as missed."""
    return [Verdict(target, tuple(_values(target, files.get(target.rows, ())))) for target in TARGETS]


def _values(target: Target, rows: Iterable[Row]) -> Iterable[tuple[str, float]]:
    for row in rows:
        if row.get("group", target.rows) not in target.groups or row.get("status", "ok") == "checked":
            continue
        name = starred(row, row.get("name") or row.get("model") or f"{row['operations']} operations")
        if row.get("status", "ok") != "ok":
            yield name, float("inf" if target.least is None else "-inf")
        elif (value := target.value(row)) is not None:
            yield name, value

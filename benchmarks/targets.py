"""The targets, and what the results say of each: met, missed, or not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
Value = Callable[[Row], float | None]


def fraction(row: Row) -> float | None:
    """Of the floor that the machine sets: the fewest bytes by the speed of a copy, or of a GEMM of cuBLAS."""
    return row["fraction"].get("seqfuse")


def times_faster(*peers: str, by: str = "times") -> Value:
    """Than the best of these peers that the row has."""

    def value(row: Row) -> float | None:
        found = [row[by][peer]["median"] for peer in peers if peer in row.get(by, {})]
        return min(found) / row[by]["seqfuse"]["median"] if found else None

    return value


def share(of: str, than: str, what: str) -> Value:
    """What one takes over what another takes: bytes kept, or time."""

    def value(row: Row) -> float | None:
        found = row.get("memory", {}) if what == "kept" else row.get(what, {})
        one, other = (found.get(name, {}).get("kept" if what == "kept" else "median") for name in (of, than))
        return one / other if one is not None and other else None

    return value


@dataclasses.dataclass(frozen=True)
class Target:
    """What rows of some groups have to reach, at least or at most.

    `rows` says which file and list they are in, and `where` which of them count.
    """

    what: str
    groups: tuple[str, ...]
    value: Value
    bound: float
    at_least: bool = True
    where: Callable[[Row], bool] = lambda _: True
    rows: str = "gpu"

    @property
    def wanted(self) -> str:
        """The bound as a reader sees it."""
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}"

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A target, how many of the rows it speaks of reach it, and the worst of them."""

    target: Target
    values: tuple[tuple[str, float], ...]

    @property
    def status(self) -> str:
        """`met` only where every row reaches it."""
        if not self.values:
            return "not run"
        return "met" if all(self.target.holds(value) for _, value in self.values) else "missed"

    @property
    def reached(self) -> int:
        return sum(self.target.holds(value) for _, value in self.values)

    @property
    def worst(self) -> tuple[str, float]:
        return (min if self.target.at_least else max)(self.values, key=lambda entry: entry[1])


NORMS = ("norm forward", "add + norm forward")
NORMS_BACK = ("norm backward", "norm backward + residual")
ACTIVATIONS = tuple(f"{kind} {way}" for kind in ("activation", "gated activation") for way in ("forward", "backward"))
MLP, LAYER = "MLP block forward + backward", "layer forward + backward"
COMPILED = ("compile", "compile max-autotune")
CALLED = "as_called"

TARGETS = (
    Target("norm and add + norm forward: fraction of copy bandwidth", NORMS, fraction, 0.92),
    Target("norm and add + norm forward: speed-up over Liger", NORMS, times_faster("liger"), 1.0),
    Target("norm and add + norm forward: speed-up over quack", NORMS, times_faster("quack"), 0.97),
    Target(
        "norm and add + norm forward, N >= 8192: speed-up over eager", NORMS, times_faster("eager"), 1.4,
        where=lambda row: row["shape"]["N"] >= 8192,
    ),
    Target("norm backward (+ residual): fraction of copy bandwidth", NORMS_BACK, fraction, 0.80),
    Target("norm backward (+ residual): speed-up over Liger", NORMS_BACK, times_faster("liger"), 2.0),
    Target("norm backward (+ residual): speed-up over eager", NORMS_BACK, times_faster("eager"), 2.0),
    Target("activations and gated activations, both passes: fraction of copy bandwidth", ACTIVATIONS, fraction, 0.90),
    Target(
        "dact + dbias; dropout + add + norm: fraction of copy bandwidth", ("dact + dbias", "dropout + add + norm"),
        fraction, 0.85,
    ),
    Target("MLP block: speed-up over torch.compile (best mode)", (MLP,), times_faster(*COMPILED, by=CALLED), 1.10),
    Target("MLP block: speed-up over eager", (MLP,), times_faster("eager", by=CALLED), 1.25),
    Target("layer: speed-up over torch.compile", (LAYER,), times_faster(*COMPILED, by=CALLED), 1.05),
    Target("layer: speed-up over eager", (LAYER,), times_faster("eager", by=CALLED), 1.3),
    Target(
        "MLP block, balanced: saved bytes / eager", ("memory",), lambda r: _kept(r, "seqfuse balanced"), 0.65,
        False, rows="memory",
    ),
    Target(
        "MLP block with recomputation: saved bytes / eager", ("memory",), lambda r: _kept(r, "seqfuse lean"), 0.45,
        False, rows="memory",
    ),
    Target(
        "MLP block with recomputation: time / without", (MLP,), share("seqfuse lean", "seqfuse", CALLED), 1.03, False
    ),
    Target("decode attention: fraction of copy bandwidth", ("decode attention",), fraction, 0.75),
    Target("decode attention, GQA: speed-up over SDPA", ("decode attention",), times_faster("eager"), 1.2),
    Target("CPU overhead of six operations: instructions / eager", ("host",), lambda r: r["ratio"], 1.15, False,
           where=lambda row: row["operations"] == 6 and row["what"] == "forward+backward", rows="host"),
    Target("CPU overhead on a GPU: time / eager", ("host",), share("seqfuse", "eager", CALLED), 0.5, False),
    Target("planning 10,000 operations: seconds", ("planning",), lambda r: r["plan_seconds"], 1.0, False,
           where=lambda row: row["operations"] == 10_000, rows="planning"),
    Target("plan-cache hit, 10 operations: us", ("planning",), lambda r: r["lookup_microseconds"], 10.0, False,
           where=lambda row: row["operations"] == 10, rows="planning"),
    Target("plan-cache hit: us for each further operation", ("planning",),
           lambda r: r["lookup_microseconds"] / r["operations"], 2.0, False,
           where=lambda row: row["operations"] > 10, rows="planning"),
)  # fmt: skip


def _kept(row: Row, name: str) -> float | None:
    kept = row["kept"]
    return kept[name] / kept["eager"] if name in kept else None


def judged(files: Mapping[str, Iterable[Row]]) -> list[Verdict]:
    """Every target, by the rows of each file; those that are red or failed have no times and count as missed."""
    return [Verdict(target, tuple(_values(target, files.get(target.rows, ())))) for target in TARGETS]


def _values(target: Target, rows: Iterable[Row]) -> Iterable[tuple[str, float]]:
    for row in rows:
        if row.get("group", target.rows) not in target.groups or row.get("status", "ok") == "checked":
            continue
        if row.get("status", "ok") != "ok":
            yield str(row["name"]), float("-inf") if target.at_least else float("inf")
        elif target.where(row):
            value = target.value(row)
            if value is not None:
                yield str(row.get("name") or row.get("model") or f"{row['operations']} operations"), value

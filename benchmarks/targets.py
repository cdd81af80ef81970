"""The targets, and what the results say of each: met, missed, or not run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from tables import starred

Row = Mapping[str, Any]
Value = Callable[[Row], float | None]
Where = Callable[[Row], bool]
CALLED = "as_called"
COMPILED = ("compile", "compile max-autotune")


def fraction(row: Row) -> float | None:
    """Of the floor that the machine sets: the fewest bytes by the speed of a copy, or of a GEMM of cuBLAS."""
    return row["fraction"].get("seqfuse")


def over(*peers: str, by: str = "times") -> Value:
    """Time relative to the fastest of these peers that the row has."""

    def value(row: Row) -> float | None:
        found = [row[by][peer]["median"] for peer in peers if peer in row.get(by, {})]
        return row[by]["seqfuse"]["median"] / min(found) if found else None

    return value


def share(of: str, than: str) -> Value:
    """Time that one takes as it is called, over that of another."""

    def value(row: Row) -> float | None:
        found = row.get(CALLED, {})
        return found[of]["median"] / found[than]["median"] if {of, than} <= found.keys() else None

    return value


def kept(name: str) -> Value:
    """Bytes saved, over those of eager torch."""
    return lambda row: row["kept"][name] / row["kept"]["eager"] if name in row["kept"] else None


def number(name: str) -> Value:
    return lambda row: row[name]


class Target(NamedTuple):
    """What rows of some groups have to reach, `least` or `most`.

    `rows` says which file and list they are in, and `where` which of them count.
    """

    what: str
    groups: tuple[str, ...]
    value: Value
    least: float | None = None
    most: float | None = None
    where: Where = lambda _: True
    rows: str = "gpu"

    @property
    def wanted(self) -> str:
        """The bound as a reader sees it."""
        return f"≤ {self.most:.3g}" if self.least is None else f"≥ {self.least:.3g}"

    def holds(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A target, how many of the rows it speaks of reach it, and the worst of them."""

    target: Target
    values: tuple[tuple[str, float], ...]

    @property
    def status(self) -> str:
        """`met` only where every row reaches it."""
        return "not run" if not self.values else "met" if self.reached == len(self.values) else "missed"

    @property
    def reached(self) -> int:
        return sum(self.target.holds(value) for _, value in self.values)

    @property
    def worst(self) -> tuple[str, float]:
        return (max if self.target.least is None else min)(self.values, key=lambda entry: entry[1])


NORMS = ("norm forward", "add + norm forward")
BACK = ("norm backward", "norm backward + residual")
ACTIVATIONS = tuple(f"{kind} {way}" for kind in ("activation", "gated activation") for way in ("forward", "backward"))
MLP, LAYER = ("MLP block forward + backward",), ("layer forward + backward",)
SUMS, DECODE, HOST = ("dact + dbias", "dropout + add + norm"), ("decode attention",), ("host",)


def planned(value: Value, most: float, where: Where) -> dict[str, Any]:
    return {"groups": ("planning",), "value": value, "most": most, "where": where, "rows": "planning"}


def wide(row: Row) -> bool:
    return row["shape"]["N"] >= 8192


def of_six(row: Row) -> bool:
    return row["operations"] == 6 and row["what"] == "forward+backward"


TARGETS = (
    Target("norm and add + norm forward: fraction of copy bandwidth", NORMS, fraction, 0.92),
    Target("norm and add + norm forward: time / Liger-Kernel", NORMS, over("liger"), most=1),
    Target("norm and add + norm forward: time / quack", NORMS, over("quack"), most=1 / 0.97),
    Target("norm and add + norm forward, N >= 8192: time / torch eager", NORMS, over("eager"), most=1 / 1.4,
           where=wide),
    Target("norm backward (+ residual): fraction of copy bandwidth", BACK, fraction, 0.80),
    Target("norm backward (+ residual): time / Liger-Kernel", BACK, over("liger"), most=1 / 2.0),
    Target("norm backward (+ residual): time / torch eager", BACK, over("eager"), most=1 / 2.0),
    Target("activations and gated activations, both passes: fraction of copy bandwidth", ACTIVATIONS, fraction, 0.90),
    Target("dact + dbias; dropout + add + norm: fraction of copy bandwidth", SUMS, fraction, 0.85),
    Target("MLP block: time / torch.compile (best mode)", MLP, over(*COMPILED, by=CALLED), most=1 / 1.10),
    Target("MLP block: time / torch eager", MLP, over("eager", by=CALLED), most=1 / 1.25),
    Target("layer: time / torch.compile", LAYER, over(*COMPILED, by=CALLED), most=1 / 1.05),
    Target("layer: time / torch eager", LAYER, over("eager", by=CALLED), most=1 / 1.3),
    Target('MLP block, `"balanced"`: saved bytes / torch eager', ("memory",), kept("seqfuse balanced"), most=0.65,
           rows="memory"),
    Target('MLP block, `"lean"`: saved bytes / torch eager', ("memory",), kept("seqfuse lean"), most=0.45,
           rows="memory"),
    Target('MLP block, `"lean"`: time / `"fast"`', MLP, share("seqfuse lean", "seqfuse"), most=1.03),
    Target("decode attention: fraction of copy bandwidth", DECODE, fraction, 0.75),
    Target("decode attention, GQA: time / SDPA", DECODE, over("eager"), most=1 / 1.2),
    Target("CPU overhead of six operations: instructions / torch eager", HOST, number("ratio"), most=1.15,
           where=of_six, rows="host"),
    Target("CPU overhead on a GPU: time / torch eager", HOST, share("seqfuse", "eager"), most=0.5),
    Target("planning 10,000 operations: seconds",
           **planned(number("plan_seconds"), 1.0, lambda r: r["operations"] == 10_000)),
    Target("plan-cache hit, 10 operations: µs",
           **planned(number("lookup_microseconds"), 10.0, lambda r: r["operations"] == 10)),
    Target("plan-cache hit: µs for each further operation",
           **planned(lambda r: r["lookup_microseconds"] / r["operations"], 2.0, lambda r: r["operations"] > 10)),
)  # fmt: skip


def judged(files: Mapping[str, Iterable[Row]]) -> list[Verdict]:
    """Every target, by the rows of each file; those that are red or failed have no times and count as missed."""
    return [Verdict(target, tuple(_values(target, files.get(target.rows, ())))) for target in TARGETS]


def _values(target: Target, rows: Iterable[Row]) -> Iterable[tuple[str, float]]:
    for row in rows:
        if row.get("group", target.rows) not in target.groups or row.get("status", "ok") == "checked":
            continue
        name = starred(row, row.get("name") or row.get("model") or f"{row['operations']} operations")
        if row.get("status", "ok") != "ok":
            yield name, float("inf" if target.least is None else "-inf")
        elif target.where(row) and (value := target.value(row)) is not None:
            yield name, value

"""Looks up the measured time of a candidate fusion; the key is a text that describes its operations and input."""

from __future__ import annotations

from collections.abc import Mapping

from ..cost_table import Machine, Measurement, table
from ..env import bucket, rows_of, short
from ..fusion import FusedOperation
from .described import class_identity, describe
from .step import Stretch


class Known:
    """Looks up measurements for candidates of one stretch."""

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._table: Mapping[str, Measurement] | None = None
        self._described: dict[int, str] = {}

    def __call__(self, fusion: FusedOperation, a: int, b: int) -> Measurement | None:
        """Return the measurement of a fusion on positions `a..b`, or `None`."""
        if self._table is None:  # looked up where there is a candidate, and nowhere else
            machine = Machine.of(self._stretch.env)
            self._table = {} if machine is None else table(machine)
        if not self._table:
            return None
        key = self.key(fusion, a, b)
        return None if key is None else self._table.get(key)

    def key(self, fusion: FusedOperation, a: int, b: int) -> str | None:
        """The key of a candidate among measurements; `None` where too little is known of its input."""
        stretch, env = self._stretch, self._stretch.env
        live = b > stretch.wants.live_from
        extent = self._extent(a, b)
        if extent is None:
            return None
        parts = [class_identity(type(fusion)), "; ".join(self._operation(p, live) for p in range(a, b)), extent]
        parts.append(short(stretch.around(a, a)[0].taken if stretch.borders else env.dtype))
        if env.autocast is not None:
            parts.append(f"autocast {short(env.autocast)}")
        if env.deterministic:
            parts.append("deterministic")
        return " | ".join(parts)

    def _extent(self, a: int, b: int) -> str | None:
        stretch = self._stretch
        shape = None if stretch.shapes is None else stretch.shapes[a - stretch.start]
        if shape is not None and any(type(n) is not int for n in shape):  # a compiler leaves it open
            return None
        rows = stretch.env.rows if shape is None else bucket(rows_of(shape))
        if rows is None:
            return None
        if any(node.slots for node in stretch.nodes[a:b]):
            return f"{rows} rows"  # parameters say how wide they are
        return None if shape is None else f"{rows} rows of {shape[-1] if shape else 1}"

    def _operation(self, position: int, live: bool) -> str:
        if position not in self._described:
            self._described[position] = describe(self._stretch.nodes[position])
        wanted = self._stretch.wants.needs[position] if live else ()
        return self._described[position] + (f" d({', '.join(sorted(wanted))})" if wanted else "")

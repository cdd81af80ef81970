"""Tiles of the matrix products: which are worth launching, by architecture and by how much an epilogue holds."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ._launch import cdiv

Weight = Literal["light", "heavy", "gradient", "gated", "dgated"]
"""What an epilogue keeps in registers beside the accumulator: nothing or a row; tiles it stores or adds; a tile that it
differentiates; a second accumulator; two tiles read and two written."""

Number = Literal["half", "tf32", "float32", "float64"]
"""How operands are multiplied: 16-bit formats, float32 by TF32 or exactly, float64."""


class Tile(NamedTuple):
    """One way to cut a product up.

    Args:
        m: rows of a tile of C.
        n: columns of a tile of C, of each of the two accumulators where there are two.
        k: depth of a step.
        num_warps: as in a launch.
        num_stages: as in a launch.
        split: runs of columns, 1, 2 or 4, that an epilogue is applied to one after the other.
        flatten: whether the next tile's operands are loaded during an epilogue.
        descriptors: whether tiles are moved by descriptors (TMA) where strides and addresses allow.
        group: rows of tiles that programs side by side work on.
        per_processor: programs for each multiprocessor.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    split: int = 1
    flatten: bool = True
    descriptors: bool = False
    group: int = 8
    per_processor: int = 1


DESCRIBED = frozenset({"sm_90", "sm_100"})
"""Families whose tiles are moved by descriptors; each has tiles for what they cannot move under "<family> pointers"."""

_WEIGHTS: tuple[Weight, ...] = ("light", "heavy", "gradient", "gated", "dgated")
_NUMBERS: tuple[Number, ...] = ("half", "tf32", "float32", "float64")

_TABLE: dict[tuple[str, Number, Weight], tuple[Tile, ...]] = {
    ("interpreter", number, weight): (Tile(32, 32, 32, 4, 1),) for number in _NUMBERS for weight in _WEIGHTS
}
for _of in ("sm_90",):
    for _w in _WEIGHTS:
        _TABLE[_of, "half", _w] = (Tile(128, 256, 64, 8, 3, 4, True, True), Tile(64, 128, 64, 4, 4, 2, True, True))


def family(architecture: str) -> str:
    """The part of the table an architecture such as `"sm_89"` or `"gfx950"` has its tiles in."""
    if architecture.startswith("gfx"):
        return "gfx942"
    major = architecture.removeprefix("sm_")[:-1]
    return {"9": "sm_90", "10": "sm_100"}.get(major, "interpreter" if architecture == "interpreter" else "sm_80")


def weight_of(form: str, heavy: bool) -> Weight:
    """Of an epilogue of a form of the kernel; `heavy` where it has tiles of its own to load or store."""
    if form == "plain":
        return "heavy" if heavy else "light"
    return "gradient" if form == "dact" else "gated" if form == "gated" else "dgated"


def tiles(of: str, number: Number, weight: Weight) -> tuple[Tile, ...]:
    """Tiles for a family, the best for large products first."""
    return _TABLE[of, number, weight]


def choose(of: str, number: Number, weight: Weight, M: int, N: int, processors: int) -> Tile:
    """The tile whose programs, all of them together, cover the fewest elements of C; the first of equals.

    A product of few tiles leaves processors idle, and the last round of a larger one may be almost empty.
    """
    candidates = _TABLE[of, number, weight]
    if len(candidates) == 1:
        return candidates[0]

    def cost(tile: Tile) -> float:
        width = processors * tile.per_processor
        rounds = cdiv(cdiv(M, tile.m) * cdiv(N, tile.n), width)
        # Small tiles read each operand more often.
        return rounds * tile.per_processor * tile.m * tile.n * (1 + 16 / tile.m + 16 / tile.n)

    return min(candidates, key=cost)

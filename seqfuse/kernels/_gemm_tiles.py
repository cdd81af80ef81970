"""Tiles of the matrix products: which are worth launching, by architecture and by how much an epilogue holds.

What they compile to for sm_90 in bfloat16, aligned, with Triton 3.7.1 and 3.6.0; none spills, and 232,448 bytes is what
a program may have:

| epilogue | tile, warps, stages, runs | registers | shared bytes |
| --- | --- | --- | --- |
| none | 128x256x64 w8 s4 /4 | 154, 154 | 213,024 |
| bias, gelu | 128x256x64 w8 s4 /4 | 194, 197 | 213,024 |
| sums (dgrad) | 128x256x64 w8 s4 /4 | 235, 243 | 215,072 |
| main_grad (wgrad) | 128x256x64 w8 s3 /4 | 165, 196 | 213,064 |
| bias, gelu, pre-activation stored | 128x256x64 w8 s3 /4 | 205, 214 | 163,864 |
| bias, dropout, residual | 128x256x64 w8 s3 /4 | 237, 240 | 180,264 |
| everything a forward can have | 128x256x64 w8 s3 /4 | 255, 255 | 180,264 |
| d gelu | 128x128x64 w8 s4 /2 | 128, 128 | 163,888 |
| d gelu, sums, gelu again | 128x128x64 w8 s4 /2 | 179, 246 | 163,888 |
| swiglu, [gate; up] stored | 128x128x64 w8 s3 /2, twice | 174, 192 | 163,896 |
| d swiglu, sums, swiglu again | 128x128x64 w8 s3 /4 | 175, 179 | 114,728 |

Tried and dropped, since they spill: 128x256 with d gelu; 128x128 in one run with d gelu or d swiglu; 128x256 in one run
with a stored pre-activation; any of these where each element has an address of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
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
"""Families whose tiles are moved by descriptors."""

_WEIGHTS: tuple[Weight, ...] = ("light", "heavy", "gradient", "gated", "dgated")
_NUMBERS: tuple[Number, ...] = ("half", "tf32", "float32", "float64")


_Six = tuple[int, int, int, int, int, int]


def _described(*tiles: _Six, flatten: bool = True) -> tuple[Tile, ...]:
    return tuple(Tile(*tile, flatten=flatten, descriptors=True) for tile in tiles)


def _pointers(*tiles: _Six) -> tuple[Tile, ...]:
    return tuple(Tile(*tile, flatten=False) for tile in tiles)


_GPUS = ("sm_80", "sm_90", "sm_100", "gfx942")


def _everywhere(
    number: Number, tiles: tuple[Tile, ...], suffix: str
) -> dict[tuple[str, Number, Weight], tuple[Tile, ...]]:
    return {(of + suffix, number, weight): tiles for of in _GPUS for weight in _WEIGHTS}


# m, n, k, warps, stages, split. Factors that are not aligned are in "<family> unaligned".
_TABLE: dict[tuple[str, Number, Weight], tuple[Tile, ...]] = {
    **{
        (f"interpreter{s}", n, w): (Tile(32, 32, 32, 4, 1),)
        for s in ("", " unaligned")
        for n in _NUMBERS
        for w in _WEIGHTS
    },
    ("sm_90", "half", "light"): _described((128, 256, 64, 8, 4, 4), (128, 128, 64, 8, 4, 2), (64, 128, 64, 4, 4, 2)),
    ("sm_90", "half", "heavy"): _described((128, 256, 64, 8, 3, 4), (128, 128, 64, 8, 4, 2), (64, 128, 64, 4, 4, 2)),
    ("sm_90", "half", "gradient"): _described((128, 128, 64, 8, 4, 4), (64, 128, 64, 4, 4, 2)),
    ("sm_90", "half", "gated"): _described((128, 128, 64, 8, 3, 4), (64, 128, 64, 4, 3, 2)),
    ("sm_90", "half", "dgated"): _described((128, 128, 64, 8, 3, 4), (64, 128, 64, 4, 4, 4)),
    ("sm_100", "half", "light"): _described((128, 256, 64, 8, 4, 4), (128, 128, 64, 8, 4, 2)),
    ("sm_100", "half", "heavy"): _described((128, 256, 64, 8, 3, 4), (128, 128, 64, 8, 4, 2)),
    ("sm_100", "half", "gradient"): _described((128, 128, 64, 8, 4, 4), flatten=False),
    ("sm_100", "half", "gated"): _described((128, 128, 64, 8, 3, 2)),
    ("sm_100", "half", "dgated"): _described((128, 128, 64, 8, 3, 4), flatten=False),
    ("sm_80", "half", "light"): _pointers((128, 128, 32, 8, 4, 2), (64, 64, 64, 4, 3, 2)),
    ("sm_80", "half", "heavy"): _pointers((128, 128, 32, 8, 4, 2), (64, 64, 64, 4, 3, 2)),
    ("sm_80", "half", "gradient"): _pointers((128, 128, 32, 8, 4, 4), (64, 64, 64, 4, 3, 4)),
    ("sm_80", "half", "gated"): _pointers((128, 64, 32, 8, 4, 1), (64, 64, 32, 4, 4, 1)),
    ("sm_80", "half", "dgated"): _pointers((128, 64, 32, 8, 4, 4), (64, 64, 64, 4, 3, 4)),
    ("gfx942", "half", "light"): _pointers((128, 128, 32, 8, 2, 2), (64, 64, 32, 4, 2, 1)),
    ("gfx942", "half", "heavy"): _pointers((128, 128, 32, 8, 2, 2), (64, 64, 32, 4, 2, 1)),
    ("gfx942", "half", "gradient"): _pointers((128, 128, 32, 8, 2, 4), (64, 64, 32, 4, 2, 2)),
    ("gfx942", "half", "gated"): _pointers((128, 64, 32, 8, 2, 1)),
    ("gfx942", "half", "dgated"): _pointers((128, 64, 32, 8, 2, 2)),
    **_everywhere("half", _pointers((64, 64, 32, 8, 2, 2)), " unaligned"),
    **_everywhere("tf32", _pointers((64, 64, 32, 8, 2, 2)), " unaligned"),
    **_everywhere("tf32", _pointers((64, 64, 32, 8, 3, 2)), ""),
    ("sm_90", "tf32", "light"): _described((128, 128, 32, 8, 4, 4), (64, 64, 32, 4, 4, 2)),
    ("sm_90", "tf32", "heavy"): _described((128, 128, 32, 8, 3, 4), (64, 64, 32, 4, 3, 2)),
    ("sm_90", "tf32", "gradient"): _described((128, 64, 32, 8, 3, 2)),
    ("sm_90", "tf32", "gated"): _described((128, 64, 32, 8, 3, 2)),
    ("sm_90", "tf32", "dgated"): _described((128, 64, 32, 8, 3, 4)),
    **_everywhere("float32", _pointers((64, 64, 16, 8, 2, 2)), ""),
    **_everywhere("float32", _pointers((64, 64, 16, 8, 2, 2)), " unaligned"),
    **_everywhere("float64", _pointers((32, 16, 16, 4, 2, 1)), ""),
    **_everywhere("float64", _pointers((32, 16, 16, 4, 2, 1)), " unaligned"),
    ("sm_100 unaligned", "half", "dgated"): _pointers((64, 16, 32, 4, 2, 1)),
    **{(of, "float32", "gated"): _pointers((64, 32, 16, 4, 2, 2)) for of in _GPUS},
    **{(of, "tf32", "gated"): _pointers((64, 32, 32, 4, 3, 2)) for of in _GPUS if of != "sm_90"},
}


def table() -> Iterator[tuple[str, Number, Weight, tuple[Tile, ...]]]:
    """Every entry: family, number, weight and tiles."""
    for (of, number, weight), candidates in _TABLE.items():
        yield of, number, weight, candidates


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


def stored_singly(weight: Weight, candidates: tuple[Tile, ...]) -> tuple[Tile, ...]:
    """The tiles for results or added tiles that are not aligned.

    Each element then has an address of its own in two registers, so fewer of them are worked on at a time.
    """
    if weight == "light":
        return tuple(tile._replace(split=4) for tile in candidates if tile.m * tile.n <= 128 * 128)
    last = candidates[-1]
    m, n = min(last.m, 64), min(last.n, 32 if weight == "dgated" and last.descriptors else 64)
    return (last._replace(m=m, n=n, num_warps=max(4, n // 8), split=4 if n > 16 else 1, flatten=False),)


def choose(of: str, number: Number, weight: Weight, aligned: bool, M: int, N: int, processors: int) -> Tile:
    """The tile whose programs, all of them together, cover the fewest elements of C; the first of equals.

    A product of few tiles leaves processors idle, and the last round of a larger one may be almost empty.
    """
    candidates = _TABLE[of, number, weight]
    if not aligned:
        candidates = stored_singly(weight, candidates)
    if len(candidates) == 1:
        return candidates[0]

    def cost(tile: Tile) -> float:
        width = processors * tile.per_processor
        rounds = cdiv(cdiv(M, tile.m) * cdiv(N, tile.n), width)
        # Small tiles read each operand more often.
        return rounds * tile.per_processor * tile.m * tile.n * (1 + 16 / tile.m + 16 / tile.n)

    return min(candidates, key=cost)

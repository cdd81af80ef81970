"""What norms, decoding and GEMMs of groups take on a GPU by many tiles, beside the one launched, and what is wrong.

    python benchmarks/tile_sweep.py                  # there; writes `gpu_tiles.json`, or the file `--out`
    python benchmarks/tile_sweep.py --warm           # compiles all of it for sm_90, without a GPU, into the warm cache

In bfloat16, everything in one process: a tile that fails is left out, with a line that says why.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["SEQFUSE_TUNE"] = "0"

import torch
import torch.nn.functional as F
import warm_cache
from record import RESULTS, about, lines
from torch import Tensor

from seqfuse.kernels import decode, grouped, norm
from seqfuse.kernels._launch import cdiv, next_power_of_2
from seqfuse.kernels.norm import RowTile

Calls = dict[str, Callable[[], Any]]
COLUMNS = (4096, 8192, 2048, 1024, 16384, 12288, 32768)
CACHES = ((16, 2048), (64, 8192), (16, 512), (16, 128), (64, 2048), (1, 8192), (1, 32768), (16, 8192))
# Experts, rows, and the sizes of their first GEMM, of Qwen3-MoE 30B and Mixtral 8x7B.
GROUPS = ((128, 65536, 1536, 2048), (8, 16384, 28672, 4096))
HEADS, KV_HEADS, SIZE = 32, 8, 128
P = 0.1
NEAR = 2e-2
WARPS = (2, 4, 8, 16, 32)


def jobs() -> Iterator[tuple[str, Callable[[bool], Calls]]]:
    """By name, what makes the calls of one kernel, of tensors with or without numbers."""
    for columns in COLUMNS:
        for centered in (True, False):
            name = f"{'LayerNorm' if centered else 'RMSNorm'} {columns}"
            for around in (False, True) if columns <= 8192 else (False,):
                behind = " behind bias, dropout and residual" * around
                yield f"{name} backward{behind}", functools.partial(_backward, columns, centered, around)
                yield f"{name} forward{behind}", functools.partial(_forward, columns, centered, around)
    for batch, rows in CACHES:
        yield f"decode {batch} x {rows}", functools.partial(_decode, batch, rows)
    for (groups, rows, columns, depth), way in itertools.product(GROUPS, ("forward", "dgrad", "wgrad")):
        yield (
            f"grouped {groups} x {rows} x {columns} x {depth} {way}",
            functools.partial(_grouped, groups, rows, columns, depth, way),
        )


def _drawn(empty: bool, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype) if empty else torch.randn(shape, dtype=dtype, device="cuda")


def rows_of(columns: int, around: bool) -> int:
    """Rows of a norm that is timed."""
    return 16384 if around or columns > 16384 else 32768


def _by(tile: Any, function: Callable[[], Any], **patches: Any) -> Callable[[], Any]:
    """A call by a tile, or by the one that is launched."""

    def call() -> Any:
        if tile is None:
            return function()
        with contextlib.ExitStack() as stack:
            for name, value in patches.items():
                module, _, attribute = name.partition("__")
                stack.enter_context(
                    mock.patch.object({"norm": norm, "decode": decode, "grouped": grouped}[module], attribute, value)
                )
            return function()

    return call


def named(tile: RowTile) -> str:
    chunks = f"chunks={tile.chunks}, " * (tile.chunks > 1)
    limits = f"num_warps={tile.num_warps}, stages={tile.stages}, per_processor={tile.per_processor}"
    return f"(m={tile.m}, n={tile.n}, {chunks}{limits})"


def _cut(rows: int, columns: int, each: tuple[int, ...], most: int) -> Iterator[tuple[int, int]]:
    """Rows at a time and warps, where a thread has so many numbers."""
    for m in range(1, rows + 1):
        for per in each:
            if m * columns // (32 * per) in WARPS and m * columns <= most:
                yield m, m * columns // (32 * per)


def _forward(columns: int, centered: bool, around: bool, empty: bool) -> Calls:
    new, M = functools.partial(_drawn, empty), rows_of(columns, around)
    x, weight, bias = new(M, columns), new(columns), new(columns) if centered else None
    rest: dict[str, Any] = {"centered": centered}
    if around:
        seed = torch.zeros((), dtype=torch.int64, device=x.device)
        rest |= {"pre_bias": new(columns), "seed": seed, "p": P, "residual": new(M, columns)}
    function = functools.partial(norm.norm_fwd.__wrapped__, x, weight, bias, 1e-5, **rest)
    whole = next_power_of_2(columns)
    tiles = [RowTile(m, whole, 1, warps) for m, warps in _cut(4, whole, (8, 16, 32, 64), 32768)]
    if columns > 8192:
        tiles += [RowTile(1, n, cdiv(columns, n), warps) for n in (4096, 8192) for warps in (4, 8, 16)]
    return {"default": function} | {
        named(t): _by(t, function, norm__forward_tile=lambda *_, t=t: t, norm___measured=lambda *_: False)
        for t in tiles
    }


def _backward(columns: int, centered: bool, around: bool, empty: bool) -> Calls:
    new, M = functools.partial(_drawn, empty), rows_of(columns, around)
    x, dy, weight, bias = new(M, columns), new(M, columns), new(columns), new(columns) if centered else None
    rstd = new(M, dtype=torch.float32).abs() + 0.5
    mean = new(M, dtype=torch.float32) if centered else None
    rest: dict[str, Any] = {"dweight": x.dtype, "dbias": x.dtype if centered else None}
    if around:
        seed = torch.zeros((), dtype=torch.int64, device=x.device)
        rest |= {"dstream": new(M, columns), "seed": seed, "p": P, "dbranch": True, "dpre_bias": x.dtype}
    function = functools.partial(norm.norm_bwd.__wrapped__, dy, x, mean, rstd, weight, bias, **rest)
    if columns > 16384:
        tiles = [
            RowTile(1, n, columns // n, w, s, sums=False)
            for n, w in ((16384, 16), (16384, 32), (8192, 16))
            for s in (1, 2)
        ]
    else:
        whole = next_power_of_2(columns)
        tiles = [
            RowTile(m, whole, 1, warps, stages, most // warps, sums=sums)
            for m, warps in _cut(2, whole, (8, 16), 16384)
            for stages in (1, 2, 3)
            for most in (16, 32)
            if most >= warps
            for sums in ((True, False) if columns > 8192 else (True,))
        ]
        if columns > 8192:
            tiles += [RowTile(1, n, cdiv(columns, n), 16, stages) for n in (4096, 8192) for stages in (1, 2)]
    return {"default": function} | {
        named(t) + ", sums apart" * (not t.sums): _by(
            t, function, norm__backward_tile=lambda *_, t=t: t, norm___measured=lambda *_: False
        )
        for t in tiles
    }


def _decode(batch: int, rows: int, empty: bool) -> Calls:
    new = functools.partial(_drawn, empty)
    q, k, v = new(batch, HEADS, SIZE), new(batch, KV_HEADS, rows, SIZE), new(batch, KV_HEADS, rows, SIZE)
    lengths = torch.full((batch,), rows, dtype=torch.int32, device=q.device)
    function = functools.partial(decode.decode_attention.__wrapped__, q, k, v, lengths)
    calls: Calls = {"default": function}
    for splits in (1, 2, 4, 8, 16, 32):
        for block, stages, warps in ((64, 3, 4), (64, 4, 4), (128, 2, 4), (128, 3, 4), (128, 3, 8)):
            if splits * block <= max(rows, block):
                calls[f"sp{splits} bn{block} st{stages} w{warps}"] = _by(
                    splits, function, decode__splits_of=lambda *_, n=splits: n, decode___block_n=lambda *_, n=block: n,
                    decode___stages=lambda *_, n=stages: n, decode___warps=lambda *_, n=warps: n,
                )  # fmt: skip
    if not empty:
        calls["sdpa"] = lambda: F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    return calls


def _grouped(groups: int, rows: int, columns: int, depth: int, way: str, empty: bool) -> Calls:
    """Groups of unequal sizes; beside them torch's own kernel."""
    new = functools.partial(_drawn, empty)
    x, dy = new(rows, depth), new(rows, columns)
    share = torch.linspace(0.5, 1.5, groups, device=x.device).cumsum(0)
    ends = (share / share[-1] * rows).to(torch.int32)
    if way == "wgrad":
        function = functools.partial(grouped.grouped_outer.__wrapped__, dy, x, ends)
        theirs = functools.partial(F.grouped_mm, dy.mT, x, offs=ends)
    else:
        weight = new(groups, columns, depth)
        a, b = (x, weight) if way == "forward" else (dy, weight.mT)
        function = functools.partial(grouped.grouped_gemm.__wrapped__, a, b, ends)
        theirs = functools.partial(F.grouped_mm, a, b.mT, offs=ends)
    calls: Calls = {"default": function} if empty else {"default": function, "torch": theirs}
    for m, n, k, warps, stages in (
        (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3), (128, 256, 32, 8, 4), (64, 256, 64, 8, 4),
    ):  # fmt: skip
        tile = grouped.Tile(m, n, k, warps, stages)
        calls[f"{m}x{n}x{k} w{warps} st{stages}"] = _by(tile, function, grouped___tile=lambda *_, t=tile: t)
    return calls


def swept(make: Callable[[bool], Calls]) -> dict[str, float]:
    """Microseconds of each call whose results are those of the first."""
    from gpu.clock import OnDevice, interleaved

    right: list[Tensor] | None = None
    ready: dict[str, Any] = {}
    for name, call in make(False).items():
        try:
            found = call()
            found = [t for t in ((found,) if isinstance(found, Tensor) else found) if t is not None]
        except Exception as error:
            print(f"  {name}: {type(error).__name__}: {str(error)[:100]}")
            continue
        right = found if right is None else right
        near = all((a.float() - b.float()).norm() <= NEAR * b.float().norm() for a, b in zip(found, right, strict=True))
        if near:
            ready[name] = [call]
        else:
            print(f"  {name}: it gives something else")
    times = interleaved(ready, OnDevice(), seconds=0.0, least=4)
    return {name: round(t.median, 1) for name, t in sorted(times.items(), key=lambda entry: entry[1].median)}


def warm(only: str) -> None:
    """Compile what a GPU would."""
    os.environ["TRITON_CACHE_DIR"] = str(warm_cache.FOLDER)
    from tools.stub_driver import stub_driver

    with stub_driver(checks=False) as stub, warm_cache.launchers(stub):
        for name, make in jobs():
            for tile, call in make(True).items() if re.search(only, name) else ():
                try:
                    call()
                except Exception as error:
                    print(f"{name}, {tile}: {type(error).__name__}: {str(error)[:100]}")
        print(f"{len(stub.compiled)} kernels compiled")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS) / "gpu_tiles.json")
    parser.add_argument("--only", default="", help="a regular expression of what is swept; the rest stays in the file")
    parser.add_argument("--warm", action="store_true", help="compile, without a GPU")
    options = parser.parse_args()
    if options.warm:
        warm(options.only)
        return
    kept = json.loads(options.out.read_text())["tiles"] if options.only and options.out.exists() else {}
    until, found = time.time() + options.budget, dict[str, Any](kept)
    for name, make in jobs():
        if not re.search(options.only, name):
            continue
        if time.time() > until:
            print(f"no time was left for {name}")
            continue
        kind, width, *rest = name.split()
        rows = None if kind in ("decode", "grouped") else rows_of(int(width), len(rest) > 1)
        found[name] = {"rows": rows, "us": swept(make)}
        print(name, list(found[name]["us"].items())[:4], f"default {found[name]['us'].get('default')}", flush=True)
        options.out.write_text(lines({"about": about(), "tiles": found}))


if __name__ == "__main__":
    main()

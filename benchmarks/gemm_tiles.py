"""GEMMs with an epilogue, every tile of the table with and without `flatten`, beside cuBLAS and cuBLAS with a chain.

The question that this settles is from which K on an epilogue is worth a GEMM of our own. Results are whole after every
row; a row that hangs is killed from outside, and the rest goes on. Writes `gemm.json`, or the file `--out`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["SEQFUSE_TUNE"] = "0"

from record import RESULTS, about

M, N = 8192, 4096
KS = (4096, 1024, 8192, 2048)
FORMS = ("bias, GeLU, pre-activation", "dGeLU, dbias", "SwiGLU, pre-activation", "bias, dropout, add")
MOST = 60.0
SMALL = (256, 1024, 256)
WARMERS = 12
"""Processes that compile at a time: one kernel takes 3-10 s, and there are six for each form."""


def contenders(form: str, m: int, n: int, k: int, tiny: bool, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    """By name, calls whose first result is the same; tiny ones are on a CPU."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from seqfuse.kernels import gemm
    from seqfuse.kernels import pointwise as p
    from seqfuse.kernels._gemm_kernel import Tile, tiles, weight_of
    from seqfuse.kernels.activations import ACTIVATIONS

    dtype, device = (torch.float32, "cpu") if tiny else (torch.bfloat16, device)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    gelu, silu, seed = ACTIVATIONS["gelu"], ACTIVATIONS["silu"], torch.tensor(3, device=device)
    wide = 2 * n if form.startswith("SwiGLU") else n
    x, w, b, t = drawn(m, k), drawn(wide, k) * k**-0.5, drawn(wide), drawn(m, n)
    back = drawn(k, n) * k**-0.5
    forward = functools.partial(F.linear, x, w)
    if form == FORMS[0]:
        kind, heavy, product = "plain", True, forward
        ours = functools.partial(gemm.linear, x, w, b, act=gelu, store_pre=True)
        chain, operands = p.Chain(p.bias(), p.store(), p.act(gelu)), (b,)
    elif form == FORMS[1]:
        kind, heavy, product = "dact", False, functools.partial(torch.mm, x, back)
        ours = functools.partial(gemm.linear_dgrad, x, back, act=gelu, t=t, sums=True)
        chain, operands = p.Chain(p.dact(gelu), p.column_sum()), (t,)
    elif form == FORMS[2]:
        kind, heavy, product = "gated", True, forward
        ours = functools.partial(gemm.linear_gated, x, w, act=silu, store_pre=True)
        chain, operands = p.Chain(p.gated(silu)), ()
    else:
        kind, heavy, product = "plain", True, forward
        ours = functools.partial(gemm.linear, x, w, b, dropout=gemm.DropoutMask(seed, 0.1), residual=t)
        chain, operands = p.Chain(p.bias(), p.dropout(0.1), p.add()), (b, seed, t)
    family = "interpreter" if tiny else "sm_90"
    table = tiles(family, "float32" if tiny else "half", weight_of(kind, heavy))
    wanted: list[Tile] = [one._replace(flatten=flatten) for one in table for flatten in (True, False)]
    found: dict[str, Callable[[], Any]] = {
        "cublas": product,
        "cublas+chain": lambda: p.pointwise(product(), chain, operands),
    }
    for tile in wanted:
        name = f"{tile.m}x{tile.n}x{tile.k} w{tile.num_warps} s{tile.num_stages}" + " flatten" * tile.flatten
        found[name] = functools.partial(ours, tile=tile)
    return found


def row(form: str, m: int, n: int, k: int, tiny: bool) -> dict[str, Any]:
    """Times of one shape; a tile that fails or gives something else has a reason instead."""
    import torch
    from gpu.case import NEAR
    from gpu.clock import OnDevice, OnHost, interleaved

    calls = contenders(form, m, n, k, tiny)
    right = calls["cublas+chain"]()[0].double()
    failed: dict[str, str] = {}
    for name in [name for name in calls if not name.startswith("cublas")]:
        try:
            result = calls[name]()[0].double()
            apart = float((result - right).norm() / right.norm())
            if not apart <= NEAR[torch.float32 if tiny else torch.bfloat16]:
                failed[name] = f"apart by {apart:.2e}"
        except torch.AcceleratorError:
            raise
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
    clock = OnHost(torch.device("cpu")) if tiny else OnDevice()
    ready = {name: [call] for name, call in calls.items() if name not in failed}
    times = interleaved(ready, clock, seconds=0.0 if tiny else 0.1, least=3 if tiny else 7)
    status = "ok" if len(failed) < len(calls) - 2 else "red"
    shape = {"M": m, "N": n, "K": k}
    return {
        "group": "gemm", "name": f"{form} {k}", "status": status, "shape": shape, "failed": failed,
        "why": str(failed) if status == "red" else "", "times": {n: dataclasses.asdict(t) for n, t in times.items()},
    }  # fmt: skip


def warm(part: int) -> int:
    """Compile a part of what the rows launch, by matrices that are small and as divisible by 16."""
    calls = [call for form in FORMS for call in contenders(form, *SMALL, tiny=False).values()]
    for call in calls[part::WARMERS]:
        with contextlib.suppress(Exception):  # its row will tell
            call()
    return 0


def work(out: Path, until: float, tiny: bool) -> int:
    from gpu.book import Book

    book = Book(out)
    m, n, ks = (64, 32, (32,)) if tiny else (M, N, KS)
    keys = [(form, k) for k in ks for form in FORMS]
    book.state(about=about(), planned=[f"gemm: {form} {k}" for form, k in keys])
    for form, k in keys:
        key = f"gemm: {form} {k}"
        if key in book.rows or time.time() > until:
            continue
        book.begin(key)
        found = row(form, m, n, k, tiny)
        book.add(key, found)
        best = {name: round(t["median"], 1) for name, t in found["times"].items()}
        print(key, best, found["failed"] or "", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or RESULTS) / "gemm.json")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, interpreted")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--warm", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    if arguments.warm is not None:
        return warm(arguments.warm)
    if arguments.child is not None:
        return work(arguments.out, arguments.child, arguments.tiny)
    from gpu.book import Book
    from gpu.watch import GRACE, watched

    arguments.out.unlink(missing_ok=True)
    until = time.time() + arguments.budget
    if not arguments.tiny:
        warmers = [[sys.executable, __file__, "--warm", str(part)] for part in range(WARMERS)]
        with ThreadPoolExecutor(WARMERS) as pool:
            list(pool.map(lambda command: watched(command, time.time() + arguments.budget / 2), warmers))
    command = [sys.executable, __file__, *sys.argv[1:], "--child", repr(until)]
    for _ in range(len(KS) * len(FORMS)):
        status, why = watched(command, until + GRACE, lambda: Book(arguments.out).overdue(MOST))
        key = Book(arguments.out).bury(why or "its process ended too early")
        if status == 0 or key is None or time.time() >= until:
            break
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

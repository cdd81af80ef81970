"""Every row that needs a GPU, beside eager torch, `torch.compile`, Liger-Kernel and quack where they can be imported.

Each row is checked by the numeric rule before it is timed; one that does not agree reports no speed. The most important
rows come first, and those for which there was no time are listed. Results are written after every row, to
`results/gpu.json` or into the folder that `OUT` names. Rows run in a child process: one that ends it is marked, and the
rest goes on in a new one. Needs torch and Triton, and no installation of this library.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Whatever a user has measured on this machine must not decide what is compared, and a fusion that fails must not be
# timed as what takes its place.
if __name__ == "__main__":
    os.environ |= {"SEQFUSE_TUNE": "0", "SEQFUSE_ON_ERROR": "raise"}
    os.environ |= {"TRITON_INTERPRET": "1"} if "--tiny" in sys.argv and "--on-gpu" not in sys.argv else {}

import torch
from gpu import clock, peers, rows, sizes, watch
from gpu.case import Case
from gpu.clock import OnDevice, OnHost
from gpu.measure import Bench
from gpu.watch import Book
from record import RESULTS, about

from seqfuse.testing.interpreter import corrected

MOST_CHILDREN = 12
ENDED = 3  # exit status of a child that has lost its device


class TooLong(BaseException):
    """A row that took more than its share of the time; no error, which something might handle."""


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--budget", type=float, default=470.0, help="seconds for everything")
    parser.add_argument("--most", type=float, default=120.0, help="seconds for one row")
    parser.add_argument("--seconds", type=float, default=0.2, help="of samples, for each contender of a row")
    parser.add_argument("--only", default="", help="a regular expression that a row's key contains")
    parser.add_argument("--without", default="^$", help="a regular expression of contenders that are left out")
    parser.add_argument("--out", type=Path, help="the file of results")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--check", action="store_true", help="check every row, time none")
    parser.add_argument("--list", action="store_true", help="print the rows and their order")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, on a CPU in Triton's interpreter")
    parser.add_argument("--dtype", default="float32", help="of the tiny rows")
    parser.add_argument("--on-gpu", action="store_true", help="tiny sizes, but on the GPU")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    name = "gpu_check.json" if arguments.check else "gpu.json"
    out = arguments.out or Path(os.environ.get("OUT") or RESULTS, name)
    if arguments.child is not None:
        return work(arguments, out, arguments.child)
    if arguments.list:
        print(*(f"{case.priority} {case.key}" for case in chosen(arguments)), sep="\n")
        return 0
    if not interpreted(arguments) and not torch.cuda.is_available():
        print("there is no GPU here; --tiny checks every row without one", file=sys.stderr)
        return 2
    return supervise(arguments, out)


def interpreted(arguments: argparse.Namespace) -> bool:
    return arguments.tiny and not arguments.on_gpu


def supervise(arguments: argparse.Namespace, out: Path) -> int:
    """Run children until everything is measured or the time is over."""
    if not arguments.resume:
        out.unlink(missing_ok=True)
    elif not out.exists() and (RESULTS / out.name).exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(RESULTS / out.name, out)
    until, most = time.time() + arguments.budget, arguments.most + watch.GRACE
    command = [sys.executable, __file__, *sys.argv[1:], "--child", repr(until)]
    for _ in range(MOST_CHILDREN):
        if time.time() >= until:
            break
        status, why = watch.watched(command, until + watch.GRACE, lambda: Book(out).overdue(most))
        key = Book(out).bury(why or "its process ended too early")
        if status == 0 or (key is None and status != ENDED):
            break
    book = Book(out)
    bad = {key: row for key, row in book.rows.items() if row["status"] in ("red", "failed")}
    late = [key for key in book.data.get("planned", []) if key not in book.rows]
    for key, row in bad.items():
        print(f"  {row['status']}: {key}: {row['why']}")
    print(f"{out}: {len(book.rows)} rows, {len(bad)} red or failed, {len(late)} not run")
    return 1 if bad or not book.rows else 0


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The rows that were asked for, without the contenders that are left out."""
    of = sizes.tiny(getattr(torch, arguments.dtype)) if arguments.tiny else sizes.real()
    of = dataclasses.replace(of, device=sizes.FIRST_GPU) if arguments.on_gpu else of
    found = [case for case in rows.cases(of) if re.search(arguments.only, case.key)]
    left = [{n: c for n, c in case.contenders.items() if not re.search(arguments.without, n)} for case in found]
    return [dataclasses.replace(case, contenders=own) for case, own in zip(found, left, strict=True)]


def work(arguments: argparse.Namespace, out: Path, until: float) -> int:
    """Measure, in this process, what the file has not yet."""
    cases, book = chosen(arguments), Book(out)
    book.state(about=about(), peers=peers.versions(), planned=[case.key for case in cases])
    bench = _bench(arguments, book)
    with corrected() if interpreted(arguments) else contextlib.nullcontext():
        for case in let_go(cases):
            begun = time.time()
            left = until - begun
            if left <= 0:
                break
            if case.key in book.rows:
                continue
            book.begin(case.key)
            try:
                with limited(min(arguments.most, max(5.0, left))):
                    row = bench.row(case, checks_only=arguments.check)
            except TooLong:
                if left < arguments.most:  # the time was over, for which the row is not to blame
                    book.state(running=None)
                    break
                row = {"group": case.group, "name": case.name, "status": "failed", "why": "it took too long"}
            except torch.AcceleratorError as error:
                book.bury(f"the device was lost: {str(error).splitlines()[0]}")
                return ENDED
            book.add(case.key, row | {"seconds": round(time.time() - begun, 2)})
            print(_line(case.key, row), flush=True)
            del case
            if not _tidy():
                return ENDED
    return 0


def let_go(cases: list[Case]) -> Iterator[Case]:
    """One after the other, none of which is kept: each holds models, of which a GPU has no room for those of all."""
    cases.reverse()
    while cases:
        yield cases.pop()


def _bench(arguments: argparse.Namespace, book: Book) -> Bench:
    device = torch.device("cpu" if interpreted(arguments) else "cuda")
    on_host = OnHost(device)
    if arguments.tiny:
        found = clock.ceilings(on_host, device, (getattr(torch, arguments.dtype),), numel=2**16, side=64)
        return Bench(device, found, on_host, on_host, 1024, arguments.seconds)
    on_device, known = OnDevice(), book.data.get("ceilings")
    found = clock.Ceilings(**known) if known else clock.ceilings(on_device, device, (torch.bfloat16, torch.float32))
    book.state(ceilings=found._asdict())
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    return Bench(device, found, on_device, on_host, cache, arguments.seconds)


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `TooLong` in the block after so many seconds."""

    def ring(*_: Any) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _tidy() -> bool:
    """Free what the last row held, compiled graphs among it; `False` where the device was lost."""
    try:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:  # after an illegal access nothing in this process can run on it
        return False
    return True


def _line(key: str, row: dict[str, Any]) -> str:
    """A row for the eye."""
    if row["status"] != "ok":
        return f"{row['status']:>7}  {key}  {row.get('why', '')[:160]}"
    times = ", ".join(f"{name} {t['median']:.1f}" for name, t in row["times"].items())
    return f"{row['fraction']['seqfuse']:>7.2f}  {key}  us: {times}"


if __name__ == "__main__":
    raise SystemExit(main())

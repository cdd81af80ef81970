"""Measures every row that needs a GPU, against eager torch, `torch.compile`, and Liger-Kernel and quack if installed.

Each row is checked by the error bound before it is timed; a row that fails reports no speed. The most important rows
run first. Results are written after every row, to `results/` or the folder in `OUT`. Rows run in a child process: a
row that kills it is marked, and the others continue in a new one. Needs only torch and Triton.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

# Stored measurements of a user on this machine must not affect the comparison, and the fallback of a failed fusion
# must not be timed in its place.
if __name__ == "__main__":
    os.environ |= {"SEQFUSE_TUNE": "0", "SEQFUSE_ON_ERROR": "raise"}
    os.environ |= {"TRITON_INTERPRET": "1"} if "--tiny" in sys.argv and "--on-gpu" not in sys.argv else {}

import torch
from gpu import clock, peers, rows, sizes, watch
from gpu.case import Case, Contender, Inputs, by_the_rule, copied, counted, fewest_bytes, reds, said
from gpu.watch import Book
from record import RESULTS, about

from seqfuse.testing.interpreter import corrected

_CACHES = 3  # the inputs of one sample are as large as this many second-level caches
_MOST_SETS = 64
MOST_CHILDREN = 12
ENDED = 3  # exit status of a child that lost its device


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
    out = arguments.out or Path(os.environ.get("OUT") or RESULTS, f"gpu{'_check' * arguments.check}.json")
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
    """Run children until everything is measured or the time is up."""
    if not arguments.resume:
        out.unlink(missing_ok=True)
    elif not out.exists() and (RESULTS / out.name).exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(RESULTS / out.name, out)
    until = time.time() + arguments.budget
    command = [sys.executable, __file__, *sys.argv[1:], "--child", repr(until)]
    for _ in range(MOST_CHILDREN):
        status, why = watch.watched(command, until, lambda: Book(out).overdue(arguments.most))
        if time.time() >= until:
            Book(out).state(running=None)  # a row that is cut off is not marked as failed
            break
        key = Book(out).bury(why or "its process ended too early")
        if status == 0 or (key is None and status != ENDED):
            break
    book = Book(out)
    bad = {key: row for key, row in book.rows.items() if row["status"] in ("red", "failed")}
    late = len(set(book.data.get("planned", ())) - book.rows.keys())
    for key, row in bad.items():
        print(f"  {row['status']}: {key}: {row['why']}")
    print(f"{out}: {len(book.rows)} rows, {len(bad)} red or failed, {late} not run")
    return 1 if bad or not book.rows else 0


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The rows and contenders selected by the arguments."""
    of = sizes.tiny(getattr(torch, arguments.dtype)) if arguments.tiny else sizes.real()
    of = dataclasses.replace(of, device=sizes.FIRST_GPU) if arguments.on_gpu else of
    found = [case for case in rows.cases(of) if re.search(arguments.only, case.key)]
    left = [{n: c for n, c in case.contenders.items() if not re.search(arguments.without, n)} for case in found]
    return [dataclasses.replace(case, contenders=own) for case, own in zip(found, left, strict=True)]


def work(arguments: argparse.Namespace, out: Path, until: float) -> int:
    """Measure, in this process, the rows that the file does not have yet."""
    cases, book = chosen(arguments), Book(out)
    book.state(about=about(), peers=peers.versions(), planned=[case.key for case in cases])
    bench = _bench(arguments, book)
    with corrected() if interpreted(arguments) else contextlib.nullcontext():
        while cases and (begun := time.time()) < until:
            case = cases.pop(0)  # and deleted below: each holds models, and a GPU has no room for all of them
            if case.key in book.rows:
                continue
            book.begin(case.key)
            try:
                row = bench.row(case, checks_only=arguments.check)
            except torch.AcceleratorError as error:
                book.bury(f"the device was lost: {str(error).splitlines()[0]}")
                return ENDED
            book.add(case.key, row | {"seconds": round(time.time() - begun, 2)})
            print(_line(case.key, row), flush=True)
            del case
            if not _tidy():
                return ENDED
    return 0


@dataclasses.dataclass
class Bench:
    """The clocks and limits that rows are measured with."""

    device: torch.device
    ceilings: clock.Ceilings
    on_device: clock.Clock
    on_host: clock.Clock
    cache_bytes: int
    seconds: float = 0.2

    def row(self, case: Case, *, checks_only: bool = False) -> dict[str, Any]:
        """The row's data for the file; `status` is `ok`, `red` or `failed`, and only `ok` has times.

        Raises:
            torch.AcceleratorError: if the device is lost.
        """
        row: dict[str, Any] = {"group": case.group, "name": case.name}
        row |= {"dtype": clock.name_of(case.dtype), "shape": dict(case.shape)}
        try:
            by_the_rule(case)
            inputs = case.make(case.rows, 1)
            wrong = reds(case, inputs)
            if "seqfuse" in wrong:
                return {**row, "status": "red", "why": f"on all rows: {wrong['seqfuse']}"}
            row |= {"left_out": wrong} if wrong else {}
            if checks_only:
                return {**row, "status": "checked"}
            times = self._times(case, inputs, {n: c for n, c in case.contenders.items() if n not in wrong})
            return {**row, **times, "status": "ok"}
        except torch.AcceleratorError:
            raise
        except AssertionError as error:
            return {**row, "status": "red", "why": str(error)[:1000]}
        except Exception as error:
            return {**row, "status": "failed", "why": said(error)}

    def _times(self, case: Case, inputs: Inputs, contenders: dict[str, Contender]) -> dict[str, Any]:
        least = fewest_bytes(case, inputs, contenders["seqfuse"].prepare(copied(inputs))())
        row: dict[str, Any] = {"fewest_bytes": least, "flops": case.flops, **case.notes(inputs)}
        if case.as_called:
            row["memory"] = {name: self._memory(c, inputs) for name, c in contenders.items()}
        sets = self._sets(case, inputs)
        ready = {name: [contender.prepare(one) for one in sets] for name, contender in contenders.items()}
        before = getattr(self.on_device, "exposed", 0)
        times = clock.interleaved(ready, self.on_device, seconds=self.seconds)
        if exposed := getattr(self.on_device, "exposed", 0) - before:
            row["host_not_hidden"] = exposed
        row["times"] = {name: t._asdict() for name, t in times.items()}
        if case.as_called:
            called = clock.interleaved(ready, self.on_host, seconds=self.seconds)
            row["as_called"] = {name: t._asdict() for name, t in called.items()}
        floor = self.ceilings.floor(least, case.flops, case.dtype)
        fraction = {name: floor / t.median for name, t in times.items()}
        return row | {"floor": floor, "fraction": fraction, "sets": len(sets)}

    def _sets(self, case: Case, inputs: Inputs) -> list[Inputs]:
        """Enough sets of inputs that none is in the cache when it is used."""
        size = sum(t.nbytes for t in inputs.values())
        count = min(_MOST_SETS, max(2, math.ceil(_CACHES * self.cache_bytes / max(1, size))))
        return [inputs, *(case.make(case.rows, seed) for seed in range(2, count + 1))]

    def _memory(self, contender: Contender, inputs: Inputs) -> dict[str, int | None]:
        call = contender.prepare(inputs)
        call()  # one-time allocations
        found: dict[str, int | None] = {"kept": counted(call, contender.own()), "peak": None}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            results = call()
            torch.cuda.synchronize()
            found["peak"] = torch.cuda.max_memory_allocated() - before
            del results
        return found


def _bench(arguments: argparse.Namespace, book: Book) -> Bench:
    device = torch.device("cpu" if interpreted(arguments) else "cuda")
    on_host = clock.OnHost(device)
    if arguments.tiny:
        found = clock.ceilings(on_host, device, (getattr(torch, arguments.dtype),), numel=2**16, side=64)
        return Bench(device, found, on_host, on_host, 1024, arguments.seconds)
    on_device, known = clock.OnDevice(), book.data.get("ceilings")
    found = clock.Ceilings(**known) if known else clock.ceilings(on_device, device, (torch.bfloat16, torch.float32))
    book.state(ceilings=found._asdict())
    cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
    return Bench(device, found, on_device, on_host, cache, arguments.seconds)


def _tidy() -> bool:
    """Free the last row's memory, including compiled graphs; `False` if the device was lost."""
    try:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:  # after an illegal access this process cannot use the device
        return False
    return True


def _line(key: str, row: dict[str, Any]) -> str:
    """A row as text."""
    if row["status"] != "ok":
        return f"{row['status']:>7}  {key}  {row.get('why', '')[:160]}"
    times = ", ".join(f"{name} {t['median']:.1f}" for name, t in row["times"].items())
    return f"{row['fraction']['seqfuse']:>7.2f}  {key}  us: {times}"


if __name__ == "__main__":
    raise SystemExit(main())

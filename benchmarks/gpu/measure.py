"""One row measured: checked first, then timed beside the peers, then weighed."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch

from .case import Case, Contender, Inputs, by_the_rule, copied, counted, fewest_bytes, reds, said
from .clock import Ceilings, Clock, interleaved, name_of

_CACHES = 3  # the inputs of one sample are as much as this many second-level caches
_MOST_SETS = 64


@dataclasses.dataclass
class Bench:
    """What rows are measured with."""

    device: torch.device
    ceilings: Ceilings
    on_device: Clock
    on_host: Clock
    cache_bytes: int
    seconds: float = 0.2

    def row(self, case: Case, *, checks_only: bool = False) -> dict[str, Any]:
        """The row as it is written down; `status` is `ok`, `red` or `failed`, and only `ok` has times.

        Raises:
            torch.AcceleratorError: if the device is lost.
        """
        row: dict[str, Any] = {"group": case.group, "name": case.name}
        row |= {"dtype": name_of(case.dtype), "shape": dict(case.shape)}
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
        times = interleaved(ready, self.on_device, seconds=self.seconds)
        if exposed := getattr(self.on_device, "exposed", 0) - before:
            row["host_not_hidden"] = exposed
        row["times"] = {name: t._asdict() for name, t in times.items()}
        if case.as_called:
            called = interleaved(ready, self.on_host, seconds=self.seconds)
            row["as_called"] = {name: t._asdict() for name, t in called.items()}
        floor = self.ceilings.floor(least, case.flops, case.dtype)
        fraction = {name: floor / t.median for name, t in times.items()}
        return row | {"floor": floor, "fraction": fraction, "sets": len(sets)}

    def _sets(self, case: Case, inputs: Inputs) -> list[Inputs]:
        """So many sets of inputs that none is in the cache when its turn comes."""
        size = sum(t.nbytes for t in inputs.values())
        count = min(_MOST_SETS, max(2, math.ceil(_CACHES * self.cache_bytes / max(1, size))))
        return [inputs, *(case.make(case.rows, seed) for seed in range(2, count + 1))]

    def _memory(self, contender: Contender, inputs: Inputs) -> dict[str, int | None]:
        call = contender.prepare(inputs)
        call()  # whatever is made once
        forward = contender.forward and functools.partial(contender.forward, inputs)
        found: dict[str, int | None] = {"kept": forward and counted(forward, contender.own()), "peak": None}
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            results = call()
            torch.cuda.synchronize()
            found["peak"] = torch.cuda.max_memory_allocated() - before
            del results
        return found

"""`seqfuse compare`: the first operation at which two runs differ beyond the rule of the test kit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from ..env import Env
from ..errors import InputError, hinted
from ..operation import UnfusedOperation
from ..plan import flatten
from ..run import Sequential
from ..testing.numerics import FusedMismatch, assert_fused_close
from . import inputs
from .inputs import Spec, Under
from .runs import Place, Run, Values
from .target import Unable, container, said

DRAWS = 3
"""Draws of inputs, in more than half of which a place has to differ: correct kernels alarm once in 150."""


@dataclasses.dataclass(frozen=True)
class Seen:
    """A place that both runs have: whose tensor it is, and the checks that failed there, if any.

    `step` is the fusion that made it, `saver` the forward fusion whose saved tensors an unfused backward made it of.
    """

    place: Place
    operation: str
    path: str
    step: str
    failures: tuple[str, ...]
    saver: str = ""

    def __str__(self) -> str:
        named = f"{self.operation} {self.path}".rstrip()
        made = f", by {self.step}" if self.step else f", of what {self.saver} saved" if self.saver else ""
        return f"{self.place.tensor} of {named} at {self.place.at}{made}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What was compared: the places in the order in which they come to be."""

    first: str
    second: str
    places: tuple[Seen, ...]
    given: str

    @property
    def difference(self) -> Seen | None:
        """The first place at which the runs differ."""
        return next((seen for seen in self.places if seen.failures), None)

    def __str__(self) -> str:
        found = self.difference
        if found is None:
            agreed = f"{self.first} and {self.second} agree within tolerance at all {len(self.places)} places"
            hint = "try others too, with an odd number of tokens and more than a block of a kernel, such as 67"
            return f"{agreed}, for one input alone, {self.given}{hinted(hint)}"
        lines = [f"{self.first} and {self.second} differ first in {found}"]
        agreed = self.places.index(found)
        lines += [f"  {failure}" for failure in found.failures]
        return "\n".join([*lines, f"  {agreed} places before it agree; {len(self.places)} were compared"])


def compare(
    model: Sequential,
    spec: Spec,
    channels: Mapping[str, Spec],
    runs: tuple[Run, Run, Run],
    *,
    grad: bool,
    seed: int = 0,
) -> Comparison:
    """Compare two runs within tolerance, given one in float64, at every place that all three have."""
    first, second = _label(runs[0]), _label(runs[1])
    if any(t.is_floating_point() and not t.isfinite().all() for t in (*model.parameters(), *model.buffers())):
        raise Unable("the model has parameters that are not finite")
    alarms: dict[Place, list[tuple[str, ...]]] = {}
    places: list[Place] = []
    names: dict[int, str] = {}
    for draw in range(DRAWS):
        try:
            (f, names), (u, _), (r, _) = (run(model, spec, channels, seed + 1000 * draw, grad) for run in runs)
        except (InputError, Unable):
            raise
        except Exception as error:
            raise Unable(f"the model raised {said(error)}") from error
        places = sorted(f.keys() & u.keys() & r.keys())
        for place in places:
            failures = _failures(place, f, u, r, runs[0].autocast is not None)
            if failures:
                alarms.setdefault(place, []).append(failures)
        if not alarms:
            break
    nodes = flatten(model)
    differing = {place: found[0] for place, found in alarms.items() if len(found) > DRAWS // 2}
    seen = (
        Seen(
            place,
            nodes[place.at].name,
            nodes[place.at].path,
            names.get(place.at if place.tensor == "y" else ~place.at, ""),
            differing.get(place, ()),
            "" if place.tensor == "y" else names.get(place.at, ""),
        )
        for place in places
    )
    return Comparison(first, second, tuple(seen), str(spec))


def _failures(place: Place, f: Values, u: Values, r: Values, autocast: bool) -> tuple[str, ...]:
    fused, plain = f[place], u[place]
    if autocast and place.tensor in ("y", "dx"):  # a fusion casts where the step behind it would
        narrow = min(fused.dtype, plain.dtype, key=lambda dtype: dtype.itemsize)
        fused, plain = fused.to(narrow), plain.to(narrow)
    try:
        assert_fused_close(fused, plain, r[place].double(), name=place.tensor)
    except FusedMismatch as mismatch:
        return tuple(map(str, mismatch.report.failures))
    return ()


def _label(run: Run) -> str:
    dtype = str(run.dtype).removeprefix("torch.")
    if run.kind == "rounded":
        return f"{dtype} rounding alone"
    parts = ["fused" if run.fused else "unfused", dtype, str(run.device)]
    return " ".join([*parts, f"autocast {run.autocast}"] if run.autocast else parts)


def runs_of(
    spec: Spec, device: torch.device, dtype: torch.dtype, against: str, autocast: str | None, fused: bool = True
) -> tuple[Run, Run, Run]:
    """The two runs that are asked for, and the one in float64 that both are measured against.

    Against another dtype the second run is what rounding to the first one's 16 bits between operations does to a run
    in the other; within operations these are expected to compute in float32.
    """
    cpu = torch.device("cpu")
    first = Run("engine", dtype, device, fused, autocast=autocast)
    if against == "unfused":
        return first, dataclasses.replace(first, fused=False), Run("reference", torch.float64, device, rounds=dtype)
    if autocast is not None:
        raise Unable("under --autocast a run is compared with the unfused one alone")
    if against in inputs.DTYPES:
        wide = inputs.dtype(against)
        short = str(dtype).removeprefix("torch.")
        if dtype not in (torch.bfloat16, torch.float16):
            raise Unable(f"{short} adds up in {short}, so rounding is not all it loses: compare a 16-bit dtype")
        if wide not in (torch.float32, torch.float64):
            raise Unable(f"{against} has not all digits of float32: {short} is compared with float32 or float64")
        return first, Run("rounded", dtype, device, rounds=dtype), Run("reference", torch.float64, device, rounds=wide)
    Env.of(against)
    other = inputs.device(against)
    if other == device:
        raise Unable(f"{against} is where the first run is, too: name another device")
    return first, dataclasses.replace(first, device=other), Run("reference", torch.float64, cpu, rounds=dtype)


def compared(name: str, given: str, on: Under, grad: bool, against: str, seed: int) -> Comparison:
    """Compare what is named.

    Raises:
        Unable: if it cannot be loaded or built, or what is said of it does not fit.
    """
    here, spec = inputs.device(on.device), on.spec(given)
    torch.default_generator.manual_seed(inputs.seed(seed))
    model = container(on.build(name, spec), name, on.part)
    low = next((p.dtype for p in model.parameters() if p.is_floating_point()), spec.dtype)
    runs = runs_of(spec, here, low, against, on.autocast)
    random = [i.name for i in flatten(model) if isinstance(i.operation, UnfusedOperation) and i.operation.random]
    if random and runs[1].device != here:
        raise Unable(f"{random[0]} draws other numbers on another device: add --eval")
    return compare(model, spec, on.channels(), runs, grad=grad, seed=seed)


def data(found: Comparison) -> dict[str, Any]:
    """A comparison as plain data."""
    places = [
        {
            "pass": "forward" if seen.place.tensor == "y" else "backward",
            "at": seen.place.at,
            "tensor": seen.place.tensor,
            "operation": seen.operation,
            "path": seen.path,
            "fusion": seen.step or seen.saver or None,
            "failures": [*seen.failures],
        }
        for seen in found.places
    ]
    index = None if found.difference is None else found.places.index(found.difference)
    return {"first": found.first, "second": found.second, "input": found.given, "difference": index, "places": places}

"""Measured schedules: times every candidate fusion of a model and stores the results for this machine."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import cost_table
from ..cost_table import Machine, Measurement
from ..errors import InputError, KernelError, StateError
from ..plan import tells_all
from ..run import Sequential
from ..settings import settings
from ..traffic import unfused
from .chains import captured_in, sites_of
from .shadow import MODES, CalledRegion, Candidate, Shadow, Site, called_regions, passes, real_parameters, why_not_now
from .timing import SECONDS, TRIES, Unmeasurable, doubt, is_passing, time_passes

if TYPE_CHECKING:
    from ..convert.region import CapturedRegion

__all__ = ["Row", "TuneReport", "tune"]

OUT_OF_BUDGET = "not measured: the budget ran out"
NOT_KEPT = "not kept"


@dataclasses.dataclass(frozen=True)
class Row:
    """One candidate: where it matched, in which mode, its measured times, and whether a plan uses it now.

    `noise_us` is three standard errors of the difference. `note` is the reason why it was not measured, failed, or was
    dropped as too noisy; otherwise empty.
    """

    fusion: str
    at: str
    mode: str
    fused_us: float | None
    unfused_us: float | None
    noise_us: float | None
    chosen: bool
    note: str = ""


@dataclasses.dataclass(frozen=True)
class TuneReport:
    """The result of `sf.tune`; printable.

    Attributes:
        rows: the candidates, including earlier measurements.
        measured: number of new measurements.
        skipped: parts of the model that could not be measured, with reasons.
        machine: the device and versions that the measurements are valid for.
        file: the file of the measurements; `None` if in memory only.
    """

    rows: tuple[Row, ...]
    measured: int = 0
    skipped: tuple[str, ...] = ()
    machine: str = ""
    file: Path | None = None

    def __str__(self) -> str:
        chosen, late = sum(r.chosen for r in self.rows), sum(r.note == OUT_OF_BUDGET for r in self.rows)
        on = f" on {self.machine}" if self.machine else ""
        lines = [f"{len(self.rows)} candidates{on}: {self.measured} measured now, {chosen} chosen"]
        lines[0] += f"; the budget ran out before {late}" if late else ""
        busy = sum(r.note.startswith(NOT_KEPT) for r in self.rows)
        if self.rows:
            name = max(len("candidate"), *(len(r.fusion) for r in self.rows))
            at = max(len("at"), *(len(r.at) for r in self.rows))
            head = f"{'candidate':<{name}}  {'at':<{at}}  mode   {'fused us':>10}  {'unfused us':>10}"
            lines.append(f"{head}  {'noise us':>8}  chosen")
            for r in self.rows:
                given = (r.fused_us, 10), (r.unfused_us, 10), (r.noise_us, 8)
                times = "  ".join(f"{'-' if t is None else format(t, '.1f'):>{width}}" for t, width in given)
                end = "yes" if r.chosen else "no"
                text = f"{r.fusion:<{name}}  {r.at:<{at}}  {r.mode:<5}  {times}  {end:<6}  {r.note}"
                lines.append(text.rstrip())
        lines += [f"skipped: {what}" for what in self.skipped]
        if busy:
            were = "1 measurement was" if busy == 1 else f"{busy} measurements were"
            lines += [f"this machine is busy: {were} too noisy to keep, and plans use the estimated cost instead"]
            lines += ["Hint: tune again when nothing else runs here"]
        return "\n".join([*lines, f"kept in {self.file}" if self.file else "kept in memory"])


def tune(
    model: nn.Module,
    x: Tensor | None = None,
    *,
    modes: str | Sequence[str] = MODES,
    budget: float | None = None,
    progress: bool | None = None,
    group: Any = None,
    file: str | os.PathLike[str] | None = None,
    **channels: Tensor,
) -> TuneReport:
    """Measure every candidate fusion of a model for inputs like `x`; plans then use those that are faster.

    Each candidate and the operations that it replaces run alternately on random tensors of the same shapes. The medians
    replace the estimated cost of the fusion. Kernels are compiled before. A fusion that is not faster or fails is no
    longer used, with that reason in the plan; if it takes longer than 30 s, only in this process. A measurement whose
    noise exceeds the difference, or that is noisy and 100 times as long as estimated, is repeated after the others. If
    it is still noisy, it is dropped, and the fusion has its estimated cost. Candidates with a measurement are skipped,
    so an interrupted call can be continued.

    The model does not run; candidates are found with a copy on fake tensors. Gradients, buffers, modes, hooks and
    torch's random generators do not change. Of a converted model, those of the chains that its calls have captured are
    measured, as in these calls, so call it first as you train or use it; it needs no `x`.

    Measurements are valid for one device and driver, these versions of torch, Triton and this library, and operations
    of the same configuration, shape (number of tokens rounded up to a power of two), dtypes and needed gradients. They
    are written immediately, to the user's cache (`SEQFUSE_TUNE=0`: never) or to `file`.

    Args:
        model: a `Sequential`, a module that contains some, or a converted model.
        x: an input, which a converted model does not need; its shape, dtype, device and `requires_grad` matter. A
            surrounding `torch.autocast` also matters.
        modes: `"train"` (with gradients), `"eval"` (without), or both.
        budget: seconds after which no further measurement starts.
        progress: whether to show progress (first rank only); by default on a terminal.
        group: the process group whose first rank measures for all; by default the default group, if any. Every rank
            must call this function, and gets the same measurements.
        file: file for the measurements of one device, instead of the user's cache. An existing file without
            measurements, or of another machine, is an error and is not changed.
        channels: the public extra inputs, by channel name.

    Raises:
        InputError: (SF105, SF106) for an invalid argument, a `file` with other content, or a model that cannot be
            copied, or has nothing to tune.
        StateError: (SF504) on the other ranks, if the first rank failed.
        KernelError: (SF401) if the device was lost.
    """
    chosen, device = _checked(x, modes, budget, file), _device_of(model, x)
    reason = why_not_now(device)
    if reason is not None:
        warnings.warn(f"nothing was tuned: {reason}; fusions keep the costs they declare", UserWarning, stacklevel=2)
        return TuneReport((), skipped=(reason,))
    ranks = Ranks(group, device)
    shown = ranks.first and (sys.stderr.isatty() if progress is None else progress)
    path = None if file is None else Path(file)
    search = _Search(path, budget, ranks, shown)
    generators: Any = torch.random
    with generators.fork_rng([device] if device.type == "cuda" else []):
        try:
            chains = _chains_of(model, x)  # here, since another rank may have captured some
            if x is not None:
                search.look(model, x, channels, chosen)
            search.take_all(sites_of(chains, chosen))
            if ranks.first:
                search.measure()
        except BaseException as error:
            ranks.send(f"{type(error).__name__}: {error}")
            if ranks.several and not ranks.first and isinstance(error, Exception):
                ranks.receive()  # the first rank does not know that this one failed
            raise
        search.share()
    return search.report()


def _checked(x: Any, modes: Any, budget: Any, file: Any) -> tuple[str, ...]:
    if x is not None and type(x) not in (Tensor, nn.Parameter):
        raise InputError(f"tune takes a plain tensor, not {type(x).__name__}", code="SF105")
    if x is not None and x.device.type == "meta":
        raise InputError("tune takes an input on the device to measure, not on meta", code="SF105")
    chosen = (modes,) if isinstance(modes, str) else tuple(modes)
    if not chosen or not set(chosen) <= set(MODES):
        raise InputError(f"modes must be among {', '.join(MODES)}, not {modes!r}", code="SF106")
    if budget is not None and not (type(budget) in (int, float) and budget >= 0 and not math.isnan(budget)):
        raise InputError(f"budget must be a number of seconds, not {budget!r}", code="SF106")
    if file is not None and not isinstance(file, str | os.PathLike):
        raise InputError(f"file must be a path, not {file!r}", code="SF106")
    return tuple(dict.fromkeys(chosen))


def _device_of(model: Any, x: Tensor | None) -> torch.device:
    if not isinstance(model, nn.Module):
        raise InputError(f"tune takes a torch.nn.Module, not {type(model).__name__}", code="SF106")
    if x is not None:
        return x.device
    places = [torch.device(region.device) for region in captured_in(model) or ()]
    return next(iter([*places, *(p.device for p in model.parameters())]), torch.device("cpu"))


def _chains_of(model: nn.Module, x: Tensor | None) -> list[CapturedRegion]:
    """The chains that the model has captured, if it is converted; raises if there is nothing to tune."""
    chains, name = captured_in(model), type(model).__name__
    if not any(isinstance(module, Sequential) for module in model.modules()):
        if chains is None:
            message = f"{name} contains no sf.Sequential and is not converted, so there is nothing to tune"
            raise InputError(message, code="SF106", hint="sf.convert(model), call it as you train or use it, then tune")
        if not chains:
            message = f"{name} is converted, but its calls have captured no chains yet"
            raise InputError(message, code="SF106", hint="call it as you train or use it, then tune")
    elif x is None and not chains:
        raise InputError(f"tune needs an input x of the sf.Sequentials in {name}", code="SF105")
    return chains or []


class Ranks:
    """The ranks of a group, the first of which measures; `None` is the default group, if there is one."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.several = dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1
        self.first = not self.several or dist.get_rank(group) == 0
        self._group = group
        if self.several:
            self._from = dist.get_global_rank(group, 0) if group is not None else 0
            self._device = device if dist.get_backend(group) == "nccl" else torch.device("cpu")

    def send(self, found: Any) -> None:
        """Send measurements, or the error that ended the search, from the first rank to the others.

        `None` says that it still measures, so that they do not time out.
        """
        if self.several and self.first:
            self._broadcast(found)

    def receive(self) -> Any:
        """Receive from the first rank; raises if it failed."""
        while (found := self._broadcast(None)) is None:
            pass
        if isinstance(found, str):
            raise StateError(f"the first rank could not tune: {found}", code="SF504")
        return found

    def _broadcast(self, found: Any) -> Any:
        box = [found]
        dist.broadcast_object_list(box, self._from, self._group, self._device)
        return box[0]


@dataclasses.dataclass(eq=False)
class _Job:
    """A candidate, timed once for all the places where it matches."""

    key: str
    machine: Machine
    stretch: CalledRegion
    candidate: Candidate
    places: list[tuple[CalledRegion, Candidate]]
    note: str = ""
    unkept: Measurement | None = None  # the last measurement, if too noisy to decide

    @property
    def estimated(self) -> float:
        """Nanoseconds of the unfused pass: the forward work, and twice that for a backward pass."""
        entered, c = self.stretch.entered, self.candidate
        shape = self.stretch.site.entering[c.start][0].shape
        env = dataclasses.replace(entered.env, width=shape[-1] if shape else 1)
        operations: list[Any] = [node.operation for node in self.stretch.site.op_list.nodes[c.start : c.stop]]
        return 3000 * env.microseconds(unfused(operations, env, range(len(operations))))


class _Search:
    """One call of `tune`."""

    def __init__(self, path: Path | None, budget: float | None, ranks: Ranks, shown: bool) -> None:
        self._path, self._budget, self._ranks, self._shown = path, budget, ranks, shown
        self._jobs: dict[tuple[Machine, str], _Job] = {}
        self._skipped: list[str] = []
        self._measured = 0

    def look(self, model: nn.Module, x: Tensor, channels: dict[str, Tensor], modes: Sequence[str]) -> None:
        """Find the candidates in the containers that a call runs, in each mode."""
        for mode in modes:
            sites, ended = Shadow(model, mode).sites(x, channels)
            if ended is not None:
                self._skipped.append(f"what comes after an error in {mode} mode: {ended}")
            self.take_all(sites)

    def take_all(self, sites: Iterable[Site | str]) -> None:
        """Find the candidates of calls; a string is the reason why a call cannot be measured."""
        for site in sites:
            for stretch in [site] if isinstance(site, str) else called_regions(site):
                if isinstance(stretch, str):
                    self._skipped.append(stretch)
                else:
                    self._take(stretch)
        self._skipped = list(dict.fromkeys(self._skipped))

    def _take(self, stretch: CalledRegion) -> None:
        machine = Machine.of(stretch.entered.env)
        nodes = stretch.site.op_list.nodes
        for candidate in stretch.found:
            inside: list[Any] = [node.operation for node in nodes[candidate.start : candidate.stop]]
            if any(operation.redistribution is not None for operation in inside):
                self._skipped.append(f"{candidate.name}: processes exchange tensors in it, and one alone measures")
                continue
            if unknown := [type(operation).__name__ for operation in inside if not tells_all(operation)]:
                reason = f"{unknown[0]} has an attribute that is not plain data, so no time can be stored for it"
                self._skipped.append(f"{candidate.name}: {reason}")
                continue
            key = stretch.known.key(candidate.fusion, candidate.start, candidate.stop)
            if machine is not None and key is not None:
                new = _Job(key, machine, stretch, candidate, [])
                self._jobs.setdefault((machine, key), new).places.append((stretch, candidate))

    def measure(self) -> None:
        """Time the candidates without a measurement, the most promising first, until the budget runs out."""
        begun = time.perf_counter()
        files = {machine: self._file(machine) for machine in self._machines()}
        todo = [job for job in self._jobs.values() if job.key not in cost_table.table(job.machine)]
        todo.sort(key=lambda job: job.candidate.cost)
        found: dict[Machine, dict[str, Measurement]] = {}
        try:
            for attempt in range(1, TRIES + 1):
                for number, job in enumerate(todo, 1):
                    if self._budget is not None and time.perf_counter() - begun >= self._budget:
                        job.note = job.note or OUT_OF_BUDGET
                        continue
                    result = self._one(job, files[job.machine], attempt)
                    if result is not None:
                        found.setdefault(job.machine, {})[job.key] = result
                    if self._shown:
                        again = f" (again, as it was noisy: {attempt} of {TRIES})" if attempt > 1 else ""
                        print(f"tuning {number}/{len(todo)} {job.candidate.name}{again}", file=sys.stderr, flush=True)
                    self._ranks.send(None)
                todo = [job for job in todo if job.unkept is not None]
        finally:
            for machine, several in found.items():
                cost_table.keep_measured(machine, several)

    def _one(self, job: _Job, file: Path | None, attempt: int) -> Measurement | None:
        lost: KernelError | None = None
        result, job.unkept, job.note = None, None, ""
        try:
            with real_parameters(job.stretch, job.candidate):
                device = job.stretch.site.entering[job.candidate.start][0].device
                seconds = attempt**2 * SECONDS
                result = time_passes(lambda: passes(job.stretch, job.candidate), device, seconds)
        except Unmeasurable as error:
            job.note = f"not measured: {error}"
        except KernelError as error:
            lost, result = error, Measurement(failed=str(error)[:200])
        if result is not None and not result.failed and (why := doubt(result, job.estimated)) is not None:
            job.unkept, job.note, result = result, f"{NOT_KEPT}: {why}", None
        if result is not None:
            self._measured += 1
            if file is not None and not is_passing(result):
                cost_table.save(file, job.machine, {job.key: result})
        if lost is not None:
            raise lost
        return result

    def _machines(self) -> list[Machine]:
        return list(dict.fromkeys(job.machine for job in self._jobs.values()))

    def _file(self, machine: Machine) -> Path | None:
        """The file of a machine's measurements, after loading those that other processes stored there."""
        path = self._path
        if path is None:
            path = cost_table.user_file(machine, create=True) if settings().tune else None
            cost_table.keep_measured(machine, {} if path is None else cost_table.load_own(path, machine))
            return path
        if not path.parent.is_dir():
            message = f"measurements cannot be kept in {path}: there is no folder {path.parent}"
            raise InputError(message, code="SF106", hint="make the folder first, or name a file in one that is there")
        try:
            cost_table.keep_measured(machine, cost_table.measured_in(path, machine))
        except (ValueError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            hint = "name a file that sf.tune has written here, or one that is not there yet"
            message = f"{path} holds no measurements of this machine, and is left as it is: {why}"
            raise InputError(message, code="SF106", hint=hint) from error
        return path

    def share(self) -> None:
        """Send the first rank's measurements to all ranks."""
        if not self._ranks.several:
            return
        if self._ranks.first:
            self._ranks.send({_tag(machine): dict(cost_table.table(machine)) for machine in self._machines()})
            return
        told = self._ranks.receive()
        for machine in self._machines():
            if _tag(machine) in told:
                cost_table.keep_measured(machine, told[_tag(machine)], instead=True)

    def report(self) -> TuneReport:
        """The report from all measurements so far."""
        steps: dict[int, set[tuple[str, range]]] = {}
        for site in {id(s.site): s.site for job in self._jobs.values() for s, _ in job.places}.values():
            plan = site.plan()
            steps[id(site)] = {(s.name, s.covers) for s in (*plan.forward, *plan.backward) if s.fused}
        rows: list[Row] = []
        for job in self._jobs.values():
            known = cost_table.table(job.machine).get(job.key)
            shown = known or job.unkept
            times = (None, None, None)
            if shown is not None and not shown.failed:
                times = shown.fused / 1000, shown.unfused / 1000, shown.noise / 1000
            used = any((c.name, range(c.start, c.stop)) in steps[id(s.site)] for s, c in job.places)
            note = known.refusal or "" if known is not None and known.failed else job.note
            rows.append(Row(job.candidate.name, _places(job), job.stretch.site.mode, *times, used, note))
        machines = self._machines()
        path = self._path
        if path is None and settings().tune and machines:
            path = cost_table.user_file(machines[0], create=False)
        kept = path if path is not None and path.exists() and self._ranks.first else None
        return TuneReport(
            tuple(rows), self._measured, tuple(self._skipped), ", ".join(map(str, machines)), kept
        )  # fmt: skip


def _places(job: _Job) -> str:
    path, c = job.stretch.site.path, job.candidate
    first = f"{path} {c.start}{f'-{c.stop - 1}' if c.stop > c.start + 1 else ''}".lstrip()
    return first + (f" and {len(job.places) - 1} more" if len(job.places) > 1 else "")


def _tag(machine: Machine) -> str:
    return f"{machine.arch} {machine.kernels}"

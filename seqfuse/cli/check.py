"""`seqfuse check`: the test kit on an operation, a fusion or a model, and a script that shows what it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..env import Env
from ..errors import PluginError
from ..fusion import FusedOperation
from ..operation import UnfusedOperation
from ..plan import flatten
from ..run import Sequential
from ..testing import NotRun, check_fusion, check_op
from . import inputs, repro
from .compare import compare, runs_of
from .inputs import Spec
from .output import tell
from .repro import Failure
from .runs import Run
from .target import Target, Unable, container, load, said

_SMALLER = ((1, 1), (1, 4), (3, 8))
_BOTH = (torch.float32, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A check: what of, how it failed if it did, what it left out, and why it could not run if it could not.

    `repro` is the script that shows the first failure.
    """

    check: str
    failure: str | None = None
    repro: str | None = None
    skipped: tuple[str, ...] = ()
    not_run: str | None = None


def checked(
    name: str,
    *,
    given: str | None,
    channels: Sequence[str],
    device: str | None,
    dtype: str | None,
    part: str | None,
    evaluate: bool,
    file: Path | None,
    seed: int,
) -> Iterator[Checked]:
    """Make the checks that fit what is named, one after the other.

    Raises:
        Unable: if it cannot be loaded or built, cannot run here, or what is said of it does not fit.
    """
    if file is not None:
        repro.check(file)
    torch.default_generator.manual_seed(0)
    targets, here = load(name).members, inputs.device(device)
    dtypes = _BOTH if dtype is None else (inputs.floating(dtype),)
    spec = inputs.spec(given or "4x64")
    path: Path | None = None
    for target in targets:
        job = _Job(target, here, spec, dtypes, inputs.seed(seed), given is not None, channels)
        for check, failure, skipped in job.checks(part, evaluate):
            if isinstance(failure, str):
                yield Checked(check, not_run=failure)
            elif failure is None:
                yield Checked(check, skipped=skipped)
            else:
                shows, path = path is None, path or repro.write(failure, target, file)
                yield Checked(check, failure.message, str(path) if shows else None)


# What a check is called, how it failed or why it could not run, what it left out.
_Made = tuple[str, Failure | str | None, tuple[str, ...]]
# A check of the test kit on an input in some dtypes, which returns what it left out.
_Run = Callable[[Spec, Sequence[torch.dtype]], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class _Job:
    target: Target
    device: torch.device
    spec: Spec
    dtypes: Sequence[torch.dtype]
    seed: int
    fixed: bool  # whether the shape of the input was said
    channels: Sequence[str] = ()

    def checks(self, part: str | None, evaluate: bool) -> Iterator[_Made]:
        """Each check with its failure, and what it left out."""
        torch.default_generator.manual_seed(0)
        value = self.target.value
        of_the_kit = self.target.is_class and issubclass(value, UnfusedOperation | FusedOperation)
        if self.channels and (of_the_kit or isinstance(value, UnfusedOperation)):
            raise Unable("--channel is for a model: the test kit draws what else an operation takes")
        if self.target.is_class and issubclass(value, FusedOperation):
            yield self._fusion(value)
            return
        if self.target.is_class and issubclass(value, UnfusedOperation):
            yield self._operation(value.example, "named.example(x)", self.target.attribute, self.spec, not self.fixed)
            return
        built = self.target.build()
        made = "named" if isinstance(value, nn.Module) else "named()"
        if isinstance(built, UnfusedOperation):
            yield self._operation(lambda x: built, made, self.target.attribute, self.spec, not self.fixed)
            return
        model = container(built.eval() if evaluate else built, self.target.name, part)
        modules: Iterator[tuple[str, nn.Module]] = cast(Any, built).named_modules()
        path = next((path for path, module in modules if module is model), "")
        made += f".get_submodule({path!r})" if path else ""
        yield from self._model(model, made + (".eval()" if evaluate else ""))

    def _fusion(self, fusion: type[FusedOperation]) -> _Made:
        if fusion.is_contract:
            raise Unable(f"{self.target.name} is no fusion but a base of fusions")
        if fusion.kernels and Env.of(self.device).kernels not in fusion.kernels:
            return f"testing.check_fusion {fusion.__name__}", f"needs a Triton device{_interpreted(self.device)}", ()

        def run(spec: Spec, dtypes: Sequence[torch.dtype]) -> tuple[str, ...]:
            x = spec.draw(self.device, 0, 1)
            return check_fusion(fusion, x, seed=self.seed, dtypes=None if dtypes is _BOTH else dtypes).skipped

        return self._of_the_kit("check_fusion", fusion.__name__, "named", run, self.spec, not self.fixed)

    def _operation(self, make: Callable[[Tensor], nn.Module], made: str, name: str, spec: Spec, shrinks: bool) -> _Made:
        def run(spec: Spec, dtypes: Sequence[torch.dtype]) -> tuple[str, ...]:
            x = spec.draw(self.device, 0, 1)
            try:
                torch.default_generator.manual_seed(0)
                operation: Any = make(x).to(self.device)
            except (ValueError, NotImplementedError) as error:
                raise Unable(f"{self.target.name}.example(x) raised {said(error)}") from error
            return check_op(operation, x, seed=self.seed, dtypes=dtypes).skipped

        return self._of_the_kit("check_op", name, made, run, spec, shrinks)

    def _of_the_kit(
        self,
        check: str,
        name: str,
        made: str,
        run: _Run,
        spec: Spec,
        shrinks: bool,
    ) -> _Made:
        """A check; where it fails, in one dtype if it does in one, and on the smallest input on which it does."""
        dtypes, check = self.dtypes, f"testing.{check}"
        try:
            message, skipped = _failure(run, spec, dtypes)
        except NotRun as error:
            return f"{check} {name}", str(error), ()
        if message is None:
            return f"{check} {name}", None, skipped
        for one in dtypes if len(dtypes) > 1 else ():
            try:
                alone, _ = _failure(run, spec, (one,))
            except NotRun:
                continue
            if alone is not None:
                message, dtypes = alone, (one,)
                break
        for shape in _SMALLER if shrinks else ():
            smaller = Spec(shape, spec.dtype)
            try:
                found, _ = _failure(run, smaller, dtypes)
            except (Unable, NotRun):
                continue
            if found is not None and _kind(found) == _kind(message):
                message, spec = found, smaller
                break
        line = f"{check}({made}, x, seed={self.seed}, dtypes={_listed(dtypes)})"
        return f"{check} {name}", Failure(check, message, repro.KIT, (repro.drawn(spec, str(self.device)), line)), ()

    def _model(self, model: Sequential, made: str) -> Iterator[_Made]:
        """The operations of a model that are not this library's, then all of it, fused and unfused."""
        if not self.fixed:
            raise Unable("a model is checked on an input: give --input, such as 8x1024")
        extra = inputs.channels(self.channels)
        shapes = self._shapes(model, extra)
        foreign: dict[type, tuple[str, nn.Module, Spec]] = {}
        for at, node in enumerate(flatten(model)):
            own = type(node.operation).__module__.startswith("seqfuse.")
            if node.fusable and isinstance(node.operation, UnfusedOperation) and not own and at in shapes:
                foreign.setdefault(type(node.operation), (node.path, node.operation, shapes[at]))
        for path, operation, spec in foreign.values():
            which = f"{made}.get_submodule({path!r})"
            yield self._operation(lambda x, found=operation: found, which, type(operation).__name__, spec, False)
        for dtype in self.dtypes:
            spec = Spec(self.spec.shape, dtype) if self.spec.dtype.is_floating_point else self.spec
            runs = runs_of(spec, self.device, dtype, "unfused", None)
            for grad in (True, False):
                check = f"fused and unfused, {_short(dtype)}{'' if grad else ', no gradients'}"
                found = compare(model.to(dtype), spec, extra, runs, grad=grad, seed=self.seed)
                if found.difference is None:
                    yield check, None, ()
                    continue
                whole = made, spec, str(found)
                part = self._smallest(model, made, runs, shapes, grad, found.difference.place.at) or whole
                end = f"{dtype}, device={str(self.device)!r}, grad={grad}, seed={self.seed}"
                end += f", channels={[*self.channels]!r})" if part is whole and extra else ")"
                lines = (f"assert_same({part[0]}, {str(part[1])!r}, {end}",)
                yield check, Failure(check, part[2], repro.SAME, lines), ()

    def _shapes(self, model: Sequential, extra: dict[str, Spec]) -> dict[int, Spec]:
        """What enters each position."""
        dtype = self.dtypes[0]
        run = runs_of(self.spec, self.device, dtype, "unfused", None)[1]
        values, _ = run(model, self.spec, extra, self.seed, False)
        after = {place.at + 1: Spec(tuple(y.shape), dtype) for place, y in values.items()}
        return {0: self.spec, **after}

    def _smallest(
        self, model: Sequential, made: str, runs: tuple[Run, Run, Run], shapes: dict[int, Spec], grad: bool, at: int
    ) -> tuple[str, Spec, str] | None:
        """The few members around a position that differ by themselves: how they are made, x, the message."""
        top = _members(model)
        inside = next((i for i, covered in enumerate(top) if at in covered), None)
        for reach in (0, 1) if inside is not None else ():
            assert inside is not None
            a, b = max(inside - reach, 0), min(inside + 1 + reach, len(top))
            spec = shapes.get(top[a].start)
            if spec is None or b - a == len(top):
                continue
            spec = Spec(spec.shape, runs[0].dtype) if spec.dtype.is_floating_point else spec
            try:
                found = compare(model[a:b], spec, {}, runs, grad=grad, seed=self.seed)
            except (Unable, ValueError, RuntimeError):
                continue  # it reads a channel that is made elsewhere
            if found.difference is not None:
                return f"{made}[{a}:{b}]", spec, str(found)
        return None


def _members(model: Sequential) -> list[range]:
    """The positions of each member of a sequence."""
    found: list[range] = []
    start = 0
    for member in model:
        length = len(flatten(Sequential(member)))
        found.append(range(start, start + length))
        start += length
    return found


def _failure(run: _Run, spec: Spec, dtypes: Sequence[torch.dtype]) -> tuple[str | None, tuple[str, ...]]:
    """What a check failed with, and what it left out."""
    try:
        return None, run(spec, dtypes)
    except NotRun:
        raise
    except (AssertionError, PluginError) as error:
        return str(error), ()


def _interpreted(device: torch.device) -> str:
    return "; TRITON_INTERPRET=1 runs Triton kernels on a CPU, slowly" if device.type == "cpu" else ""


def _kind(message: str) -> str:
    """What a message says without the case and the numbers."""
    return message.partition("\n")[0].rpartition(": ")[2]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return f"({', '.join(map(str, dtypes))}{',' if len(dtypes) == 1 else ''})"


def data(found: Sequence[Checked]) -> dict[str, Any]:
    """Checks as plain data."""
    ok = all(one.failure is None and one.not_run is None for one in found)
    return {"ok": ok, "checks": [dataclasses.asdict(one) for one in found]}


def show(one: Checked) -> None:
    """Print a check for a reader."""
    if one.not_run is not None:
        tell(f"not run {one.check}\n    {one.not_run}")
    elif one.failure is None:
        tell("\n    skipped: ".join((f"passed  {one.check}", *one.skipped)))
    else:
        _show_failure(one, one.failure)


def _show_failure(one: Checked, failure: str) -> None:
    tell(f"FAILED  {one.check}", "bold")
    tell("\n".join(f"    {line}" for line in failure.splitlines()))
    if one.repro is not None:
        tell(f"    to see it again: python {one.repro}")

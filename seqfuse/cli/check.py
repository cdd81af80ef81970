"""`seqfuse check`: the test kit on an operation, a fusion or a model, and a script that shows what it found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..env import Env
from ..errors import PluginError
from ..fuser import Sequential, flatten
from ..fusion import FusedOperation
from ..operation import UnfusedOperation
from ..testing import check_fusion, check_op
from . import inputs, repro
from .compare import compare, runs_of
from .inputs import Spec
from .output import tell
from .repro import Failure
from .target import Target, Unable, container, load, said

_SMALLER = ((1, 1), (1, 4), (3, 8))
_BOTH = (torch.float32, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A check that was made: what of, and how it failed, if it did; `repro` is the script that shows it."""

    check: str
    failure: str | None = None
    repro: str | None = None


def checked(
    name: str, *, given: str | None, device: str | None, dtype: str | None, part: str | None, evaluate: bool,
    file: Path | None, seed: int,
) -> Iterator[Checked]:  # fmt: skip
    """Make the checks that fit what is named, one after the other.

    Raises:
        Unable: if it cannot be loaded or built, cannot run here, or what is said of it does not fit.
    """
    target, here = load(name), inputs.device(device)
    spec = inputs.spec(given or "4x64")
    dtypes = _BOTH if dtype is None else (inputs.dtype(dtype),)
    job = _Job(target, here, spec, dtypes, seed, given is not None)
    for check, failure in job.checks(part, evaluate):
        path = None if failure is None else repro.write(failure, target, str(here), file)
        yield Checked(check, failure and failure.message, path and str(path))


@dataclasses.dataclass(frozen=True)
class _Job:
    target: Target
    device: torch.device
    spec: Spec
    dtypes: Sequence[torch.dtype]
    seed: int
    fixed: bool  # whether the shape of the input was said

    def checks(self, part: str | None, evaluate: bool) -> Iterator[tuple[str, Failure | None]]:
        torch.default_generator.manual_seed(self.seed)
        value = self.target.value
        if self.target.is_class and issubclass(value, FusedOperation):
            yield self._fusion(value)
            return
        if self.target.is_class and issubclass(value, UnfusedOperation):
            yield self._operation(value.example, "named.example(x)")
            return
        model = self.target.build()
        made = "named" if isinstance(value, nn.Module) else "named()"
        if isinstance(model, UnfusedOperation):
            yield self._operation(lambda x: model, made)
            return
        made += f".get_submodule({part!r})" if part is not None else ""
        model = container(model.eval() if evaluate else model, self.target.name, part)
        yield from self._model(model, made + (".eval()" if evaluate else ""))

    def _x(self, spec: Spec) -> Tensor:
        return spec.draw(self.device, 0, 1)

    def _fusion(self, fusion: type[FusedOperation]) -> tuple[str, Failure | None]:
        if fusion.is_contract:
            raise Unable(f"{self.target.name} is no fusion but a base of fusions")
        if fusion.triton and not Env.of(self.device).triton:
            here = "; TRITON_INTERPRET=1 interprets its kernels, slowly" if self.device.type == "cpu" else ""
            raise Unable(f"{fusion.__name__} needs a Triton device{here}")

        def run(spec: Spec, dtypes: Sequence[torch.dtype]) -> None:
            check_fusion(fusion, self._x(spec), seed=self.seed, dtypes=None if dtypes is _BOTH else dtypes)

        failed = self._shrunk(run)
        name = "testing.check_fusion"
        return f"{name} {fusion.__name__}", failed and Failure(
            name, failed[0], failed[1], (f"{name}(named, x, seed={self.seed}, dtypes={_listed(failed[2])})",)
        )

    def _operation(self, make: Callable[[Tensor], UnfusedOperation], made: str) -> tuple[str, Failure | None]:
        def run(spec: Spec, dtypes: Sequence[torch.dtype]) -> None:
            torch.default_generator.manual_seed(self.seed)
            x = self._x(spec)
            try:
                operation = make(x).to(self.device)
            except (ValueError, NotImplementedError) as error:
                raise Unable(f"{self.target.name}.example(x) raised {said(error)}") from error
            check_op(operation, x, seed=self.seed, dtypes=dtypes)

        failed = self._shrunk(run)
        name = "testing.check_op"
        return f"{name} {self.target.attribute}", failed and Failure(
            name, failed[0], failed[1], (f"{name}({made}, x, seed={self.seed}, dtypes={_listed(failed[2])})",)
        )

    def _shrunk(
        self, run: Callable[[Spec, Sequence[torch.dtype]], None]
    ) -> tuple[str, Spec, Sequence[torch.dtype]] | None:
        """How a check fails, in one dtype if it does in one, and on the smallest of a few inputs on which it does."""
        message = _failure(run, self.spec, self.dtypes)
        if message is None:
            return None
        spec, dtypes = self.spec, self.dtypes
        for one in dtypes if len(dtypes) > 1 else ():
            alone = _failure(run, spec, (one,))
            if alone is not None:
                message, dtypes = alone, (one,)
                break
        for shape in () if self.fixed else _SMALLER:
            smaller = Spec(shape, spec.dtype)
            try:
                found = _failure(run, smaller, dtypes)
            except Unable:
                continue
            if found is not None and _kind(found) == _kind(message):
                return found, smaller, dtypes
        return message, spec, dtypes

    def _model(self, model: Sequential, made: str) -> Iterator[tuple[str, Failure | None]]:
        """A model fused and unfused, with gradients and without, and what is in it that this library does not have."""
        if not self.fixed:
            raise Unable("a model is checked on an input: give --input, such as 8x1024")
        floating = self.spec.dtype.is_floating_point
        for dtype in self.dtypes:
            spec = Spec(self.spec.shape, dtype) if floating else self.spec
            for grad in (True, False):
                check = f"fused and unfused, {str(dtype).removeprefix('torch.')}{'' if grad else ', no gradients'}"
                found = compare(
                    model.to(dtype), spec, {}, runs_of(spec, self.device, dtype, "unfused", None), grad=grad,
                    seed=self.seed,
                )  # fmt: skip
                if found.difference is None:
                    yield check, None
                    continue
                at = found.difference.place.at
                lines = self._smallest(model, made, spec, dtype, grad, at)
                yield check, Failure(check, str(found), spec, lines)

    def _smallest(
        self, model: Sequential, made: str, spec: Spec, dtype: torch.dtype, grad: bool, at: int
    ) -> tuple[str, ...]:
        """The members of the list around a position, if they differ by themselves, else all of it."""
        end = f"{dtype}, device={str(self.device)!r}, grad={grad}, seed={self.seed})"
        runs = runs_of(spec, self.device, dtype, "unfused", None)
        values, _ = runs[1](model, spec, {}, self.seed, False)
        entering = {place.at + 1: tuple(y.shape) for place, y in values.items() if place.tensor == "y"}
        top = _members(model)
        inside = next((i for i, covered in enumerate(top) if at in covered), None)
        for reach in (0, 1) if inside is not None and len(top) > 1 else ():
            assert inside is not None
            a, b = max(inside - reach, 0), min(inside + 1 + reach, len(top))
            shape = spec.shape if a == 0 else entering.get(top[a].start)
            if shape is None:
                continue
            smaller = Spec(shape, dtype if a else spec.dtype)
            try:
                found = compare(model[a:b], smaller, {}, runs, grad=grad, seed=self.seed)
            except (Unable, ValueError):
                continue
            if found.difference is not None:
                return f"assert_same({made}[{a}:{b}], {str(smaller)!r}, {end}",  # fmt: skip
        return f"assert_same({made}, {str(spec)!r}, {end}",  # fmt: skip


def _members(model: Sequential) -> list[range]:
    """The positions of each member of a list."""
    found: list[range] = []
    start = 0
    for member in model:
        length = len(flatten(Sequential(member)))
        found.append(range(start, start + length))
        start += length
    return found


def _failure(
    run: Callable[[Spec, Sequence[torch.dtype]], None], spec: Spec, dtypes: Sequence[torch.dtype]
) -> str | None:
    try:
        run(spec, dtypes)
    except (AssertionError, PluginError) as error:
        return str(error)
    return None


def _kind(message: str) -> str:
    """What a message says without the case and the numbers."""
    return message.partition("\n")[0].rpartition(": ")[2]


def _listed(dtypes: Sequence[torch.dtype]) -> str:
    return f"({', '.join(map(str, dtypes))}{',' if len(dtypes) == 1 else ''})"


def data(found: Sequence[Checked]) -> dict[str, Any]:
    """Checks as plain data."""
    return {"ok": all(one.failure is None for one in found), "checks": [dataclasses.asdict(one) for one in found]}


def show(one: Checked) -> None:
    """Print a check for a reader."""
    if one.failure is None:
        tell(f"passed  {one.check}")
        return
    tell(f"FAILED  {one.check}", "bold")
    tell("\n".join(f"    {line}" for line in one.failure.splitlines()))
    tell(f"    to see it again: python {one.repro}")

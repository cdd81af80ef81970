"""`seqfuse check`: the test kit on an operation, a fusion or a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import torch
from cyclopts import Parameter
from torch import Tensor

from .. import Env, FusedOperation, Fuser, Sequential, UnfusedOperation
from ..errors import PluginError
from ..testing import NotRun, check_fusion, check_op
from ..testing.structure import copied_module
from . import FOUND, NOT_RUN, inputs
from .compare import compare_runs
from .inputs import Json, Named, On, Spec
from .output import tell, tell_json
from .target import Target, Unable, calling, container, load_target, moved, said

_BOTH = (torch.float32, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one check: its failure, if any; cases it skipped; and the reason if it could not run."""

    check: str
    failure: str | None = None
    skipped: tuple[str, ...] = ()
    not_run: str | None = None

    def __str__(self) -> str:
        if self.not_run is not None:
            return f"not run {self.check}\n    {self.not_run}"
        if self.failure is not None:
            return "\n    ".join((f"FAILED  {self.check}", *self.failure.splitlines()))
        return "\n    skipped: ".join((f"passed  {self.check}", *self.skipped))


def check(
    target: Named,
    /,
    *,
    input: Annotated[str | None, Parameter(help="The input, such as 8x64; required for a model.")] = None,
    seed: int = 0,
    json: Json = False,
    on: Annotated[On | None, Parameter(name="*")] = None,
) -> int:
    """Run the test kit on an operation, a fusion or a model.

    Exits with 1 if it finds something; with 3 if nothing failed and a check could not run here.
    """
    found: list[CheckResult] = []
    for one in _checked(target, input, on or On(), seed):
        found.append(one)
        if not json:
            tell(str(one), "bold" if one.failure is not None else "")
    failed, not_run = any(one.failure is not None for one in found), any(one.not_run is not None for one in found)
    if json:
        tell_json({"ok": not (failed or not_run), "checks": [dataclasses.asdict(one) for one in found]})
    return FOUND if failed else NOT_RUN if not_run else 0


def _checked(name: str, given: str | None, on: On, seed: int) -> Iterator[CheckResult]:
    """Yield the results of the checks that apply to the target."""
    torch.default_generator.manual_seed(0)
    here, seed = inputs.device_here(on.device), inputs.parse_seed(seed)
    dtypes = _BOTH if on.dtype is None else (inputs.parse_floating(on.dtype),)
    spec = inputs.parse_spec(given or "4x64")
    for target in load_target(name).members:
        torch.default_generator.manual_seed(0)
        value = target.value
        is_fusion = target.is_class and issubclass(value, FusedOperation)
        if is_fusion or issubclass(value if target.is_class else type(value), UnfusedOperation):
            if on.channel:
                raise Unable("--channel is for a model: the test kit draws what else an operation takes")
            x = spec.draw(here, 0, 1)
            if is_fusion:
                yield _fusion(target, value, x, seed, dtypes)
            else:
                yield _operation(target.attribute, _example(target, x), x, seed, dtypes)
            continue
        built = target.build()
        if isinstance(built, UnfusedOperation):
            yield _operation(target.attribute, built, spec.draw(here, 0, 1), seed, dtypes)
            continue
        if given is None:
            raise Unable("a model is checked on an input: give --input, such as 8x1024")
        model = container(built.eval() if on.evaluate else built, name, on.part)
        yield from _model(model, spec, on.channels(), here, seed, dtypes)


def _fusion(
    target: Target, fusion: type[FusedOperation], x: Tensor, seed: int, dtypes: Sequence[torch.dtype]
) -> CheckResult:
    if fusion.is_contract:
        raise Unable(f"{target.name} is a base class of fusions, not a fusion")
    name = f"testing.check_fusion {fusion.__name__}"
    if fusion.kernels and Env.of(x.device).kernels not in fusion.kernels:
        hint = "; TRITON_INTERPRET=1 runs Triton kernels on a CPU, slowly" if x.device.type == "cpu" else ""
        return CheckResult(name, not_run=f"needs a Triton device{hint}")
    given = None if dtypes is _BOTH else dtypes
    return _of_the_kit(name, lambda: check_fusion(fusion, x, seed=seed, dtypes=given).skipped)


def _example(target: Target, x: Tensor) -> UnfusedOperation:
    if not target.is_class:
        return target.value
    try:
        torch.default_generator.manual_seed(0)
        return target.value.example(x)
    except (ValueError, NotImplementedError) as error:
        raise Unable(f"{target.name}.example(x) raised {said(error)}") from error


def _operation(
    name: str, operation: UnfusedOperation, x: Tensor, seed: int, dtypes: Sequence[torch.dtype]
) -> CheckResult:
    on = operation.to(x.device)
    return _of_the_kit(f"testing.check_op {name}", lambda: check_op(on, x, seed=seed, dtypes=dtypes).skipped)


def _of_the_kit(name: str, run: Callable[[], tuple[str, ...]]) -> CheckResult:
    try:
        return CheckResult(name, skipped=run())
    except NotRun as error:
        return CheckResult(name, not_run=str(error))
    except (AssertionError, PluginError) as error:
        return CheckResult(name, failure="\n".join([str(error), *getattr(error, "__notes__", ())]))


def _model(
    model: Sequential,
    spec: Spec,
    channels: dict[str, Spec],
    device: torch.device,
    seed: int,
    dtypes: Sequence[torch.dtype],
) -> Iterator[CheckResult]:
    """Check the operations of a model that are not this library's, then compare the whole model fused and unfused."""
    foreign: dict[type, tuple[UnfusedOperation, Spec]] = {}

    def note(step: Any, run: Callable[..., Any], /, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        operation: UnfusedOperation = step.operation
        if type(x) is Tensor and not type(operation).__module__.startswith("seqfuse."):  # not fake tensors
            foreign.setdefault(type(operation), (operation, Spec(tuple(x.shape), x.dtype)))
        return run(x, *args, **kwargs)

    with torch.no_grad():
        fuser = Fuser(moved(copied_module(model), device).to(dtypes[0]), on_step=note)
        drawn = {name: one.draw(device, 0, inputs.vocabulary(model)) for name, one in {"x": spec, **channels}.items()}
        with calling():
            fuser(**{name: t.to(dtypes[0]) if t.is_floating_point() else t for name, t in drawn.items()})
    for kind, (operation, entering) in foreign.items():
        yield _operation(kind.__name__, operation, entering.draw(device, 0, 1), seed, dtypes)
    for dtype in dtypes:
        x = dataclasses.replace(spec, dtype=dtype) if spec.dtype.is_floating_point else spec
        for grad in (True, False):
            found = compare_runs(model.to(dtype), x, channels, device, grad=grad, seed=seed)
            name = f"fused and unfused, {str(dtype).removeprefix('torch.')}{'' if grad else ', no gradients'}"
            yield CheckResult(name, failure=None if found.difference is None else str(found))

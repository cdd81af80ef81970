"""`seqfuse tune` and `seqfuse cache warm`, which run a model on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
from cyclopts import Parameter

from .. import compiler
from ..convert import convert
from ..env import why_no_c
from ..operation import FusableOperation
from ..tune import tune
from ..tune.shadow import MODES
from . import inputs
from .inputs import InputText, Json, Named, Under
from .output import tell, tell_json
from .target import Unable, calling, moved, named_part


def tune_model(
    target: Named,
    /,
    *,
    input: InputText,
    modes: Literal["train", "eval", "both"] = "both",
    budget: Annotated[float | None, Parameter(help="Seconds after which no measurement starts.")] = None,
    file: Annotated[Path | None, Parameter(help="Keep measurements in this file.")] = None,
    json: Json = False,
    on: Annotated[Under | None, Parameter(name="*")] = None,
) -> None:
    """Measure every candidate fusion here, so that plans use those that are faster."""
    on = on or Under()
    here, spec = inputs.device_here(on.device), on.spec(input)
    model = named_part(moved(on.build(target, spec), here), target, on.part)
    x, extra = on.drawn(model, spec, here)
    with on.surroundings(here.type, True):
        report = tune(model, x, modes=MODES if modes == "both" else modes, budget=budget, file=file, **extra)
    if json:
        tell_json({**dataclasses.asdict(report), "file": None if report.file is None else str(report.file)})
    else:
        tell(str(report))


def warm(target: Named, /, *, input: InputText, on: Annotated[Under | None, Parameter(name="*")] = None) -> None:
    """Compile the C kernels that a model calls on this CPU, so that its first step does not wait for them."""
    if reason := why_no_c():
        raise Unable(reason)
    on = on or Under()
    here, spec, grad = torch.device("cpu"), on.spec(input), not on.evaluate
    model = on.build(target, spec).train(grad)
    if not any(isinstance(module, FusableOperation) for module in model.modules()):
        convert(model)
    chosen = cast(Any, named_part(model, target, on.part))
    x, extra = on.drawn(model, spec, here)
    before = _kernels()
    # One step on random inputs.
    with calling(f"{target} called on {spec}"), on.surroundings("cpu", grad):
        out: Any = chosen(x.requires_grad_(grad and x.is_floating_point()), **extra)
        several: list[Any] = [*out] if isinstance(out, tuple) else [out, *getattr(out, "__dict__", {}).values()]
        made = [t for t in several if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward(made, [torch.ones_like(t) for t in made])
    now = _kernels()
    tell(f"{len(now - before)} kernels compiled, {len(now)} kept in {compiler.folder()}")


def _kernels() -> set[Path]:
    return {*compiler.folder().glob("*.so")}

"""`seqfuse tune` and `seqfuse cache warm`: a model that is run here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

import torch

from .. import compiler
from ..convert import convert
from ..env import why_no_c
from ..operation import FusableOperation
from ..tune import TuneReport, tune
from ..tune.shadow import MODES
from . import inputs
from .inputs import Under
from .target import Unable, part_of


def tuned(name: str, given: str, on: Under, modes: str, budget: float | None, file: Path | None) -> TuneReport:
    """Tune what is named for an input.

    Raises:
        Unable: if it cannot be loaded or built, or what is said of it does not fit.
    """
    here, spec = inputs.device(on.device), on.spec(given)
    model = part_of(on.build(name, spec).to(here), name, on.part)
    x, extra = on.drawn(model, spec, here)
    with on.surroundings(here.type, True):
        return tune(model, x, modes=MODES if modes == "both" else modes, budget=budget, file=file, **extra)


def data(report: TuneReport) -> dict[str, Any]:
    """A report as plain data."""
    return {**dataclasses.asdict(report), "file": None if report.file is None else str(report.file)}


def warmed(name: str, given: str, on: Under) -> str:
    """Compile the C kernels of a model on this CPU by one step with random numbers; says how many were compiled.

    A model without operations of this library is converted for that.

    Raises:
        Unable: if it cannot be loaded or run, or nothing compiles here.
    """
    if reason := why_no_c():
        raise Unable(reason)
    here, spec, grad = torch.device("cpu"), on.spec(given), not on.evaluate
    model = on.build(name, spec).train(grad)
    if not any(isinstance(module, FusableOperation) for module in model.modules()):
        convert(model)
    chosen = cast(Any, part_of(model, name, on.part))
    x, extra = on.drawn(model, spec, here)
    before = _kernels()
    with on.surroundings("cpu", grad):
        out: Any = chosen(x.requires_grad_(grad and x.is_floating_point()), **extra)
        several: list[Any] = [*out] if isinstance(out, tuple) else [out, *getattr(out, "__dict__", {}).values()]
        made = [t for t in several if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.autograd.backward(made, [torch.ones_like(t) for t in made])
    now = _kernels()
    return f"{len(now - before)} kernels compiled, {len(now)} kept in {compiler.folder()}"


def _kernels() -> set[Path]:
    return {*compiler.folder().glob("*.so")}

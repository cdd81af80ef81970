"""`seqfuse tune`: `sf.tune` on what is named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, cast

from ..tune import TuneReport, tune
from ..tune.shadow import MODES
from . import inputs
from .target import Unable, load


def tuned(
    name: str,
    *,
    given: str,
    channels: list[str],
    device: str | None,
    dtype: str | None,
    autocast: str | None,
    part: str | None,
    evaluate: bool,
    modes: str,
    budget: float | None,
    file: Path | None,
) -> TuneReport:
    """Tune what is named for an input.

    Raises:
        Unable: if it cannot be loaded or built, or what is said of it does not fit.
    """
    here, spec, extra = inputs.device(device), inputs.spec(given, dtype), inputs.channels(channels, dtype)
    model = inputs.cast(load(name).build(), spec, dtype, autocast).to(here)
    if part is not None:
        try:
            model = cast(Any, model).get_submodule(part)
        except AttributeError as error:
            raise Unable(f"{name} has no part {part!r}: {error}") from error
    x = spec.draw(here, 0, inputs.vocabulary(model))
    drawn: Any = {n: s.draw(here, 1) for n, s in extra.items()}
    with inputs.surroundings(here.type, autocast, True):
        return tune(
            model.eval() if evaluate else model,
            x,
            modes=MODES if modes == "both" else modes,
            budget=budget,
            file=file,
            **drawn,
        )


def data(report: TuneReport) -> dict[str, Any]:
    """A report as plain data."""
    return {**dataclasses.asdict(report), "file": None if report.file is None else str(report.file)}

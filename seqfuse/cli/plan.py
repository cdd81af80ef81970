"""`seqfuse plan`: what is fused, here or on a machine that is not here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from cyclopts import Parameter

from ..env import Env, rows_of
from ..pictures.text import curve
from ..plan import Plan
from . import inputs
from .inputs import Json, Named, Under
from .output import write
from .target import Unable, container

Form = Callable[[Plan], str]
FORMS: dict[str, Form] = {".svg": Plan.svg, ".json": lambda plan: plan.json(indent=2), ".txt": str}


FRONT = "front"
"""`--memory front` shows the peak and the time of budgets, rather than a plan."""


def front(plan: Plan) -> str:
    """The choices of a plan as a curve."""
    return curve(plan.as_dict()["choices"])


def plan(
    target: Named,
    /,
    *,
    input: Annotated[str | None, Parameter(help="What enters, such as 8x1024:bf16.")] = None,
    memory: Annotated[str | None, Parameter(help="fast, balanced, lean, least, bytes, or front: all of them.")] = None,
    no_grad: Annotated[bool, Parameter(negative="", show_default=False, help="Plan for inference.")] = False,
    json: Json = False,
    output: Annotated[
        Path | None, Parameter(help="Write to this file, whose ending says the form: .svg, .json or .txt.")
    ] = None,
    on: Annotated[Under | None, Parameter(name="*")] = None,
) -> None:
    """Show what is fused and why not more, here or for --device cuda:sm_90, a machine that is not here."""
    form = form_of(json, output)
    if memory == FRONT:
        if form is not str:
            raise Unable("--memory front is text alone: without it, JSON has the same numbers under choices")
        form = front
    write(form(_planned(target, input, on or Under(), memory, not no_grad)), output)


def _planned(name: str, given: str | None, on: Under, memory: str | None, grad: bool) -> Plan:
    spec = None if given is None else on.spec(given)
    if on.channel and spec is None:
        raise Unable("--channel says what enters beside the input: give --input, too")
    model = on.build(name, spec)
    elsewhere = on.device is not None and inputs.is_elsewhere(on.device)
    device = on.device if elsewhere and on.device else inputs.device(on.device)
    chosen = container(model if isinstance(device, str) else model.to(device), name, on.part)
    if memory is not None and memory != FRONT:
        chosen.memory = cast(Any, int(memory) if memory.isdecimal() else memory)
    dtype = next((p.dtype for p in chosen.parameters() if p.is_floating_point()), torch.float32)
    if spec is not None and not isinstance(device, str):
        x, drawn = on.drawn(chosen, spec, device)
        with on.surroundings(device.type, grad):
            return chosen.plan(x, **drawn)
    low = None if on.autocast is None else inputs.floating(on.autocast)
    if spec is None:
        return chosen.plan(env=Env.of(device, dtype=dtype, autocast=low, grad=grad))
    dtype = spec.dtype if spec.dtype.is_floating_point else dtype
    env = Env.of(device, dtype=dtype, autocast=low, grad=grad, rows=rows_of(spec.shape))
    x = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    extra: Any = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in on.channels().items()}
    with inputs.surroundings(env.device, None, grad):
        return chosen.plan(x, env=env, **extra)


def form_of(json: bool, output: Path | None) -> Form:
    """How a plan is written: as JSON if asked, else as the file's ending says, else as text.

    Raises:
        Unable: for an ending that says none.
    """
    ending = ".json" if json else ".txt" if output is None else output.suffix or ".txt"
    if ending not in FORMS:
        known = ", ".join(FORMS)
        raise Unable(f"{output} says no form of a plan: end it with one of {known}, or ask for --json")
    return FORMS[ending]

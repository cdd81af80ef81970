"""`seqfuse convert`: which calls of a model run fused after `sf.convert`, and why the others do not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from cyclopts import Parameter
from torch import nn

from .. import Plan
from ..convert import Conversion
from ..convert import convert as start
from . import inputs
from .inputs import InputText, Json, Named, NoGrad, Output, Spec, Under
from .output import colored, ending_of, write_text
from .target import Unable, calling, moved, named_part

FRONT = "front"
"""`plan --memory front` shows the peak and time of each budget of a Sequential, instead of a plan."""


def convert_model(
    target: Named,
    /,
    *,
    input: InputText,
    memory: Annotated[str, Parameter(help="fast, balanced, lean or least.")] = "balanced",
    no_grad: NoGrad = False,
    launches: Annotated[
        bool, Parameter(negative="", show_default=False, help="Also count kernel launches on a CPU.")
    ] = False,
    json: Json = False,
    output: Output = None,
    on: Annotated[Under | None, Parameter(name="*")] = None,
) -> None:
    """Convert any model, call it once, and report its fused chains and unconverted calls, also for --device h100."""
    on = on or Under()
    spec = on.spec(input)
    model = named_part(on.build(target, spec), target, on.part)
    show_conversion(
        model, target, spec, on, memory, grad=not no_grad, launches=launches, ending=ending_of(json, output), to=output
    )


def show_conversion(
    model: nn.Module,
    name: str,
    given: Spec,
    on: Under,
    memory: str,
    *,
    grad: bool,
    launches: bool = False,
    ending: str,
    to: Path | None,
) -> None:
    """Convert a model, call it once on random inputs, and write the report.

    Raises:
        Unable: if the call fails, for `FRONT`, or if a picture of several plans is requested.
    """
    if memory == FRONT:
        needs = "--memory front needs a Sequential and seqfuse plan"
        raise Unable(f"{needs}; without it, the report of {name} has a table of all choices")
    elsewhere = on.device if on.device is not None and inputs.is_elsewhere(on.device) else None
    device = inputs.device_here(on.device) if elsewhere is None else torch.device("cpu")
    conversion = start(moved(model, device), memory=cast(Any, int(memory) if memory.isdecimal() else memory))
    x, drawn = on.drawn(model, given, device)
    with calling(f"{name} called on {given}"), on.surroundings(device.type, grad):
        model(x, **drawn)
    plans = [*_plans(conversion, elsewhere, on, grad)]
    if ending == ".svg":
        if len(plans) != 1:
            raise Unable(f"the model has {len(plans)} chains, and a picture is of one: --part chooses a module")
        write_text(plans[0].svg(), to)
    elif ending == ".json":
        write_text(json.dumps(_data(conversion, plans), indent=2), to)
    else:
        text = [conversion.report(launches=launches)]
        if elsewhere is not None:
            text.insert(0, "Converted and called on this CPU; plans for the other device follow.")
            chains: dict[str, list[str]] = {}
            for number, plan in enumerate(plans, 1):
                chains.setdefault(str(plan), []).append(str(number))
            text += [f"\nChain {', '.join(numbers)}\n{plan}" for plan, numbers in chains.items()]
        write_text("\n".join(text) if to is not None else colored("\n".join(text)), to)


def _plans(conversion: Conversion, elsewhere: str | None, on: Under, grad: bool) -> list[Plan]:
    """The plan of each chain, for this machine or for another."""
    chains = [region for graph in conversion.graphs for region in graph.regions]
    if elsewhere is None:
        return [plan for chain in chains if (plan := chain.plan) is not None]
    low = None if on.autocast is None else inputs.parse_floating(on.autocast)
    return [chain.plan_for(elsewhere, autocast=low, grad=grad) for chain in chains]


def _data(conversion: Conversion, plans: list[Plan]) -> dict[str, Any]:
    graphs = [
        {
            "name": graph.name,
            "call": None if graph.captured is None else graph.captured.call,
            "chains": len(graph.regions),
            "beside": dict(graph.beside),
            "left": [dataclasses.asdict(left) for left in graph.left],
        }
        for graph in conversion.graphs
    ]
    return {"graphs": graphs, "plans": [plan.as_dict() for plan in plans]}

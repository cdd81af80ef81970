"""`seqfuse plan` and `seqfuse convert`: the fusions of a model, on this machine or another."""

from __future__ import annotations

import dataclasses
from json import dumps
from pathlib import Path
from typing import Annotated, Any, cast

import torch
from cyclopts import Parameter
from torch import nn

from .. import Env, Plan
from ..convert import Conversion
from ..convert import convert as start
from ..env import rows_of
from ..pictures.text import curve
from . import inputs
from .inputs import InputText, Json, Named, NoGrad, Output, Spec, Under
from .output import colored, ending_of, write_text
from .target import Unable, calling, container, holds_sequence, moved, named_part

FRONT = "front"
"""`plan --memory front` shows the peak and time of each budget of a Sequential, instead of a plan."""


def plan(
    target: Named,
    /,
    *,
    input: Annotated[str | None, Parameter(help="The input, such as 8x1024:bf16.")] = None,
    memory: Annotated[str | None, Parameter(help="fast, balanced, lean, least, bytes, or front: all of them.")] = None,
    no_grad: NoGrad = False,
    json: Json = False,
    output: Output = None,
    on: Annotated[Under | None, Parameter(name="*")] = None,
) -> None:
    """Print the plan of a model, on this machine or for --device h100; a model without plans is converted first."""
    ending, on = ending_of(json, output), on or Under()
    if memory == FRONT and ending != ".txt":
        raise Unable("--memory front prints text only; --json without it has the same numbers under choices")
    spec = None if input is None else on.spec(input)
    if on.channel and spec is None:
        raise Unable("--channel adds an argument to the input: give --input, too")
    model = on.build(target, spec)
    part = named_part(model, target, on.part)
    if not holds_sequence(part):
        if spec is None:
            raise Unable(f"{target} has no Sequential, so it is converted and called: give --input")
        _show_conversion(part, target, spec, on, memory or "balanced", not no_grad, output, ending)
        return
    made = _planned(model, target, spec, on, memory, not no_grad)
    text = {".svg": made.svg, ".json": lambda: made.json(indent=2), ".txt": lambda: str(made)}[ending]()
    text = curve(made.as_dict()["choices"]) if memory == FRONT else text
    write_text(text if output is not None else colored(text), output)


def _planned(model: nn.Module, name: str, spec: Spec | None, on: Under, memory: str | None, grad: bool) -> Plan:
    elsewhere = on.device is not None and inputs.is_elsewhere(on.device)
    device = on.device if elsewhere and on.device else inputs.device_here(on.device)
    chosen = container(model if isinstance(device, str) else moved(model, device), name, on.part)
    if memory is not None and memory != FRONT:
        chosen.memory = cast(Any, int(memory) if memory.isdecimal() else memory)
    dtype = next((p.dtype for p in chosen.parameters() if p.is_floating_point()), torch.float32)
    if spec is not None and not isinstance(device, str):
        x, drawn = on.drawn(chosen, spec, device)
        with on.surroundings(device.type, grad):
            return chosen.plan(x, **drawn)
    low = None if on.autocast is None else inputs.parse_floating(on.autocast)
    if spec is None:
        return chosen.plan(env=Env.of(device, dtype=dtype, autocast=low, grad=grad))
    dtype = spec.dtype if spec.dtype.is_floating_point else dtype
    env = Env.of(device, dtype=dtype, autocast=low, grad=grad, rows=rows_of(spec.shape))
    x = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
    extra: Any = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in on.channels().items()}
    with inputs.surroundings(env.device, None, grad):
        return chosen.plan(x, env=env, **extra)


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
    _show_conversion(model, target, spec, on, memory, not no_grad, output, ending_of(json, output), launches)


def _show_conversion(
    model: nn.Module,
    name: str,
    given: Spec,
    on: Under,
    memory: str,
    grad: bool,
    to: Path | None,
    ending: str,
    launches: bool = False,
) -> None:
    """Convert a model, call it once on random inputs, and write the report."""
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
        write_text(dumps(_data(conversion, plans), indent=2), to)
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

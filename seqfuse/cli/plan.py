"""`seqfuse plan`: the fusions of a model, on this machine or another."""

from __future__ import annotations

from typing import Annotated, Any, cast

import torch
from cyclopts import Parameter
from torch import nn

from .. import Env, Plan
from ..env import rows_of
from ..pictures.text import curve
from . import inputs
from .convert import FRONT, show_conversion
from .inputs import Json, Named, NoGrad, Output, Spec, Under
from .output import colored, ending_of, write_text
from .target import Unable, container, holds_sequence, moved, named_part


def front(plan: Plan) -> str:
    """The memory choices of a plan as a curve."""
    return curve(plan.as_dict()["choices"])


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
        show_conversion(part, target, spec, on, memory or "balanced", grad=not no_grad, ending=ending, to=output)
        return
    made = _planned(model, target, spec, on, memory, not no_grad)
    text = {".svg": made.svg, ".json": lambda: made.json(indent=2), ".txt": lambda: str(made)}[ending]()
    text = front(made) if memory == FRONT else text
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

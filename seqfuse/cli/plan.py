"""`seqfuse plan`: what is fused, here or on a machine that is not here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from ..env import Env, rows_of
from ..plan import Plan
from ..run import Sequential
from . import inputs
from .target import Unable, container, load

FORMS = {"": "text", ".txt": "text", ".json": "json", ".html": "html", ".svg": "svg", ".mmd": "mermaid"}


def planned(
    name: str,
    *,
    given: str | None,
    channels: list[str],
    device: str | None,
    dtype: str | None,
    autocast: str | None,
    part: str | None,
    memory: str | None,
    grad: bool,
    evaluate: bool,
) -> Plan:
    """The plan of what is named.

    Raises:
        Unable: if it cannot be loaded or built, or what is said of it does not fit.
    """
    model = load(name).build()
    spec = None if given is None else inputs.spec(given, dtype)
    extra = inputs.channels(channels, dtype)
    if extra and spec is None:
        raise Unable("--channel says what enters beside the input: give --input, too")
    model = inputs.cast(model, spec, dtype, autocast)
    model = model.eval() if evaluate else model
    if device is not None and inputs.is_elsewhere(device):
        chosen = _chosen(model, name, part, memory)
        env = Env.of(
            device,
            dtype=spec.dtype if spec is not None and spec.dtype.is_floating_point else _dtype_of(chosen),
            autocast=None if autocast is None else inputs.floating(autocast),
            grad=grad,
            rows=None if spec is None else rows_of(spec.shape),
        )
        if spec is None:
            return chosen.plan(env=env)
        x = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        given_channels: Any = {n: torch.empty(s.shape, dtype=s.dtype, device="meta") for n, s in extra.items()}
        with inputs.surroundings(env.device, None, grad):
            return chosen.plan(x, env=env, **given_channels)
    here = inputs.device(device)
    chosen = _chosen(model.to(here), name, part, memory)
    with inputs.surroundings(here.type, autocast, grad):
        if spec is None:
            low = None if autocast is None else inputs.floating(autocast)
            return chosen.plan(env=Env.of(here, dtype=_dtype_of(chosen), autocast=low, grad=grad))
        x = spec.draw(here, 0, inputs.vocabulary(chosen))
        drawn: Any = {n: s.draw(here, 1) for n, s in extra.items()}
        return chosen.plan(x, **drawn)


def _chosen(model: nn.Module, name: str, part: str | None, memory: str | None) -> Sequential:
    chosen = container(model, name, part)
    if memory is not None:
        chosen.memory = cast(Any, int(memory) if memory.isdecimal() else memory)
    return chosen


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def form_of(chosen: dict[str, bool], output: Path | None) -> str:
    """The form to write: the one that is asked for, else what the file's ending says, else text."""
    asked = [form for form, wanted in chosen.items() if wanted]
    if len(asked) > 1:
        raise Unable(f"--{asked[0]} and --{asked[1]} are two forms of one plan: ask for one")
    if asked:
        return asked[0]
    if output is None:
        return "text"
    if output.suffix not in FORMS:
        known = ", ".join(filter(None, FORMS))
        raise Unable(f"{output} says no form of a plan: end it with one of {known}, or ask for a form, as by --json")
    return FORMS[output.suffix]


def written(plan: Plan, form: str) -> str:
    """A plan in one of its forms."""
    if form == "json":
        return plan.json(indent=2)
    return {"html": plan.html, "svg": plan.svg, "mermaid": plan.mermaid, "text": plan.__str__}[form]()

"""Time and peak of a training step: eager, each layer checkpointed, and each choice of `memory=`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import seqfuse as sf

from .blocks import Models, drawn, flops, spec_of, trained, unfused
from .case import Case, Inputs
from .sizes import MAIN, Model, Sizes

GROUP = "memory: layers forward + backward"
LAYERS = 4
CHOICES: dict[str, Any] = {
    "seqfuse": "fast", "seqfuse balanced": "balanced", "seqfuse lean": "lean", "seqfuse 0.5": sf.Budget(part=0.5),
    "seqfuse 0.3": sf.Budget(part=0.3), "seqfuse least": "least",
}  # fmt: skip


def cases(sizes: Sizes) -> Iterator[Case]:
    """A few layers of the main models."""
    mains = [m for m in sizes.models if m.name in MAIN] or sizes.models
    for place, model in enumerate(sorted(mains, key=lambda m: not m.llama)):
        yield _case(sizes, model, 1 + 2 * place)


def _case(sizes: Sizes, model: Model, priority: int) -> Case:
    rows = sizes.tokens[0]
    models = Models("stack", spec_of(model), sizes, LAYERS)
    ours: dict[str, Callable[[], Any]] = {
        name: functools.cache(functools.partial(models.choosing, memory)) for name, memory in CHOICES.items()
    }
    contenders = {name: trained(make) for name, make in ours.items()}
    contenders["eager"] = trained(lambda: models.torch)
    contenders["checkpointed"] = trained(models.checkpointed)
    return Case(
        GROUP, f"{model.name} x {LAYERS} {rows}", sizes.dtype, make=drawn(sizes, model, "x", "dy"), rows=rows,
        contenders=contenders, checked_rows=min(rows, sizes.checked_rows), as_called=True, priority=priority,
        flops=3 * LAYERS * flops("layer", model, rows, min(sizes.sequence, rows)), notes=said(ours),
        unfused=trained(lambda: models.ours, unfused), exact=trained(lambda: models.exact, unfused),
        shape={"model": model.name, "M": rows, "H": model.H, "F": model.F, "layers": LAYERS},
    )  # fmt: skip


def said(ours: dict[str, Callable[[], Any]]) -> Any:
    """What the plan of each choice says that it saves and holds at most, without parameters' gradients."""

    def notes(inputs: Inputs) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, make in ours.items():
            plan = make().plan(inputs["x"].detach().requires_grad_())
            assert plan.memory is not None
            found[name] = {"saved": plan.memory.saved, "peak": plan.memory.peak}
        gradients = sum(p.nbytes for p in ours["seqfuse"]().parameters())
        return {"said": found, "gradients": gradients}

    return notes

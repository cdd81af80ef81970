"""A random op sequence run once: its results, and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from seqfuse.testing import LAYOUTS, in_regime, laid_out, seeded_randn
from seqfuse.testing.cases import seeded

from .lists import ListSpec

Results = dict[str, Tensor | None]
CPU = torch.device("cpu")
DISTINCT = tuple(layout for layout in LAYOUTS if layout not in ("expanded", "scalar"))
"""Layouts whose rows differ: attention over equal rows has gradients of queries and keys that are rounding errors
only."""


def results(
    call: Callable[..., Any],
    model: nn.Module,
    spec: ListSpec,
    seed: int,
    *,
    rows: tuple[int, ...] = (4,),
    x_wants: bool = True,
    dtype: torch.dtype = torch.float32,
    grad: bool = True,
    wide: bool = False,
    layout: str = "contiguous",
    dy_layout: str = "contiguous",
    checkpointed: str = "",
) -> Results:
    """Outputs and every gradient of a run on the numbers of a seed, rounded to `dtype`, then widened to float64.

    `layout` is that of the inputs, `dy_layout` that of the incoming gradients; `checkpointed` is `"reentrant"`,
    `"non-reentrant"`, or not at all.
    """
    own = torch.float64 if wide else dtype
    given = {
        name: laid_out(in_regime("normal", (*rows, width), seed + i, dtype=dtype), layout).to(own)
        for i, (name, width) in enumerate({"x": spec.width, **dict(spec.inputs)}.items())
    }
    for name, mask in spec.masked(rows[-1] if rows else 0, seed, dtype).items():
        given[name] = mask.to(own) if mask.is_floating_point() else mask
    for t in given.values():
        t.requires_grad_(x_wants and t.is_floating_point())
    reentrant = checkpointed == "reentrant"
    with seeded(seed, CPU), torch.set_grad_enabled(grad):
        if checkpointed:
            run = lambda *tensors: call(**dict(zip(given, tensors, strict=True)))  # noqa: E731
            out = checkpoint(run, *given.values(), use_reentrant=reentrant)
        else:
            out = call(**given)
    names = ("y", *spec.outputs)
    outputs = out if isinstance(out, dict) else dict(zip(names, out if spec.outputs else (out,), strict=True))
    wanted = {f"d_{name}": t for name, t in given.items() if t.requires_grad}
    wanted |= {f"{name}.grad": p for name, p in model.named_parameters() if p.requires_grad}
    pairs = [
        (y, laid_out(seeded_randn(tuple(y.shape), seed + 9 + i, dtype=dtype), dy_layout).to(y.dtype))
        for i, y in enumerate(outputs.values())
        if y.requires_grad
    ]
    if not pairs or not wanted:
        return {**outputs}
    ys, dys = zip(*pairs, strict=True)
    if reentrant:  # it requires inputs to differentiate
        torch.autograd.backward(ys, dys)
        found = tuple(t.grad for t in wanted.values())
        for t in wanted.values():
            t.grad = None
    else:
        found = torch.autograd.grad(ys, tuple(wanted.values()), dys, allow_unused=True)
    return {**outputs, **{n: _zeros_for_none(g, t) for (n, t), g in zip(wanted.items(), found, strict=True)}}


def _zeros_for_none(g: Tensor | None, like: Tensor) -> Tensor:
    # Autograd returns None where no path leads back, and zeros where a path adds nothing.
    return torch.zeros_like(like) if g is None else g

"""A random list run once: what it gives, and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqfuse.testing import ListSpec, in_regime, seeded_randn
from seqfuse.testing.cases import seeded

Results = dict[str, Tensor | None]
CPU = torch.device("cpu")


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
) -> Results:
    """Outputs and every gradient of a run on the numbers of a seed, rounded to `dtype`, then widened to float64."""
    own = torch.float64 if wide else dtype
    given = {
        name: in_regime("normal", (*rows, width), seed + i, dtype=dtype).to(own).requires_grad_(x_wants)
        for i, (name, width) in enumerate({"x": spec.width, **dict(spec.inputs)}.items())
    }
    with seeded(seed, CPU), torch.set_grad_enabled(grad):
        out = call(**given)
    names = ("y", *spec.outputs)
    outputs = out if isinstance(out, dict) else dict(zip(names, out if spec.outputs else (out,), strict=True))
    wanted = {f"d_{name}": t for name, t in given.items() if x_wants}
    wanted |= {f"{name}.grad": p for name, p in model.named_parameters() if p.requires_grad}
    pairs = [
        (y, seeded_randn(tuple(y.shape), seed + 9 + i, dtype=dtype).to(y.dtype))
        for i, y in enumerate(outputs.values())
        if y.requires_grad
    ]
    if not pairs or not wanted:
        return {**outputs}
    ys, dys = zip(*pairs, strict=True)
    found = torch.autograd.grad(ys, tuple(wanted.values()), dys, allow_unused=True)
    return {**outputs, **{n: _zeros_for_none(g, t) for (n, t), g in zip(wanted.items(), found, strict=True)}}


def _zeros_for_none(g: Tensor | None, like: Tensor) -> Tensor:
    # Autograd says None where nothing leads back, and zeros where something does that adds nothing.
    return torch.zeros_like(like) if g is None else g

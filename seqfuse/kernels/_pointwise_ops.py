# pyright: basic
# Schemas are text, and what is registered under them has no types of its own.
"""Point-wise chains as an operator, `torch.ops.seqfuse.pointwise`: what traces and exports see.

The chain is passed as its `text`, dtypes as their names; results come as a list without the one that was not wanted.
Importing the kernel registers it; eager code calls the function, which calls the operator where it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._operators import register as _register

_SCHEMA = (
    "pointwise(Tensor x, str chain, Tensor[] operands, *, ScalarType? dtype=None, str[]? dtypes=None, "
    "bool result=True) -> Tensor[]"
)


def _of_names(names: Sequence[str] | None) -> list[torch.dtype]:
    # A list of dtypes would reach a kernel written in Python as numbers.
    return [getattr(torch, name) for name in names or ()]


def register(pointwise: Callable[..., Any], parse: Callable[[str], Any]) -> None:
    """Register an operator that calls `pointwise.pointwise` with the chain that `parse` makes of a text."""

    def run(
        x: Tensor,
        chain: str,
        operands: Sequence[Tensor],
        *,
        dtype: torch.dtype | None = None,
        dtypes: Sequence[str] | None = None,
        result: bool = True,
    ) -> list[Tensor]:
        results = pointwise(x, parse(chain), operands, dtype=dtype, dtypes=_of_names(dtypes), result=result)
        return [t for t in results if t is not None]

    def fake(
        x: Tensor,
        chain: str,
        operands: Sequence[Tensor],
        *,
        dtype: torch.dtype | None = None,
        dtypes: Sequence[str] | None = None,
        result: bool = True,
    ) -> list[Tensor]:
        steps = parse(chain)
        width = (x.shape[-1] if x.ndim else 1) // steps.parts[0]
        dtype = dtype or x.dtype
        wanted = iter(_of_names(dtypes) or [dtype] * len(steps.steps))
        results = [x.new_empty((*x.shape[:-1], steps.parts[-1] * width) if x.ndim else (), dtype=dtype)] * result
        for step, parts in zip(steps.steps, steps.parts, strict=False):
            if step.output == "matrix":
                results.append(x.new_empty((*x.shape[:-1], parts * width) if x.ndim else (), dtype=next(wanted)))
            elif step.output == "row":
                results.append(x.new_empty((parts * width,), dtype=next(wanted)))
        return results

    _register(_SCHEMA, run, fake)


def recorded(
    x: Tensor,
    chain: str,
    operands: Sequence[Tensor],
    dtype: torch.dtype | None,
    dtypes: Sequence[torch.dtype],
    result: bool,
) -> tuple[Tensor | None, ...]:
    """`pointwise.pointwise` by its operator."""
    made = torch.ops.seqfuse.pointwise(
        x,
        chain,
        list(operands),
        dtype=dtype,
        dtypes=[str(of).removeprefix("torch.") for of in dtypes] or None,
        result=result,
    )
    return tuple(made) if result else (None, *made)

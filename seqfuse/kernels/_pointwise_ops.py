# pyright: basic
# Schemas are text, and what is registered under them has no types of its own.
"""Point-wise chains as an operator, `torch.ops.seqfuse.pointwise`: what traces and exports see.

The chain is passed as its `text`, dtypes as their names; results come as a list without the one that was not wanted.
Importing this module registers it; eager code calls the function, which calls the operator where it is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import pointwise

_library = torch.library.Library("seqfuse", "FRAGMENT")
_SCHEMA = (
    "pointwise(Tensor x, str chain, Tensor[] operands, *, ScalarType? dtype=None, str[]? dtypes=None, "
    "bool result=True) -> Tensor[]"
)


def _of_names(names: Sequence[str] | None) -> list[torch.dtype]:
    # A list of dtypes would reach a kernel written in Python as numbers.
    return [getattr(torch, name) for name in names or ()]


def _run(
    x: Tensor,
    chain: str,
    operands: Sequence[Tensor],
    *,
    dtype: torch.dtype | None = None,
    dtypes: Sequence[str] | None = None,
    result: bool = True,
) -> list[Tensor]:
    results = pointwise.pointwise(
        x, pointwise.parse(chain), operands, dtype=dtype, dtypes=_of_names(dtypes), result=result
    )
    return [t for t in results if t is not None]


def _fake(
    x: Tensor,
    chain: str,
    operands: Sequence[Tensor],
    *,
    dtype: torch.dtype | None = None,
    dtypes: Sequence[str] | None = None,
    result: bool = True,
) -> list[Tensor]:
    steps = pointwise.parse(chain)
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


_library.define(_SCHEMA)
_library.impl("pointwise", _run, "CompositeExplicitAutograd")
torch.library.register_fake("seqfuse::pointwise", _fake, lib=_library)


def recorded(
    x: Tensor,
    chain: pointwise.Chain,
    operands: Sequence[Tensor],
    dtype: torch.dtype | None,
    dtypes: Sequence[torch.dtype],
    result: bool,
) -> tuple[Tensor | None, ...]:
    """`pointwise.pointwise` by its operator."""
    made = torch.ops.seqfuse.pointwise(
        x,
        chain.text,
        list(operands),
        dtype=dtype,
        dtypes=[str(of).removeprefix("torch.") for of in dtypes] or None,
        result=result,
    )
    return tuple(made) if result else (None, *made)

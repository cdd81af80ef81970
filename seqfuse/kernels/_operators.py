# pyright: basic
# torch gives what it registers no types.
"""Registers functions of this package as operators, `torch.ops.seqfuse.*`: what traces and exports see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import flop_counter

_library = torch.library.Library("seqfuse", "FRAGMENT")
_registered: set[str] = set()


def register(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
    flops: Callable[..., int] | None = None,
) -> None:
    """Register an operator, once for each name.

    Args:
        schema: its name and arguments.
        run: what runs.
        fake: gives results of the right shapes.
        tags: of torch.
        flops: gives the FLOPs that torch's `FlopCounterMode` counts, as it counts those of ATen's operators.
    """
    name = schema.partition("(")[0]
    if name in _registered:
        return
    _registered.add(name)
    _library.define(schema, tags=tuple(tags))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"seqfuse::{name}", fake, lib=_library)
    if flops is not None:
        # Raw: called with the tensors of the call and its result, `out_val`.
        flop_counter.register_flop_formula(getattr(torch.ops.seqfuse, name), get_raw=True)(flops)

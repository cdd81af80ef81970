# pyright: basic
# torch gives what it registers no types.
"""Registers functions of this package as operators, `torch.ops.seqfuse.*`: what traces and exports see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_library = torch.library.Library("seqfuse", "FRAGMENT")
_registered: set[str] = set()


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any], tags: Sequence[torch.Tag] = ()) -> None:
    """Register an operator: what runs, and what gives the shapes of its results. The first one of a name stays."""
    name = schema.partition("(")[0]
    if name in _registered:
        return
    _registered.add(name)
    _library.define(schema, tags=tuple(tags))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"seqfuse::{name}", fake, lib=_library)

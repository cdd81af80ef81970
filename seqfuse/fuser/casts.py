"""The casts of a plan, as it says them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ..casts import dtype_of
from ..env import Env
from .step import Step


@dataclasses.dataclass(frozen=True, slots=True)
class Cast:
    """The cast of a tensor at a position, of `"x"`, which enters the operation there, or of a parameter by its name."""

    at: int
    name: str
    dtype: torch.dtype


def casts_of(steps: Sequence[Step], env: Env) -> tuple[Cast, ...]:
    """The casts of a forward schedule under autocast."""
    found: list[Cast] = []
    absorbed: int | None = None
    for step in steps:
        if step.cast is not None and absorbed != step.start:
            found.append(Cast(step.start, "x", step.cast))
        absorbed = step.stop if step.y_dtype is not None else None
        for position, node in enumerate(step.nodes, step.start):
            operation: Any = node.operation
            parameters = node.slots.items() if getattr(operation, "autocast", None) == "lower" else ()
            dtypes = [(name, dtype_of(owner, own)) for name, (owner, own) in parameters]
            found += [Cast(position, name, env.cast(dtype)) for name, dtype in dtypes if env.cast(dtype) is not dtype]
    return tuple(found)

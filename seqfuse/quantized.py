"""Tensors in 8 bits that an operation hands to the next one, and what that one asks for."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .recipes import Recipe, Role

COLUMNS = 128
"""Of tiles that kernels quantize: each has whole blocks."""


class Operand(NamedTuple):
    """A quantized matrix: 8-bit numbers and the inverse of their scales, as `recipes.quantize` gives them."""

    data: Tensor
    inverse: Tensor


class Quantized(NamedTuple):
    """A tensor that exists only in 8 bits: the kernel that computed it quantized it for the `Linear` that reads it.

    It stands between two steps of a segment, in the place of a tensor. It is no input or output of an autograd node.
    """

    rows: Operand | None  # quantized along its rows
    columns: Operand | None  # and down its columns
    shape: torch.Size
    dtype: torch.dtype  # that it was rounded to before it was quantized
    device: torch.device


@dataclasses.dataclass(frozen=True, eq=False)
class Quantize:
    """How the step behind, or in a backward pass the one before, takes its tensor: what `to` is of `fwd` and `bwd`.

    Attributes:
        at: the position of the operation that takes it.
        operation: that operation.
        recipe: its recipe.
        role: `"x"` or `"dy"`.
        rows: whether it is read along its rows.
        columns: whether it is read down its columns.
        record: whether its maximum is noted, under delayed scaling.
    """

    at: int
    operation: Any
    recipe: Recipe
    role: Role
    rows: bool
    columns: bool
    record: bool

    @property
    def block(self) -> int | None:
        """How many numbers along a row share a scale; `None` for a scale that is given."""
        return None if self.recipe.keeps_state else self.recipe.block(self.role, "rows")[1]

    def kept(self, x: Tensor) -> Any:
        """The scale that is kept of it, and where its maximum is noted; `None` unless scaling is delayed."""
        return self.operation.scale_for(self.role, x, self.recipe, self.record)


def is_local(recipe: Recipe) -> bool:
    """Whether a kernel that has a few rows and columns at hand can quantize them: no scale needs all others."""
    return recipe.keeps_state or recipe.block("x", "rows")[1] in (32, 128)

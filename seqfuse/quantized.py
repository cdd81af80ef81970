"""8-bit tensors that one operation passes to the next, and the format that the reader requests."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .recipes import Recipe, Role

COLUMNS = 128
"""Columns of a tile in kernels that quantize: whole blocks."""


class Operand(NamedTuple):
    """A quantized matrix: 8-bit data and inverse scales, as returned by `recipes.quantize`."""

    data: Tensor
    inverse: Tensor


class Quantized(NamedTuple):
    """A tensor that exists only in 8 bits: the kernel that computed it quantized it for the `Linear` that reads it.

    It replaces a tensor between two steps of a segment and is never an input or output of an autograd node.
    """

    rows: Operand | None  # quantized along its rows
    columns: Operand | None  # and down its columns
    shape: torch.Size
    dtype: torch.dtype  # to which it was rounded before quantization
    device: torch.device


@dataclasses.dataclass(frozen=True, eq=False)
class Quantize:
    """The format in which the next operation (for dy the previous one) reads a tensor; the argument `to` of a pass.

    Attributes:
        at: the position of the reader.
        operation: the reader.
        recipe: its recipe.
        role: `"x"` or `"dy"`.
        rows: whether it is read along its rows.
        columns: whether it is read down its columns.
        record: whether its maximum is recorded, under delayed scaling.
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
        """Number of elements along a row that share a scale; `None` for a precomputed scale."""
        return None if self.recipe.keeps_state else self.recipe.block(self.role, "rows")[1]

    def kept(self, x: Tensor) -> Any:
        """Its stored scale and the place for its maximum; `None` unless scaling is delayed."""
        return self.operation.scale_for(self.role, x, self.recipe, self.record)


def is_local(recipe: Recipe) -> bool:
    """Whether a kernel can quantize a tile without the rest of the tensor."""
    return recipe.keeps_state or recipe.block("x", "rows")[1] in (32, 128)

"""Recipes of the tests, and each recipe's definition in docs/low_precision.md in terms of `formats`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from seqfuse import recipes
from seqfuse.recipes import Direction, Recipe, Role

from . import formats

RECIPES: tuple[Recipe, ...] = (
    recipes.Float8CurrentScaling(),
    recipes.Float8RowScaling(),
    recipes.Float8BlockScaling(),
    recipes.MXFP8(),
)
OTHERS: tuple[Recipe, ...] = (
    recipes.Float8CurrentScaling(format="e4m3", power_of_two=True),
    recipes.Float8RowScaling(format="hybrid", power_of_two=True),
    recipes.Float8BlockScaling(format="hybrid", power_of_two=False),
    recipes.MXFP8(format="hybrid"),
)
ROLES: tuple[Role, ...] = ("x", "weight", "dy")
DIRECTIONS: tuple[Direction, ...] = ("rows", "columns")
# Without roles that a recipe quantizes as it does x.
PAIRS: list[tuple[Recipe, Role]] = [
    (recipe, role)
    for recipe in RECIPES + OTHERS
    for role in ROLES
    if role == "x" or (recipe.dtype(role), recipe.block(role, "rows")) != (recipe.dtype("x"), recipe.block("x", "rows"))
]


def named(value: Recipe | Role) -> str:
    return value if isinstance(value, str) else f"{type(value).__name__}-{value.format}-{value.power_of_two}"


def form_of(recipe: Recipe, role: str) -> formats.Format:
    return formats.E5M2 if role == "dy" and recipe.format == "hybrid" else formats.E4M3


def size_of(recipe: Recipe, role: str, direction: str) -> tuple[int | None, int | None]:
    along: Any = {
        "Float8CurrentScaling": (None, None),
        "Float8RowScaling": (1, None),
        "Float8BlockScaling": (1, 128),
        "MXFP8": (1, 32),
    }[type(recipe).__name__]
    if isinstance(recipe, recipes.Float8BlockScaling) and role == "weight":
        return 128, 128
    return along if direction == "rows" else along[::-1]


def expected(x: torch.Tensor, recipe: Recipe, role: str, direction: str) -> tuple[np.ndarray, np.ndarray]:
    mx = isinstance(recipe, recipes.MXFP8)
    size, form = size_of(recipe, role, direction), form_of(recipe, role)
    return formats.quantized(x, size, form, recipe.power_of_two, mx)


def multiplied(x: torch.Tensor, recipe: Recipe, role: str, direction: str) -> np.ndarray:
    """The operand that a GEMM multiplies, in float64."""
    mx = isinstance(recipe, recipes.MXFP8)
    codes, inverse = expected(x, recipe, role, direction)
    return formats.values(codes, inverse, size_of(recipe, role, direction), form_of(recipe, role), mx)

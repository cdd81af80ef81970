"""Recipes of the tests and what docs/low_precision.md says of each, and numbers that are hard to quantize."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seqfuse import recipes
from seqfuse.recipes import Direction, Recipe, Role
from seqfuse.testing import seeded_randn

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


def draw(*shape: int, seed: int, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """Asymmetric numbers of different magnitudes, the same on each machine."""
    return ((seeded_randn(shape, seed) * seeded_randn(shape, seed + 100).exp() + 0.2) * factor).to(dtype)


def hard(form: Any) -> list[Tensor]:
    """Numbers at every code, tie and neighbor of a format, at the limits of float32, zeros, and non-finite ones."""
    values = form.values
    middles = (values[1:] + values[:-1]) / 2
    numbers = np.concatenate([values, middles]).astype(np.float32)
    numbers = np.concatenate([numbers, np.nextafter(numbers, np.float32(np.inf)), np.nextafter(numbers, np.float32(0))])
    numbers = np.minimum(numbers, np.float32(values[-1]))
    found: list[Tensor] = []
    in_turn = np.where(np.arange(numbers.size) % 4 < 2, numbers, -numbers)
    for factor, signed in ((1.0, np.concatenate([numbers, -numbers])), (3e-3, in_turn), (2.0**90, -in_turn)):
        one = torch.from_numpy(signed * np.float32(factor))
        beside = torch.full((-(-one.numel() // 4), 4, 32), float(values[-1] * factor))  # each beside the largest
        beside.view(-1, 32)[: one.numel(), 0] = one
        found += [one[None], beside.flatten(1)]
    ends = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-126, 1e-30, 1.0, 448.0, 449.0, 57344.0, 1e30, 3.4028234e38]
    found += [torch.tensor(ends).repeat(40, 11), torch.tensor(ends)[:, None].repeat(1, 33), torch.zeros(3, 130)]
    for bad in (math.nan, math.inf, -math.inf):
        x = seeded_randn((130, 140), 0)
        x[3, 5] = bad
        found.append(x)
    return found

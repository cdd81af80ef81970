"""`recipes.quantize` gives the codes and scales of a reference in numpy, bit for bit."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch

import seqfuse as sf
from seqfuse import recipes
from seqfuse.recipes import Recipe
from seqfuse.testing import seeded_randn

from . import formats
from .named import DIRECTIONS, OTHERS, PAIRS, RECIPES, ROLES, expected, form_of, named, size_of

SHAPES = [(1, 1), (7, 31), (32, 32), (33, 127), (3, 128), (129, 129), (128, 300), (2, 3, 40), (9,), (0, 8), (8, 0)]
every_recipe = pytest.mark.parametrize("recipe", RECIPES + OTHERS, ids=named)


def assert_as_expected(x: torch.Tensor, recipe: Recipe, role, direction) -> None:
    data, inverse = recipes.quantize(x, recipe, role, direction)
    codes, scales = expected(x, recipe, role, direction)
    assert data.shape == x.shape
    form = form_of(recipe, role)
    assert data.dtype is (torch.float8_e4m3fn if form is formats.E4M3 else torch.float8_e5m2)
    np.testing.assert_array_equal(data.view(torch.uint8).reshape(codes.shape).numpy(), codes)
    if isinstance(recipe, recipes.MXFP8):
        assert inverse.dtype is torch.float8_e8m0fnu
        np.testing.assert_array_equal(inverse.view(torch.uint8).numpy(), scales)
    else:
        assert inverse.dtype is torch.float32
        shape = () if size_of(recipe, role, direction) == (None, None) else scales.shape
        assert inverse.shape == shape
        np.testing.assert_array_equal(inverse.numpy().reshape(scales.shape).view(np.int32), scales.view(np.int32))


@every_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_and_scales_are_those_of_the_reference(recipe: Recipe, shape: tuple[int, ...]):
    for i, role in enumerate(role for of, role in PAIRS if of is recipe):
        for direction in DIRECTIONS:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                # Blocks of very different sizes.
                x = seeded_randn(shape, i) * (3 * seeded_randn(shape, 10 + i)).exp() - 0.1
                assert_as_expected(x.to(dtype), recipe, role, direction)


@pytest.mark.parametrize(("recipe", "role"), PAIRS, ids=named)
def test_every_code_tie_and_neighbour(recipe: Recipe, role):
    values = form_of(recipe, role).values
    middles = (values[1:] + values[:-1]) / 2
    hard = np.concatenate([values, middles]).astype(np.float32)
    hard = np.concatenate([hard, np.nextafter(hard, np.float32(np.inf)), np.nextafter(hard, np.float32(0))])
    hard = np.minimum(hard, np.float32(values[-1]))
    for factor in (1.0, 2.0**-20, 1.7, 3e-3, 2.0**90):
        x = torch.from_numpy(np.concatenate([hard, -hard]) * np.float32(factor))
        largest = torch.full((x.numel(), 31), float(values[-1] * factor))
        # Each of them with the largest number beside it, so that the scale is that of the factor.
        for t in (x.unsqueeze(0), torch.cat([x.unsqueeze(1), largest], 1), x.unsqueeze(1)):
            for direction in DIRECTIONS:
                assert_as_expected(t, recipe, role, direction)


@every_recipe
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_numbers_at_the_ends_of_float32(recipe: Recipe, role, direction):
    special = [0.0, -0.0, 1e-45, -1e-45, 1e-40, 2.0**-126, 1e-30, 1.0, 448.0, 449.0, 57344.0, 1e30, 3.4028234e38]
    for value in special:
        x = torch.zeros(3, 33)
        x[1, 32], x[2, 5] = value, -value / 3
        assert_as_expected(x, recipe, role, direction)
    x = torch.tensor(special).repeat(40, 11)
    assert_as_expected(x, recipe, role, direction)


@every_recipe
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_visible(recipe: Recipe, role, bad: float):
    x = seeded_randn((130, 70), 0)
    x[3, 5] = bad
    for direction in DIRECTIONS:
        assert_as_expected(x, recipe, role, direction)
        data, inverse = recipes.quantize(x, recipe, role, direction)
        assert torch.equal(data.float().isnan(), ~x.isfinite())
        assert inverse.float().isfinite().all()


@every_recipe
def test_dequantized_numbers_are_data_times_inverse_scales(recipe: Recipe):
    x = seeded_randn((130, 140), 1)
    for role in ROLES:
        for direction in DIRECTIONS:
            data, inverse = recipes.quantize(x, recipe, role, direction)
            got = recipes.dequantize(data, inverse, recipe, role, direction)
            codes, scales = expected(x, recipe, role, direction)
            mx = isinstance(recipe, recipes.MXFP8)
            exact = formats.values(codes, scales, size_of(recipe, role, direction), form_of(recipe, role), mx)
            np.testing.assert_array_equal(got.numpy(), exact.astype(np.float32))


def test_strided_and_expanded_tensors_and_leading_dimensions():
    x = seeded_randn((6, 5, 64), 2)
    for recipe in RECIPES:
        for role in ROLES:
            for direction in DIRECTIONS:
                for t in (x.transpose(0, 1), x[:, ::2], x[:1].expand(4, 5, 64), x.requires_grad_()):
                    assert_as_expected(t.contiguous(), recipe, role, direction)
                    for a, b in zip(
                        recipes.quantize(t, recipe, role, direction),
                        recipes.quantize(t.reshape(-1, 64), recipe, role, direction),
                        strict=True,
                    ):
                        assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))
                        assert not a.requires_grad


def test_float64_is_quantized_from_the_nearest_float32():
    x = seeded_randn((4, 32), 0, dtype=torch.float64)
    for recipe in RECIPES:
        wide, narrow = (recipes.quantize(t, recipe, "x", "rows") for t in (x, x.float()))
        assert all(torch.equal(a.float(), b.float()) for a, b in zip(wide, narrow, strict=True))


def test_recipes_are_values():
    for recipe in (
        *RECIPES,
        *OTHERS,
        recipes.MXFP8(strict=True, emulate=True),
        recipes.Float8DelayedScaling(history=3),
    ):
        traced = recipes.recipe_of(*recipe.constants)
        for same in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe)), type(recipe)(**vars(recipe)), traced):
            assert same == recipe
            assert hash(same) == hash(recipe)
    assert len({*RECIPES, *OTHERS}) == 8
    assert recipes.MXFP8(strict=True) != recipes.MXFP8()
    with pytest.raises(AttributeError):
        RECIPES[0].format = "e4m3"  # pyright: ignore[reportAttributeAccessIssue]


def test_wrong_arguments_are_named():
    x = torch.randn(4, 4)
    for call, match in [
        (lambda: recipes.quantize(x, recipes.MXFP8, "x", "rows"), "takes a recipe"),  # pyright: ignore[reportArgumentType]
        (lambda: recipes.quantize(x, recipes.MXFP8(), "y", "rows"), "role must be one of 'x', 'weight', 'dy'"),  # pyright: ignore[reportArgumentType]
        (lambda: recipes.quantize(x, recipes.MXFP8(), "x", "down"), "direction must be one of 'rows', 'columns'"),  # pyright: ignore[reportArgumentType]
        (lambda: recipes.quantize(x.long(), recipes.MXFP8(), "x", "rows"), "floating tensor"),
        (lambda: recipes.quantize(x[0, 0], recipes.MXFP8(), "x", "rows"), "floating tensor"),
        (lambda: recipes.MXFP8(format="e5m2"), 'format "hybrid" or "e4m3"'),  # pyright: ignore[reportArgumentType]
    ]:
        with pytest.raises(sf.InputError, match=match):
            call()

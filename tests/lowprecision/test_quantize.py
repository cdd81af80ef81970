"""`recipes.quantize` gives the codes and scales of a reference in numpy, bit for bit."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

import seqfuse as sf
from seqfuse import recipes
from seqfuse.recipes import Recipe
from seqfuse.testing import seeded_randn

from . import formats
from .named import DIRECTIONS, OTHERS, PAIRS, RECIPES, ROLES, expected, form_of, hard, named, size_of

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
    for x in hard(form_of(recipe, role)):
        assert_as_expected(x, recipe, role, "rows")
        assert_as_expected(x.t().contiguous(), recipe, role, "columns")


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
    x, ends = torch.randn(4, 32), torch.tensor([1, 4])
    given: dict[str, Any] = {"x": x, "recipe": recipes.MXFP8(), "role": "x", "direction": "rows"}
    current, delayed = recipes.Float8CurrentScaling(), recipes.Float8DelayedScaling()
    for wrong, code, match in [
        ({"recipe": recipes.MXFP8}, "SF106", "takes a recipe"),
        ({"role": "y"}, "SF106", "role must be one of 'x', 'weight', 'dy'"),
        ({"direction": "down"}, "SF106", "direction must be one of 'rows', 'columns'"),
        ({"x": x.long()}, "SF102", "floating tensor"),
        ({"x": x[0, 0]}, "SF102", "floating tensor"),
        ({"x": x.numpy()}, "SF102", "not ndarray"),
        ({"recipe": current, "scale": torch.tensor(2.0)}, "SF106", "computes its scales"),
        ({"recipe": delayed, "scale": 2.0}, "SF102", "scale of 1 numbers, not float"),
        ({"recipe": delayed, "scale": torch.ones(3)}, "SF102", "scale of 1 numbers"),
        ({"recipe": delayed, "scale": torch.tensor(1.0), "offsets": ends}, "SF102", "scale of 2 numbers"),
        *[
            ({"recipe": current, "offsets": wrong}, "SF102", "offsets must be integers")
            for wrong in ([1, 4], ends.float(), ends[None])
        ],
    ]:
        with pytest.raises(sf.InputError, match=match) as caught:
            recipes.quantize(**given | wrong)
        assert caught.value.code == code
    for wrong in ({"format": "e5m2"}, {"strict": None}, {"emulate": "no"}):
        with pytest.raises(sf.InputError, match=r'format "hybrid" or "e4m3"|takes True or False for (strict|emulate)'):
            recipes.MXFP8(**wrong)
    with pytest.raises(sf.InputError, match="takes True or False for power_of_two"):
        recipes.Float8RowScaling(power_of_two=1)  # pyright: ignore[reportArgumentType]


def test_numbers_are_dequantized_with_scales_of_their_recipe_and_direction_alone():
    data, inverse = recipes.quantize(torch.randn(4, 64), recipes.MXFP8(), "x", "rows")
    for recipe, role, direction, match in [
        (recipes.MXFP8(), "x", "columns", "1 x 64 scales"),
        (recipes.Float8RowScaling(), "x", "rows", "4 x 1 scales"),
        (recipes.MXFP8(), "y", "rows", "role must be one of"),
        (recipes.MXFP8, "x", "rows", "takes a recipe"),
    ]:
        with pytest.raises(sf.InputError, match=match):
            recipes.dequantize(data, inverse, recipe, role, direction)  # pyright: ignore[reportArgumentType]

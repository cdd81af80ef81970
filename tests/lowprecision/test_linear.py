"""Linear and MergedLinear under recipes: each GEMM multiplies operands quantized by the reference in numpy, within the
error of a float32 sum."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops, recipes, testing
from seqfuse.recipes import Recipe
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from tests.selection import few_cases as few_cases
from tests.selection import some_cases as some_cases

from .named import OTHERS, RECIPES, draw, multiplied, named

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
every_recipe = pytest.mark.parametrize("recipe", RECIPES + OTHERS, ids=named)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=named)


def assert_within(got: Tensor, a: np.ndarray, b: np.ndarray, addend: Any = 0.0) -> None:
    """|got - (a b + addend)| <= eps (|ref| + |addend|) + 2^-22 (2 + log2 K) sum |a| |b|: one sum, rounded once."""
    exact = a @ b + addend
    k, sums = max(a.shape[1], 1), np.abs(a) @ np.abs(b)
    bound = torch.finfo(got.dtype).eps / 2 * (np.abs(exact) + np.abs(addend)) + 2.0**-22 * (2 + math.log2(k)) * sums
    wrong = np.abs(got.detach().double().numpy().reshape(exact.shape) - exact) > bound + torch.finfo(got.dtype).tiny
    assert not wrong.any(), f"{wrong.sum()} of {wrong.size} elements are beyond the error of a sum in float32"


def check_products(recipe: Recipe, rows: int, dtype: torch.dtype, k: int = 80, n: int = 144) -> None:
    """Each of the three GEMMs of a Linear multiplies quantized operands, twice with the same bits."""
    model = sf.Sequential(ops.Linear(k, n, bias=False, dtype=dtype), recipe=recipe)
    (weight,) = model.parameters()
    weight.data = draw(n, k, seed=1, dtype=dtype, factor=0.1)
    x = draw(rows, k, seed=2, dtype=dtype).requires_grad_()
    dy = draw(rows, n, seed=3, dtype=dtype, factor=1e-3)
    y = model(x)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert y.dtype is dx.dtype is dweight.dtype is dtype
    assert_within(y, multiplied(x, recipe, "x", "rows"), multiplied(weight, recipe, "weight", "rows").T)
    assert_within(dx, multiplied(dy, recipe, "dy", "rows"), multiplied(weight, recipe, "weight", "columns"))
    assert_within(dweight, multiplied(dy, recipe, "dy", "columns").T, multiplied(x, recipe, "x", "columns"))
    again = model(x)
    assert_bitwise_equal([again, *torch.autograd.grad(again, (x, weight), dy)], [y, dx, dweight])


@every_recipe
@pytest.mark.parametrize("rows", [1, 7, 33, 129])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_quantized_operands(recipe: Recipe, rows: int, dtype: torch.dtype):
    check_products(recipe, rows, dtype)


@each_recipe
def test_a_wrong_scale_is_beyond_the_bound(recipe: Recipe):
    x, weight = draw(33, 80, seed=2, dtype=torch.float32), draw(144, 80, seed=1, dtype=torch.float32)
    model = sf.Sequential(ops.Linear(80, 144, bias=False), recipe=recipe)
    model[0].weight.data = weight
    a, b = multiplied(x, recipe, "x", "rows"), multiplied(weight, recipe, "weight", "rows").T
    assert_within(model(x), a, b)
    with pytest.raises(AssertionError, match="beyond the error"):
        assert_within(model(x), a * (1 + 2.0**-12), b)
    with pytest.raises(AssertionError, match="beyond the error"):
        assert_within(model(x), x.double().numpy(), weight.double().numpy().T)


@each_recipe
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_is_added_and_its_gradient_is_of_the_gradient_as_it_is(recipe: Recipe, dtype: torch.dtype):
    model = sf.Sequential(ops.Linear(32, 48, dtype=dtype), recipe=recipe)
    linear: Any = model[0]
    x, dy = draw(9, 32, seed=2, dtype=dtype), draw(9, 48, seed=3, dtype=dtype)
    product = sf.Sequential(ops.Linear(32, 48, bias=False, dtype=dtype), recipe=recipe)
    product[0].weight = linear.weight
    y = model(x)
    assert torch.equal(y, product(x) + linear.bias)
    (dbias,) = torch.autograd.grad(y, (linear.bias,), dy)
    assert torch.equal(dbias, dy.sum(0))


def assert_parts(
    op: Any, x: Tensor, dy: Tensor, y: Tensor, grads: list[Tensor], recipe: Recipe, main: float = 0.0
) -> None:
    """The output of a MergedLinear is that of each part by itself; `grads` are of x and weights, the first with
    `main`."""
    a = multiplied(x, recipe, "x", "rows")
    for part, weight, shift in zip(y.split(op.parts, -1), op.weights(), op.biases(), strict=True):
        addend = 0.0 if shift is None else shift.detach().double().numpy()
        assert_within(part, a, multiplied(weight, recipe, "weight", "rows").T, addend)
    each = dy.split(op.parts, -1)
    along = np.concatenate([multiplied(d, recipe, "dy", "rows") for d in each], 1)
    down = np.concatenate([multiplied(weight, recipe, "weight", "columns") for weight in op.weights()], 0)
    assert_within(grads[0], along, down)
    for i, (d, dweight) in enumerate(zip(each, grads[1:], strict=True)):
        left, right = multiplied(d, recipe, "dy", "columns").T, multiplied(x, recipe, "x", "columns")
        assert_within(dweight, left, right, 0.0 if i else main)


@each_recipe
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True, (True, False, True)], ids=str)
def test_merged_linear_quantizes_x_once_and_each_weight_by_itself(recipe: Recipe, dtype: torch.dtype, bias: Any):
    parts = (48, 16, 32)
    op: Any = ops.MergedLinear(64, parts, bias, dtype=dtype)
    for i, weight in enumerate(op.weights()):
        weight.data.copy_(draw(parts[i], 64, seed=i, dtype=dtype, factor=10.0**-i))
    model = sf.Sequential(op, recipe=recipe)
    x = draw(9, 64, seed=5, dtype=dtype).requires_grad_()
    dy = draw(9, 96, seed=6, dtype=dtype)
    y = model(x)
    assert_parts(op, x, dy, y, list(torch.autograd.grad(y, (x, *op.weights()), dy)), recipe)


@pytest.mark.parametrize("recipe", [recipes.Float8BlockScaling(), recipes.MXFP8()], ids=named)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("laid", [True, False])
def test_parts_that_end_with_blocks_are_one_weight(
    recipe: Recipe, bias: bool, laid: bool, monkeypatch: pytest.MonkeyPatch
):
    parts, dtype = (128, 256, 128), torch.bfloat16
    op: Any = ops.MergedLinear(160, parts, bias, dtype=dtype)
    if not laid:
        op = ops.MergedLinear.of(*(ops.Linear(160, size, bias, dtype=dtype) for size in parts))
    for i, (weight, shift) in enumerate(zip(op.weights(), op.biases(), strict=True)):
        weight.data.copy_(draw(parts[i], 160, seed=i, dtype=dtype, factor=10.0**-i))
        if shift is not None:
            shift.data.copy_(draw(parts[i], seed=i, dtype=dtype))
    op.weight_0.main_grad = torch.full((128, 160), 0.5)
    calls: list[str] = []
    low: Any = ops.linear.low
    quantize = low.quantize
    monkeypatch.setattr(
        low, "quantize", lambda x, r, role, d, **s: (calls.append(role), quantize(x, r, role, d, **s))[1]
    )
    model = sf.Sequential(op, recipe=recipe)
    x, dy = draw(37, 160, seed=5, dtype=dtype).requires_grad_(), draw(37, 512, seed=6, dtype=dtype)
    y = model(x)
    y.backward(dy)
    square = isinstance(recipe, recipes.Float8BlockScaling)
    assert calls.count("weight") == (1 if laid else 3) * (1 if square else 2)
    assert calls.count("dy") == 2 * (1 if laid else 3)
    grads: Any = [x.grad, op.weight_0.main_grad, op.weight_1.grad, op.weight_2.grad]
    assert_parts(op, x, dy, y, grads, recipe, 0.5)


@each_recipe
def test_check_op_passes(recipe: Recipe):
    op = ops.Linear(16, 32)
    op.recipe = recipe
    testing.check_op(op, seeded_randn((5, 16), 0))
    merged = ops.MergedLinear(16, (32, 16), (True, False))
    merged.recipe = recipe
    testing.check_op(merged, seeded_randn((5, 16), 0))


class Users(ops.Linear):
    """A user's Linear."""


def test_check_op_sees_a_gradient_that_is_a_little_off(monkeypatch: pytest.MonkeyPatch):
    op: Any = ops.Linear(16, 32, bias=False)
    op.recipe = recipes.Float8BlockScaling()
    grads: Any = ops.Linear._quantized_grads

    def off(*given: Any) -> Any:
        dx, others = grads(*given)
        return None if dx is None else dx * (1 + 2.0**-16), others

    monkeypatch.setattr(ops.Linear, "_quantized_grads", off)
    with pytest.raises(AssertionError, match="d_x"):
        testing.check_op(op, seeded_randn((5, 16), 0), dtypes=[torch.float32])


@each_recipe
def test_only_what_gradients_read_is_quantized_and_saved(recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, str]] = []
    low: Any = ops.linear.low
    quantize = low.quantize
    monkeypatch.setattr(
        low, "quantize", lambda x, r, role, d, **s: (calls.append((role, d)), quantize(x, r, role, d, **s))[1]
    )
    shared = isinstance(recipe, recipes.Float8CurrentScaling)
    of_weight = shared or isinstance(recipe, recipes.Float8BlockScaling)
    for frozen, given, wanted in [
        (False, True, {("x", "columns"), ("weight", "columns")}),
        (True, True, {("weight", "columns")}),
        (False, False, {("x", "columns")}),
        (True, False, set()),
    ]:
        model = sf.Sequential(ops.Linear(32, 48, bias=False), recipe=recipe)
        model.requires_grad_(not frozen)
        x = seeded_randn((64, 32), 0).requires_grad_(given)
        calls.clear()
        y = model(x)
        kept = {("x", "rows"), ("weight", "rows")} | wanted
        kept -= {("x", "columns")} if shared else set()
        kept -= {("weight", "columns")} if of_weight else set()
        assert sorted(calls) == sorted(kept)
        if wanted:
            calls.clear()
            y.sum().backward()
            back = {("dy", "rows")} if given else set()
            back |= {("dy", "columns")} if not frozen and not (shared and given) else set()
            assert sorted(calls) == sorted(back)


def test_bytes_that_an_mlp_saves_under_block_scaling():
    rows, width, hidden = 256, 128, 512
    x = seeded_randn((rows, width), 0).bfloat16().requires_grad_()
    model = sf.Sequential(
        ops.Linear(width, hidden, bias=False), ops.GeLU(), ops.Linear(hidden, width, bias=False)
    ).bfloat16()
    plain = model.plan(x).memory
    model.recipe = recipes.Float8BlockScaling()
    with sf.fusing(False):
        low = model.plan(x).memory
    assert plain is not None
    assert low is not None
    z = 2 * rows * hidden  # saved by the activation, in 16 bits
    # x and h in 8 bits with a float32 for 128 of them; weights in 8 bits with one for 128 x 128.
    saved = z + sum(rows * n + 4 * n * rows // 128 for n in (width, hidden))
    saved += 2 * (width * hidden + 4 * (width // 128) * (hidden // 128))
    assert low.saved == saved
    model.requires_grad_(False)
    with sf.fusing(False):
        frozen = model.plan(x).memory
    assert frozen is not None
    assert frozen.saved == z + 2 * (width * hidden + 4 * (width // 128) * (hidden // 128))


@each_recipe
def test_no_rows_and_leading_dimensions(recipe: Recipe):
    model = sf.Sequential(ops.Linear(32, 16), recipe=recipe)
    x = seeded_randn((0, 32), 0).requires_grad_()
    y = model(x)
    y.sum().backward()
    assert y.shape == (0, 16)
    assert model[0].weight.grad is not None
    assert not model[0].weight.grad.any()
    x = seeded_randn((2, 3, 4, 32), 0)
    assert torch.equal(model(x), model(x.view(24, 32)).view(2, 3, 4, 16))
    assert torch.equal(model(x[0, 0, 0]), model(x.view(24, 32)[:1])[0])


@each_recipe
def test_main_grad_gets_the_sum_in_float32(recipe: Recipe):
    model = sf.Sequential(ops.Linear(32, 48, bias=False, dtype=torch.bfloat16), recipe=recipe)
    weight: Any = model[0].weight
    x = draw(40, 32, seed=0, dtype=torch.bfloat16)
    dy = draw(40, 48, seed=1, dtype=torch.bfloat16)
    weight.main_grad = torch.full((48, 32), 0.5)
    model(x).backward(dy)
    model(x).backward(dy)
    a, b = multiplied(dy, recipe, "dy", "columns").T, multiplied(x, recipe, "x", "columns")
    assert_within(weight.main_grad, np.concatenate([a, a], 1), np.concatenate([b, b], 0), 0.5)


def test_sizes_and_dtypes_that_are_not_quantized_say_so_and_keep_their_bits():
    x = seeded_randn((4, 33), 0)
    for op, given, reason in [
        (ops.Linear(33, 48), x, "in_features 33 is not a multiple of 16, so it is not quantized"),
        (ops.Linear(48, 40), seeded_randn((4, 48), 0), "out_features 40 is not a multiple of 16"),
        (ops.MergedLinear(32, (32, 8)), seeded_randn((4, 32), 0), "out_features 8 is not a multiple of 16"),
        (ops.Linear(32, 32, dtype=torch.float64), seeded_randn((4, 32), 0).double(), "float64 is not quantized"),
    ]:
        for recipe in RECIPES:
            model = sf.Sequential(op, recipe=recipe)
            plan = model.plan(given)
            (refusal,) = [r for r in plan.refused if r.fusion == type(recipe).__name__]
            assert refusal.reason.startswith(reason)
            assert refusal.at == 0
            assert f"{type(recipe).__name__} at 0: {reason.split(',')[0]}" in " ".join(str(plan).split())
            assert not plan.quantizations
            assert torch.equal(model(given), sf.Sequential(op)(given))
            strict = sf.Sequential(op, recipe=type(recipe)(strict=True))
            for call in (strict, strict.plan):
                with pytest.raises(sf.InputError, match=reason.split(",")[0]) as caught:
                    call(given)
                assert caught.value.code == "SF108"
                assert caught.value.path == "0"
    rows = sf.Sequential(ops.Linear(32, 32), recipe=recipes.MXFP8(strict=True))
    for m in (1, 7, 17):
        assert rows(seeded_randn((m, 32), 0)).shape == (m, 32)


def test_a_class_of_the_user_is_not_quantized():
    model = sf.Sequential(Users(32, 32), recipe=recipes.MXFP8())
    x = seeded_randn((4, 32), 0)
    assert "Users derives from Linear, so it is not quantized" in " ".join(str(model.plan(x)).split())
    assert torch.equal(model(x), sf.Sequential(model[0])(x))

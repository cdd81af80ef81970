"""GEMMs of a GPU, by torch's `_scaled_mm`: their numbers on the CPU's, their layouts on fake tensors of a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import ops, recipes
from seqfuse.ops import _lowprecision as low
from seqfuse.recipes import Recipe
from seqfuse.testing import seeded_randn

from .hard import draw
from .named import multiplied, named
from .test_linear import assert_within

RECIPES: tuple[Recipe, ...] = (
    recipes.Float8CurrentScaling(),
    recipes.Float8CurrentScaling(format="e4m3", power_of_two=True),
    recipes.Float8RowScaling(),
    recipes.Float8RowScaling(format="hybrid"),
)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=named)
# The CPU's has no scales for rows before torch 2.13.
BY_ROWS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low, "by_torch", lambda recipe, data: recipe.whole_rows and not recipe.emulate)


@each_recipe
@pytest.mark.parametrize("rows", [1, 7, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_are_those_of_quantized_operands(recipe: Recipe, rows: int, dtype: torch.dtype):
    if dtype is torch.bfloat16 and isinstance(recipe, recipes.Float8RowScaling) and not BY_ROWS:
        pytest.skip("the CPU's GEMM has no scales for rows")
    x, dy = draw(rows, 80, seed=2, dtype=dtype), draw(rows, 144, seed=3, dtype=dtype, factor=1e-3)
    model = sf.Sequential(ops.Linear(80, 144, bias=False, dtype=dtype), recipe=recipe)
    weight: Any = model[0].weight
    weight.data = draw(144, 80, seed=1, dtype=dtype, factor=0.1)
    x.requires_grad_()
    y = model(x)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert y.dtype is dx.dtype is dweight.dtype is dtype
    assert_within(y, multiplied(x, recipe, "x", "rows"), multiplied(weight, recipe, "weight", "rows").T)
    assert_within(dx, multiplied(dy, recipe, "dy", "rows"), multiplied(weight, recipe, "weight", "columns"))
    assert_within(dweight, multiplied(dy, recipe, "dy", "columns").T, multiplied(x, recipe, "x", "columns"))


@each_recipe
def test_merged_linear_main_grad_and_no_rows(recipe: Recipe):
    parts = (48, 16, 32)
    op: Any = ops.MergedLinear(64, parts, (True, False, True))
    model = sf.Sequential(op, recipe=recipe)
    x, dy = draw(9, 64, seed=5, dtype=torch.float32), draw(9, 96, seed=6, dtype=torch.float32)
    emulated = type(recipe)(**{**vars(recipe), "emulate": True})
    found = []
    for r in (recipe, emulated):
        model.recipe = r
        given = x.clone().requires_grad_()
        for p in model.parameters():
            p.grad, p.main_grad = None, torch.full_like(p, 0.5)  # pyright: ignore[reportAttributeAccessIssue]
        y = model(given)
        y.backward(dy)
        found.append([y, given.grad, *(p.main_grad for p in op.weights())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.detach().abs().max()))
    model.recipe = recipe
    assert model(x[:0]).shape == (0, 96)


def on_gpu(m: int, n: int, recipe: Recipe, role: Any, direction: Any) -> low.Operand:
    """An operand as `quantize` gives it."""
    high, wide = recipe.block(role, direction)
    scales = () if high is None and wide is None else (m if high else 1, n if wide else 1)
    return low.Operand(torch.empty(m, n, device="cuda", dtype=recipe.dtype(role)), torch.empty(scales, device="cuda"))


# Torch without CUDA copies nothing there, not even without data.
@each_recipe
@pytest.mark.parametrize("rows", [16, 48, *([1, 7, 33] if torch.backends.cuda.is_built() else [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_gpu_takes_the_layouts(recipe: Recipe, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(low, "_turned", lambda data: data.new_empty(data.shape[1], data.shape[0]))
    if isinstance(recipe, recipes.Float8RowScaling):
        dtype = torch.bfloat16  # torch cannot multiply numbers of a GPU that is not there, as the others are
    k, n = 80, 144
    with FakeTensorMode():
        x, weight, dy = (
            {d: on_gpu(*size, recipe, role, d) for d in ("rows", "columns")}
            for role, size in (("x", (rows, k)), ("weight", (n, k)), ("dy", (rows, n)))
        )
        y = low.linear(x["rows"], weight["rows"], recipe, dtype)
        dx = low.dgrad(dy["rows"], weight["columns"], recipe, dtype)
        dweight: Any = low.weight_grad(dy["columns"], x["columns"], recipe, dtype)
        for t, shape in ((y, (rows, n)), (dx, (rows, k)), (dweight, (n, k))):
            assert (tuple(t.shape), t.dtype, t.device.type) == (shape, dtype, "cuda")
        one = torch.empty((), device="cuda")
        with pytest.raises(RuntimeError):  # which says that the checks are those of a GPU
            torch._scaled_mm(x["rows"].data, torch.empty(k, n, device="cuda", dtype=y.dtype), one, one, out_dtype=dtype)


def test_plans_for_a_gpu_have_recipes_that_torch_has_gemms_for():
    model = sf.Sequential(ops.RMSNorm(64), ops.Linear(64, 128), ops.GeLU(), ops.Linear(128, 64)).bfloat16()
    for recipe in (*RECIPES, recipes.Float8DelayedScaling()):
        model.recipe = recipe
        for device in ("cuda:sm_89", "cuda:sm_90", "cuda:sm_100", "cuda:sm_120"):
            plan = model.plan(env=sf.Env.of(device, dtype=torch.bfloat16, tokens=4096))
            assert {q.at for q in plan.quantizations} == {1, 4}
        for device in ("cuda:sm_80", "cuda:gfx942", "cuda:gfx950"):
            with pytest.raises(sf.InputError, match=f"has no kernels for {device.removeprefix('cuda:')}"):
                model.plan(env=sf.Env.of(device, dtype=torch.bfloat16, tokens=4096))
    assert not low.by_torch(recipes.MXFP8(), seeded_randn((2, 2), 0))

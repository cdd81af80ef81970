"""GEMMs of a GPU by torch's `_scaled_mm`: numbers on a CPU, layouts on fake CUDA tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import ops, recipes
from seqfuse.ops import _grouped_lowprecision as grouped
from seqfuse.ops import _lowprecision as low
from seqfuse.plan.tally import Tally
from seqfuse.recipes import Recipe

from .named import draw, named
from .test_linear import check_products

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
    monkeypatch.setattr(low, "by_torch", lambda recipe, data: not recipe.emulate)


@each_recipe
@pytest.mark.parametrize("rows", [1, 7, 16, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_are_those_of_quantized_operands(recipe: Recipe, rows: int, dtype: torch.dtype):
    if dtype is torch.bfloat16 and isinstance(recipe, recipes.Float8RowScaling) and not BY_ROWS:
        pytest.skip("the CPU's GEMM has no scales for rows")
    check_products(recipe, rows, dtype)


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
    """An operand in the kernels' layout: codes down columns, and scales of blocks, are column-major."""
    high, wide = recipe.block(role, direction)
    down, across = 1 if high is None else -(-m // high), 1 if wide is None else -(-n // wide)
    data = torch.empty(m, n, device="cuda", dtype=recipe.dtype(role))
    if direction == "columns":
        data = torch.empty(n, m, device="cuda", dtype=recipe.dtype(role)).t()
    if high is None and wide is None:
        return low.Operand(data, torch.empty((), device="cuda"))
    inverse = torch.empty(down, across, device="cuda")
    return low.Operand(data, torch.empty(across, down, device="cuda").t() if (high, wide) == (1, 128) else inverse)


# Torch without CUDA copies nothing there, not even without data.
@each_recipe
@pytest.mark.parametrize("rows", [16, 48, *([1, 7, 33] if torch.backends.cuda.is_built() else [])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_gpu_takes_the_layouts(recipe: Recipe, rows: int, dtype: torch.dtype):
    if isinstance(recipe, recipes.Float8RowScaling):
        dtype = torch.bfloat16  # torch cannot multiply fake CUDA tensors here as it does the others
    assert_taken(recipe, rows, 80, 144, dtype)


@pytest.mark.parametrize(("k", "n"), [(512, 128), (128, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_takes_the_layouts_of_blocks(k: int, n: int, dtype: torch.dtype):
    # With copies of scales, which are skipped there, for the others.
    assert_taken(recipes.Float8BlockScaling(), 256, k, n, dtype, products="y" if k > n else "dx")


def assert_taken(recipe: Recipe, rows: int, k: int, n: int, dtype: torch.dtype, products: str = "y dx") -> None:
    with FakeTensorMode():
        x, weight, dy = (
            {d: on_gpu(*size, recipe, role, d) for d in ("rows", "columns")}
            for role, size in (("x", (rows, k)), ("weight", (n, k)), ("dy", (rows, n)))
        )
        found: list[tuple[Any, tuple[int, int]]] = [
            (low.weight_grad_in_8_bits(dy["columns"], x["columns"], recipe, dtype), (n, k))
        ]
        if "y" in products.split():
            found.append((low.linear_in_8_bits(x["rows"], weight["rows"], recipe, dtype), (rows, n)))
        if "dx" in products:
            found.append((low.dgrad_in_8_bits(dy["rows"], weight["columns"], recipe, dtype), (rows, k)))
        for t, shape in found:
            assert (tuple(t.shape), t.dtype, t.device.type) == (shape, dtype, "cuda")
        one = torch.empty((), device="cuda")
        with pytest.raises(RuntimeError):  # which enables the checks for a GPU
            torch._scaled_mm(x["rows"].data, torch.empty(k, n, device="cuda", dtype=dtype), one, one, out_dtype=dtype)


def test_a_plan_counts_gemms_in_8_bits() -> None:
    for recipe in (*RECIPES, recipes.Float8BlockScaling(), recipes.MXFP8()):
        with FakeTensorMode(), Tally() as tally:
            x, weight = on_gpu(64, 256, recipe, "x", "rows"), on_gpu(128, 256, recipe, "weight", "rows")
            if recipe.by_blocks == 32:
                x, weight = (one._replace(inverse=one.inverse.to(torch.float8_e8m0fnu)) for one in (x, weight))
            low.linear_in_8_bits(x, weight, recipe, torch.bfloat16)
        assert tally.work.flops == 2 * 64 * 256 * 128, recipe
    with FakeTensorMode(), Tally() as tally:
        x, weights = (torch.empty(*size, 256, dtype=torch.float8_e4m3fn, device="cuda") for size in ((64,), (4, 128)))
        scales = (torch.empty(*size, device="cuda") for size in ((64,), (4, 128)))
        grouped._scaled_grouped_mm(x, weights.mT, *scales, torch.empty(4, dtype=torch.int64, device="cuda"))
    assert tally.work.flops == 2 * 64 * 256 * 128


def by_blocks(a: Tensor, b: Tensor, a_scale: Tensor, a_kind: Any, b_scale: Tensor, b_kind: Any, **given: Any) -> Tensor:
    """`F.scaled_mm` as cuBLAS documents it for scales of blocks, in float64."""
    (m, k), n, blocks = a.shape, b.shape[1], -(-a.shape[1] // 128)
    assert m % 4 == n % 4 == k % 16 == 0
    assert a.stride() == (k, 1)
    assert b.stride() == (1, k)
    assert a_kind is F.ScalingType.BlockWise1x128
    assert (a_scale.shape, a_scale.stride()) == ((m, blocks), (1, m))
    high = a_scale.double().repeat_interleave(128, 1)[:, :k]
    if b_kind is F.ScalingType.BlockWise1x128:
        assert (b_scale.shape, b_scale.stride()) == ((n, blocks), (1, n))
        wide = b_scale.double().repeat_interleave(128, 1)[:, :k]
    else:
        assert b_kind is F.ScalingType.BlockWise128x128
        padded = -(-blocks // 4) * 4
        assert (b_scale.shape, b_scale.stride()) == ((padded, -(-n // 128)), (1, padded))
        wide = b_scale[:blocks].t().double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    assert given["output_dtype"] in (torch.bfloat16, torch.float32)
    return ((a.double() * high) @ (b.t().double() * wide).t()).to(given["output_dtype"])


def by_mx(
    a: Tensor, b: Tensor, a_scale: Tensor, a_kind: Any, b_scale: Tensor, b_kind: Any, a_order: Any, b_order: Any,
    output_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """`F.scaled_mm` as cuBLAS documents it for E8M0 scales, in float64."""
    (m, k), n = a.shape, b.shape[1]
    assert k % 32 == n % 16 == 0
    assert a.stride() == (k, 1)
    assert b.stride() == (1, k)
    assert a_kind is b_kind is F.ScalingType.BlockWise1x32
    assert a_order is b_order is F.SwizzleType.SWIZZLE_32_4_4
    assert output_dtype in (torch.bfloat16, torch.float32)

    def scales(given: Tensor, rows: int) -> Tensor:
        assert given.dtype is torch.float8_e8m0fnu
        across = -(-k // 128)
        assert given.shape == (-(-rows // 128) * across * 512,)
        i, j = torch.arange(rows)[:, None], torch.arange(k // 32)[None]
        at = (i // 128 * across + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
        return given.double()[at].repeat_interleave(32, 1)

    return ((a.double() * scales(a_scale, m)) @ (b.t().double() * scales(b_scale, n)).t()).to(output_dtype)


OF_BLOCKS = (
    (recipes.Float8BlockScaling(), by_blocks),
    (recipes.Float8BlockScaling(power_of_two=False), by_blocks),
    (recipes.MXFP8(), by_mx),
)


@pytest.mark.parametrize(("rows", "k", "n"), [(1, 80, 144), (7, 400, 48), (33, 640, 272), (260, 128, 528)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("recipe", "run"), OF_BLOCKS, ids=["block", "block of any scale", "MXFP8"])
def test_scales_of_blocks_go_where_they_belong(
    recipe: Recipe, run: Any, rows: int, k: int, n: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(F, "scaled_mm", run)
    check_products(recipe, rows, dtype, k, n)


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
    for recipe, device in ((recipes.Float8BlockScaling(), "cuda:sm_90"), (recipes.MXFP8(), "cuda:sm_100")):
        model.recipe = recipe
        assert model.plan(env=sf.Env.of(device, dtype=torch.bfloat16, tokens=4096)).quantizations
    for recipe, device in [
        *((recipes.Float8BlockScaling(), device) for device in ("cuda:sm_89", "cuda:sm_100")),
        (recipes.Float8BlockScaling(format="hybrid"), "cuda:sm_90"),
        *((recipes.MXFP8(), device) for device in ("cuda:sm_90", "cuda:sm_120")),
        (recipes.MXFP8(format="hybrid"), "cuda:sm_100"),
    ]:
        model.recipe = recipe
        with pytest.raises(sf.InputError, match=f"has no kernels for {device.removeprefix('cuda:')}"):
            model.plan(env=sf.Env.of(device, dtype=torch.bfloat16, tokens=4096))

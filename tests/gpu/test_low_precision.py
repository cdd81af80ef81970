"""Linear and MergedLinear under recipes: a GPU multiplies 8-bit operands, a CPU emulates that at tiny sizes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops, recipes
from seqfuse.kernels import quantize as kernels
from seqfuse.ops import _lowprecision as low
from seqfuse.ops._grouped_lowprecision import why_no_grouped_gemm
from seqfuse.recipes import Direction, Recipe, Role
from seqfuse.testing import assert_bitwise_equal
from tests.kernels.test_quantize import assert_as_defined, by_kernels, widened
from tests.lowprecision.named import OTHERS, RECIPES, draw, expected, form_of, hard, named

from . import steps

HERE = torch.cuda.is_available()
GPU = pytest.mark.gpu
K, N = (4096, 1040) if HERE else (80, 48)
ROWS = (1027, 1024, 33, 1) if HERE else (33, 1)
ALL = (
    *RECIPES,
    recipes.Float8CurrentScaling(format="e4m3", power_of_two=True),
    recipes.Float8RowScaling(format="hybrid", power_of_two=True),
)
ROLES: tuple[Role, ...] = ("x", "weight", "dy")
DIRECTIONS: tuple[Direction, ...] = ("rows", "columns")
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
each_recipe = pytest.mark.parametrize("recipe", ALL, ids=named)


BY_ROWS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels quantize on a CPU, too, and its own 8-bit GEMM multiplies, by rows from torch 2.13 on."""
    if HERE:
        return

    def by_torch(recipe: Recipe, data: Tensor) -> bool:
        return recipe.whole_rows and not recipe.emulate and (BY_ROWS or recipe.block("x", "rows") == (None, None))

    def kernels_for(x: Tensor, columns: bool) -> Any:
        fits = x.dtype in DTYPES and x.numel() and x.shape[1] % 16 == 0
        return kernels if fits and not (columns and x.dtype is torch.float32) else None

    monkeypatch.setattr(low, "by_torch", by_torch)
    monkeypatch.setattr(low, "kernels_for", kernels_for)


def runs(recipe: Recipe) -> Recipe:
    """The recipe, emulated where there are no GEMMs for it."""
    major, minor = torch.cuda.get_device_capability() if HERE else (8, 9)
    return recipe if recipe.has_gemms(10 * major + minor) else type(recipe)(**{**vars(recipe), "emulate": True})


def bits(t: Tensor) -> Tensor:
    return t.view(torch.uint8) if t.dtype.itemsize == 1 else t.view(torch.int32)


# Without a GPU tests/kernels/test_quantize.py compares kernels with the reference, so one role is enough here to show
# that `quantize` calls the kernels; a CPU is not compared with itself.
@pytest.mark.parametrize("role", [ROLES[0], *(pytest.param(role, marks=GPU) for role in ROLES[1:])])
@pytest.mark.parametrize("recipe", RECIPES + OTHERS, ids=named)
def test_hard_numbers_have_the_codes_and_scales_of_the_reference(recipe: Recipe, role: Role, device: torch.device):
    for x in hard(form_of(recipe, role)):
        for direction in DIRECTIONS:
            data, inverse = recipes.quantize(x.to(device), recipe, role, direction)
            codes, scales = expected(x, recipe, role, direction)
            np.testing.assert_array_equal(data.view(torch.uint8).cpu().numpy(), codes)
            np.testing.assert_array_equal(bits(inverse.cpu()).numpy().reshape(scales.shape), scales.view(_as(scales)))


def _as(scales: Any) -> Any:
    return np.uint8 if scales.dtype == np.uint8 else np.int32


@GPU
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("recipe", RECIPES + OTHERS, ids=named)
def test_codes_and_scales_are_those_of_a_cpu(recipe: Recipe, role: Role, device: torch.device):
    for shape in ((1027, 2064), (4, 77, 400), (1, 16)):
        for dtype in DTYPES:
            x = draw(*shape, seed=1, dtype=dtype)
            for direction in DIRECTIONS:
                mine, theirs = (recipes.quantize(t, recipe, role, direction) for t in (x.to(device), x))
                for a, b in zip(mine, theirs, strict=True):
                    assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, x.to(device).device)
                    assert torch.equal(bits(a.cpu()), bits(b))


@GPU
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("recipe", RECIPES + OTHERS, ids=named)
def test_kernels_of_quantization(recipe: Recipe, role: Role, device: torch.device):
    for shape in ((1027, 2064), (8192, 1024), (1, 16)):
        for dtype in DTYPES:
            x = draw(*shape, seed=1, dtype=dtype)
            columns = dtype is not torch.float32
            assert_as_defined(by_kernels(x.to(device), recipe, role, columns=columns), x, recipe, role)
    for x in hard(form_of(recipe, role)):
        for t in (widened(x), widened(x.t())):
            assert_as_defined(by_kernels(t.to(device), recipe, role), t, recipe, role)
            t = t.bfloat16()
            assert_as_defined(by_kernels(t.to(device), recipe, role, columns=True), t, recipe, role)


def multiplied(x: Tensor, recipe: Recipe, role: Role, direction: Direction) -> Tensor:
    """The operands of a GEMM, in float64 where x is: quantized on a CPU, which other tests prove right."""
    data, inverse = recipes.quantize(x.detach().cpu(), recipe, role, direction)
    high, wide = recipe.block(role, direction)
    m, n = data.shape
    scales = (
        inverse.float().double().reshape(1 if high is None else -(-m // high), 1 if wide is None else -(-n // wide))
    )
    scales = scales.repeat_interleave(high or m, 0)[:m].repeat_interleave(wide or n, 1)[:, :n]
    return (data.float().double() * scales).to(x.device)


# Hopper's instructions for 8 bits sum with fewer bits than float32 has. Measured on an H100: the error is up to 3.2e-3
# of sum |a| |b|, where numbers differ by orders of magnitude.
CUT = 2.0**-8


class Errors:
    """By name, the worst error of a GEMM as a multiple of its bound, and as a part of sum |a| |b|: at most, and rms."""

    def __init__(self, recipe: Recipe) -> None:
        self.found: dict[str, tuple[float, float, float]] = {}
        self.cut = CUT if HERE and not recipe.emulate else 0.0

    def add(self, name: str, got: Tensor, a: Tensor, b: Tensor, addend: Any = 0.0, exact: bool = False) -> None:
        """The bound: eps (|ref| + |addend|) + 2^-22 (2 + log2 K) sum |a| |b|; without an addend half of the first.

        Of instructions for 8 bits the last part is larger, unless this is no GEMM and `exact`.
        """
        whole, sums = a @ b + addend, a.abs() @ b.abs()
        # A GPU rounds the product, then the sum.
        twice = isinstance(addend, Tensor)
        rounding = torch.finfo(got.dtype).eps / (1 if twice else 2) * (whole.abs() + abs(addend))
        rounding += torch.finfo(got.dtype).tiny
        error = (got.detach().double().reshape(whole.shape) - whole).abs()
        part = 2.0**-22 * (2 + math.log2(a.shape[1]))
        bound = rounding + (part if exact else max(part, self.cut)) * sums
        beyond = (error - rounding).clamp_min(0) / sums.clamp_min(1e-300)
        worst = float((error / bound).max())
        rms = float(beyond.square().mean().sqrt())
        self.found[name] = (worst if math.isfinite(worst) else math.inf, float(beyond.max()), rms)

    def check(self) -> None:
        told = "; ".join(
            f"{name} {worst:.3g} of the bound, {part:.1e} of the sum, rms {rms:.1e}"
            for name, (worst, part, rms) in self.found.items()
        )
        print(told)
        assert all(worst <= 1 for worst, *_ in self.found.values()), told


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@each_recipe
def test_gemms_are_those_of_quantized_operands(recipe: Recipe, rows: int, dtype: torch.dtype, device: torch.device):
    x, dy = draw(rows, K, seed=2, dtype=dtype), draw(rows, N, seed=3, dtype=dtype, factor=1e-3)
    model = sf.Sequential(ops.Linear(K, N, device=device, dtype=dtype), recipe=runs(recipe))
    linear: Any = model[0]
    linear.weight.data = draw(N, K, seed=1, dtype=dtype, factor=0.001).to(device)  # y fits float16
    linear.bias.data.fill_(0)
    x, dy, weight, bias = x.to(device).requires_grad_(), dy.to(device), linear.weight, linear.bias
    y = model(x)
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), dy)
    assert y.dtype is dx.dtype is dweight.dtype is dbias.dtype is dtype
    errors = Errors(runs(recipe))
    errors.add("y", y, multiplied(x, recipe, "x", "rows"), multiplied(weight, recipe, "weight", "rows").T)
    errors.add("dx", dx, multiplied(dy, recipe, "dy", "rows"), multiplied(weight, recipe, "weight", "columns"))
    errors.add("dweight", dweight, multiplied(dy, recipe, "dy", "columns").T, multiplied(x, recipe, "x", "columns"))
    errors.add("dbias", dbias, torch.ones(1, rows, device=device, dtype=torch.float64), dy.double(), exact=True)
    errors.check()
    again = model(x)
    assert_bitwise_equal([again, *torch.autograd.grad(again, (x, weight, bias), dy)], [y, dx, dweight, dbias])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@each_recipe
@pytest.mark.parametrize("bias", [(True, False, True), False], ids=["some", "none"])
def test_merged_linear(recipe: Recipe, dtype: torch.dtype, bias: Any, device: torch.device):
    parts, width, rows = ((1024, 256, 256), 2048, 515) if HERE else ((128, 256, 128), 64, 9)
    op: Any = ops.MergedLinear(width, parts, bias, device=device, dtype=dtype)
    for i, weight in enumerate(op.weights()):
        weight.data.copy_(draw(parts[i], width, seed=i, dtype=dtype, factor=10.0**-i))
    model = sf.Sequential(op, recipe=runs(recipe))
    x = draw(rows, width, seed=5, dtype=dtype).to(device).requires_grad_()
    dy = draw(rows, sum(parts), seed=6, dtype=dtype).to(device)
    y = model(x)
    dx, *dweights = torch.autograd.grad(y, (x, *op.weights()), dy)
    errors, a = Errors(runs(recipe)), multiplied(x, recipe, "x", "rows")
    for i, (part, weight, shift) in enumerate(zip(y.split(parts, -1), op.weights(), op.biases(), strict=True)):
        addend: Any = 0.0 if shift is None else shift.detach().double()
        b = multiplied(weight, recipe, "weight", "rows").T
        errors.add(f"y {i}", part, a, b, addend)
    each = dy.split(parts, -1)
    along = torch.cat([multiplied(d, recipe, "dy", "rows") for d in each], 1)
    down = torch.cat([multiplied(weight, recipe, "weight", "columns") for weight in op.weights()], 0)
    errors.add("dx", dx, along, down)
    for i, (d, dweight) in enumerate(zip(each, dweights, strict=True)):
        d_down, x_down = multiplied(d, recipe, "dy", "columns").T, multiplied(x, recipe, "x", "columns")
        errors.add(f"dweight {i}", dweight, d_down, x_down)
    errors.check()


@each_recipe
def test_main_grad_gets_the_sum_in_float32(recipe: Recipe, device: torch.device):
    rows = 517 if HERE else 13
    model = sf.Sequential(ops.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16), recipe=runs(recipe))
    weight: Any = model[0].weight
    x, dy = (draw(rows, n, seed=i, dtype=torch.bfloat16).to(device) for i, n in enumerate((K, N)))
    weight.main_grad = torch.full((N, K), 0.5, device=device)
    for _ in range(2):
        model(x).backward(dy)
    assert weight.grad is None
    a, b = multiplied(dy, recipe, "dy", "columns").T, multiplied(x, recipe, "x", "columns")
    errors = Errors(runs(recipe))
    errors.add("main_grad", weight.main_grad, torch.cat([a, a], 1), torch.cat([b, b], 0), 0.5)
    errors.check()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@each_recipe
def test_what_is_not_finite_stays_visible(recipe: Recipe, bad: float, device: torch.device):
    rows = 130 if HERE else 9
    model = sf.Sequential(ops.Linear(K, N, bias=False, device=device, dtype=torch.bfloat16), recipe=runs(recipe))
    x, dy = (draw(rows, n, seed=i, dtype=torch.bfloat16).to(device) for i, n in enumerate((K, N)))
    x[3, 5], dy[2, 7] = bad, bad
    x.requires_grad_()
    y = model(x)
    dx, dweight = torch.autograd.grad(y, (x, model[0].weight), dy)
    row, other = torch.arange(rows, device=device) == 3, torch.arange(rows, device=device) == 2
    assert torch.equal(y.isnan(), row[:, None].expand(rows, N))
    assert torch.equal(dx.isnan(), other[:, None].expand(rows, K))
    outputs, inputs = torch.arange(N, device=device) == 7, torch.arange(K, device=device) == 5
    assert torch.equal(dweight.isnan(), outputs[:, None] | inputs[None])


def block(recipe: Recipe | None, device: torch.device) -> tuple[Any, Tensor, Tensor]:
    """A feed-forward block of which norm and activation are fused around quantized GEMMs."""
    torch.manual_seed(0)
    width, rows = (1024, 771) if HERE else (32, 7)
    model = sf.Sequential(
        ops.RMSNorm(width), ops.Linear(width, 2 * width), ops.GeLU(), ops.Linear(2 * width, width), recipe=recipe
    )
    model = model.to(device, torch.bfloat16)
    x, dy = (draw(rows, width, seed=i, dtype=torch.bfloat16).to(device) for i in (0, 1))
    return model, x, dy


def off(mine: Tensor, other: Tensor) -> float:
    return float((mine.double() - other.double()).norm() / other.double().norm())


def step(model: Any, x: Tensor, dy: Tensor) -> list[Tensor]:
    return steps.step(model, model.parameters(), x, dy)


@GPU
@pytest.mark.parametrize("recipe", [*RECIPES, recipes.Float8DelayedScaling(history=4)], ids=str)
def test_a_graph_replays_a_step(recipe: Recipe, device: torch.device):
    model, x, dy = block(runs(recipe), device)
    static = x.clone()
    graph, results = steps.captured(lambda: step(model, static, dy))
    for seed in (5, 6):
        static.copy_(draw(*x.shape, seed=seed, dtype=x.dtype))
        graph.replay()
        replayed = [t.clone() for t in results]
        assert_bitwise_equal(replayed, step(model, static, dy))


@pytest.mark.parametrize("recipe", ALL if HERE else RECIPES, ids=named)
def test_compilers_trace_it(recipe: Recipe, device: torch.device):
    width, rows = (512, 131) if HERE else (32, 7)
    model = sf.Sequential(ops.Linear(width, 2 * width, False), ops.Linear(2 * width, width, False), recipe=runs(recipe))
    model = model.to(device, torch.bfloat16)
    x, dy = (draw(rows, width, seed=i, dtype=torch.bfloat16).to(device) for i in (0, 1))
    eager = step(model, x, dy)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_bitwise_equal(steps.step(compiled, model.parameters(), x, dy), eager)


@pytest.mark.parametrize("recipe", [*RECIPES, recipes.Float8DelayedScaling(history=4)], ids=str)
def test_a_block_learns_what_it_would_in_16_bits(recipe: Recipe, device: torch.device):
    model, x, dy = block(runs(recipe), device)
    step(model, x, dy)
    if recipe.keeps_state:  # the first step has scales of 1
        sf.update_scales(model)
    with sf.fusing(False):
        unfused = step(model, x, dy)
    fused, plain = step(model, x, dy), step(block(None, device)[0], x, dy)
    # Rounding to e5m2 is off by 0.07 on the average, to e4m3 by 0.03; up to three lie behind one another.
    assert max(map(off, fused, plain)) < 0.12
    assert max(map(off, fused, unfused)) < 0.02


@GPU
def test_delayed_scales_are_those_of_a_cpu(device: torch.device):
    width, recipe = 512, recipes.Float8DelayedScaling(history=3, margin=1)
    models = [sf.Sequential(ops.Linear(width, width), recipe=recipe).to(at) for at in (device, torch.device("cpu"))]
    models[1].load_state_dict(models[0].state_dict())
    for i in range(6):
        x, dy = (draw(37, width, seed=2 * i + j, dtype=torch.float32, factor=10.0 ** (i % 3)) for j in (0, 1))
        for model in models:
            at = next(model.parameters()).device
            leaf = x.to(at).requires_grad_()
            model(leaf).backward(dy.to(at))
            sf.update_scales(model)
        one, other = (model.state_dict() for model in models)
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name].cpu(), other[name].cpu()), name


@GPU
@pytest.mark.parametrize("recipe", [recipes.Float8CurrentScaling(), recipes.Float8BlockScaling()], ids=str)
def test_plans_and_launches_say_what_runs(recipe: Recipe, device: torch.device):
    """8-bit GEMMs run where the plan quantizes: none of the three of each Linear is in 16 bits."""
    model, x, dy = block(recipe, device)
    step(model, x, dy)
    assert {q.at for q in model.plan(x).quantizations} == {1, 4}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(model, x, dy)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts.get("aten::_scaled_mm", 0) + counts.get("aten::_scaled_mm_v2", 0) == 6, counts
    assert not {"aten::mm", "aten::addmm", "aten::linear"} & counts.keys(), counts


@GPU
@pytest.mark.parametrize("recipe", [*ALL, recipes.Float8CurrentScaling(format="e4m3")], ids=named)
def test_groups_have_the_codes_and_results_of_a_cpu(recipe: Recipe, device: torch.device):
    """By torch's grouped GEMM where it takes the recipe, else emulated; one group is empty, and some rows have no
    group."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    if why_no_grouped_gemm(recipe, torch.bfloat16, arch) is not None:
        recipe = type(recipe)(**{**vars(recipe), "emulate": True})
    ends, rows = torch.tensor([200, 200, 901]), 1027
    for role in ("x", "dy"):
        for direction in DIRECTIONS:
            x = draw(rows, 400, seed=1, dtype=torch.bfloat16)
            places = (device, torch.device("cpu"))
            found = [recipes.quantize(x.to(at), recipe, role, direction, offsets=ends.to(at)) for at in places]
            for mine, theirs in zip(*found, strict=True):
                assert torch.equal(bits(mine.cpu()), bits(theirs))
    op: Any = ops.GroupedLinear(3, 256, 400, dtype=torch.bfloat16)
    results: list[list[Tensor]] = []
    for at in (torch.device("cpu"), device):
        model = sf.Sequential(op.to(at), recipe=recipe)
        x = draw(rows, 256, seed=2, dtype=torch.bfloat16).to(at).requires_grad_()
        dy, offsets = draw(rows, 400, seed=3, dtype=torch.bfloat16).to(at), ends.to(at)
        y = model(x, offsets=offsets)
        results.append([y, *torch.autograd.grad(y, [x, op.weight, op.bias], dy)])
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, rtol=0.02, atol=0.01 * float(theirs.detach().abs().max()))
    assert not results[1][0][901:].any()
    assert not results[1][2][1].any()

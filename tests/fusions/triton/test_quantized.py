"""Fusions around quantized GEMMs: a schedule gives the numbers of the operations, but for neighboring codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops, recipes
from seqfuse.kernels import quantize as kernels
from seqfuse.ops import _lowprecision as low
from seqfuse.plan import search as planning
from seqfuse.recipes import Recipe
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from tests.triton_fixtures import DEVICE

pytestmark = pytest.mark.filterwarnings("error::seqfuse.errors.FallbackWarning")

RECIPES = recipes.Float8CurrentScaling(), recipes.Float8RowScaling(), recipes.Float8BlockScaling(), recipes.MXFP8()


def passes(model: sf.Sequential, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: type(recipe).__name__)
def test_norms_units_and_residuals_around_quantized_gemms(recipe: Recipe):
    torch.manual_seed(0)
    mlp = ops.Residual(ops.RMSNorm(32), ops.MergedLinear(32, (64, 64)), ops.SwiGLU(), ops.Linear(64, 32))
    model = sf.Sequential(ops.RMSNorm(32), ops.Linear(32, 32), ops.GeLU(), mlp, recipe=recipe).to(DEVICE)
    x = (seeded_randn((33, 32), 1) + 0.1).to(DEVICE)
    fused = passes(model, x)
    plan = model.plan(x)
    assert plan.env.triton
    assert min(plan.fused) >= 3
    with sf.fusing(False):
        unfused = passes(model, x)
    with sf.low_precision(enabled=False):
        exact = passes(model, x)
    for a, b, c in zip(fused, unfused, exact, strict=True):
        # A difference in the last bit may change a code to its neighbor: far less than the error of quantization.
        assert float((a - b).norm()) <= 1e-3 * float(b.norm())
        assert float((c - b).norm()) > 5e-3 * float(b.norm())


def gated(recipe: Recipe | None, **how: Any) -> sf.Sequential:
    parts = ops.RMSNorm(80), ops.MergedLinear(80, (128, 128), False), ops.SwiGLU(**how), ops.Linear(128, 80, bias=False)
    return sf.Sequential(ops.Linear(80, 80), ops.Residual(*parts), ops.RMSNorm(80), ops.Linear(80, 48), recipe=recipe)


def biased(recipe: Recipe | None) -> sf.Sequential:
    parts = ops.LayerNorm(80), ops.Linear(80, 144), ops.GeLU(), ops.Linear(144, 80)
    return sf.Sequential(ops.Residual(*parts), ops.Linear(80, 256), ops.GEGLU(), ops.Linear(128, 16), recipe=recipe)


def rotated(recipe: Recipe | None) -> sf.Sequential:
    heads = ops.RotaryEmbedding(2, 1, style="half"), ops.Attention(2, 1, causal=True)
    parts = ops.RMSNorm(80), ops.Linear(80, 256), *heads, ops.Linear(128, 80, bias=False)
    return sf.Sequential(ops.Residual(*parts), ops.RMSNorm(80), ops.Linear(80, 16), recipe=recipe)


LOCAL = [
    recipes.Float8BlockScaling(),
    recipes.Float8BlockScaling(format="hybrid", power_of_two=False),
    recipes.MXFP8(),
    recipes.Float8DelayedScaling(history=3),
]


def same_but_for_sums(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Bit for bit, but for bias gradients: sums over tokens in float32, which tiles add in another order."""
    for one, other in zip(found, wanted, strict=True):
        if one.ndim == 1:
            smallest = torch.finfo(one.dtype).smallest_normal * torch.finfo(one.dtype).eps
            atol = max(smallest, 2.0**-20 * float(other.abs().max()))
            torch.testing.assert_close(one, other, rtol=torch.finfo(one.dtype).eps, atol=atol)
        else:
            assert_bitwise_equal(one, other)


def absorbed(model: sf.Sequential, x: Tensor) -> set[tuple[str, str | None]]:
    return {(one.role, one.inside) for one in model.plan(x).quantizations if one.inside}


NORMS = {("x", "NormForward"), ("x", "BlockBoundary"), ("dy", "BlockBoundaryBackward")}
INSIDE: dict[Any, set[tuple[str, str]]] = {
    gated: NORMS | {("x", "BiasGated"), ("dy", "BiasGatedBackward")},
    biased: {
        ("x", "NormForward"), ("x", "PointwiseChain"), ("dy", "PointwiseChainBackward"), ("x", "BiasGated"),
        ("dy", "BiasGatedBackward"),
    },
    rotated: NORMS | {("dy", "BiasQKNormRotaryBackward")},
}  # fmt: skip


@pytest.mark.parametrize("make", INSIDE)
@pytest.mark.parametrize("recipe", LOCAL, ids=lambda recipe: f"{type(recipe).__name__}-{recipe.format}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_quantize_what_they_write_bit_for_bit(
    make: Callable[..., sf.Sequential], recipe: Recipe, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    def made() -> sf.Sequential:
        torch.manual_seed(0)
        return make(recipe).to(DEVICE, dtype)

    x = (seeded_randn((2, 37, 80), 1) + 0.1).to(DEVICE, dtype)
    model, steps = made(), 2 if recipe.keeps_state else 1
    fused = [passes(model, x) for _ in range(steps)]
    # Each part of a MergedLinear has its own scale there; tiles of 128 after a bias do not fit in registers.
    without = {("dy", "BiasGatedBackward")} if recipe.keeps_state and make is gated else set[Any]()
    without |= {("x", "BiasGated")} if recipe.block("x", "rows")[1] == 128 and make is biased else set()
    assert absorbed(model, x) == INSIDE[make] - without
    for p in [*model.parameters()][:2]:
        p.requires_grad_(requires_grad=False)
    frozen = passes(model, x)
    with torch.no_grad():
        inferred = model(x)
    monkeypatch.setattr(planning, "absorbing", lambda stretch, forward, backward: (tuple(forward), tuple(backward)))
    other = made()
    for one in fused:
        same_but_for_sums(passes(other, x), one)
    assert not absorbed(other, x)
    assert_bitwise_equal([*model.buffers()], [*other.buffers()])
    for p in [*other.parameters()][:2]:
        p.requires_grad_(requires_grad=False)
    same_but_for_sums(passes(other, x), frozen)
    with torch.no_grad():
        assert_bitwise_equal(other(x), inferred)


def test_what_kernels_cannot_quantize_is_a_pass_of_its_own():
    x = (seeded_randn((5, 80), 1) + 0.1).to(DEVICE, torch.bfloat16)
    for recipe in (recipes.Float8CurrentScaling(), recipes.Float8RowScaling()):  # scales of more than a tile
        assert not absorbed(gated(recipe).to(DEVICE, torch.bfloat16), x)
    block = recipes.Float8BlockScaling()
    assert not absorbed(gated(block).to(DEVICE), x.float())  # float32 tiles are not transposed
    # Gate and up interleaved, and parts that tiles do not divide.
    assert absorbed(gated(block, packing="interleaved").to(DEVICE, torch.bfloat16), x) == NORMS
    # With blocks of 128 a backward of a LayerNorm does not fit in registers.
    post = sf.Sequential(ops.Residual(ops.Linear(80, 80)), ops.LayerNorm(80), ops.Linear(80, 16), recipe=block)
    assert absorbed(post.to(DEVICE, torch.bfloat16), x) == {("x", "BlockBoundary")}
    post.recipe = recipes.MXFP8()
    assert absorbed(post, x) == {("x", "BlockBoundary"), ("dy", "BlockBoundaryBackward")}
    odd = sf.Sequential(ops.MergedLinear(80, (64, 64), False), ops.SwiGLU(), ops.Linear(64, 16), recipe=block)
    assert absorbed(odd.to(DEVICE, torch.bfloat16), x) == {("x", "BiasGated")}
    saved = sf.Sequential(ops.Bias(80), ops.ReLU(), ops.Linear(80, 16), recipe=block).to(DEVICE, torch.bfloat16)
    assert not absorbed(saved, x)  # y is saved in 16 bits
    with torch.no_grad():
        assert absorbed(saved, x) == {("x", "PointwiseChain")}
        assert saved(x[:0]).shape == (0, 16)
    passes(gated(block).to(DEVICE, torch.bfloat16), seeded_randn((0, 80), 2).to(DEVICE, torch.bfloat16))


def test_any_number_of_tokens_is_quantized_by_the_kernels_that_the_plan_names(monkeypatch: pytest.MonkeyPatch):
    counts, quantize = [0], low.quantize

    def counted(*given: Any, **how: Any) -> Any:
        counts[-1] += 1
        return quantize(*given, **how)

    monkeypatch.setattr(low, "quantize", counted)
    model = gated(recipes.MXFP8()).to(DEVICE, torch.bfloat16)
    for tokens in (32, 33):  # rows of the transposed operand are not multiples of 16 bytes
        passes(model, seeded_randn((tokens, 80), 2).to(DEVICE, torch.bfloat16))
        counts.append(0)
    assert counts[0] == counts[1] > 0


def test_a_kernel_that_fails_gives_way_to_its_operations(monkeypatch: pytest.MonkeyPatch):
    from seqfuse.fusions import chain

    x = (seeded_randn((32, 80), 1) + 0.1).to(DEVICE, torch.bfloat16)
    torch.manual_seed(0)
    model = gated(recipes.Float8BlockScaling()).to(DEVICE, torch.bfloat16)
    with sf.fusing(exclude=("BiasGated", "BiasGatedBackward")):
        wanted = passes(model, x)

    def fails(*given: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(chain, "as_codes", fails)
    with pytest.warns(sf.errors.FallbackWarning, match="no such kernel"):
        found = passes(model, x)
    assert_bitwise_equal(found, wanted)


@pytest.mark.parametrize("recipe", LOCAL[::2], ids=lambda recipe: type(recipe).__name__)
def test_weights_of_a_segment_take_one_launch(recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    x = (seeded_randn((32, 80), 1) + 0.1).to(DEVICE, torch.bfloat16)
    several, counts = kernels.quantize_several, list[int]()

    def counted(one: Tensor, others: list[Tensor], *given: Any, **how: Any) -> Any:
        counts.append(1 + len(others))
        return several(one, others, *given, **how)

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        return passes(gated(recipe).to(DEVICE, torch.bfloat16), x)

    wanted = run()
    monkeypatch.setattr(low, "kernels_for", lambda *_: kernels)
    monkeypatch.setattr(kernels, "quantize_several", counted)
    assert_bitwise_equal(run(), wanted)
    assert counts == [4]

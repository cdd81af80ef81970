"""GroupedLinear under recipes: each group has its own scales, and each GEMM is that of the reference in numpy by
group."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import ops, recipes, testing
from seqfuse.ops import _grouped_lowprecision as low
from seqfuse.ops._lowprecision import quantized
from seqfuse.recipes import Recipe
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from tests.selection import few_cases as few_cases
from tests.selection import some_cases as some_cases

from .named import DIRECTIONS, OTHERS, RECIPES, ROLES, draw, expected, multiplied, named, size_of
from .test_delayed import windows
from .test_linear import DTYPES, assert_within

ENDS = {
    "odd": (7, 8, 139), "empty first": (0, 129, 141), "empty between": (5, 5, 141), "empty last": (40, 141, 141),
    "rows of none": (3, 40, 90), "no rows in any": (0, 0, 0), "beyond the last row": (40, 150, 999),
}  # fmt: skip
ROWS, K, N = 141, 32, 48
every_recipe = pytest.mark.parametrize("recipe", RECIPES + OTHERS, ids=named)
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=named)
every_ends = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)


def slices(ends: tuple[int, ...], rows: int = ROWS) -> list[slice]:
    return [slice(a, min(b, rows)) for a, b in zip((0, *ends), ends, strict=False)]


@every_recipe
@every_ends
def test_codes_and_scales_are_those_of_each_group(recipe: Recipe, ends: tuple[int, ...]):
    offsets = torch.tensor(ends, dtype=torch.int32)
    for i, (role, direction) in enumerate((r, d) for r in ROLES for d in DIRECTIONS if r != "weight"):
        x = draw(ROWS, K, seed=i, dtype=torch.float32)
        x[37, 3], x[99, 4] = torch.nan, torch.inf
        x[:7] *= 1e-3
        data, inverse = recipes.quantize(x, recipe, role, direction, offsets=offsets)
        found, scales = data.view(torch.uint8).numpy(), inverse
        if isinstance(recipe, recipes.MXFP8):
            scales = scales.view(torch.uint8)
        at, high = 0, size_of(recipe, role, direction)[0]
        for g, own in enumerate(slices(ends)):
            codes, wanted = expected(x[own], recipe, role, direction)
            np.testing.assert_array_equal(found[own], codes)
            if high == 1:
                np.testing.assert_array_equal(scales[own].numpy(), wanted)
            elif high is None:
                np.testing.assert_array_equal(scales[g].numpy().reshape(wanted.shape), wanted)
            else:
                np.testing.assert_array_equal(scales[at : at + len(wanted)].numpy(), wanted)
                at += len(wanted)
        back = recipes.dequantize(data, inverse, recipe, role, direction, offsets=offsets)
        for own in slices(ends):
            exact = multiplied(x[own], recipe, role, direction).astype(np.float32)
            np.testing.assert_array_equal(back[own].numpy(), exact)


def model_of(recipe: Recipe | None, dtype: torch.dtype, bias: bool = True) -> tuple[sf.Sequential, Any]:
    op: Any = ops.GroupedLinear(3, K, N, bias=bias, dtype=dtype)
    for g in range(3):
        op.weight.data[g] = draw(N, K, seed=10 + g, dtype=dtype, factor=10.0**-g)
    return sf.Sequential(op, recipe=recipe), op


@pytest.mark.parametrize("i", range(len(RECIPES + OTHERS)), ids=lambda i: named((RECIPES + OTHERS)[i]))
@pytest.mark.parametrize("j", range(len(ENDS)), ids=lambda j: [*ENDS][j])
def test_products_are_those_of_quantized_operands_of_each_group(i: int, j: int):
    recipe, ends, dtype = (RECIPES + OTHERS)[i], [*ENDS.values()][j], DTYPES[(i + j) % 3]
    model, op = model_of(recipe, dtype)
    offsets = torch.tensor(ends, dtype=torch.int32)
    x = draw(ROWS, K, seed=2, dtype=dtype).requires_grad_()
    dy = draw(ROWS, N, seed=3, dtype=dtype, factor=1e-2)
    leaves = [x, op.weight, op.bias]

    def passes() -> list[Tensor]:
        y = model(x, offsets=offsets)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    y, dx, dweight, dbias = found = passes()
    assert all(t.dtype is dtype for t in found)
    for g, own in enumerate(slices(ends)):
        weight, rows, back = op.weight[g], x[own], dy[own]
        a = multiplied(rows, recipe, "x", "rows")
        b = multiplied(weight, recipe, "weight", "rows").T
        assert_within(y[own], a, b, op.bias[g].detach().double().numpy())
        a = multiplied(back, recipe, "dy", "rows")
        assert_within(dx[own], a, multiplied(weight, recipe, "weight", "columns"))
        a = multiplied(back, recipe, "dy", "columns").T
        assert_within(dweight[g], a, multiplied(rows, recipe, "x", "columns"))
        assert torch.equal(dbias[g], back.sum(0))
        assert own.stop > own.start or not dweight[g].any()
    assert not y[ends[-1] :].any()
    assert not dx[ends[-1] :].any()
    assert_bitwise_equal(passes(), found)


def test_blocks_that_cross_a_group_are_beyond_the_bound():
    recipe, ends = recipes.MXFP8(), ENDS["odd"]
    model, op = model_of(recipe, torch.float32, bias=False)
    x, dy = draw(ROWS, K, seed=2, dtype=torch.float32), draw(ROWS, N, seed=3, dtype=torch.float32)
    x[:7] *= 1e-6
    y = model(x, offsets=torch.tensor(ends))
    (dweight,) = torch.autograd.grad(y, (op.weight,), dy)
    whole = [multiplied(t, recipe, role, "columns") for t, role in ((dy, "dy"), (x, "x"))]
    with pytest.raises(AssertionError, match="beyond the error"):
        assert_within(dweight[0], whole[0][:7].T, whole[1][:7])


@each_recipe
def test_keeps_its_contract(recipe: Recipe):
    """With a bias and without, in turn."""
    op = ops.GroupedLinear(3, 16, 32) if RECIPES.index(recipe) % 2 else ops.GroupedLinear(3, 32, 16, bias=False)
    op.recipe = recipe
    testing.check_op(op, seeded_randn((40, op.in_features), 0), offsets=torch.tensor([11, 11, 33], dtype=torch.int32))


@pytest.mark.parametrize("history", [1, 4])
def test_scales_of_earlier_steps_are_those_of_each_group(history: int):
    recipe = recipes.Float8DelayedScaling(history=history)
    model, op = model_of(recipe, torch.float32, bias=False)
    optimizer, own = torch.optim.SGD(model.parameters(), lr=1e-3), [windows(recipe) for _ in range(3)]
    for step in range(7):
        ends = [*ENDS.values()][step % 5]
        x = (draw(ROWS, K, seed=40 * step, dtype=torch.float32) * (1 + step)).requires_grad_()
        dy = draw(ROWS, N, seed=1000 + step, dtype=torch.float32, factor=1e-3)
        for window, part, g in zip(own, slices(ends), range(3), strict=True):
            for name, seen in (("x", x[part]), ("weight", op.weight[g]), ("dy", dy[part])):
                if seen.numel():
                    window[name].see(seen.detach().numpy())
        optimizer.zero_grad()
        y = model(x, offsets=torch.tensor(ends))
        dx, op.weight.grad = torch.autograd.grad(y, (x, op.weight), dy)
        for g, (window, part) in enumerate(zip(own, slices(ends), strict=True)):
            assert_within(y[part], window["x"].values(x[part]), window["weight"].values(op.weight[g]).T)
            assert_within(dx[part], window["dy"].values(dy[part]), window["weight"].values(op.weight[g]))
            assert_within(op.weight.grad[g], window["dy"].values(dy[part]).T, window["x"].values(x[part]))
        optimizer.step()
        for g, window in enumerate(own):
            for name, one in window.items():
                one.step()
                assert op.get_buffer(f"{name}_scale")[g].numpy() == one.scale, (step, g, name)
    again, _ = model_of(recipe, torch.float32, bias=False)
    again.load_state_dict(model.state_dict())
    assert op.x_amax_history.shape == (history, 3)
    assert_bitwise_equal(again(x, offsets=torch.tensor(ends)), model(x, offsets=torch.tensor(ends)))


@each_recipe
def test_x_and_weights_are_saved_in_8_bits(recipe: Recipe):
    model, op = model_of(recipe, torch.bfloat16)
    x = draw(ROWS, K, seed=2, dtype=torch.bfloat16).requires_grad_()
    offsets = torch.tensor(ENDS["odd"], dtype=torch.int32)
    memory = model.plan(x, offsets=offsets).memory
    scales = {
        "Float8CurrentScaling": 4 * (3 + 3), "Float8RowScaling": 4 * (3 * K + 3 * K),
        "Float8BlockScaling": 4 * ((ROWS // 128 + 3) * K + 3), "MXFP8": (ROWS // 32 + 3) * K + 3 * 2 * K,
    }[type(recipe).__name__]  # fmt: skip
    assert memory is not None
    assert memory.saved == ROWS * K + op.weight.numel() + scales + 4 * 3
    text = " ".join(str(model.plan(x, offsets=offsets)).split())
    assert "per tensor" not in text


@each_recipe
def test_main_grad_compilation_and_autocast(recipe: Recipe):
    model, op = model_of(recipe, torch.float32)
    x = draw(ROWS, K, seed=2, dtype=torch.float32).requires_grad_()
    dy, offsets = draw(ROWS, N, seed=3, dtype=torch.float32), torch.tensor(ENDS["odd"])
    leaves = [x, op.weight, op.bias]
    wanted = torch.autograd.grad(model(x, offsets=offsets), leaves, dy)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, offsets=offsets), leaves, dy)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    op.weight.main_grad = torch.ones_like(op.weight)
    model(x, offsets=offsets).backward(dy)
    torch.testing.assert_close(op.weight.main_grad, 1 + wanted[1], rtol=1e-6, atol=1e-5)
    assert op.weight.grad is None
    low_precision, _ = model_of(recipe, torch.bfloat16)
    low_precision.load_state_dict(model.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, offsets=offsets)
    assert_bitwise_equal(y, low_precision(x.bfloat16(), offsets=offsets))


def test_on_a_gpu_a_plan_says_what_stays_in_16_bits():
    for recipe, dtype, reason in [
        (recipes.Float8RowScaling(), torch.bfloat16, None),
        (recipes.Float8CurrentScaling(format="e4m3"), torch.bfloat16, None),
        (recipes.Float8RowScaling(), torch.float16, "that gives float16"),
        (recipes.Float8CurrentScaling(), torch.bfloat16, "of e5m2"),
        (recipes.Float8BlockScaling(), torch.bfloat16, "with scales of 1x128"),
    ]:
        model, _ = model_of(recipe, dtype)
        plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=dtype))
        said = [r.reason for r in plan.refused if r.fusion == str(recipe)]
        assert bool(plan.quantizations) == (reason is None)
        assert (not said) if reason is None else reason in said[0], said
    strict, _ = model_of(recipes.Float8BlockScaling(strict=True), torch.bfloat16)
    with pytest.raises(sf.InputError, match=r"SF108 .*strict, and torch has no grouped GEMM"):
        strict.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16))
    mx, _ = model_of(recipes.MXFP8(), torch.bfloat16)
    with pytest.raises(sf.InputError, match=r"SF108 .*MXFP8 has no kernels for sm_90"):
        mx.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16))


def by_loop(a: Tensor, b: Tensor, a_inverse: Tensor, b_inverse: Tensor, *, offs: Tensor, out_dtype: Any) -> Tensor:
    """`torch._scaled_grouped_mm` of codes and scales, with its requirements; rows outside groups are not written."""
    ends, k = [0, *offs.tolist()], a.shape[1]
    assert a.stride(1) == 1
    assert b.stride(-2) == 1
    if b.dim() == 3:
        assert a_inverse.shape == a.shape[:1]
        assert b_inverse.shape == (b.shape[0], b.shape[2])
        assert ends[-1] <= len(a)
        y = torch.full((len(a), b.shape[2]), torch.nan)
        for g, (start, end) in enumerate(pairwise(ends)):
            y[start:end] = a[start:end].float() @ b[g].float() * a_inverse[start:end, None] * b_inverse[g]
        return y.to(out_dtype)
    groups = len(offs)
    assert not any(end % 16 for end in ends)
    assert ends[-1] <= k
    scales = [t.view(groups, -1) for t in (a_inverse, b_inverse)]
    y = torch.full((groups, len(a), b.shape[1]), torch.nan)
    for g, (start, end) in enumerate(pairwise(ends)):
        if end > start:
            y[g] = a[:, start:end].float() @ b[start:end].float() * scales[0][g][:, None] * scales[1][g]
    return y.to(out_dtype)


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.Float8RowScaling(),
        recipes.Float8CurrentScaling(format="e4m3"),
        recipes.Float8DelayedScaling(format="e4m3"),
    ],
    ids=str,
)
@every_ends
def test_the_grouped_gemm_of_torch_gets_the_same_operands(
    recipe: Recipe, ends: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
):
    found: list[list[Tensor]] = []
    for on_gpu in (False, True):
        if on_gpu:
            monkeypatch.setattr(low, "_by_torch", lambda recipe, data: not recipe.emulate)
            monkeypatch.setattr(torch, "_scaled_grouped_mm", by_loop)
        model, op = model_of(recipe, torch.bfloat16)
        op.bias.data = draw(3, N, seed=5, dtype=torch.bfloat16)
        x = draw(ROWS, K, seed=2, dtype=torch.bfloat16).requires_grad_()
        y = model(x, offsets=torch.tensor(ends))
        leaves = [x, op.weight, op.bias]
        found.append([y, *torch.autograd.grad(y, leaves, draw(ROWS, N, seed=3, dtype=torch.bfloat16))])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.01 * float(a.detach().abs().max()))
        assert not b[(a == 0).all(-1)].any()


@each_recipe
def test_no_offset_of_a_gpu_is_read(recipe: Recipe):
    """On fake tensors, on which a read would raise."""
    emulated = type(recipe)(**{**vars(recipe), "emulate": True})
    taken = [emulated]
    if low.why_no_grouped_gemm(recipe, torch.bfloat16, "sm_90") is None:
        taken.append(recipe)
    for own in taken:
        with FakeTensorMode(), torch.device("cuda"):
            x, dy = (torch.empty(64, n, dtype=torch.bfloat16) for n in (32, 48))
            weight, ends = torch.empty(4, 48, 32, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32)
            qx, x_down = quantized(x, own, "x", columns=True, offsets=ends)
            qdy, dy_down = quantized(dy, own, "dy", columns=True, offsets=ends)
            qweight, weight_down = low.quantized_group_weights(weight, own, columns=True)
            assert None not in (qx, x_down, qdy, dy_down, weight_down)
            y = low.grouped_in_8_bits(qx, qweight, own, ends, torch.bfloat16)  # pyright: ignore[reportArgumentType]
            assert y.shape == (64, 48)
            if own is recipe and not torch.backends.cuda.is_built():
                continue  # torch without CUDA copies nothing there, not even without data
            dx = low.grouped_in_8_bits(qdy, weight_down, own, ends, torch.bfloat16, role="dy")  # pyright: ignore[reportArgumentType]
            dweight = low.grouped_weight_grad_in_8_bits(dy_down, x_down, own, ends, torch.bfloat16)  # pyright: ignore[reportArgumentType]
            assert dx.shape == (64, 32)
            assert isinstance(dweight, Tensor)
            assert dweight.shape == (4, 48, 32)


def test_a_block_of_experts_trains_under_a_recipe():
    torch.manual_seed(0)
    model = sf.Sequential(
        ops.Route(32, 4, 2), ops.Permute(4, 2), ops.GroupedLinear(4, 32, 96, bias=False), ops.SwiGLU(),
        ops.GroupedLinear(4, 48, 32, bias=False), ops.Unpermute(), recipe=recipes.MXFP8(),
    )  # fmt: skip
    x = seeded_randn((40, 32), 0).requires_grad_()
    plan = model.plan(x)
    assert {q.at for q in plan.quantizations} == {2, 4}
    with sf.low_precision(enabled=False):
        exact = model(x)
    y = model(x)
    y.sum().backward()
    assert 1e-4 < float((y.detach() - exact.detach()).norm() / exact.detach().norm()) < 0.1
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_experts_of_a_converted_model_are_quantized():
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("transformers.integrations.moe")
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    ids = torch.randint(3, 64, (2, 7))
    exact = model(input_ids=ids).logits
    conversion = sf.convert(model, recipe=recipes.Float8BlockScaling())
    y = model(input_ids=ids).logits
    y.sum().backward()
    said = {k: why for graph in conversion.graphs for region in graph.regions for k, why in region.quantized.items()}
    assert said["model.layers.0.mlp.experts"] is None
    assert said["lm_head"] == "excluded"
    assert not torch.equal(y, exact)
    conversion.undo()
    assert torch.equal(model(input_ids=ids).logits, exact)

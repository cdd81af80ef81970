"""Recipes in the engine: where they are set, plans, autocast, recomputation, scalers, compilers, copies."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.utils import checkpoint

import seqfuse as sf
from seqfuse import ops, recipes
from seqfuse.nn import TransformerLayer
from seqfuse.ops import _lowprecision
from seqfuse.plan import search as planning
from seqfuse.plan.step import Step, Stretch
from seqfuse.recipes import Direction, Recipe, Role
from seqfuse.testing import assert_bitwise_equal, seeded_randn

from .named import RECIPES, named

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=named)
BLOCK = recipes.Float8BlockScaling()


def model_of(recipe: Recipe | None = None, dtype: torch.dtype = torch.float32) -> sf.Sequential:
    torch.manual_seed(0)
    mlp = ops.Residual(ops.RMSNorm(32), ops.MergedLinear(32, (64, 64)), ops.SwiGLU(), ops.Linear(64, 32))
    model = sf.Sequential(ops.LayerNorm(32), ops.Linear(32, 32), ops.GeLU(), mlp, ops.Linear(32, 16), recipe=recipe)
    return model.to(dtype)


def step(model: nn.Module, x: Tensor, run: Callable[..., Tensor] | None = None) -> list[Tensor]:
    """The output, and the gradients of x and of every parameter."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = (run or model)(x)
    y.float().square().sum().backward()
    grads = [t.grad for t in (x, *model.parameters())]
    return [y.detach(), *(g for g in grads if g is not None)]


X = seeded_randn((33, 32), 1) + 0.1


@each_recipe
def test_off_is_bit_for_bit_what_it_was(recipe: Recipe):
    plain = step(model_of(), X)
    model = model_of(recipe)
    low = step(model, X)
    assert not torch.equal(low[0], plain[0])
    with sf.low_precision(enabled=False):
        assert_bitwise_equal(step(model, X), plain)
        assert not model.plan(X).quantizations
        with sf.low_precision():
            assert_bitwise_equal(step(model, X), low)
    model.recipe = None
    assert_bitwise_equal(step(model, X), plain)
    model.recipe = recipe
    assert_bitwise_equal(step(model, X), low)


@each_recipe
def test_a_default_is_for_what_has_no_recipe(recipe: Recipe):
    low, plain = step(model_of(recipe), X), step(model_of(), X)
    model = model_of()
    with sf.low_precision(recipe):
        assert_bitwise_equal(step(model, X), low)
        with sf.low_precision(enabled=False):
            assert_bitwise_equal(step(model, X), plain)
    assert_bitwise_equal(step(model, X), plain)
    env = sf.Env.of("cpu", recipe=recipe)
    assert model.plan(env=env).quantizations == model_of(recipe).plan(env=sf.Env.of("cpu")).quantizations
    kept_out = model_of()
    kept_out.recipe = None
    with sf.low_precision(recipe):
        assert_bitwise_equal(step(kept_out, X), plain)


def test_the_backward_is_that_of_the_forward_whatever_is_switched_meanwhile():
    model = model_of(BLOCK)
    low = step(model, X)
    x = X.detach().requires_grad_()
    y = model(x)
    model.recipe = None
    with sf.low_precision(enabled=False):
        assert_bitwise_equal(torch.autograd.grad(y.square().sum(), (x, *model.parameters())), low[1:])


def test_on_and_off_alternate_without_another_plan(monkeypatch: pytest.MonkeyPatch):
    model, made = model_of(BLOCK), list[int]()
    plan_region = planning.plan_region
    from seqfuse.run import fuser

    monkeypatch.setattr(fuser, "plan_region", lambda *given, **how: (made.append(1), plan_region(*given, **how))[1])

    def each() -> None:
        step(model, X)
        with sf.low_precision(enabled=False):
            step(model, X)
        model.recipe = None
        step(model, X)
        model.eval()
        with torch.no_grad():
            model(X)
        model.train()
        model.recipe = BLOCK
        with sf.low_precision(recipes.MXFP8()):
            step(model, X)

    each()
    first = len(made)
    for _ in range(3):
        each()
    assert len(made) == first


def test_innermost_recipes_win():
    model = model_of(BLOCK)
    model[1].recipe = None  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    model[3].recipe = recipes.MXFP8()  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    found = {(q.at, q.scaling) for q in model.plan(X).quantizations if q.role == "x"}
    at = {node: i for i, node in enumerate(model.plan(X).paths)}
    assert found == {(at["3.1"], "1x32"), (at["3.3"], "1x32"), (at["4"], "1x128")}
    assert "quantize e4m3 128x128: weight at" in str(model.plan(X))
    with pytest.raises(sf.InputError, match=r"recipe must be one of sf\.recipes or None"):
        model.recipe = recipes.MXFP8  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(sf.InputError, match=r"sf.recipes.MXFP8\(\)"):
        sf.Sequential(ops.Linear(16, 16), recipe=recipes.MXFP8)  # pyright: ignore[reportArgumentType]
    with pytest.raises(sf.InputError, match="recipe must be"), sf.low_precision("mxfp8"):  # pyright: ignore[reportArgumentType]
        pass
    model[1].recipe = "mxfp8"  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    with pytest.raises(sf.InputError, match=r"recipe must be one of sf\.recipes") as caught:
        model(X)
    assert caught.value.path == "1"


def test_slices_sums_and_copies_keep_the_recipe():
    model = model_of(BLOCK)
    assert model[1:3].recipe == (model + sf.Sequential(ops.ReLU())).recipe == copy.copy(model).recipe == BLOCK
    low = step(model, X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_bitwise_equal(step(other, X), low)
    model.recipe = None
    assert model[:2].recipe is None
    twin = nn.Sequential(nn.Linear(32, 16))
    model = sf.Sequential(ops.Linear(32, 16), recipe=BLOCK)
    model(X).sum().backward()
    model.load_state_dict(twin.state_dict(), strict=True)
    twin.load_state_dict(model.state_dict(), strict=True)


@each_recipe
def test_fusions_that_take_a_linear_say_why_they_are_not_applied(recipe: Recipe):
    model = model_of(recipe)
    plan = model.plan(X)
    quantized = {q.at for q in plan.quantizations}
    for steps in (plan.forward, plan.backward):
        assert not [s for s in steps if s.fused and quantized.intersection(s.covers)]
    reason = f"{type(recipe).__name__} quantizes Linear here, which this fusion does not"
    assert {r.fusion for r in plan.refused if r.reason == reason} >= {"LinearBias", "LinearBiasBackward"}
    assert plan.fused[0] > 0
    assert plan.fused[1] > 0


@each_recipe
def test_c_kernels_around_quantized_gemms_give_the_numbers_of_the_operations(recipe: Recipe):
    model = model_of(recipe)
    with sf.fusing(unmeasured=True):
        fused, plan = step(model, X), model.plan(X)
    assert plan.env.kernels == "c"
    assert min(plan.fused) >= 3
    with sf.fusing(False):
        unfused = step(model, X)
    for a, b in zip(fused, unfused, strict=True):
        assert float((a - b).norm()) <= 1e-3 * float(b.norm())


@each_recipe
@pytest.mark.parametrize("memory", ["lean", "balanced"])
def test_choices_of_memory_give_the_same_numbers(recipe: Recipe, memory: Any):
    model = model_of(recipe)
    with sf.fusing(False):
        low = step(model, X)
    model.memory = memory
    for got, want in zip(step(model, X), low, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))


@each_recipe
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_quantizes_what_it_hands_to_a_gemm(recipe: Recipe, dtype: torch.dtype):
    model = sf.Sequential(ops.Linear(32, 48, bias=False), recipe=recipe)
    low = sf.Sequential(ops.Linear(32, 48, bias=False, dtype=dtype), recipe=recipe)
    low[0].weight.data.copy_(model[0].weight.data)
    want, outside = step(low, X.to(dtype)), model(X)
    with torch.autocast("cpu", dtype):
        got = step(model, X)
        assert got[0].dtype is dtype
        with torch.no_grad():
            assert torch.equal(model(X), got[0])
        with torch.autocast("cpu", enabled=False):
            assert_bitwise_equal([model(X)], [outside])
    assert_bitwise_equal([got[0], *(g.to(dtype) for g in got[1:])], want)
    with torch.autocast("cpu", dtype):
        whole = model_of(recipe)
        y = whole(X)
        plan = whole.plan(X)
    assert y.dtype is dtype
    assert plan.quantizations


@each_recipe
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputed_forward_has_the_same_bits(recipe: Recipe, reentrant: bool):
    model = model_of(recipe)
    low = step(model, X)
    assert_bitwise_equal(step(model, X, lambda x: checkpoint.checkpoint(model, x, use_reentrant=reentrant)), low)  # pyright: ignore


@each_recipe
def test_forwards_alive_together_and_retained_graphs(recipe: Recipe):
    model = model_of(recipe)
    first, second = step(model, X), step(model, 2 * X)
    a, b = X.detach().requires_grad_(), (2 * X).detach().requires_grad_()
    ya, yb = model(a), model(b)
    own = tuple(model.parameters())
    for _ in range(2):
        assert_bitwise_equal(torch.autograd.grad(yb.square().sum(), (b, *own), retain_graph=True), second[1:])
        assert_bitwise_equal(torch.autograd.grad(ya.square().sum(), (a, *own), retain_graph=True), first[1:])
    (dx,) = torch.autograd.grad(ya.square().sum(), (a,), retain_graph=True)
    assert torch.equal(dx, first[1])
    (dweight,) = torch.autograd.grad(ya.square().sum(), (own[2],))
    assert torch.equal(dweight, first[4])


@each_recipe
def test_a_loss_scaler_sees_what_overflows_and_skips_the_step(recipe: Recipe):
    model = sf.Sequential(ops.Linear(32, 32), ops.GeLU(), ops.Linear(32, 16), recipe=recipe)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)  # pyright: ignore
    for bad in (1.0, float("inf"), float("nan")):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        loss = model(X).sum() * bad
        scaler.scale(loss).backward()
        found = [not p.grad.isfinite().all() for p in model.parameters() if p.grad is not None]
        scaler.step(optimizer)
        scaler.update()
        moved = [not torch.equal(before[name], value) for name, value in model.state_dict().items()]
        assert all(found) == (bad != 1.0)
        assert any(moved) == (bad == 1.0)
    x = X.clone()
    x[2, 3] = float("nan")
    y = sf.Sequential(ops.Linear(32, 32), recipe=recipe)(x)
    assert y[2].isnan().all()
    if not isinstance(recipe, recipes.Float8CurrentScaling):
        assert y[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize(
    ("recipe", "kernels"),
    [
        pytest.param(recipe, kernels, id=f"{named(recipe)} {way}", marks=[pytest.mark.full] * (kernels == bool(at % 2)))
        for at, recipe in enumerate(RECIPES)
        for kernels, way in ((True, "planned"), (False, "by reference"))
    ],
)
def test_compiles_whole(recipe: Recipe, kernels: bool):
    several = ops.RMSNorm(32), ops.Linear(32, 32), ops.SwiGLU()
    model = sf.Sequential(*several * kernels, ops.Linear(32 >> kernels, 16, bias=False), recipe=recipe)
    low = step(model, X)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        exported = torch.export.export(model, (X,)).module()(X)
    for got, want in zip([exported, *step(model, X, compiled)], [low[0], *low], strict=True):
        if kernels:  # other fusions, which round otherwise, may be in it
            assert float((got - want).norm()) <= 1e-2 * float(want.norm())
        else:
            assert torch.equal(got, want)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlocksOf(Recipe):
    """A user's recipe."""

    size: int

    def block(self, role: Role, direction: Direction) -> tuple[int | None, int | None]:
        return (1, self.size) if direction == "rows" else (self.size, 1)


def test_a_recipe_of_the_user_is_compiled_as_it_is():
    model = sf.Sequential(ops.Linear(32, 16, bias=False), recipe=BlocksOf(size=8))
    low = step(model, X)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_bitwise_equal(step(model, X, compiled), low)
    model.recipe = recipes.MXFP8()
    assert not torch.equal(step(model, X)[0], low[0])


@each_recipe
def test_transforms_of_torch_see_the_recipe(recipe: Recipe):
    model = sf.Sequential(ops.Linear(32, 16), recipe=recipe)
    own = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    grads, dx = torch.func.grad(loss, argnums=(0, 1))(own, X)
    low = step(model, X)
    assert_bitwise_equal([dx, *(grads[name] for name in own)], low[1:])
    # Codes have no derivatives: their gradients would be zeros.
    first = torch.func.grad(loss, argnums=1)
    for of in (lambda x: torch.func.grad(lambda x: first(own, x).square().sum())(x), torch.func.hessian(model)):
        with pytest.raises(sf.InputError, match=f"{recipe} has first derivatives in reverse mode only"):
            of(X)
    with pytest.raises(sf.InputError, match=f"{recipe} has first"), forward_ad.dual_level():
        model(forward_ad.make_dual(X, X))
    with sf.low_precision(enabled=False):
        assert torch.func.hessian(lambda x: model(x).square().sum())(X[:1]).any()


@each_recipe
def test_an_operation_with_hooks_has_the_recipe_of_its_container(recipe: Recipe):
    model = model_of(recipe)
    low = step(model, X)
    seen: list[Tensor] = []
    model[1].register_forward_hook(lambda module, given, y: seen.append(y))
    model[3].register_forward_hook(lambda module, given, y: seen.append(y))
    with sf.fusing(False):
        hooked = step(model, X)
    assert len(seen) == 2
    with sf.fusing(False):
        assert_bitwise_equal(hooked, step(model_of(recipe), X))
    torch.testing.assert_close(hooked[0], low[0], rtol=1e-2, atol=1e-2)


def test_a_foreign_module_does_not_inherit_a_recipe():
    inner = sf.Sequential(ops.Linear(32, 16))

    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    assert torch.equal(sf.Sequential(Foreign(), recipe=BLOCK)(X), inner(X))


@each_recipe
def test_devices_without_kernels_for_a_recipe_say_so(recipe: Recipe):
    model = model_of(recipe)
    name = type(recipe).__name__
    without = ["cuda:sm_80", "cuda:gfx942"] + ([] if recipe.whole_rows else ["cuda:sm_120"])
    without += {128: ["cuda:sm_100"], 32: ["cuda:sm_90"]}.get(recipe.by_blocks or 0, [])
    for device in without:
        env = sf.Env.of(device, dtype=torch.bfloat16)
        with pytest.raises(sf.InputError, match=f"{name} has no kernels") as caught:
            model.plan(env=env)
        assert caught.value.code == "SF108"
        assert caught.value.hint is not None
        assert "emulate=True" in caught.value.hint
        model.recipe = type(recipe)(emulate=True)
        assert model.plan(env=env).quantizations
        model.recipe = recipe
    assert model_of().plan(env=sf.Env.of("cuda:sm_80")).quantizations == ()


def test_gpus_whose_kernels_quantize_what_they_write():
    kinds = tuple(
        kind(emulate=True) for kind in (recipes.Float8BlockScaling, recipes.MXFP8, recipes.Float8DelayedScaling)
    )
    parts = functools.partial(ops.Linear, 256, bias=False)
    models = [sf.Sequential(parts(512), ops.SwiGLU(), parts(256), recipe=kind) for kind in kinds]
    for arch, wanted in {
        "sm_80": (), "gfx942": (), "gfx950": (), "sm_89": kinds[1:], "sm_90": kinds, "sm_100": kinds[1:],
        "sm_120": kinds[1:],
    }.items():  # fmt: skip
        env = sf.Env.of(f"cuda:{arch}", dtype=torch.bfloat16, tokens=8192)
        plans = [model.plan(env=env) for model in models]
        inside = [plan.quantizations for plan in plans if any(q.inside for q in plan.quantizations)]
        assert inside == [plans[kinds.index(kind)].quantizations for kind in wanted], arch


@pytest.mark.parametrize(
    ("size", "biased", "arch", "wanted"),
    [
        (32, False, "sm_100", True),
        (64, True, "sm_100", False),
        (64, False, "sm_100", True),
        (128, True, "sm_100", True),
        (64, True, "sm_120", False),
        (32, True, "sm_90", True),
    ],
)
def test_from_sm_100_on_rope_quantizes_its_gradient_without_the_biases_of_small_heads(
    size: int, biased: bool, arch: str, wanted: bool
):
    """Triton 3.6.0 crashes when it compiles sums of biases of heads smaller than 128."""
    parts = ops.RotaryEmbedding(1, 1, style="half"), ops.Attention(1, 1, causal=True)
    biases = [ops.Bias(3 * size)] * biased
    before = ops.Linear(128, 3 * size, bias=False)
    model = sf.Sequential(before, *biases, *parts, recipe=recipes.MXFP8(emulate=True)).bfloat16()
    plan = model.plan(env=sf.Env.of(f"cuda:{arch}", dtype=torch.bfloat16, tokens=8192))
    assert (("dy", "BiasQKNormRotaryBackward") in [(q.role, q.inside) for q in plan.quantizations]) == wanted


def test_gpus_that_have_kernels_of_quantization(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton")
    device = torch.device("cuda")
    found = dict[tuple[int, int], bool]()
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(_lowprecision, "_capability", lambda _, c=capability: c)
        _lowprecision._kernels_on.cache_clear()
        found[capability] = _lowprecision._kernels_on(device) is not None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    _lowprecision._kernels_on.cache_clear()
    assert _lowprecision._kernels_on(device) is None
    _lowprecision._kernels_on.cache_clear()
    assert [c for c, there in found.items() if not there] == [(8, 0), (8, 6)]


def test_launches_of_a_llama_layer_beside_those_in_bfloat16():
    """The middle one of three: its steps are those of bfloat16, and two more launches quantize for the others."""
    rotary = functools.partial(ops.RotaryEmbedding, style="half")
    layer = functools.partial(
        TransformerLayer, 1024, 8, 2, hidden_dim=4096, activation=ops.SwiGLU, norm=ops.RMSNorm, bias=False,
        causal=True, rotary=rotary,
    )  # fmt: skip
    model = sf.Sequential(*(layer() for _ in range(3)))
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, tokens=8192)
    plain = model.plan(env=env)
    model.recipe = BLOCK
    plan = model.plan(env=env)
    middle = [i for i, path in enumerate(plan.paths) if path.startswith("1.")]
    for found, wanted in ((plan.forward, plain.forward), (plan.backward, plain.backward)):
        assert [s.key for s in found if s.start in middle] == [s.key for s in wanted if s.start in middle]
    own = {(q.at, q.role): q.inside for q in plan.quantizations if q.at in middle}
    qkv, out, up, down = (i for i in middle if plan.names[i] == "Linear")
    assert {place: by for place, by in own.items() if by} == {
        (qkv, "x"): "BlockBoundary", (up, "x"): "BlockBoundary", (down, "x"): "BiasGated",
        (qkv, "dy"): "BiasQKNormRotaryBackward", (out, "dy"): "BlockBoundaryBackward", (up, "dy"): "BiasGatedBackward",
        (down, "dy"): "BlockBoundaryBackward",
    }  # fmt: skip
    # Attention is torch's kernel. Weights have no kernel before them, and all weights of a segment take one launch.
    assert {place for place, by in own.items() if by is None} == {
        (out, "x"), *((at, "weight") for at in (qkv, out, up, down))
    }  # fmt: skip
    shared = {next(i for i, span in enumerate(plan.segments) if at in span) for at in (out, up, down)}
    assert len(shared) == 1
    assert len(plan.segments) == 4  # each of which but the first and the last has as many weights as a layer


@each_recipe
def test_plans_as_data(recipe: Recipe):
    model = model_of(recipe)
    data = model.plan(X).as_dict()
    one = data["quantizations"][0]
    assert one["role"] == "x"
    assert one["inside"] is None
    assert data["env"]["recipe"] is None
    with sf.low_precision(recipe):
        assert model.plan(X).as_dict()["env"]["recipe"] == type(recipe).__name__
        assert type(recipe).__name__ in str(model.plan(X)).split(":")[0]
    with sf.low_precision(enabled=False):
        assert model.plan(X).as_dict()["env"]["recipe"] == "off"
        assert "low precision off" in str(model.plan(X))
    saves = [one["saves"] for one in data["operations"] if one["name"] == "Linear"]
    assert saves[0] == ["x", "x_inverse", "weight", "weight_inverse"]


def test_a_compiler_is_told_of_a_recipe_that_it_does_not_see():
    model = model_of(BLOCK)
    model[1].register_forward_hook(lambda module, given, y: y)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="set its own recipe"):
        torch.compile(model, fullgraph=True, backend="eager")(X)
    model[1].recipe = BLOCK  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with sf.fusing(False):
        torch.testing.assert_close(compiled(X), model(X), rtol=2e-2, atol=2e-2)


def test_a_plan_for_a_gpu_says_the_memory_of_what_kernels_quantize(monkeypatch: pytest.MonkeyPatch):
    def plan() -> sf.Plan:
        parts = ops.Linear(256, 512, bias=False), ops.SwiGLU(), ops.Linear(256, 256, bias=False)
        model = sf.Sequential(*parts, recipe=recipes.Float8BlockScaling()).to(torch.bfloat16)
        env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)
        return model.plan(torch.randn(1024, 256, dtype=torch.bfloat16), env=env)

    found = plan()
    assert [s.name for s in found.forward if s.to is not None] == ["BiasGated"]
    assert found.memory is not None, found.memory_unknown
    monkeypatch.setattr(Stretch, "absorbed", lambda *_: ())
    apart = plan().memory
    assert apart is not None
    assert found.memory.saved == apart.saved
    assert found.memory.peak is not None
    assert apart.peak is not None
    assert found.memory.peak < apart.peak  # the unit's output exists only in 8 bits


@pytest.mark.parametrize("recipe", [BLOCK, recipes.MXFP8(), recipes.Float8RowScaling()], ids=str)
def test_weights_of_a_segment_are_quantized_together(recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    asked: list[list[str]] = []
    together = ops.Linear.quantized_weights

    def noted(several: Any) -> Any:
        asked.append([type(operation).__name__ for operation, _, _ in several])
        return together(several)

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        parts = ops.Linear(32, 48), ops.GeLU(), ops.MergedLinear(48, (32, 16)), ops.Linear(48, 20), ops.Linear(20, 16)
        model = sf.Sequential(*parts, recipe=recipe)
        model[0].weight.requires_grad_(requires_grad=False)
        x = torch.randn(33, 32)
        y = model(x)
        y.square().sum().backward()
        with torch.no_grad():
            return [y, model(x), *(p.grad for p in model.parameters() if p.grad is not None)]

    for kind in (ops.Linear, ops.MergedLinear):
        monkeypatch.setattr(kind, "quantized_weights", staticmethod(noted))
    found = run()
    # Sizes that are not multiples of 16 are excluded; scales of a row are computed before.
    assert {*map(tuple, asked)} == (set[Any]() if recipe.whole_rows else {("Linear", "MergedLinear")})
    asked.clear()
    monkeypatch.setattr(Step, "weighs", False)
    assert_bitwise_equal(run(), found)
    assert not asked

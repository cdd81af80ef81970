"""Delayed scaling: scales of earlier steps against a reference in numpy, and the state that carries them."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils import checkpoint

import seqfuse as sf
from seqfuse import ops
from seqfuse.recipes import Float8DelayedScaling
from seqfuse.testing import assert_bitwise_equal, seeded_randn

from . import formats
from .test_linear import assert_within

SHORT = Float8DelayedScaling(history=4)


class Window:
    """The scale of one tensor, and the maxima that determine it, by step."""

    def __init__(self, form: formats.Format, recipe: Float8DelayedScaling) -> None:
        self.form, self.recipe = form, recipe
        self.scale, self.maxima, self.now = np.float32(1), [], np.float32(0)

    def see(self, x: np.ndarray) -> None:
        self.now = np.maximum(self.now, np.abs(x).max().astype(np.float32))

    def step(self) -> None:
        self.maxima.append(self.now)
        last = self.maxima[-self.recipe.history :]
        most = max(last) if self.recipe.algorithm == "max" else last[-1]
        if most > 0 and np.isfinite(most):
            with np.errstate(over="ignore"):
                new = np.float32(self.form.largest) / most / np.float32(2.0**self.recipe.margin)
            self.scale = np.minimum(new, np.finfo(np.float32).max).astype(np.float32)
        self.now = np.float32(0)

    def values(self, x: Tensor) -> np.ndarray:
        rows = x.detach().float().numpy()
        with np.errstate(over="ignore"):
            codes = formats.encode(rows * self.scale, self.form)
        return formats.decode(codes, self.form) * np.float64(np.float32(1) / self.scale)


def windows(recipe: Float8DelayedScaling) -> dict[str, Window]:
    wide = formats.E5M2 if recipe.format == "hybrid" else formats.E4M3
    return {"x": Window(formats.E4M3, recipe), "weight": Window(formats.E4M3, recipe), "dy": Window(wide, recipe)}


RECIPES = [
    *(Float8DelayedScaling(history=history) for history in (1, 4, 7, 1024)),
    Float8DelayedScaling(history=4, margin=2),
    Float8DelayedScaling(history=4, margin=-1, algorithm="most_recent"),
    Float8DelayedScaling(history=7, format="e4m3", algorithm="most_recent"),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.history} {r.margin} {r.algorithm} {r.format}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_twenty_steps_are_those_of_the_reference(recipe: Float8DelayedScaling, dtype: torch.dtype):
    model = sf.Sequential(ops.Linear(32, 48, bias=False, dtype=dtype), recipe=recipe)
    linear: Any = model[0]
    optimizer, own = torch.optim.SGD(model.parameters(), lr=1e-3), windows(recipe)
    for step in range(20):
        optimizer.zero_grad()
        # Of four micro-batches; one step of zeros, one of huge numbers, and one that is not finite.
        for part in range(4 if step % 5 == 0 else 1):
            factor = {3: 0.0, 8: 1e-3, 11: 300.0, 15: float("inf")}.get(step, 1.0 + step % 3)
            x = (seeded_randn((9, 32), 40 * step + part) * factor).nan_to_num(nan=0.0, posinf=torch.inf).to(dtype)
            x.requires_grad_()
            dy = (seeded_randn((9, 48), 1000 + 40 * step + part) * 1e-3).to(dtype)
            dy = dy if step != 15 else torch.zeros_like(dy)
            own["x"].see(x.detach().float().numpy())
            own["weight"].see(linear.weight.detach().float().numpy())
            own["dy"].see(dy.float().numpy())
            y = model(x)
            dx, dweight = torch.autograd.grad(y, (x, linear.weight), dy)
            linear.weight.grad = dweight if linear.weight.grad is None else linear.weight.grad + dweight
            for name, window in own.items():
                assert linear.get_buffer(f"{name}_scale").numpy() == window.scale, (step, name)
                newest = linear.get_buffer(f"{name}_amax_history")[0].numpy()
                assert newest == window.now or (np.isnan(newest) and np.isnan(window.now)), (step, name)
            if step != 15:
                assert_within(y, own["x"].values(x), own["weight"].values(linear.weight).T)
                assert_within(dx, own["dy"].values(dy), own["weight"].values(linear.weight))
                assert_within(dweight, own["dy"].values(dy).T, own["x"].values(x))
            else:
                assert not y.isfinite().all()
                linear.weight.grad = torch.zeros_like(linear.weight)
        optimizer.step()
        for window in own.values():
            window.step()
    for name, window in own.items():
        assert linear.get_buffer(f"{name}_scale").numpy() == window.scale


def two(recipe: Any = SHORT) -> sf.Sequential:
    torch.manual_seed(0)
    merged = ops.MergedLinear(64, (32, 16), (True, False))
    return sf.Sequential(ops.LayerNorm(32), ops.Linear(32, 64), ops.GeLU(), merged, recipe=recipe)


def trained(model: nn.Module, steps: range, run: Any = None, optimizer: Any = None) -> list[Tensor]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        x = seeded_randn((17, 32), step).requires_grad_()
        loss = (run or model)(x * (1 + step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def test_recomputation_retained_graphs_and_forwards_alive_together_give_the_same_scales():
    model = two()
    expected = trained(model, range(6))
    for reentrant in (False, True):
        other = two()

        def run(x: Tensor, other: nn.Module = other, reentrant: bool = reentrant) -> Tensor:
            return checkpoint.checkpoint(other, x, use_reentrant=reentrant)  # pyright: ignore

        assert_bitwise_equal(trained(other, range(6), run), expected)
        assert_bitwise_equal(other.state_dict(), model.state_dict())
    other = two()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.05)
    for step in range(6):
        optimizer.zero_grad()
        x = seeded_randn((17, 32), step) * (1 + step)
        first, second = other(x).square().mean(), other(x).square().mean()
        first.backward(retain_graph=True)
        again = [p.grad.clone() for p in other.parameters() if p.grad is not None]
        optimizer.zero_grad()
        second.backward()
        assert_bitwise_equal([p.grad for p in other.parameters()], again)
        assert torch.equal(first.detach(), expected[step])
        optimizer.step()
    assert_bitwise_equal(other.state_dict(), model.state_dict())


def test_segments_that_run_again_take_each_maximum_once_and_have_the_scales_of_their_forward():
    def state(memory: Any, between: bool) -> list[Any]:
        torch.manual_seed(0)
        blocks = (ops.Residual(ops.LayerNorm(64), ops.Linear(64, 256), ops.GeLU(), ops.Linear(256, 64)) for _ in "1234")
        model = sf.Sequential(*blocks, memory=memory, recipe=SHORT)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            x = (seeded_randn((64, 64), step) / 2**step).requires_grad_()
            loss = model(x).square().mean()
            if between:
                sf.update_scales(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert bool(model.plan(x).recomputed) == (memory == "least")
        return [model.state_dict()[name] for name in sorted(model.state_dict())]

    for between in (False, True):
        torch.testing.assert_close(state("least", between), state("fast", between), rtol=1e-5, atol=1e-7)


def test_evaluation_and_no_grad_record_nothing():
    model = two()
    trained(model, range(2))
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        model(100 * seeded_randn((4, 32), 0))
    model.eval()
    model(100 * seeded_randn((4, 32), 0)).sum().backward()
    model.plan(seeded_randn((4, 32), 0))
    with sf.low_precision(enabled=False):
        model.train()
        model(100 * seeded_randn((4, 32), 0)).sum().backward()
    assert_bitwise_equal(model.state_dict(), before)


def test_state_is_plain_tensors_and_training_resumes_bit_for_bit(tmp_path: Any):
    whole = two()
    expected = trained(whole, range(8))
    model = two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first = trained(model, range(4), optimizer=optimizer)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = two()
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    assert_bitwise_equal([*first, *trained(other, range(4, 8))], expected)
    assert_bitwise_equal(other.state_dict(), whole.state_dict())
    copied = copy.deepcopy(model)
    assert_bitwise_equal(trained(copied, range(4, 8)), expected[4:])
    assert_bitwise_equal(model.state_dict(), torch.load(tmp_path / "model.pt", weights_only=True))
    kinds = {type(t) for t in model.state_dict().values()}
    assert kinds == {Tensor}


def test_checkpoints_of_other_models_load():
    plain = nn.Linear(32, 48)
    model = sf.Sequential(ops.Linear(32, 48))
    assert [*model.state_dict()] == ["0.weight", "0.bias"]
    given = {f"0.{name}": t for name, t in plain.state_dict().items()}
    model.recipe = SHORT
    with torch.no_grad():
        for kept in ("x_scale", "x_amax_history"):
            model[0].get_buffer(kept).fill_(3)
    with pytest.warns(UserWarning, match="scales start at 1"):
        model.load_state_dict(given, strict=True)
    assert model[0].get_buffer("x_scale") == 1
    assert not model[0].get_buffer("x_amax_history").any()
    trained_one = sf.Sequential(ops.Linear(32, 48), recipe=Float8DelayedScaling(history=7))
    trained(trained_one, range(3))
    state = trained_one.state_dict()
    without = sf.Sequential(ops.Linear(32, 48))
    with pytest.warns(UserWarning, match="no delayed recipe is set"):
        without.load_state_dict(state, strict=True)
    assert len(state) == 8
    model.load_state_dict(state, strict=True)
    assert torch.equal(model[0].get_buffer("x_amax_history"), state["0.x_amax_history"][:4])
    longer = sf.Sequential(ops.Linear(32, 48), recipe=Float8DelayedScaling(history=9))
    longer.load_state_dict(state, strict=True)
    assert torch.equal(longer[0].get_buffer("x_amax_history")[:7], state["0.x_amax_history"])
    longer.recipe = SHORT
    assert torch.equal(longer[0].get_buffer("x_amax_history"), state["0.x_amax_history"][:4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        two().load_state_dict(two().state_dict(), strict=True)
        two(None).load_state_dict(two(None).state_dict(), strict=True)


def test_buffers_stay_float32_and_odd_sizes_and_excluded_operations_have_none():
    model = two()
    trained(model, range(2))
    scale = model[1].get_buffer("dy_scale").clone()
    assert scale > 1000
    for cast in (model.half, model.bfloat16, model.double, lambda: model.to("cpu", torch.float16)):
        cast()
        assert torch.equal(model[1].get_buffer("dy_scale"), scale)
        assert model[1].get_buffer("dy_amax_history").dtype is torch.float32

    def fails(t: Tensor) -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        model._apply(fails)
    assert torch.equal(model[1].get_buffer("dy_scale"), scale)
    for lone, size in ((ops.Linear(32, 32), 8), (ops.Linear(32, 33), 2), (ops.Linear(0, 32, device="meta"), 2)):
        lone.recipe = SHORT  # pyright: ignore[reportAttributeAccessIssue]
        assert len(lone.state_dict()) == size
    out = ops.Linear(32, 32)
    out.recipe = None  # pyright: ignore[reportAttributeAccessIssue]
    nested = sf.Sequential(sf.Sequential(ops.Linear(32, 32)), ops.Linear(32, 33), out, recipe=SHORT)
    assert [name for name, _ in nested.named_buffers() if name.endswith("x_scale")] == ["0.0.x_scale"]
    for absent in (two().to("meta", torch.float16), sf.Sequential(ops.Linear(32, 32, device="meta"), recipe=SHORT)):
        kept = [t for name, t in absent.named_buffers() if name.endswith(("scale", "history"))]
        assert {(t.device.type, t.dtype) for t in kept} == {("meta", torch.float32)}
    empty = two().to("meta").to_empty(device="cpu")
    assert empty[1].get_buffer("x_scale") == 1
    assert not empty[1].get_buffer("x_amax_history").any()


def test_scales_are_updated_by_hand_and_by_the_optimizer_that_owns_the_weight():
    model, other = two(), two()
    optimizer = torch.optim.AdamW(other.parameters())
    model(seeded_randn((4, 32), 0)).sum().backward()
    optimizer.step()
    assert model[1].get_buffer("x_scale") == 1
    sf.update_scales(model)
    assert model[1].get_buffer("x_scale") > 1
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert_bitwise_equal(model.state_dict(), before)
    frozen = two()
    frozen[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in frozen.parameters() if p.requires_grad])
    frozen(seeded_randn((4, 32), 0)).sum().backward()
    optimizer.step()
    assert frozen[3].get_buffer("x_scale") > 1
    assert frozen[1].get_buffer("x_scale") == 1
    biased = two()
    biased[1].weight.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in biased.parameters() if p.requires_grad])
    biased(seeded_randn((4, 32), 0)).sum().backward()
    optimizer.step()
    assert biased[1].get_buffer("x_scale") > 1
    grouped = two()
    matrices, vectors = ([p for p in grouped.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False))
    optimizer = torch.optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices}])
    grouped(seeded_randn((4, 32), 0)).sum().backward()
    optimizer.step()
    assert grouped[1].get_buffer("x_scale") > 1
    with pytest.raises(sf.InputError, match="no operation of the model keeps scales"):
        sf.update_scales(two(None))


def test_each_part_of_a_merged_linear_has_scales_for_the_format_of_its_role():
    model, x, dy = two(), seeded_randn((4, 32), 0), seeded_randn((4, 48), 1)
    model(x).backward(dy)
    sf.update_scales(model)
    for i, own in enumerate(dy.split((32, 16), 1)):
        largest = torch.tensor([448.0, 57344.0])
        most = torch.stack([model[3].weights()[i].abs().max(), own.abs().max()])
        found = torch.stack([model[3].get_buffer(f"{role}_{i}_scale") for role in ("weight", "dy")])
        assert torch.equal(found, largest / most)


def test_a_module_that_is_appended_gets_its_scales_in_its_first_call():
    model = two()
    model.append(ops.Linear(48, 32))
    trained(model, range(2))
    assert model[4].get_buffer("dy_scale") > 1
    with sf.low_precision(SHORT):
        plain = two(None)
        trained(plain, range(2))
    assert plain[1].get_buffer("x_scale") > 1
    with sf.low_precision(Float8DelayedScaling(history=7)):
        plain(seeded_randn((4, 32), 0))
    assert len(plain[1].get_buffer("x_amax_history")) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_without_tokens_or_without_data_record_nothing(dtype: torch.dtype):
    model = two().to(dtype)
    model(torch.zeros(0, 32, dtype=dtype)).sum().backward()
    assert not any(t.any() for name, t in model.named_buffers() if name.endswith(("x_amax_history", "dy_amax_history")))
    before = copy.deepcopy(model.state_dict())
    plan = model.plan(torch.zeros(4, 32, dtype=dtype, device="meta"))
    assert "quantize e4m3 per tensor, delayed: x at" in str(plan)
    absent = copy.deepcopy(model).to("meta")
    y = absent(torch.zeros(4, 32, dtype=dtype, device="meta"))
    y.sum().backward()
    assert (y.dtype, y.shape) == (dtype, (4, 48))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.zeros(4, 32, dtype=dtype)).sum().backward()
    assert_bitwise_equal(model.state_dict(), before)


def test_what_does_not_see_scales_says_so():
    model, x = two(), seeded_randn((4, 32), 0)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(model, fullgraph=True, backend="eager")(x)
    torch._dynamo.reset()
    other, y, said = copy.deepcopy(model), None, "keeps scales between steps, which compilers do not see"
    try:
        y = torch.compile(model, backend="eager")(x)
    except sf.InputError as error:
        said = str(error)
    assert "keeps scales between steps, which compilers do not see" in said
    if y is not None:  # torch 2.15 runs what it does not trace as it is
        assert torch.equal(y, other(x))
        assert_bitwise_equal(dict(model.named_buffers()), dict(other.named_buffers()))
    with pytest.raises(sf.InputError, match="keeps scales between steps"):
        torch.func.jvp(model, (x,), (x,))
    with pytest.raises(sf.InputError, match="keeps scales in operations"):
        sf.convert(nn.Sequential(nn.Linear(32, 32), nn.GELU()), recipe=SHORT)
    for wrong in ({"history": 0}, {"margin": 0.5}, {"algorithm": "mean"}, {"format": "e5m2"}):
        with pytest.raises(sf.InputError):
            Float8DelayedScaling(**wrong)
    data, inverse = sf.recipes.quantize(x, SHORT, "dy", "rows")
    assert torch.equal(data.float(), x.to(torch.float8_e5m2).float())
    assert inverse == 1
    data, inverse = sf.recipes.quantize(x, SHORT, "x", "rows", scale=torch.tensor(3.0))
    assert torch.equal(data.float(), (x * 3).to(torch.float8_e4m3fn).float())
    assert inverse == torch.tensor(1.0) / torch.tensor(3.0)


def test_a_plan_says_that_scales_are_delayed_and_pickles_keep_state():
    model, x = two(), seeded_randn((33, 32), 0)
    trained(model, range(2))
    assert "quantize e4m3 per tensor, delayed: x at" in str(model.plan(x))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    other = torch.load(buffer, weights_only=False)
    assert_bitwise_equal(trained(other, range(2, 4)), trained(model, range(2, 4)))

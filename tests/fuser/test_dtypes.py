"""Autocast: which dtypes operations declare, compared with torch, and which casts 16-bit plans contain, run and
save."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import seqfuse as sf
from seqfuse import compiler, env, ops
from seqfuse import nn as layers
from seqfuse.plan.flatten import flatten
from seqfuse.plan.inputs import Border, along_of, under_autocast
from seqfuse.plan.step import Stretch
from seqfuse.run.lower import Context, lower
from seqfuse.run.node import back_alone, run_alone
from seqfuse.testing import assert_bitwise_equal
from tests.fuser.fusions import Doubles, stepwise
from tests.watching import Calls, bytes_of, saving

from .kit import draw

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
OPERATIONS = sorted(
    {
        kind
        for kind in vars(ops).values()
        if isinstance(kind, type) and issubclass(kind, sf.UnfusedOperation) and kind.is_final
    },
    key=lambda kind: kind.__name__,
)
ELSEWHERE = {"AllGather", "AllReduce", "CopyToTensorParallel", "ReduceScatter"}
# torch without CUDA cannot trace all calls of these on fake tensors.
WITHOUT_FAKES = {"PositionEmbedding", "QKNorm", "RotaryEmbedding"}
# Such a torch ends the process that asks which attention kernel a GPU would take.
OF_ATTENTION = {"Attention", "CrossAttention"}
# Their channels differ from x in shape; their own tests run them under autocast.
OF_CHANNELS = {"GroupedLinear", "Permute", "TokenScale", "Unpermute"}


@contextlib.contextmanager
def autocast(kind: str, dtype: torch.dtype) -> Generator[None]:
    """A region like `torch.autocast`, which refuses to open without such a device."""
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.set_autocast_cache_enabled(before[2])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [kind for kind in OPERATIONS if kind.__name__ not in ELSEWHERE])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_every_operation_says_what_autocast_makes_of_its_result(kind: type[sf.UnfusedOperation], device: str):
    integers, compared = kind.__name__ == "Embedding", 0
    example = kind.example(torch.zeros(3, 12, dtype=torch.int64 if integers else torch.float32))
    assert example.autocast is not None, f"{kind.__name__} does not say it"
    if kind.__name__ in OF_CHANNELS:
        return
    if device == "cuda" and kind.__name__ in OF_ATTENTION:
        assert example.autocast == "lower"
        return
    extras = [name for name in example.forward_signature.extras if name not in example.forward_signature.optional]
    for dtype in DTYPES:
        env = sf.Env(device, dtype=dtype, autocast=torch.bfloat16)
        with FakeTensorMode(), torch.no_grad(), autocast(device, torch.bfloat16):
            for module in example.modules():
                for name, p in module._parameters.items():
                    if p is not None:
                        module._parameters[name] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=device))
            x = torch.empty(3, 12, dtype=torch.int64 if integers else dtype, device=device)
            channels = {channel: dtype for channel in example.channels.values() if channel is not None}
            borders = under_autocast(flatten(example)[:1], range(1), env, channels)
            try:
                y = example.reference(x, **dict.fromkeys(extras, x))
            except RuntimeError as error:  # as torch itself refuses float64 with a float32 weight, or for lack of a GPU
                if dtype is not torch.float64 and "not linked with support for cuda" not in str(error):
                    raise
                continue
        compared += 1
        y = y[0] if example.outputs else y
        assert borders[-1].given is y.dtype, f"{dtype}: {borders[-1].given}, in torch {y.dtype}"
    assert compared >= 2 or (device == "cuda" and kind.__name__ in WITHOUT_FAKES)


def perceptron(norm: type[nn.Module], act: sf.UnfusedOperation) -> sf.Sequential:
    width = 16 if isinstance(act, sf.Gated) else 32
    blocks = [ops.Residual(norm(16), ops.Linear(16, 32), act, ops.Linear(width, 16)) for _ in range(2)]
    return sf.Sequential(*blocks, norm(16), act, ops.Linear(16 if width > 16 else 8, 4))


def forward_and_backward(model: Any, env: sf.Env, x: torch.Tensor, enabled: bool) -> tuple[Any, dict[Any, Any]]:
    """Runs a plan for an accelerator; dtype and shape of y, of all saved tensors, and of every gradient."""
    fuser = model._fuser
    op_list = fuser.op_list()
    (region,) = op_list.parts
    parameters = [getattr(owner, name) for owner, name in region.slots]
    with sf.fusing(enabled, on_error="raise"):
        plan = fuser.plan(env=env)
        stretch = Stretch.of(op_list.nodes, region.positions, x, {}, parameters, env)
        context = Context.of(stretch, region.slots, parameters, "raise", lambda: None)
        segments = lower(plan, context, op_list.configured)
    runs, channels, gradients = list[Any](), dict[str, Any](), dict[str, Any]()
    with torch.no_grad():
        for segment in segments:
            node, (x, *outputs) = run_alone(segment, None, x, *[channels[c] for c in segment.inputs])
            runs.append(node)
            channels.update(zip(segment.outputs, outputs, strict=True))
        found: dict[Any, Any] = {"y": x}
        dy: Any = torch.empty_like(x)
        for segment, node in zip(reversed(segments), reversed(runs), strict=True):
            indices = [region.slots.index(slot) for slot in segment.parameters]
            saves = segment.saves
            for field, t in zip((*saves.tensors, *saves.several), node.saved_tensors, strict=False):
                found |= {(saves.records[field.record][1].position, field.name): t} if t is not None else {}
            dy, *grads = back_alone(node, dy, *[gradients.get(c) for c in segment.outputs])
            gradients.update(zip(segment.inputs, grads, strict=False))
            found |= {
                region.slots[i]: g.to(parameters[i].dtype)
                for i, g in zip(indices, grads[len(segment.inputs) :], strict=True)
            }
    return plan, {key: (t.dtype, tuple(t.shape)) for key, t in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("norm", "act"),
    [
        (ops.LayerNorm, ops.GeLU()), (ops.LayerNorm, ops.ReLU()), (ops.LayerNorm, ops.SquaredReLU()),
        (ops.RMSNorm, ops.SwiGLU()), (ops.RMSNorm, sf.Gated(ops.SquaredReLU())),
    ],
    ids=lambda of: of.__name__ if isinstance(of, type) else type(getattr(of, "activation", of)).__name__,
)  # fmt: skip
def test_on_an_accelerator_all_that_is_saved_has_the_dtype_that_operations_give_it(
    norm: Any, act: Any, dtype: torch.dtype
):
    model = perceptron(norm, act)
    with FakeTensorMode(), autocast("cuda", torch.bfloat16):
        for module in model.modules():
            for name, p in module._parameters.items():
                module._parameters[name] = None if p is None else nn.Parameter(torch.empty(p.shape, device="cuda"))
        x = torch.empty(32, 16, device="cuda", dtype=dtype)
        env = sf.Env.of("cuda:sm_90", dtype=dtype, autocast=torch.bfloat16, rows=32)
        plan, fused = forward_and_backward(model, env, x, True)
        _, unfused = forward_and_backward(model, env, x, False)
    assert sum(bool(step.fused and step.operation.kernels) for step in (*plan.forward, *plan.backward)) >= 4
    alike = {key for key in fused if key in unfused}
    assert len(alike) >= 20
    assert {key: fused[key] for key in alike} == {key: unfused[key] for key in alike}


def test_autocast_leaves_float64_and_integers_as_they_are():
    env = sf.Env(autocast=torch.bfloat16)
    for dtype in (torch.float64, torch.int64, torch.bool):
        assert env.cast(dtype) is dtype
    assert env.cast(torch.float32) is env.cast(torch.float16) is torch.bfloat16


def test_a_fusion_gives_what_comes_next_takes_only_where_it_makes_the_cast():
    wide, narrow = torch.float32, torch.bfloat16
    borders = Border(wide, narrow), Border(narrow, narrow), Border(wide, narrow)
    assert along_of(borders, True) == (narrow, narrow, narrow)
    assert along_of(borders, False) == (narrow, narrow, wide)
    assert along_of((), False) == ()


@pytest.fixture(autouse=True)
def _with_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts are counted: those to float32 that a CPU without bfloat16 instructions needs have tests of their own."""
    monkeypatch.setattr(env, "WIDENED", frozenset())


HALF = torch.bfloat16
NORM = functools.partial(ops.RMSNorm, eps=1e-5)


def gpt(width: int = 64, **around: Any) -> sf.Sequential:
    return layers.TransformerLayer(width, 4, causal=True, **around)


def llama(width: int = 64) -> sf.Sequential:
    rotary = functools.partial(ops.RotaryEmbedding, style="half")
    shape: dict[str, Any] = {"hidden_dim": 3 * width, "activation": ops.SwiGLU, "norm": NORM, "bias": False}
    return layers.TransformerLayer(width, 4, 2, causal=True, rotary=rotary, **shape)


MODELS = pytest.mark.parametrize(
    "make", [gpt, functools.partial(gpt, dropout=0.1), llama], ids=["gpt", "dropout", "llama"]
)


def casting() -> Calls:
    """The shapes of tensors cast to 16 bits."""
    cast = torch.ops.aten._to_copy.default
    return Calls(lambda func, args, out: tuple(out.shape) if func is cast and out.dtype is HALF else None)


@MODELS
@pytest.mark.parametrize("place", ["cpu", "cuda:sm_90", "cuda:gfx942"])
def test_the_schedule_is_that_of_a_16_bit_model_but_for_casts_of_weights(make: Any, place: str):
    mixed = make().plan(env=sf.Env.of(place, autocast=HALF, rows=4096))
    half = make().to(HALF).plan(env=sf.Env.of(place, dtype=HALF, rows=4096))
    for ahead, names in (("forward", {"LayerNorm": "NormForward", "RMSNorm": "NormForward"}), ("backward", {})):
        # A norm that no other fusion takes writes 16 bits; the other model's norm does so by itself.
        wanted = [(names.get(step.name, step.name), step.covers) for step in getattr(half, ahead)]
        assert [(step.name, step.covers) for step in getattr(mixed, ahead)] == wanted
    products = [at for at, name in enumerate(mixed.names) if name == "Linear"]
    assert [cast.at for cast in mixed.casts if cast.name == "weight"] == products
    assert {cast.dtype for cast in mixed.casts} == {HALF}
    assert [cast.at for cast in mixed.casts if cast.name == "x"] == []
    assert half.casts == ()
    with sf.fusing(False):
        plain = make().plan(env=sf.Env.of(place, autocast=HALF, rows=4096))
    behind_norms = [at + 1 for at, name in enumerate(plain.names) if "Norm" in name]
    assert [cast.at for cast in plain.casts if cast.name == "x"] == behind_norms


class Own(Tensor):
    """A tensor of a subclass."""


class Owned(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.as_subclass(Own)


@pytest.mark.parametrize(
    "enter", [None, torch.nn.Identity, Owned], ids=["", "gradients begin in a later segment", "of a class of its own"]
)
def test_a_weight_is_cast_once_in_a_call_and_saved_once_however_often_it_is_read(enter: type[torch.nn.Module] | None):
    first, last = ops.Linear(12, 12, bias=False), ops.Linear(12, 12, bias=False)
    last.weight = first.weight
    model = sf.Sequential(first, ops.Tanh(), *(ops.Identity() for _ in range(20)), last)
    if enter is not None:
        model = sf.Sequential(enter(), *(ops.Identity() for _ in range(20))) + model
    x = draw(5, 12, dtype=torch.float32).requires_grad_(enter is None)
    for _ in range(3):  # interpreted, then by generated code
        with casting() as casts, saving() as saved, torch.autocast("cpu", HALF):
            y = model(x)
        assert casts.count((12, 12)) == 1
        assert len({t.untyped_storage().data_ptr() for t in saved if t.shape == (12, 12)}) == 1
        with casting() as casts:
            y.sum().backward()
        assert (12, 12) not in casts.names
    assert first.weight.grad.dtype is torch.float32


def test_without_gradients_products_leave_casts_to_the_cache_of_torch():
    model, x = gpt(), draw(3, 4, 64, dtype=torch.float32)
    with torch.autocast("cpu", HALF), torch.no_grad():
        model(x)
        with casting() as casts:
            model(x)
    assert (192, 64) not in casts.names


@MODELS
def test_no_more_is_kept_than_torch_keeps_under_autocast(make: Any):
    model, x = make(), draw(2, 16, 64, dtype=torch.float32).requires_grad_()
    sizes: list[int] = []
    for enabled in (True, False):
        with torch.autocast("cpu", HALF), saving() as saved, sf.fusing(enabled):
            model(x)
        sizes.append(bytes_of(saved, model))
        wide = [t for t in saved if t.dtype is torch.float32 and t.shape == x.shape]
        assert len({t.untyped_storage().data_ptr() for t in wide}) <= 2  # what the norms read: the residual stream
    assert sizes[0] <= sizes[1]


@pytest.mark.parametrize("make", [gpt, llama])
def test_what_is_made_again_is_made_of_the_same_casts(make: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiler, "_found", lambda: (None, "schedules of C kernels round in other places"))
    model, half = make(), make().to(HALF)
    x = draw(2, 16, 64, dtype=torch.float32)
    found: list[list[Tensor]] = []
    for memory in ("fast", "balanced", "lean"):
        model.memory = half.memory = memory
        leaf = x.clone().requires_grad_()
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", HALF), sf.fusing(on_error="raise"):
            plan = model.plan(leaf)
            model(leaf)
            y = model(leaf)  # by generated code
        same = half.plan(x.to(HALF).requires_grad_())
        assert [(step.name, step.covers) for step in plan.forward] == [(s.name, s.covers) for s in same.forward]
        y.square().sum().backward()
        found.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    assert plan.memory is not None
    assert plan.memory.saved < 0.85 * plan.memory.saved_unfused
    assert_bitwise_equal(found[1], found[0])
    assert_bitwise_equal(found[2], found[0])


@pytest.mark.parametrize("place", ["cpu", "cuda:sm_90"])
def test_float32_norms_in_a_16_bit_model_change_no_step(place: str):
    model, half = llama().to(HALF), llama().to(HALF)
    for module in model.modules():
        if isinstance(module, ops.RMSNorm):
            module.float()
    mixed, same = (m.plan(env=sf.Env.of(place, dtype=HALF, rows=4096)) for m in (model, half))
    for ahead in ("forward", "backward"):
        assert [step.covers for step in getattr(mixed, ahead)] == [step.covers for step in getattr(same, ahead)]
    x = draw(2, 8, 64, dtype=torch.float32).to(HALF).requires_grad_()
    y = model(x)
    y.backward(draw(2, 8, 64, seed=1).to(HALF))
    assert y.dtype is HALF
    assert {p.grad.dtype is p.dtype for p in model.parameters()} == {True}


def test_an_operation_that_states_nothing_is_looked_at_in_a_call():
    class Doubled(sf.Pointwise):
        def reference(self, x: Tensor) -> Tensor:
            return (2 * x).double()

    model = sf.Sequential(ops.Linear(4, 4), Doubled(), ops.Tanh(), ops.Add("other"))
    x, other = (draw(3, 4, seed=i, dtype=torch.float32) for i in range(2))
    with torch.autocast("cpu", HALF):
        plan = model.plan(x, other=other)
        assert model(x, other=other).dtype is torch.float64
    (step,) = [step for step in plan.forward if step.name == "Tanh"]
    assert [border.taken for border in step.borders] == [torch.float64, torch.float64]
    plan = model.plan(env=sf.Env.of("cuda:sm_90", autocast=HALF))
    assert not any(step.fused and step.operation.kernels for step in plan.forward if step.stop > 2)


def test_a_cast_inside_a_fusion_refuses_it_unless_it_says_that_it_takes_account_of_it():
    class NormLinear(sf.ForwardFusion):
        norm: ops.LayerNorm
        linear: ops.Linear
        fwd = stepwise

    class Casting(sf.ForwardFusion):
        norm: ops.LayerNorm
        linear: ops.Linear

        casts = True

        def fwd(self, x: Tensor, *, env: sf.Env) -> Any:
            y, norm = self.norm.fwd(x)
            z, linear = self.linear.fwd(y.to(env.part(1).dtype))
            return z, {"norm": norm, "linear": linear}

    x = draw(3, 8, dtype=torch.float32).requires_grad_()
    for fusion, applied in ((NormLinear, 0), (Casting, 1)):
        model = sf.Sequential(ops.LayerNorm(8), ops.Linear(8, 4, bias=False), fusions=fusion)
        with torch.autocast("cpu", HALF), sf.fusing(on_error="raise"):
            plan = model.plan(x)
            model(x).sum().backward()
        assert plan.count(fusion.__name__) == applied
        assert [r.reason for r in plan.refused] == ["x is cast to bfloat16 inside it, before Linear"] * (not applied)


def test_a_fusion_gives_the_dtype_that_it_is_told():
    told: list[torch.dtype | None] = []

    class Norm(sf.ForwardFusion):
        norm: ops.LayerNorm

        def saves(self, env: sf.Env) -> sf.Savings:
            return sf.Savings(launches=1)

        def fwd(self, x: Tensor, *, dtype: torch.dtype | None) -> Any:
            told.append(dtype)
            y, record = self.norm.fwd(x)
            return y if dtype is None else y.to(dtype), {"norm": record}

    model = sf.Sequential(ops.LayerNorm(8), ops.Linear(8, 4), fusions=Norm)
    x = draw(3, 8, dtype=torch.float32).requires_grad_()
    for _ in range(2):
        model(x)
        with torch.autocast("cpu", HALF):
            assert [cast.name for cast in model.plan(x).casts] == ["weight"]
            model(x)
    assert told == [None, HALF, None, HALF]


def test_a_fusion_that_passed_its_check_is_checked_again_under_autocast():
    class Norm(sf.ForwardFusion):
        norm: ops.LayerNorm

        def saves(self, env: sf.Env) -> sf.Savings:
            return sf.Savings(launches=1)

        def fwd(self, x: Tensor, *, dtype: torch.dtype | None) -> Any:
            y, record = self.norm.fwd(x)
            return y, {"norm": record}

    model, x = sf.Sequential(ops.LayerNorm(8), ops.Linear(8, 4), fusions=Norm), draw(3, 8, dtype=torch.float32)
    model(x.requires_grad_())
    with torch.autocast("cpu", HALF), pytest.raises(sf.PluginError, match=r"its output should be bfloat16\[3, 8\]"):
        model(x)


def test_a_fusion_written_without_autocast_in_mind_may_keep_the_parameter_itself():
    class LinearGeLU(sf.ForwardFusion):
        linear: ops.Linear
        act: ops.GeLU

        def fwd(self, x: Tensor) -> Any:
            z = nn.functional.linear(x, self.linear.weight)
            return nn.functional.gelu(z), {
                "linear": ops.Linear.Saved(x=x, weight=self.linear.weight),
                "act": ops.GeLU.Saved(x=z),
            }

    model = sf.Sequential(ops.Linear(8, 4, bias=False), ops.GeLU(), fusions=LinearGeLU)
    plain = copy.deepcopy(model)
    x = draw(3, 8, dtype=torch.float32)
    grads: list[Tensor] = []
    for m, enabled in ((model, True), (plain, False)):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", HALF), sf.fusing(enabled, on_error="raise"):
            m(leaf).sum().backward()
        grads += [leaf.grad, m[0].weight.grad]
    assert torch.equal(grads[0], grads[2])
    assert torch.equal(grads[1], grads[3])


@pytest.mark.parametrize("takes_any", [True, False])
def test_a_gradient_is_cast_for_what_takes_no_other_dtype(takes_any: bool):
    seen: list[torch.dtype] = []

    class Doubled(Doubles):
        autocast, any_dy = "same", takes_any

        def bwd(self, dy: Tensor, saved: Any) -> Any:
            seen.append(dy.dtype)
            return 2 * dy.float(), {}

    model = sf.Sequential(Doubled(), ops.Linear(6, 6, bias=False))
    for _ in range(2):
        with torch.autocast("cpu", HALF):
            y = model(torch.randn(4, 6, requires_grad=True))
        y.sum().backward()
    assert seen == [HALF if takes_any else torch.float32] * 2

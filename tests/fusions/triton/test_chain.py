"""Point-wise operations in one kernel per direction, also around a GEMM of torch."""

from __future__ import annotations

import functools
import importlib
from typing import Any, cast

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.fusions import (
    ActivationLinearJoint,
    BiasDropoutAdd,
    BiasQKNorm,
    BiasQKNormRotary,
    LinearBias,
    LinearBiasPointwise,
    PointwiseChain,
    PointwiseChainBackward,
    PointwiseChainJoint,
    chain,
)
from seqfuse.fusions.chain import chain_of
from seqfuse.kernels import activations, kernels_of
from seqfuse.testing import seeded_randn
from tests.watching import saving

EVERY = (PointwiseChain, PointwiseChainBackward)


def bias(width: int) -> ops.Bias:
    made = ops.Bias(width)
    made.bias.data.copy_(seeded_randn((width,), 7))
    return made


def test_training_takes_the_form_that_keeps_less(device: torch.device):
    model = sf.Sequential(bias(8), ops.SiLU(), ops.Tanh(), ops.GeLU(), fusions=(PointwiseChainJoint, *EVERY)).to(device)
    x = seeded_randn((5, 8), 0).to(device).requires_grad_()
    assert model.plan(x).count("PointwiseChainJoint") == 1
    for fuse, numbers in ((True, 40), (False, 80)):
        with sf.fusing(fuse), saving() as kept:
            model(x)
        assert sum(t.numel() for t in kept) == numbers


def test_a_factor_that_changes_between_the_passes_changes_no_gradient(device: torch.device):
    x, dy = (seeded_randn((5, 8), i).to(device).requires_grad_() for i in range(2))
    found: list[torch.Tensor] = []
    for chosen in ((), PointwiseChainJoint):
        model = sf.Sequential(ops.SiLU(), ops.Scale(0.5), ops.Tanh(), fusions=chosen).to(device)
        y = model(x)
        model[1].factor = 3.0
        found += torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(found[1], found[0])


def test_a_chain_that_drops_everything_gives_zeros(device: torch.device):
    model = sf.Sequential(ops.SiLU(), ops.Dropout(0.4), ops.Tanh(), ops.Dropout(1), fusions=EVERY).to(device)
    assert model(seeded_randn((19, 13), 0).to(device).requires_grad_()).eq(0).all()


def test_a_chain_drops_what_the_operations_drop(device: torch.device):
    model = sf.Sequential(ops.Dropout(0.3), ops.Scale(2.0), ops.Dropout(0.6), fusions=PointwiseChain).to(device)
    x = torch.ones(33, 7, device=device)
    kept: list[torch.Tensor] = []
    for grad in (False, True):
        x.requires_grad_(grad)
        for fuse in (True, False):
            with sf.fusing(fuse):
                assert model.plan(x).count("PointwiseChain") == fuse
                torch.manual_seed(0)
                kept.append(model(x).ne(0))
    assert all(mask.equal(kept[0]) for mask in kept)
    assert 0.15 < kept[0].float().mean() < 0.41  # 0.28, give or take four standard errors


@pytest.mark.parametrize("length", [2, 9, 12])
def test_of_any_length_few_kernels_are_left(length: int):
    model = sf.Sequential(*([ops.SiLU()] * length), fusions=EVERY)
    plan = model.plan(env=sf.Env.of("cuda:sm_90", rows=64, grad=False))
    assert len(plan.forward) == (length + 8) // 9
    assert all(step.fused for step in plan.forward)


def test_a_tensor_that_two_keep_is_stored_once(device: torch.device):
    model = sf.Sequential(ops.Scale(2.0), ops.Tanh(), ops.SiLU(), fusions=EVERY).to(device)
    x = seeded_randn((5, 8), 0).to(device).requires_grad_()
    assert model.plan(x).count("PointwiseChain") == 1
    with saving() as kept:
        model(x)
    assert len({t.data_ptr() for t in kept}) == 1


@pytest.mark.parametrize("drop", [ops.Dropout(0.3).eval(), ops.Dropout(0.0)], ids=["evaluation", "p = 0"])
def test_is_refused_where_nothing_is_dropped(drop: ops.Dropout):
    fusion = BiasDropoutAdd(bias=None, dropout=drop, add=None)
    assert [why for holds, why in fusion.requires(sf.Env(kernels="triton")) if not holds] == ["nothing is dropped here"]


@pytest.mark.parametrize("norm", [(), (ops.LayerNorm(8, dtype=torch.float64),)], ids=["", "before a norm"])
def test_a_sum_in_float64_is_left_to_the_operations(norm: tuple[ops.LayerNorm, ...], device: torch.device):
    model = sf.Sequential(bias(8), ops.Dropout(0.3), ops.Add("other"), *norm).to(device)

    def passes() -> list[torch.Tensor]:
        x, other = seeded_randn((5, 8), 0).to(device), seeded_randn((5, 8), 1, dtype=torch.float64).to(device)
        torch.manual_seed(0)
        y = model(x.requires_grad_(), other=other.requires_grad_())
        return [y, *torch.autograd.grad(y.square().sum(), (x, other, *model.parameters()))]

    x = seeded_randn((5, 8), 0).to(device)
    assert model.plan(x, other=x).forward[0].name in ("BiasDropoutAdd", "BlockBoundary")
    fused = passes()
    with sf.fusing(False):
        unfused = passes()
    torch.testing.assert_close(fused[0], unfused[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(fused[1:], unfused[1:])


def test_an_activation_with_other_numbers_is_another_one(device: torch.device):
    x, acts = (
        seeded_randn((3, 8), 0).to(device),
        cast(Any, (activations.constant_factor(1.0), activations.constant_factor(2.0))),
    )
    one, two = (kernels_of("pointwise").pointwise_of(chain_of([("gated", act)]))(x)[0] for act in acts)
    assert torch.equal(two, 2 * one)


def test_is_one_step_of_as_many_kernels_as_the_two_that_it_replaces():
    model = sf.Sequential(ops.Linear(64, 256), ops.GeLU(), fusions=(LinearBias, LinearBiasPointwise)).bfloat16()
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    assert [step.name for step in model.plan(env=there).forward] == ["LinearBiasPointwise"]


def test_applies_under_autocast_and_not_to_a_weight_of_another_dtype():
    model = sf.Sequential(ops.Linear(64, 256), ops.GeLU(), fusions=LinearBiasPointwise)
    assert model.plan(env=sf.Env.of("cuda:sm_90", autocast=torch.bfloat16)).count("LinearBiasPointwise") == 1
    assert model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)).count("LinearBiasPointwise") == 0


@pytest.mark.parametrize("other", ["weight", "bias"])
def test_does_not_apply_where_a_parameter_has_another_dtype(other: str):
    parts = ops.Linear(64, 256, bias=False), ops.Bias(256)
    model = sf.Sequential(*parts, ops.GeLU(), fusions=LinearBiasPointwise).bfloat16()
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)
    assert model.plan(env=there).count("LinearBiasPointwise") == 1
    parts[other == "bias"].float()
    assert model.plan(env=there).count("LinearBiasPointwise") == 0


class Steep(sf.Pointwise):
    """y = slope x, with the slope in a buffer."""

    @triton.jit
    def value(x, P: tl.constexpr):
        return P[0] * x

    @triton.jit
    def derivative(x, P: tl.constexpr):
        return x * 0.0 + P[0]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.tensor(2.0))

    @property
    def P(self) -> tuple[float, ...]:
        return (float(self.slope),)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return self.slope * x


def test_what_is_kept_of_a_call_follows_the_configuration(device: torch.device):
    linear, bias, act = (operation.to(device) for operation in (ops.Linear(6, 8, bias=False), ops.Bias(8), ops.GeLU()))
    fusion, x = LinearBiasPointwise(linear=linear, bias=bias, act=act), seeded_randn((5, 6), 0).to(device)
    with torch.no_grad():
        for approximate in ("none", "tanh", "none"):
            act.approximate = approximate
            z = linear.fwd(x)[0] + bias.bias
            expected = torch.nn.functional.gelu(z, approximate=approximate)
            torch.testing.assert_close(fusion.fwd(x)[0], expected, atol=2e-6, rtol=1e-6)
        steep = Steep().to(device)
        fusion = LinearBiasPointwise(linear=linear, bias=bias, act=steep)
        chain: Any = PointwiseChain(first=ops.ReLU(), rest=(steep,))
        for slope in (2.0, 3.0):
            steep.slope.fill_(slope)
            torch.testing.assert_close(fusion.fwd(x)[0], slope * (linear.fwd(x)[0] + bias.bias))
            torch.testing.assert_close(chain.fwd(x, seeds=(None, None), needs=frozenset()), slope * x.relu())


# Bias, an activation or a gated unit, and Linear: both passes, with fewer saved tensors.


def random_bias(width: int, device: torch.device) -> ops.Bias:
    made = ops.Bias(width)
    torch.nn.init.normal_(made.bias)
    return made.to(device)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_that_saves_less_takes_a_residual_of_another_dtype(dtypes: tuple[torch.dtype, ...], device: torch.device):
    list_ = [ops.SiLU(), ops.Linear(6, 9), ops.Add("other")]
    model = sf.Sequential(*list_, fusions=ActivationLinearJoint, memory="lean").to(device, dtypes[0])
    shapes = zip(((5, 6), (5, 9)), dtypes, strict=True)
    x, other = (seeded_randn(shape, 0, dtype=t).to(device).requires_grad_() for shape, t in shapes)
    assert model.plan(x, other=other).count("ActivationLinearJoint") == 1
    found: list[tuple[torch.Tensor, ...]] = []
    for fused in (True, False):
        with sf.fusing(fused, on_error="raise"):
            y = model(x, other=other)
            found.append((y, *torch.autograd.grad(y, [x, other, *model.parameters()], seeded_randn((5, 9), 1).to(y))))
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_that_saves_less_computes_only_needed_gradients(device: torch.device):
    list_ = [random_bias(6, device), ops.SiLU(), ops.Linear(6, 9).to(device)]
    model = sf.Sequential(*list_, fusions=ActivationLinearJoint, memory="lean")
    x = seeded_randn((5, 6), 0).to(device)
    operation = model.plan(x.clone().requires_grad_()).backward[0].operation
    assert isinstance(operation, ActivationLinearJoint)
    dy, saved = (
        seeded_randn((5, 9), 1).to(device),
        ActivationLinearJoint.Saved(x=x, bias=model[0].bias, weight=model[2].weight),
    )
    every = "x", "bias.bias", "linear.weight", "out_bias.bias"
    _, whole = operation.bwd(dy, saved, needs=frozenset(every), main_grads={})
    for needs in ({"x"}, {"bias.bias"}, {"linear.weight"}, {"out_bias.bias"}, {"x", "linear.weight"}):
        dx, grads = operation.bwd(dy, saved, needs=frozenset(needs), main_grads={})
        assert {name for name, g in {"x": dx, **grads}.items() if g is not None} == needs
        for name in needs - {"x"}:
            torch.testing.assert_close(grads[name], whole[name])


@pytest.mark.parametrize("gated", [False, True], ids=["GeLU", "SwiGLU"])
def test_a_block_saves_half_of_what_it_saves_otherwise(gated: bool, device: torch.device):
    inner = ops.Linear(32, 256 if gated else 128), ops.SwiGLU() if gated else ops.GeLU("tanh"), ops.Linear(128, 32)
    rules = (*fusions.triton, *fusions.aten)
    model = sf.Sequential(ops.Residual(ops.LayerNorm(32), *inner), fusions=rules).to(device, torch.bfloat16)
    lean = sf.Sequential(*model, fusions=(ActivationLinearJoint, fusions.RecomputeNorm, *rules), memory="lean")
    x = seeded_randn((64, 32), 0, dtype=torch.bfloat16).to(device).requires_grad_()
    plan = lean.plan(x)
    assert plan.count("ActivationLinearJoint") == 1, plan
    saved = {name: one.plan(x).memory.saved for name, one in (("fast", model), ("lean", lean))}
    # x and z, of x, the norm's output, z and h.
    assert saved["lean"] / saved["fast"] == pytest.approx(9 / 14 if gated else 5 / 10, abs=0.02)


def test_that_saves_less_is_refused_where_nothing_would_be_saved():
    def reasons(act: sf.UnfusedOperation, grad: bool = True) -> list[str]:
        fusion = ActivationLinearJoint(bias=None, act=act, linear=ops.Linear(4, 4), out_bias=None, add=None)
        return [why for holds, why in fusion.requires(sf.Env(kernels="triton", grad=grad)) if not holds]

    assert reasons(ops.Tanh()) == ["Tanh saves its output, which the GEMM after it does too"]
    assert reasons(ops.SiLU(), grad=False) == ["where nothing needs a gradient nothing is saved"]
    assert reasons(ops.SiLU()) == []


# Without gradients a forward fusion's kernel stores only y, and the fusion returns only y.


def heads(*names: str) -> dict[str, Any]:
    rotary = ops.RotaryEmbedding(2, 1, style="half")
    made = {"bias": ops.Bias(32), "norm": ops.QKNorm(8, 2, 1), "rotary": rotary}
    return {name: made[name] for name in names}


CASES: dict[str, Any] = {
    "chain": lambda: (PointwiseChain(first=ops.Bias(32), rest=(ops.GeLU(),)), {"seeds": (None, None)}),
    "norm": lambda: (BiasQKNorm(**heads("bias", "norm")), {}),
    "rotary": lambda: (BiasQKNormRotary(**heads("bias", "norm", "rotary")), {}),
}


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of a kernel stores something in addition to y."""
    found: list[bool] = []

    def seen(run: Any, *args: Any, **given: Any) -> Any:
        found.append(bool(given.get("store")))
        return run(*args, **given)

    kernels = importlib.import_module("seqfuse.kernels.rope")
    monkeypatch.setattr(kernels, "rope_fwd", functools.partial(seen, kernels.rope_fwd))
    steps = chain._forward_steps

    def watched(*args: Any) -> Any:
        made = steps(*args)
        found.append(("store",) in made[0])
        return made

    monkeypatch.setattr(chain, "_forward_steps", watched)
    return found


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_stored_where_nothing_is_needed(name: str, stored: list[bool], device: torch.device) -> None:
    fusion, given = CASES[name]()
    for operation in fusion.operations():
        operation.to(device)
    x = seeded_randn((5, 32), 0).to(device)
    with torch.no_grad():
        y, _ = fusion.fwd(x, **given, needs=frozenset({"x"}))
        assert any(stored)
        stored.clear()
        alone = fusion.fwd(x, **given, needs=frozenset())
    assert stored
    assert not any(stored)
    assert isinstance(alone, Tensor)
    torch.testing.assert_close(alone, y)

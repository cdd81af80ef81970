"""Parametrized parameters, and parameters of modules inside an operation: each is read anew, once per call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.utils import parametrizations, parametrize

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import BackwardLinearScale
from tests.alterations import Doubled
from tests.fuser.fusions import (
    PAIR_AND_GEMM,
    outcome,
    randomized,
    run,
    same_as_twin,
    tensor,
    with_twin,
)


class Squared(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w + w.square()


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "weight": lambda m: parametrize.register_parametrization(m, "weight", Squared()),
    "bias": lambda m: parametrize.register_parametrization(m, "bias", Squared()),
    "both": lambda m: [parametrize.register_parametrization(m, n, Squared()) for n in ("weight", "bias")],
    "twice": lambda m: [parametrize.register_parametrization(m, "weight", Squared()) for _ in range(2)],
    "spectral_norm": parametrizations.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "weight_norm of frozen norms": lambda m: parametrizations.weight_norm(
        m
    ).parametrizations.weight.original0.requires_grad_(False),
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("register", PARAMETRIZATIONS.values(), ids=PARAMETRIZATIONS.keys())
def test_parametrized_parameters_train_their_originals(register: Callable[[nn.Module], Any], when: str) -> None:
    x = tensor(7, 5)
    mine, its = with_twin()
    if when == "after":
        mine(x).sum().backward()
        mine.zero_grad()
    for model in (mine, its):
        torch.manual_seed(3)
        register(model[1])
    assert list(mine.state_dict()) == list(its.state_dict())
    for _ in range(3):
        same_as_twin(mine, its, x)
    torch.testing.assert_close([*mine.buffers()], [*its.buffers()])
    assert mine.plan(x).count("BiasReLU") == 1
    for model in (mine, its):
        for name in list(model[1].parametrizations):
            parametrize.remove_parametrizations(model[1], name)
    same_as_twin(mine, its, x)


@pytest.mark.parametrize("memory", ["balanced", "lean", "least"])
@pytest.mark.parametrize("name", ["weight", "spectral_norm"])
def test_parametrized_parameters_leave_a_choice_of_memory(name: str, memory: Any) -> None:
    x = tensor(7, 5)
    mine, its = with_twin()
    mine.memory = memory
    same_as_twin(mine, its, x)  # so that an equal step without a parametrization is known
    for model in (mine, its):
        torch.manual_seed(3)
        PARAMETRIZATIONS[name](model[1])
        model.zero_grad()
    same_as_twin(mine, its, x)
    torch.testing.assert_close([*mine.buffers()], [*its.buffers()])


class Counted(nn.Module):
    """Identity, in another dtype on request; counts its calls."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.calls, self.dtype = 0, dtype

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return w.to(self.dtype or w.dtype)


COUNTED: dict[str, tuple[Callable[[], Any], str]] = {
    "Linear": (lambda: ops.Linear(12, 12), "weight"),
    "Linear's bias": (lambda: ops.Linear(12, 12), "bias"),
    "LayerNorm": (lambda: ops.LayerNorm(12), "weight"),
    "RMSNorm": (lambda: ops.RMSNorm(12), "weight"),
    "QKNorm": (lambda: ops.QKNorm(2, 2), "q_weight"),
    "PositionEmbedding": (lambda: ops.PositionEmbedding(12, 12), "weight"),
    "Embedding": (lambda: ops.Embedding(12, 12), "weight"),
}


@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_parametrization_runs_once_in_a_step_and_not_where_it_is_planned(name: str, dtype: torch.dtype) -> None:
    make, attribute = COUNTED[name]
    model = sf.Sequential(make(), ops.GeLU()).to(dtype)
    x = torch.arange(7) if name == "Embedding" else tensor(7, 12, dtype=dtype)
    counted = Counted()
    parametrize.register_parametrization(model[0], attribute, counted)
    counted.calls = 0
    str(model.plan(x))
    assert counted.calls == 0
    for step in (1, 2):
        model(x).sum().backward()
        assert counted.calls == step


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "PositionEmbedding"])
def test_a_parametrization_may_give_another_dtype_than_it_is_made_from(name: str) -> None:
    make, attribute = COUNTED[name]
    model, x = sf.Sequential(make(), ops.GeLU()), tensor(7, 12, dtype=torch.bfloat16)
    parametrize.register_parametrization(model[0], attribute, Counted(torch.bfloat16), unsafe=True)
    for _ in range(2):
        model(x).sum().backward()
    assert model[0].parametrizations[attribute].original.grad.dtype is torch.float32


def test_a_plan_behind_an_embedding_has_the_tokens_of_its_input() -> None:
    model = sf.Sequential(ops.Embedding(9, 5), ops.Linear(5, 7), ops.GeLU())
    PARAMETRIZATIONS["weight"](model[1])
    assert model.plan(torch.zeros(4, 64, dtype=torch.int64)).env.rows == 256


def test_a_second_parameter_parametrized_after_a_call_is_seen() -> None:
    mine, its = with_twin()
    x = tensor(7, 5)
    for name in ("weight", "bias"):
        for model in (mine, its):
            parametrize.register_parametrization(model[1], name, Squared())
        same_as_twin(mine, its, x)
    for name in ("weight", "bias"):
        for model in (mine, its):
            parametrize.remove_parametrizations(model[1], name, leave_parametrized=name == "bias")
        same_as_twin(mine, its, x)


def test_a_later_call_beside_one_parametrized_parameter_is_the_generated_one() -> None:
    model, x = sf.Sequential(ops.Linear(5, 5), ops.Tanh()), tensor(7, 5)
    parametrize.register_parametrization(model[0], "weight", Squared())
    y = model(x)
    (region,) = model._fuser.op_list().parts
    assert torch.equal(region.latest(x, {}, None), y)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, w: Tensor) -> Tensor:
        self.calls += 1
        return w + torch.randn_like(w)


def test_a_parametrization_is_evaluated_once_per_call_and_by_nothing_else() -> None:
    linear = ops.Linear(5, 5)
    mine = sf.Sequential(linear, ops.GELU(), linear, ops.Tanh(), fusions=PAIR_AND_GEMM)
    noisy = Noisy()
    parametrize.register_parametrization(linear, "weight", noisy)
    x = tensor(7, 5)
    for fusing in (True, False, True):
        noisy.calls = 0
        with sf.fusing(fusing):
            y = mine(x)
            assert noisy.calls == 1
            y.sum().backward()
            assert noisy.calls == 1
    noisy.calls = 0
    before = torch.get_rng_state()
    str(mine.plan(x)), mine.plan()
    assert noisy.calls == 0
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        mine(x)
    assert noisy.calls == 1


def test_a_random_parametrization_uses_one_value_in_both_passes() -> None:
    linear = randomized(ops.Linear(5, 5))
    mine = sf.Sequential(linear, ops.Tanh(), linear, fusions=PAIR_AND_GEMM)
    parametrize.register_parametrization(linear, "weight", Noisy())
    x = tensor(7, 5, dtype=torch.float64)
    mine.double()
    original = linear.parametrizations.weight.original
    torch.manual_seed(8)
    got = outcome(mine, {"x": x, "w": original, "b": linear.bias}, x)
    torch.manual_seed(8)
    noise = torch.randn_like(original)

    def plain(x: Tensor) -> Tensor:
        w = original + noise
        return F.linear(torch.tanh(F.linear(x, w, linear.bias)), w, linear.bias)

    torch.testing.assert_close(got, outcome(plain, {"x": x, "w": original, "b": linear.bias}, x))


def test_parametrizations_work_under_function_transforms() -> None:
    mine, its = with_twin()
    for model in (mine, its):
        PARAMETRIZATIONS["both"](model[1])
    p = {k: v.detach() for k, v in mine.named_parameters()}
    x = tensor(7, 5, grad=False)
    torch.testing.assert_close(*(grad(lambda p, m=m: functional_call(m, p, x).square().mean())(p) for m in (mine, its)))


def test_two_linears_are_no_scale_beside_a_linear_where_one_is_parametrized() -> None:
    model = sf.Sequential(randomized(ops.Linear(5, 5)), randomized(ops.Linear(5, 5)), fusions=[BackwardLinearScale])
    parametrize.register_parametrization(model[0], "weight", Squared())
    (refusal,) = model.plan(x := tensor(7, 5)).refused
    assert refusal.reason == "there is no Scale beside the Linear"
    with sf.fusing(on_error="raise"):
        model(x).sum().backward()


# Modules inside an operation: their configuration and parameters may change between calls.


class Affine(sf.UnfusedOperation):
    """y = leaky(x weight^T), built of torch modules."""

    class Saved(sf.Saved):
        x: Tensor
        weight: Tensor
        z: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5, bias=False)
        self.leaky = nn.LeakyReLU(0.1)

    def reference(self, x: Tensor) -> Tensor:
        return self.leaky(self.inner(x))

    def fwd(self, x: Tensor) -> Any:
        z = x @ self.inner.weight.mT
        return self.leaky(z), self.Saved(x=x, weight=self.inner.weight, z=z)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        dz = torch.where(saved.z > 0, dy, dy * self.leaky.negative_slope)
        return dz @ saved.weight, {"inner.weight": dz.mT @ saved.x}


class SmallSlope(sf.ForwardFusion):
    """Compiled for one slope."""

    bias: ops.Bias
    affine: Affine

    def requires(self, env: sf.Env) -> sf.Requirements:
        yield self.affine.leaky.negative_slope == 0.1, "made for a slope of 0.1"

    def fwd(self, x: Tensor) -> Any:
        x = x + self.bias.bias
        weight = self.affine.inner.weight
        z = x @ weight.mT
        return F.leaky_relu(z, 0.1), {"bias": ops.Bias.Saved(), "affine": Affine.Saved(x=x, weight=weight, z=z)}


def test_configuration_of_a_module_inside_an_operation_is_asked_for_again() -> None:
    model = randomized(sf.Sequential(ops.Bias(5), Affine(), fusions=(SmallSlope,)))
    x = tensor(7, 5)
    for slope in (0.1, 0.5, 0.1):
        model[1].leaky.negative_slope = slope
        got = run(model, x)
        with sf.fusing(False):
            expected = run(model, x)
        torch.testing.assert_close(got, expected)
        assert model.plan(x).count("SmallSlope") == (slope == 0.1)


class Twofold(sf.UnfusedOperation):
    """y = factor x, with the factor of an operation inside."""

    class Saved(sf.Saved):
        """Nothing: the backward pass reads dy only."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ops.Scale(2.0)

    def reference(self, x: Tensor) -> Tensor:
        return x * self.inner.factor

    def fwd(self, x: Tensor) -> Any:
        return x * self.inner.factor, self.Saved()

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return dy * self.inner.factor, {}


def test_an_operation_inside_another_is_in_the_backward_as_it_was_in_the_forward() -> None:
    model, x = sf.Sequential(Twofold(), ops.Identity()), tensor(7, 5)
    y = model(x)
    model[0].inner.factor = 3.0
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.full_like(x, 2.0))
    assert torch.equal(model(x), 3 * x)


def plain_inside(m: Any) -> None:
    weight = m.inner.weight.detach().clone().requires_grad_()
    del m.inner.weight
    m.inner.weight = weight


INSIDE: dict[str, Callable[[Any], Any]] = {
    "replaced": lambda m: setattr(m.inner, "weight", nn.Parameter(tensor(5, 5, seed=30, grad=False))),
    "module_replaced": lambda m: setattr(m, "inner", nn.Linear(5, 5, bias=False)),
    "parametrized": lambda m: parametrize.register_parametrization(m.inner, "weight", Doubled()),
    "plain": plain_inside,
    "frozen": lambda m: m.inner.weight.requires_grad_(False),
}


@pytest.mark.parametrize("change", INSIDE.values(), ids=INSIDE.keys())
def test_a_parameter_of_a_module_inside_an_operation_may_change(change: Callable[[Any], Any]) -> None:
    model = randomized(sf.Sequential(ops.Bias(5), Affine(), fusions=(SmallSlope,)))
    x = tensor(7, 5)
    run(model, x)
    change(model[1])
    weight = model[1].inner.weight
    wanted = {"x": x, "bias": model[0].bias, **dict(model[1].named_parameters())}
    if weight.is_leaf and weight.requires_grad:
        wanted["weight"] = weight
    with parametrize.cached():
        got = outcome(model, wanted, x)
    expected = outcome(lambda: F.leaky_relu((x + model[0].bias) @ model[1].inner.weight.mT, 0.1), wanted)
    torch.testing.assert_close(got, expected)

"""Modules inside an operation: their configuration and parameters may change between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import seqfuse as sf
from seqfuse import ops
from tests.alterations import Doubled
from tests.fuser.fusions import outcome, randomized, run, tensor


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

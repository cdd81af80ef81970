"""A backward pass runs with the configuration of its forward, even if operations were changed in between."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import seeded_randn
from tests.fuser.fusions import BiasGeLUBackward


class Steep(sf.Pointwise):
    """y = factor x^2, by `reference` and its autograd only."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 3.0

    def reference(self, x: Tensor) -> Tensor:
        return self.factor * x * x


class GeLUScalesJoint(sf.JointFusion):
    act: ops.GeLU
    scales: tuple[ops.Scale, ...]

    class Saved(sf.Saved):
        x: Tensor

    def fwd(self, x: Tensor) -> Any:
        y = F.gelu(x, approximate=self.act.approximate)
        for scale in self.scales:
            y = y * scale.factor
        return y, self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        for scale in self.scales:
            dy = dy * scale.factor
        return torch.ops.aten.gelu_backward(dy, saved.x, approximate=self.act.approximate), {}


def setting(**values: Any) -> Callable[[Any], None]:
    def change(operation: Any) -> None:
        for name, value in values.items():
            setattr(operation, name, value)

    return change


def within(name: str, **values: Any) -> Callable[[Any], None]:
    return lambda operation: setting(**values)(getattr(operation, name))


def attention(**given: Any) -> ops.Attention:
    return ops.Attention(2, **given)


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "causal": (attention, setting(causal=True)),
    "window": (lambda: attention(window=2), setting(window=None)),
    "softcap": (attention, setting(softcap=0.5)),
    "scale": (attention, setting(scale=3.0)),
    "heads": (attention, setting(heads=4, kv_heads=4)),
    "dropout": (lambda: attention(dropout=0.4), setting(dropout=0.1)),
    "rotary base": (lambda: ops.RotaryEmbedding(2, style="half"), setting(base=7.0)),
    "rotary style": (lambda: ops.RotaryEmbedding(2, style="half"), setting(style="interleaved")),
    "gelu": (ops.GeLU, setting(approximate="tanh")),
    "geglu": (ops.GEGLU, within("activation", approximate="tanh")),
    "layernorm": (lambda: ops.LayerNorm(24), setting(zero_centered=True)),
    "rmsnorm": (lambda: ops.RMSNorm(24), setting(zero_centered=True)),
    "qknorm": (lambda: ops.QKNorm(4, 2), setting(heads=4, kv_heads=1)),
    "dropout mode": (ops.Dropout, setting(mode="downscale_in_infer")),
    "evaluation": (lambda: ops.Dropout(0.4, "downscale_in_infer"), lambda op: op.eval()),
    "scale factor": (lambda: ops.Scale(2.0), setting(factor=9.0)),
    "a number of one's own": (Steep, setting(factor=1.0)),
    "probability": (lambda: ops.Dropout(0.5), setting(p=0.1)),
    "evaluation, scaled": (lambda: ops.Dropout(0.5), lambda op: op.eval()),
    "eps": (lambda: ops.LayerNorm(24), setting(eps=0.5)),
    "eps of RMSNorm": (lambda: ops.RMSNorm(24), setting(eps=0.5)),
    "shape": (lambda: ops.Reshape(4, 6), setting(shape=(6, 4))),
    "weight": (lambda: ops.Linear(24, 8), lambda op: setattr(op, "weight", nn.Parameter(seeded_randn((8, 24), 7)))),
    "bias": (lambda: ops.Linear(24, 8), setting(bias=None)),
}


def gradients(model: sf.Sequential, change: Callable[[], None]) -> list[Tensor | None]:
    torch.manual_seed(1)
    x = seeded_randn((2, 6, 24), 3).requires_grad_()
    y, leaves = model(x), [x, *model.parameters()]
    change()
    y.backward(seeded_randn(tuple(y.shape), 5))
    return [leaf.grad for leaf in leaves]


def check_same(model: sf.Sequential, change: Callable[[Any], None], at: int = 0) -> None:
    untouched = copy.deepcopy(model)
    got = gradients(model, lambda: change(model[at]))
    wanted = gradients(untouched, lambda: None)
    assert all(g is not None and g.any() for g in wanted)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("case", CASES)
def test_a_backward_runs_with_the_configuration_of_its_forward(case: str) -> None:
    make, change = CASES[case]
    check_same(sf.Sequential(make()), change)
    check_same(sf.Sequential(ops.Bias(24), make(), ops.Tanh()), change, 1)


def test_a_fusion_s_backward_runs_with_the_configuration_of_its_forward() -> None:
    change = setting(approximate="tanh")
    check_same(sf.Sequential(ops.Bias(24), ops.GeLU(), fusions=(BiasGeLUBackward,)), change, 1)
    model = sf.Sequential(ops.GeLU(), ops.Scale(2.0), ops.Scale(3.0), fusions=(GeLUScalesJoint,))
    check_same(model, change)
    check_same(model, setting(factor=0.5), 2)


def test_each_of_two_forwards_before_their_backwards_has_its_own_configuration() -> None:
    model, x = sf.Sequential(ops.Scale(2.0), ops.GeLU()), seeded_randn((3, 8), 2).requires_grad_()
    first = model(x)
    model[1].approximate = "tanh"
    second = model(x)
    (got,) = torch.autograd.grad(second, x, torch.ones_like(x))
    (wanted,) = torch.autograd.grad(F.gelu(2 * x, approximate="tanh"), x, torch.ones_like(x))
    torch.testing.assert_close(got, wanted)
    (got,) = torch.autograd.grad(first, x, torch.ones_like(x))
    (wanted,) = torch.autograd.grad(F.gelu(2 * x), x, torch.ones_like(x))
    torch.testing.assert_close(got, wanted)


def test_parameters_stay_those_of_the_operation() -> None:
    norm = ops.LayerNorm(8)
    model, x = sf.Sequential(norm), seeded_randn((3, 8), 2).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
        norm.weight = nn.Parameter(torch.full((8,), 2.0))
    norm.weight.grad = None
    model(x).square().sum().backward()
    twin = F.layer_norm(x.detach(), (8,))
    torch.testing.assert_close(norm.weight.grad, (2 * (twin * 2) * twin).sum(0))

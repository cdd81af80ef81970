"""Parameters of a subclass, which may refuse to be read: the operations run unfused, by their references."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.testing._internal.two_tensor import TwoTensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import seeded_randn

F = nn.functional
TAKEN = {F.linear, F.layer_norm, F.rms_norm, F.embedding}


class Weight(Tensor):
    """A weight that only a few functions of torch take, like quantized ones."""

    held: Tensor

    @staticmethod
    def of(t: Tensor) -> Weight:
        made = torch.Tensor._make_subclass(Weight, t.detach())
        made.held = t
        return made

    @property
    def dtype(self) -> torch.dtype:
        return vars(self)["held"].dtype

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in TAKEN:
            raise RuntimeError(f"cannot handle function {func.__name__}")
        with torch._C.DisableTorchFunctionSubclass():
            plain = [vars(a)["held"] if isinstance(a, Weight) else a for a in args]
            named = {k: vars(v)["held"] if isinstance(v, Weight) else v for k, v in (kwargs or {}).items()}
            return func(*plain, **named)


X = torch.randn(6, 5, 16, generator=torch.Generator().manual_seed(2))
IDS = torch.arange(30).reshape(6, 5) % 9


def _attention() -> sf.Sequential:
    return sf.Sequential(ops.MergedLinear(16, (16, 16, 16)), ops.Attention(2), ops.Linear(16, 16))


MODELS: dict[str, tuple[Any, Tensor]] = {
    "linear": (lambda: ops.Linear(16, 8), X),
    "mlp": (lambda: sf.Sequential(ops.Linear(16, 32), ops.GeLU(), ops.Linear(32, 16, bias=False)), X),
    "norm": (lambda: sf.Sequential(ops.LayerNorm(16), ops.Linear(16, 16)), X),
    "embedding": (lambda: sf.Sequential(ops.Embedding(9, 16), ops.Linear(16, 16), ops.ReLU()), IDS),
    "residual": (lambda: sf.Sequential(ops.Residual(ops.LayerNorm(16), ops.Linear(16, 16), ops.Tanh())), X),
    "attention": (_attention, X),
    "eager": (lambda: sf.Sequential(ops.Linear(16, 16), nn.Softplus(), ops.Linear(16, 4)), X),
}
AS = {"fused": contextlib.nullcontext, "unfused": lambda: sf.fusing(False)}


@pytest.mark.parametrize("mode", AS)
@pytest.mark.parametrize("ran", [False, True], ids=["first", "after a plain call"])
@pytest.mark.parametrize("name", [*MODELS, "rms"])
def test_weights_that_refuse_to_be_read_are_handed_to_torch(name: str, ran: bool, mode: str) -> None:
    build, x = MODELS.get(name, (lambda: sf.Sequential(ops.RMSNorm(16), ops.Linear(16, 4)), X))
    model = build()
    if ran:
        model(x), model(x)
    expected = model(x)
    swapped = {name: Weight.of(p) for name, p in model.named_parameters()}
    with AS[mode]():
        y = torch.func.functional_call(model, swapped, (x,))
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(model(x), expected)  # and with its own again


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_what_such_a_weight_holds(name: str) -> None:
    build, x = MODELS[name]
    model = build()
    held = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    torch.func.functional_call(model, {name: Weight.of(p) for name, p in held.items()}, (x,)).square().sum().backward()
    model(x).square().sum().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(held[name].grad, p.grad)


@pytest.mark.parametrize("mode", AS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_each_sample_by_expanded_weights(name: str, mode: str) -> None:
    build, x = MODELS[name]
    model, one = build(), copy.deepcopy(build())
    one.load_state_dict(model.state_dict())
    with AS[mode]():
        call_for_per_sample_grads(model, loss_reduction="sum")(x).square().sum().backward()
    for i in range(len(x)):
        one.zero_grad()
        one(x[i : i + 1]).square().sum().backward()
        for name, p in one.named_parameters():
            sampled: Any = dict(model.named_parameters())[name]
            torch.testing.assert_close(sampled.grad_sample[i], p.grad, msg=lambda said, n=name: f"{n}: {said}")


def test_a_linear_with_its_bias_is_one_call_in_the_reference() -> None:
    called: list[Any] = []

    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    model = sf.Sequential(ops.Linear(16, 8), ops.ReLU())
    weights = {name: Weight.of(p) for name, p in model.named_parameters()}
    with Counting():
        torch.func.functional_call(model, weights, (X,))
    assert called.count(F.linear) == 1
    assert not [f for f in called if "add" in f.__name__]


def test_a_plan_says_that_nothing_is_fused_with_such_parameters() -> None:
    model = sf.Sequential(ops.Linear(16, 8), ops.ReLU(), nn.Identity(), ops.Linear(8, 4))
    assert model.plan(X).fused[0] == 2
    for name, p in [*model[0].named_parameters()]:
        model[0].register_parameter(name, nn.Parameter(TwoTensor(p.detach(), p.detach())))
    plan = model.plan(X)
    assert [step.name for step in plan.forward if step.fused] == ["LinearBias"]
    assert {r.reason for r in plan.refused if r.at == 0} == {
        "a parameter is of class TwoTensor, with which operations run unfused"
    }
    assert "so that autograd chooses what is saved" in str(plan.memory_unknown)
    assert type(model(X)) is TwoTensor


@pytest.mark.parametrize("kind", ["to_sparse", "to_sparse_csr"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_a_sparse_weight_is_multiplied(kind: str):
    x, linear = seeded_randn((4, 8), 0), ops.Linear(8, 8)
    model = sf.Sequential(ops.LayerNorm(8), linear, ops.GeLU())
    wanted = model(x)
    linear.weight = nn.Parameter(getattr(linear.weight.detach(), kind)(), requires_grad=False)
    for _ in range(2):
        torch.testing.assert_close(model(x), wanted)

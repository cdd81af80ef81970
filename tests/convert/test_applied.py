"""Custom autograd functions in converted models."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Interpreter

import seqfuse as sf
from seqfuse.testing import assert_bitwise_equal, seeded_randn

from .comparing import assert_same


class Scaled(torch.autograd.Function):
    """A number as an argument, two results, of which one has no gradient, and a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.factor, signs = factor, torch.sign(x)
        ctx.mark_non_differentiable(signs)
        return x * y * factor, signs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, y = ctx.saved_tensors
        return grads[0] * y * 2 * ctx.factor, (grads[0] * x).sum(0), None


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 12), nn.Linear(12, 8), nn.Parameter(seeded_randn((12,), 3))

    def forward(self, x: Tensor) -> Tensor:
        x, signs = Scaled.apply(torch.relu(self.up(x)), self.scale, 0.7)  # pyright: ignore
        return self.down(Clipped.apply(x) + signs)  # pyright: ignore


def passes(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(seeded_randn(tuple(y.shape), 5), retain_graph=True)
    once = [t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None]
    y.backward(seeded_randn(tuple(y.shape), 6))
    return [y, *once, x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("freeze", [lambda m: None, lambda m: m.scale.requires_grad_(False)], ids=["all", "frozen"])
def test_gradients_are_those_of_the_function(freeze: Callable[[Net], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net(), seeded_randn((5, 8), 0)
    freeze(model)
    other = copy.deepcopy(model)
    sf.convert(other)
    passes(other, x)  # torch interprets the bodies once, as it captures them
    other.zero_grad()
    monkeypatch.setattr(Interpreter, "run", lambda *_: pytest.fail("torch's interpreter ran"))
    wanted = passes(model, x)
    torch.testing.assert_close(passes(other, x), wanted)
    other.zero_grad()
    torch.testing.assert_close(passes(other, x), wanted)
    with torch.no_grad():
        assert_bitwise_equal(other(x), model(x))


def test_a_saved_result_is_freed_and_seen_by_hooks() -> None:
    class Squashed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(y := torch.sigmoid(x))
            return y

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            (y,) = ctx.saved_tensors
            return grads[0] * y * (1 - y)

    class Squashing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return Squashed.apply(self.up(x))  # pyright: ignore

    model, x = Squashing(), seeded_randn((5, 8), 0)
    other = copy.deepcopy(model)
    sf.convert(other)
    torch.testing.assert_close(passes(other, x), passes(model, x))
    seen: list[list[Tensor]] = []
    for of in (model, other):
        seen.append(own := [])
        with torch.autograd.graph.saved_tensors_hooks(lambda t, own=own: (own.append(t.detach()), t)[1], lambda t: t):
            y = of(x)
        assert any(torch.equal(t, y) for t in own)
        kept = weakref.ref(y)
        y.sum().backward()
        own.clear()
        del y
        assert kept() is None
    y = other(x.clone().requires_grad_())
    kept = weakref.ref(y)
    del y
    assert kept() is None


def test_a_result_that_is_changed_in_place() -> None:
    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.add_(1)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 3

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(Added.apply(self.up(x))))  # pyright: ignore

    model, x = Changing(), seeded_randn((5, 8), 0)
    other = copy.deepcopy(model)
    sf.convert(other)
    torch.testing.assert_close(passes(other, x), passes(model, x))


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def gelu_slope(x: Tensor) -> Tensor:
    t = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    return 0.5 * x * ((1 - t * t) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + t)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def silu_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s))


def by_function(value: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> nn.Module:
    """Two `Linear`s with a custom autograd function between them."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return value(x)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return slope(ctx.saved_tensors[0]) * grads[0]

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16, dtype=torch.float64), nn.Linear(16, 8, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(Function.apply(self.up(x)))  # pyright: ignore

    return Between()


@pytest.mark.parametrize(
    ("value", "slope", "chains"),
    [
        (gelu, gelu_slope, [["Linear", "GeLU", "Linear"]]),
        (silu, silu_slope, [["Linear", "SiLU", "Linear"]]),
        (silu, torch.ones_like, []),
        (silu, gelu_slope, []),
        (lambda x: silu(x) * 1.01, lambda x: silu_slope(x) * 1.01, []),
        (lambda x: silu(x).flip(0).flip(0), silu_slope, []),
        (lambda x: F.relu(x, inplace=True) * 1.0, lambda y: torch.exp(-1e-30 * torch.reciprocal(y)), []),
    ],
    ids=["gelu", "silu", "straight through", "slope of another", "another number", "not of each element", "in place"],
)  # fmt: skip
def test_a_function_whose_passes_are_those_of_an_activation_is_one(value: Any, slope: Any, chains: list[Any]) -> None:
    conversion = assert_same(by_function(value, slope), seeded_randn((5, 8), 0, dtype=torch.float64), 1e-8)
    graphs = [graph for graph in conversion.graphs if graph.name.startswith("graph 0")]  # others are without gradients
    found = [[type(op).__name__ for op in region.model] for graph in graphs for region in graph.regions]
    assert found == chains
    assert len(graphs) == (1 if chains else 3)  # each body of a function has a report of its own

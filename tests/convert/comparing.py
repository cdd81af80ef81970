"""Compares a converted model with the original: outputs and all gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.convert import Conversion
from seqfuse.testing import seeded_randn

from .recording import Replayed


def passes(model: nn.Module | Replayed, x: Tensor) -> list[Tensor | None]:
    """The output of a model, and the gradients of its input and parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    outputs: Any = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((y * seeded_randn(tuple(y.shape), 9)).sum() for y in outputs).backward()
    return [*(y.detach().clone() for y in outputs), x.grad, *(p.grad for p in model.parameters())]


def assert_equal(found: list[Tensor | None], wanted: list[Tensor | None], bound: float = 1e-9) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert (got is None) == (want is None)
        if want is not None:
            torch.testing.assert_close(got, want, rtol=bound, atol=bound, equal_nan=True)


def assert_close(found: dict[str, Tensor | None], wanted: dict[str, Tensor | None]) -> None:
    """Within float32 rounding: a gradient may be a sum that cancels, so the scale is also that of all gradients."""
    whole = max(float(t.abs().max()) for t in wanted.values() if t is not None)
    for name, want in wanted.items():
        got = found[name]
        assert (got is None) == (want is None), name
        if got is not None and want is not None:
            bound = 1e-5 * float(want.abs().max()) + 1e-6 * whole
            assert float((got - want).abs().max()) <= bound, name


def assert_same(model: nn.Module, x: Tensor, bound: float = 1e-9) -> Conversion:
    """A model gives the same before and after its conversion: in its first call, later, and without gradients."""
    wanted = passes(model, x)
    conversion = sf.convert(model)
    _assert_gives(model, x, wanted, bound)
    return conversion


def assert_same_recorded(model: nn.Module, x: Tensor, bound: float = 1e-9) -> Replayed:
    """The same for a graph that is recorded instead of captured, in a tenth of the time."""
    wanted = passes(model, x)
    replayed = Replayed(model, x.clone().requires_grad_())
    assert replayed.calls == sum(len(graph.regions) for graph in replayed.graphs)
    _assert_gives(replayed, x, wanted, bound)
    return replayed


def _assert_gives(model: nn.Module | Replayed, x: Tensor, wanted: list[Tensor | None], bound: float) -> None:
    for _ in range(2):  # the first call is interpreted, the second runs generated code
        assert_equal(passes(model, x), wanted, bound)
    with torch.no_grad():
        y = model(x)
    assert_equal([*(y if isinstance(y, tuple) else (y,))], wanted[: len(y) if isinstance(y, tuple) else 1], bound)

"""Unusual members of a sequence: operations with their own forward, sequences in themselves, an `infer` that fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import PluginError

from .fusions import Doubles
from .kit import draw, randomize


class Own(sf.FusableOperation):
    """A user's operation that declares nothing but how it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).sin()


class States(sf.FusableOperation):
    """Nothing at all."""


class Holds(sf.FusableOperation):
    def expand(self) -> tuple[nn.Module, ...]:
        return ops.Tanh(), self


def test_an_operation_with_a_forward_of_its_own_runs_in_a_list() -> None:
    model = randomize(sf.Sequential(ops.Tanh(), Own(), ops.Residual(Own()))).double()
    x = draw(3, 4).requires_grad_()
    h = model[1].inner(torch.tanh(x)).sin()
    want = h + model[2][0].inner(h).sin()
    assert torch.equal(model(x), want)
    leaves = [x, *model.parameters()]
    for g, w in zip(torch.autograd.grad(model(x).sum(), leaves), torch.autograd.grad(want.sum(), leaves), strict=True):
        torch.testing.assert_close(g, w)
    assert [a.name for a in model.plan(x).eager] == ["Own", "Own"]


def inside_itself(depth: int) -> sf.Sequential:
    model = sf.Sequential(ops.Tanh())
    holder = model
    for _ in range(depth):
        holder = sf.Sequential(ops.Tanh(), holder)
    model.append(holder)
    return model


@pytest.mark.parametrize(
    ("model", "name", "position"),
    [
        (inside_itself(0), "Sequential", 1),
        (inside_itself(1), "Sequential", 2),
        (sf.Sequential(ops.Tanh(), States()), "States", 1),
        (sf.Sequential(Holds()), "Holds", 1),
        (States(), "States", 0),
    ],
    ids=["a list", "a list in a list", "an operation without math", "one that expands to itself", "alone"],
)
def test_what_holds_itself_is_one_error_that_names_it(model: nn.Module, name: str, position: int) -> None:
    said = "it holds itself" if name == "Sequential" else "it expands to itself, and has neither fwd nor forward to run"
    with pytest.raises(PluginError, match=said) as caught:
        model(draw(3, 4))
    assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF305", name, position)


class Infers(Doubles):
    """Its `infer` fails on anything."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        raise self.error


@pytest.mark.parametrize("error", [IndexError("7"), TypeError("no"), KeyError("k"), RuntimeError()], ids=repr)
def test_an_infer_that_fails_is_named(error: Exception) -> None:
    model = sf.Sequential(ops.Tanh(), Infers(error))
    for call in (model, model.plan):
        with pytest.raises(PluginError, match=f"infer failed for shape .*{type(error).__name__}") as caught:
            call(draw(3, 4))
        assert (caught.value.code, caught.value.operation, caught.value.position) == ("SF305", "Infers", 1)
        assert caught.value.__cause__ is error


def test_the_input_may_be_given_by_the_name_that_torch_has_for_it() -> None:
    x = draw(3, 4)
    for model in (sf.Sequential(ops.Tanh()), ops.Tanh(), sf.Sequential(nn.Tanh()), ops.Residual(ops.Tanh())):
        assert torch.equal(model(input=x), model(x))
        assert torch.equal(model(x=x), model(x))
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            model()
        with pytest.raises(sf.errors.InputError, match="'input'"):
            model(x, input=x)
    model = sf.Sequential(ops.Tanh(), ops.Add("input"))
    assert torch.equal(model(x, input=x), torch.tanh(x) + x)

"""Unusual members of a sequence, members that change between calls, and copies of sequences."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import PluginError
from seqfuse.testing import seeded_randn
from tests.fuser.fusions import PAIR, outcome, randomized, tensor

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


# Parameters removed from a sequence's dictionaries, and members reordered, between calls.


@pytest.mark.parametrize("where", ["a list", "behind barriers", "under a plan"])
def test_a_bias_taken_out_of_the_dictionary_of_parameters_is_gone(where: str) -> None:
    linear = ops.Linear(4, 4)
    around = [ops.Fork(), ops.Dropout(0.5), nn.Softplus()] if where == "behind barriers" else []
    end = [ops.Fork(), nn.Softplus(), ops.Add(), ops.Add()] if around else [ops.Tanh()]
    model, x = sf.Sequential(*around, linear, *end), torch.randn(3, 4)
    model(x)
    linear._parameters["bias"] = None
    if where == "under a plan":
        assert "Bias" not in model.plan(x).names
    torch.manual_seed(3)
    y = model(x)
    torch.manual_seed(3)
    fresh = sf.Sequential(*around, linear, *end)(x)
    torch.testing.assert_close(y, fresh)
    y.sum().backward()
    assert linear.weight.grad is not None


def test_a_bias_taken_out_of_the_dictionary_of_parameters_is_gone_under_vmap() -> None:
    linear, x = ops.Linear(4, 4), torch.randn(3, 4)
    model = torch.func.vmap(sf.Sequential(linear, ops.Tanh()))
    model(x)
    linear._parameters["bias"] = None
    torch.testing.assert_close(model(x), (x @ linear.weight.t()).tanh())


@pytest.mark.parametrize(
    ("model", "name", "x"),
    [
        ([ops.Linear(4, 4, bias=False)], "weight", torch.randn(3, 4)),
        ([ops.Bias(4), ops.GeLU()], "bias", torch.randn(3, 4)),
        ([ops.PositionEmbedding(3, 4)], "weight", torch.randn(3, 4)),
        ([ops.Embedding(3, 4)], "weight", torch.tensor([0, 2])),
    ],
    ids=["Linear", "Bias", "PositionEmbedding", "Embedding"],
)
def test_a_parameter_that_an_operation_cannot_do_without_is_missed_by_name(
    model: list[nn.Module], name: str, x: Tensor
) -> None:
    run = sf.Sequential(*model)
    run(x)
    model[0]._parameters[name] = None
    with pytest.raises(sf.errors.InputError, match=rf"SF106.*{type(model[0]).__name__}.*{name} is None"):
        run(x)


def test_members_put_in_another_order_run_in_that_order() -> None:
    model, x = sf.Sequential(ops.Scale(2.0), ops.Tanh()), seeded_randn((7, 5), 0)
    model(x)
    model._modules["0"] = model._modules.pop("0")
    ops.Tanh()  # reordered children notify nobody; setting an attribute anywhere does
    torch.testing.assert_close(model(x), 2 * torch.tanh(x))


# Shallow copies and replicas run the sequence that they contain, not that of the original.


def test_a_shallow_copy_with_a_list_of_its_own_runs_that_list() -> None:
    mine = randomized(sf.Sequential(ops.Linear(5, 4), ops.ReLU(), fusions=PAIR))
    x = tensor(7, 5)
    y = mine(x)
    twin = copy.copy(mine)
    twin._modules = dict(mine._modules)
    twin.append(ops.Scale(2.0))
    assert len(mine) == len(twin) - 1
    torch.testing.assert_close(twin(x), 2 * y)
    assert len(twin.plan(x).names) == len(mine.plan(x).names) + 1
    assert torch.equal(mine(x), y)


AGAIN = pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)


@AGAIN
def test_a_copied_fuser_holds_its_own_operation(again: Callable[[Any], Any]) -> None:
    fuser, x = sf.Fuser(ops.Linear(5, 4)), tensor(7, 5)
    y, twin = fuser(x), again(fuser)
    del fuser
    gc.collect()
    assert torch.equal(twin(x), y)


@AGAIN
def test_a_shallow_copy_is_copied_without_the_original_it_was_made_from(again: Callable[[Any], Any]) -> None:
    first = randomized(sf.Sequential(ops.Linear(5, 4), ops.ReLU(), fusions=PAIR, memory="lean"))
    twin, x = copy.copy(first), tensor(7, 5)
    third = again(twin)
    y = first(x)
    del first
    for made in (third, again(twin)):
        assert torch.equal(made(x), y)
        assert (made.fusions, made.memory) == (PAIR, "lean")


def test_a_replica_for_data_parallel_runs_its_own_parameters() -> None:
    """As `nn.parallel.replicate` copies each module, on one device."""
    model = randomized(sf.Sequential(ops.Linear(5, 4), ops.ReLU(), ops.Residual(ops.Linear(4, 4)), fusions=PAIR))
    x = tensor(7, 5)
    model(x), model[0](x)
    replicas = {m: m._replicate_for_data_parallel() for m in model.modules()}
    copies: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        replica = replicas[module]
        replica._modules = {k: replicas[child] for k, child in module._modules.items()}
        for key, parameter in module._parameters.items():
            copies[f"{name}.{key}"] = (2 * parameter).detach().requires_grad_()
            setattr(replica, key, copies[f"{name}.{key}"])
    twin = replicas[model]
    got = outcome(twin, {"x": x, **copies}, x)

    def plain() -> Tensor:
        h = torch.relu(F.linear(x, copies["0.weight"], copies["0.bias"]))
        return h + F.linear(h, copies["2.0.weight"], copies["2.0.bias"])

    torch.testing.assert_close(got, outcome(plain, {"x": x, **copies}))
    torch.testing.assert_close(replicas[model[0]](x), F.linear(x, copies["0.weight"], copies["0.bias"]))
    assert all(p.grad is None for p in model.parameters())

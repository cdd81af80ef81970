"""Parameters removed from a sequence's dictionaries, and members reordered, between calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import seeded_randn


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

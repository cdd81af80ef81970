"""Scale, LayerScale, Bias and Identity."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, seeded_randn

from .passes import by_passes, check_twin, example


def test_multiplies_both_passes_by_the_factor():
    op, x = ops.Scale(-0.3), seeded_randn((3, 5), 0)
    y, saved = op.fwd(x)
    assert_bitwise_equal(y, x * -0.3)
    assert_bitwise_equal(op.bwd(x, saved)[0], x * -0.3)
    assert not op.state_dict()


def test_a_factor_changed_between_the_passes_does_no_harm():
    op, x = ops.Scale(2), seeded_randn((3, 5), 0)
    _, saved = op.fwd(x)
    op.factor = 7.0
    assert_bitwise_equal(op.bwd(x, saved)[0], 2 * x)


def test_keeps_the_dtype_of_half_inputs():
    assert ops.Scale(0.1).fwd(torch.ones(2, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_starts_small_and_has_one_key():
    op = ops.LayerScale(6)
    assert (op.gamma == 1e-5).all()
    assert list(op.state_dict()) == ["gamma"]
    assert (ops.LayerScale(6, 0.5).gamma == 0.5).all()


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (5,)], ids=str)
def test_adds_to_every_row_and_sums_over_them(shape: tuple[int, ...]):
    op, x = example("Bias", torch.empty(5)), seeded_randn(shape, 0)
    y, saved = op.fwd(x)
    dx, grads = op.bwd(torch.ones_like(x), saved, needs=frozenset({"x", "bias"}))
    rows = x.numel() // 5
    assert_bitwise_equal({"y": y.detach(), "dx": dx, "dbias": grads["bias"]}, {
        "y": x + op.bias.detach(), "dx": torch.ones_like(x), "dbias": torch.full((5,), float(rows)),
    })  # fmt: skip


def test_starts_from_zeros_and_owns_one_parameter():
    op = ops.Bias(4, dtype=torch.float64)
    assert_bitwise_equal(op.state_dict(), {"bias": torch.zeros(4, dtype=torch.float64)})
    assert isinstance(op.bias, nn.Parameter)
    assert op.parameter_slots() == {"bias": (op, "bias")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_accumulates_half_gradients_in_float32(dtype: torch.dtype):
    op = ops.Bias(3, dtype=dtype)
    dy = torch.full((1500, 3), 0.75, dtype=dtype)
    _, grads = op.bwd(dy, op.Saved(), needs=frozenset({"bias"}))
    assert_bitwise_equal(grads["bias"], torch.full((3,), 1125.0).to(dtype))


@pytest.mark.parametrize(("x", "bias", "y"), [
    (torch.bfloat16, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16, torch.float32),
    (torch.float32, torch.float64, torch.float64),
], ids=str)  # fmt: skip
def test_dtypes_promote_as_in_torch(x: torch.dtype, bias: torch.dtype, y: torch.dtype):
    op = ops.Bias(3, dtype=bias)
    assert op.fwd(torch.ones(2, 3, dtype=x))[0].dtype == y
    assert op.reference(torch.ones(2, 3, dtype=x)).dtype == y


def test_autocast_keeps_a_half_product_half():
    linear = ops.Linear(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        product, _ = linear.fwd(seeded_randn((4, 5), 0))
        y, _ = linear.expand()[1].fwd(product)
        assert y.dtype == nn.Linear(5, 3)(torch.ones(4, 5)).dtype == torch.bfloat16
        assert linear.expand()[1].reference(product).dtype == torch.bfloat16


def test_a_bound_bias_gives_the_gradient_of_its_own_name():
    _, bias = ops.Linear(5, 3).expand()
    found = by_passes(bias, seeded_randn((4, 3), 0), {})
    assert found["dbias"].shape == (3,)


def test_a_bias_by_itself_is_pickled_with_its_parameter() -> None:
    bias = ops.Bias(3)
    bias.bias.data = torch.tensor([1.0, 2.0, 3.0])
    again = pickle.loads(pickle.dumps(bias))
    assert torch.equal(again(torch.zeros(2, 3)), bias(torch.zeros(2, 3)))


def test_hands_on_what_it_gets():
    op, x = ops.Identity(54, unused=True), seeded_randn((3, 5), 0)
    y, saved = op.fwd(x)
    assert y is x
    assert op.bwd(x, saved) == (x, {})
    check_twin(op, nn.Identity(), x)

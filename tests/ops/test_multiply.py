"""Multiply."""

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import check_op, seeded_randn


@pytest.mark.parametrize("shape", [(5, 6), (6,), (5, 1), (1, 1), ()], ids=str)
def test_keeps_its_contract(shape: tuple[int, ...]):
    check_op(ops.Multiply("gate"), seeded_randn((5, 6), 0), gate=seeded_randn(shape, 1))


def test_is_a_gated_unit_of_two_tensors():
    model = sf.Sequential(ops.Fork("x"), ops.Linear(6, 4), ops.SiLU(), ops.Multiply("up"))
    x, up = seeded_randn((5, 6), 0), seeded_randn((5, 4), 1).requires_grad_()
    y, _ = model(x, up=up)
    expected = model[2](model[1](x)) * up
    torch.testing.assert_close(y, expected)
    leaves, dy = [up, *model.parameters()], seeded_randn((5, 4), 2)
    torch.testing.assert_close(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy))


def test_keeps_only_what_wanted_gradients_read():
    kept = ops.Multiply.Saved.kept
    assert kept(frozenset({"x"})) == ("other", "shape")
    assert kept(frozenset({"other"})) == ("x", "shape")


@pytest.mark.parametrize("shape", [(5, 6, 1), (2, 5, 6), (3,)], ids=str)
def test_x_is_not_broadcast(shape: tuple[int, ...]):
    with pytest.raises(sf.InputError, match=r"SF101 position 0 \(Multiply\): .* broadcasts to \(5, 6\), got"):
        sf.Sequential(ops.Multiply("gate"))(torch.zeros(5, 6), gate=torch.zeros(shape))


def test_complex_gradients_are_those_of_torch():
    x, gate = (seeded_randn((5, 6), i, dtype=torch.complex64).requires_grad_() for i in range(2))
    dy = seeded_randn((5, 6), 2, dtype=torch.complex64)
    found = torch.autograd.grad(sf.Sequential(ops.Multiply("gate"))(x, gate=gate), (x, gate), dy)
    torch.testing.assert_close(found, torch.autograd.grad(x * gate, (x, gate), dy))


def test_dtypes_promote_as_in_torch():
    x, gate = seeded_randn((5, 6), 0, dtype=torch.bfloat16).requires_grad_(), seeded_randn((6,), 1).requires_grad_()
    y = sf.Sequential(ops.Multiply("gate"))(x, gate=gate)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, gate.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)

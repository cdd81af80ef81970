"""Add, Fork, Take and Multiply: the chain and its channels, and no gradient is lost."""

from __future__ import annotations

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn
from tests.ops.passes import randomized


def test_adds_and_hands_dy_to_both():
    op, x, other = ops.Add(), seeded_randn((3, 5), 0), seeded_randn((3, 5), 1)
    y, saved = op.fwd(x, other=other)
    assert_bitwise_equal(y, x + other)
    dy = torch.ones(3, 5)
    dx, grads = op.bwd(dy, saved, needs=frozenset({"x", "other"}))
    assert_bitwise_equal({"dx": dx, **grads}, {"dx": dy, "other": dy})


@pytest.mark.parametrize(("x", "other"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_dtypes_promote_as_in_torch(x: torch.dtype, other: torch.dtype):
    for pair in ((x, other), (other, x)):
        assert ops.Add().fwd(torch.ones(2, dtype=pair[0]), other=torch.ones(2, dtype=pair[1]))[0].dtype == other


@pytest.mark.parametrize(("cls", "channel"), [(ops.Add, "other"), (ops.Fork, "out")])
@pytest.mark.parametrize("name", [(), ("skip",)])
def test_its_name_is_the_channel(cls: type[sf.UnfusedOperation], channel: str, name: tuple[str, ...]):
    assert cls(*name).channels == {channel: name[0] if name else None}


def test_hands_on_x_twice_and_adds_the_gradients():
    op, x = ops.Fork(), seeded_randn((3, 5), 0)
    y, outputs, saved = op.fwd(x)
    assert y is x
    assert outputs == {"out": x}
    dy, d_out = seeded_randn((3, 5), 1), seeded_randn((3, 5), 2)
    dx, grads = op.bwd(dy, saved, d_out=d_out)
    assert_bitwise_equal(dx, dy + d_out)
    assert grads == {}


def test_takes_a_gradient_from_one_side_alone():
    op, d = ops.Fork(), torch.ones(2)
    assert op.bwd(d, op.Saved(), d_out=None)[0] is d
    assert op.bwd(None, op.Saved(), d_out=d)[0] is d
    assert op.bwd(None, op.Saved(), d_out=None)[0] is None


BRANCHES = {
    "read one input": (
        (ops.Fork("r"), ops.LayerNorm(6), ops.Linear(6, 6), ops.Take("r"), ops.LayerNorm(6), ops.Linear(6, 6),
         ops.GeLU(), ops.Add(), ops.Add("r")),
        lambda fork, norm, first, take, other, second, act, add, last, x: x + first(norm(x)) + act(second(other(x))),
    ),
    "share a norm": (
        (ops.Fork("r"), ops.LayerNorm(6), ops.Fork("n"), ops.Linear(6, 6), ops.Take("n", "attention"),
         ops.Linear(6, 6), ops.Add("attention"), ops.Add("r")),
        lambda fork, norm, shared, first, take, second, add, last, x: x + first(norm(x)) + second(norm(x)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("members", "by_hand"), BRANCHES.values(), ids=BRANCHES)
def test_branches_of_a_parallel_block(members: tuple[sf.UnfusedOperation, ...], by_hand):
    model, x = randomized(sf.Sequential(*members)), seeded_randn((5, 6), 0).requires_grad_()
    leaves, dy = [x, *model.parameters()], seeded_randn((5, 6), 9)
    found, expected = model(x), by_hand(*model, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, dy), torch.autograd.grad(expected, leaves, dy))


def test_takes_a_public_input_and_gives_a_public_output():
    model = sf.Sequential(ops.Scale(2.0), ops.Take("new", "old"), ops.Scale(3.0))
    x, new = seeded_randn((5, 6), 0).requires_grad_(), seeded_randn((5, 6), 1).requires_grad_()
    y, old = model(x, new=new)
    torch.testing.assert_close((y, old), (3 * new, 2 * x))
    (3 * y + old).sum().backward()
    torch.testing.assert_close((x.grad, new.grad), (torch.full((5, 6), 2.0), torch.full((5, 6), 9.0)))


@pytest.mark.parametrize("used", ["y", "old"])
def test_what_is_not_used_has_no_gradient_or_zeros(used: str):
    model = sf.Sequential(ops.Scale(2.0), ops.Take("new", "old"), ops.Scale(3.0))
    x, new = seeded_randn((5, 6), 0).requires_grad_(), seeded_randn((5, 6), 1).requires_grad_()
    out = dict(zip(("y", "old"), model(x, new=new), strict=True))
    out[used].sum().backward()
    wanted = (new, 3.0) if used == "y" else (x, 2.0)
    for leaf in (x, new):
        factor = wanted[1] if leaf is wanted[0] else 0.0
        grad = torch.zeros(5, 6) if leaf.grad is None else leaf.grad
        torch.testing.assert_close(grad, torch.full((5, 6), factor))


def test_without_a_name_it_takes_the_nearest_open_fork():
    model = sf.Sequential(ops.Fork(), ops.Scale(2.0), ops.Take(), ops.Scale(5.0), ops.Add())
    x = seeded_randn((5, 6), 0)
    torch.testing.assert_close(model(x), 7 * x)


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


def test_complex_gradients_are_those_of_torch():
    x, gate = (seeded_randn((5, 6), i, dtype=torch.complex64).requires_grad_() for i in range(2))
    dy = seeded_randn((5, 6), 2, dtype=torch.complex64)
    found = torch.autograd.grad(sf.Sequential(ops.Multiply("gate"))(x, gate=gate), (x, gate), dy)
    torch.testing.assert_close(found, torch.autograd.grad(x * gate, (x, gate), dy))


def test_dtypes_of_a_product_promote_as_in_torch():
    x, gate = seeded_randn((5, 6), 0, dtype=torch.bfloat16).requires_grad_(), seeded_randn((6,), 1).requires_grad_()
    y = sf.Sequential(ops.Multiply("gate"))(x, gate=gate)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, gate.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)

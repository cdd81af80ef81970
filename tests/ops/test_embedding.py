"""Embedding and PositionEmbedding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn
from tests.watching import saving

HALF = (torch.bfloat16, torch.float16)


def twins(**arguments) -> tuple[sf.Sequential, nn.Embedding]:
    torch.manual_seed(1)
    mine = sf.Sequential(ops.Embedding(11, 6, **arguments))
    its = nn.Embedding(11, 6, **arguments)
    its.load_state_dict(mine[0].state_dict(), strict=True)
    return mine, its


@pytest.mark.parametrize("padding", [None, 3, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7,), (2, 5), (), (0, 4)], ids=str)
def test_is_the_embedding_of_torch_bit_for_bit(shape: tuple[int, ...], dtype: torch.dtype, padding: int | None):
    mine, its = twins(padding_idx=padding, dtype=dtype)
    for index in (torch.int64, torch.int32):
        x = torch.randint(11, shape, dtype=index)
        y, want = mine(x), its(x)
        dy = seeded_randn(tuple(y.shape), 3, dtype=dtype)
        mine.zero_grad()
        its.zero_grad()
        y.backward(dy)
        want.backward(dy)
        assert_bitwise_equal((y.detach(), mine[0].weight.grad), (want.detach(), its.weight.grad))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_are_summed_in_float32(dtype: torch.dtype):
    mine, _ = twins(dtype=dtype)
    y = mine(torch.full((4096,), 2))
    y.backward(torch.ones_like(y))
    assert mine[0].weight.grad[2].eq(4096).all()
    assert mine[0].weight.grad.dtype is dtype


def test_a_frozen_table_computes_nothing_and_keeps_nothing():
    mine, _ = twins()
    mine.append(ops.Linear(6, 2))
    mine[0].requires_grad_(False)
    with saving() as kept:
        y = mine(torch.arange(5))
    assert all(t.is_floating_point() for t in kept)
    y.sum().backward()
    assert mine[0].weight.grad is None
    assert mine[1].weight.grad is not None


def test_what_follows_is_planned_for_the_dtype_of_the_table():
    class Wide(sf.InferenceFusion):
        lin: ops.Linear

        def requires(self, env: sf.Env) -> sf.Requirements:
            yield (env.dtype, env.rows) == (torch.bfloat16, 16), f"got {env.dtype} and {env.rows} rows"

        def saves(self, env: sf.Env) -> sf.Savings:
            return sf.Savings(launches=1)

        def fwd(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.lin.weight)

    model = sf.Sequential(ops.Embedding(11, 6), ops.Linear(6, 2, bias=False), fusions=(Wide,)).bfloat16()
    x = torch.arange(10).view(2, 5)
    with torch.no_grad():
        assert [step.name for step in model.plan(x).forward] == ["Embedding", "Wide"]
        assert_bitwise_equal(model(x), model[1](model[0](x)))


def test_an_index_outside_the_table_is_told_with_its_place():
    mine, _ = twins()
    with pytest.raises(IndexError) as error:
        mine(torch.tensor([11]))
    assert "position 0" in str(error.value.__notes__)


@pytest.mark.parametrize("shape", [(9, 6), (2, 5, 6), (2, 3, 4, 6)], ids=str)
def test_positions_are_added_row_by_row(shape: tuple[int, ...]):
    op = ops.PositionEmbedding(9, 6)
    x = seeded_randn(shape, 0)
    torch.testing.assert_close(op(x), x + op.weight[: shape[-2]])
    check_op(op, x)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("shape", [(5,), (2, 5), (1, 5), (2, 1)], ids=str)
def test_given_positions_get_their_gradients(shape: tuple[int, ...], dtype: torch.dtype):
    op = ops.PositionEmbedding(9, 6, positions="p", dtype=dtype)
    ids = torch.randint(9, shape, generator=torch.Generator().manual_seed(5))
    x = seeded_randn((2, 5, 6), 0, dtype=dtype).requires_grad_()
    y = sf.Sequential(op)(x, p=ids)
    dy = seeded_randn((2, 5, 6), 1, dtype=dtype)
    y.backward(dy)
    want = torch.zeros(9, 6, dtype=torch.float64).index_add_(
        0, ids.expand(2, 5).reshape(-1), dy.double().reshape(-1, 6)
    )
    torch.testing.assert_close(op.weight.grad, want.to(dtype))
    assert_bitwise_equal(x.grad, dy)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_of_a_position_are_summed_in_float32(dtype: torch.dtype):
    op = ops.PositionEmbedding(9, 6, positions="p", dtype=dtype)
    y = sf.Sequential(op)(torch.zeros(4096, 6, dtype=dtype), p=torch.full((4096,), 2))
    y.backward(torch.ones_like(y))
    assert op.weight.grad[2].eq(4096).all()


def test_positions_may_be_of_zero_columns():
    model = sf.Sequential(ops.Reshape(3, 0), ops.PositionEmbedding(3, 0, positions="positions"))
    x = torch.zeros(2, 0, requires_grad=True)
    model(x, positions=torch.tensor([0, 2, 1])).sum().backward()
    assert x.grad.shape == (2, 0)
    assert model[1].weight.grad.shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_positions_are_integers_of_any_kind(dtype: torch.dtype):
    op, x = ops.PositionEmbedding(6, 8, positions="at"), seeded_randn((2, 4, 8), 0)
    at = torch.tensor([1, 0, 5, 1])
    y = sf.Sequential(op)(x, at=at.to(dtype))
    torch.testing.assert_close(y, x + op.weight[at])
    dy = seeded_randn((2, 4, 8), 1)
    (got,) = torch.autograd.grad(y, op.weight, dy)
    torch.testing.assert_close(got, torch.zeros(6, 8).index_add_(0, at, dy.sum(0)))
    torch.testing.assert_close(op.reference(x, position_ids=at.to(dtype)), y)


def test_a_rotation_s_positions_are_numbers():
    model = sf.Sequential(ops.RotaryEmbedding(1, style="half", positions="at"))
    x = seeded_randn((4, 12), 0)
    torch.testing.assert_close(model(x, at=torch.arange(4, dtype=torch.uint8)), model(x, at=torch.arange(4.0)))

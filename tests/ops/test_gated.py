"""The gated units: SwiGLU, GEGLU, ReGLU, GLU, and those of two functions or another packing."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, check_op, seeded_randn

from .passes import by_passes, check_passes, gradient

UNITS = {
    "SwiGLU": (ops.SwiGLU(), ops.SiLU()),
    "GEGLU": (ops.GEGLU(), ops.GeLU()),
    "GEGLU tanh": (ops.GEGLU("tanh"), ops.GeLU("tanh")),
    "ReGLU": (ops.ReGLU(), ops.ReLU()),
    "GLU": (ops.GLU(), ops.Sigmoid()),
    "QGEGLU": (ops.QGEGLU(), ops.QuickGeLU()),
    "SReGLU": (ops.SReGLU(), ops.SquaredReLU()),
}


@pytest.mark.parametrize("unit", UNITS)
def test_multiplies_the_second_half_by_the_activated_first(unit: str):
    op, activation = UNITS[unit]
    x = seeded_randn((5, 8), 0)
    gate, up = x.chunk(2, -1)
    assert_bitwise_equal(op.fwd(x)[0], activation.fwd(gate)[0] * up)


@pytest.mark.parametrize("unit", UNITS)
def test_both_halves_get_their_own_gradient(unit: str):
    op, activation = UNITS[unit]
    x = seeded_randn((5, 8), 0, dtype=torch.float64).requires_grad_()
    gate, up = x.chunk(2, -1)
    y = activation.reference(gate) * up
    (expected,) = torch.autograd.grad(y, x, gradient(y, 5))
    torch.testing.assert_close(by_passes(op, x.detach(), {})["dx"], expected)


@pytest.mark.parametrize("unit", UNITS)
def test_is_the_gated_unit_of_its_activation(unit: str):
    op, activation = UNITS[unit]
    x = seeded_randn((5, 8), 0)
    assert_bitwise_equal(by_passes(op, x, {}), by_passes(sf.Gated(activation), x, {}))


def test_torch_gates_with_the_other_half():
    x = seeded_randn((5, 8), 0)
    torch.testing.assert_close(ops.GLU().fwd(x)[0], F.glu(torch.cat(x.chunk(2, -1)[::-1], -1)))
    torch.testing.assert_close(ops.GLU(packing="up_gate").fwd(x)[0], F.glu(x))


def clamped(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float, offset: float) -> torch.Tensor:
    """The gated unit of GPT-OSS, from its reference code."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + offset)


@pytest.mark.parametrize("packing", ["gate_up", "up_gate", "interleaved"])
def test_a_unit_of_two_functions_clamps_both(packing: Any):
    op = ops.ClampedSwiGLU(0.75, 1.25, 0.5, packing=packing)
    x = seeded_randn((33, 10), 0, dtype=torch.float64).requires_grad_()
    gate, up = {"gate_up": x.chunk(2, -1), "up_gate": x.chunk(2, -1)[::-1], "interleaved": (x[:, ::2], x[:, 1::2])}[
        packing
    ]
    y = clamped(gate, up, 0.75, 1.25, 0.5)
    (expected,) = torch.autograd.grad(y, x, gradient(y, 5))
    found = by_passes(op, x.detach(), {})
    torch.testing.assert_close((found["y"], found["dx"]), (y.detach(), expected))
    assert 0 < (expected == 0).sum() < expected.numel() / 2  # some are clamped


def test_gpt_oss_clamps_at_seven():
    x = 8 * seeded_randn((5, 8), 0)
    torch.testing.assert_close(ops.ClampedSwiGLU().fwd(x)[0], clamped(*x.chunk(2, -1), 7.0, 1.702, 1.0))


@pytest.mark.parametrize(
    "op", [ops.ClampedSwiGLU(0.75, 1.25, packing="interleaved"), ops.GEGLU(packing="up_gate"), ops.Clamp(1.0)], ids=str
)
def test_keeps_its_contract(op: sf.UnfusedOperation):
    check_op(op, seeded_randn((5, 6), 0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_limit_is_not_rounded_to_16_bits(dtype: torch.dtype):
    """Numbers beyond a limit have no gradient, also if the limit is not representable in their dtype."""
    for limit in (0.1, 0.3, 0.7):
        x = (torch.tensor([limit] * 3, dtype=dtype) * torch.tensor([1 - 2**-7, 1, 1 + 2**-7])).to(dtype)
        for op in (ops.Clamp(limit), ops.ClampedSiLU(limit)):
            dx = by_passes(op, x, {})["dx"]
            assert torch.equal(dx != 0, x.double() <= limit)


@pytest.mark.parametrize("op", [ops.Clamp(0.75, 0.5), ops.ClampedSiLU(0.75)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_at_a_limit_is_that_of_torch(op: sf.Pointwise, dtype: torch.dtype):
    """Versions of torch differ. A chain with another operation runs in C where there is a compiler."""
    x = torch.tensor([[-0.75, 0.75, 0.5, 0.8] * 8] * 4, dtype=dtype).requires_grad_()
    y = x.clamp(-0.75, 0.75) if isinstance(op, ops.Clamp) else F.silu(1.702 * x.clamp(max=0.75)) / 1.702
    dy = gradient(y, 5)
    (expected,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(by_passes(op, x.detach(), {})["dx"] != 0, expected != 0)
    with sf.fusing(unmeasured=True):
        (found,) = torch.autograd.grad(sf.Sequential(op, ops.Scale(1.0))(x), x, dy)
    assert torch.equal(found != 0, expected != 0)


def test_columns_of_a_packing_in_turn_are_divided_as_they_are():
    """A process has whole pairs of gate and up, where halves must be sharded separately."""
    from seqfuse.parallel.tensor import _halves

    for packing, halves in (("gate_up", (8, 8)), ("interleaved", None)):
        model = sf.Sequential(ops.Linear(6, 16), ops.SwiGLU(packing=cast(Any, packing)), ops.Linear(8, 6))
        assert _halves(model, cast(ops.Linear, model[0])) == halves


def test_a_factor_for_each_token_is_that_of_the_channel():
    x, factors = seeded_randn((2, 5, 8), 0), seeded_randn((2, 5), 1)
    gate, up = x.chunk(2, -1)
    expected = F.silu(gate) * up * factors.unsqueeze(-1)
    torch.testing.assert_close(ops.ScaledSwiGLU("by")(x, by=factors), expected)


@pytest.mark.parametrize("shape", [(5,), (5, 1)], ids=str)
def test_token_scale_keeps_its_contract(shape: tuple[int, ...]):
    check_op(ops.TokenScale("by"), seeded_randn((5, 6), 0), by=seeded_randn(shape, 1))


def test_token_scale_keeps_dtypes_apart():
    x, by = seeded_randn((5, 6), 0, dtype=torch.bfloat16).requires_grad_(), seeded_randn((5,), 1).requires_grad_()
    y, dy = sf.Sequential(ops.TokenScale("by"))(x, by=by), seeded_randn((5, 6), 2, dtype=torch.bfloat16)
    y.backward(dy)
    assert (y.dtype, x.grad.dtype, by.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    torch.testing.assert_close(by.grad, (dy.float() * x.detach().float()).sum(-1))


def test_l2norm_makes_rows_of_length_one():
    x = seeded_randn((5, 12), 0, dtype=torch.float64).requires_grad_()
    op = ops.L2Norm(12, eps=0.25)
    y, expected = op(x), x / (x.square().sum(-1, keepdim=True) + 0.25).sqrt()
    torch.testing.assert_close(y, expected)
    dy = seeded_randn((5, 12), 1, dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy))
    assert not op.state_dict()


@pytest.mark.parametrize("made", [ops.L2Norm(16), ops.ScaledSwiGLU("by")], ids=["l2norm", "scaled"])
def test_operations_made_of_two_are_planned_with_their_neighbors(made: sf.Sequential):
    model = sf.Sequential(ops.Linear(8, 16), made)
    plan = model.plan(seeded_randn((5, 8), 0), **dict.fromkeys(model.channels.inputs, seeded_randn((5,), 1)))
    assert not plan.eager
    assert plan.names[2:] == tuple(type(member).__name__ for member in made)


@pytest.mark.parametrize("unit", UNITS)
def test_agrees_for_a_gate_of_one_column(unit: str):
    check_passes(UNITS[unit][0], seeded_randn((7, 2), 0))


@pytest.mark.parametrize("enabled", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("unit", ["SquaredReLU", "SwiGLU"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_takes_16_bits_under_autocast_to_the_other_16_bits(dtype: torch.dtype, unit: str, enabled: bool):
    (other,) = {torch.float16, torch.bfloat16} - {dtype}
    op = ops.SwiGLU() if unit == "SwiGLU" else sf.Gated(ops.SquaredReLU())
    model = sf.Sequential(ops.Bias(8, dtype=dtype), op, ops.Scale(2.0))
    leaves = [seeded_randn((5, 8), 0, dtype=dtype).requires_grad_(), *model.parameters()]
    results: list[list[torch.Tensor]] = []
    for run in (model, model, lambda x: model[2].reference(model[1].reference(model[0].reference(x)))):
        with torch.autocast("cpu", other), sf.fusing(enabled, on_error="raise"):
            y = run(leaves[0])
        results.append([y.detach(), *torch.autograd.grad(y.sum(), leaves)])
    for found in results[:2]:
        for one, expected in zip(found, results[2], strict=True):
            torch.testing.assert_close(one, expected)  # dtypes too

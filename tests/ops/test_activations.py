"""Activations, compared with torch's and their formulas; in 16 bits computed in float32 and rounded once."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, in_regime, seeded_randn

from .passes import check_passes, check_twin

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
TWINS = (
    (ops.GeLU(), nn.GELU()), (ops.GeLU("tanh"), nn.GELU("tanh")), (ops.ReLU(), nn.ReLU()), (ops.SiLU(), nn.SiLU()),
    (ops.Sigmoid(), nn.Sigmoid()), (ops.Tanh(), nn.Tanh()),
)  # fmt: skip
FAR = (
    *((op, "heavy", 1, dtype) for op in (ops.GeLU(), ops.GeLU("tanh")) for dtype in (F32, BF16)),
    *((ops.QuickGeLU(), regime, 1, dtype) for regime in ("heavy", "offset") for dtype in (F32, BF16, F16)),
    *((op, "normal", 40, F32) for op in (ops.SiLU(), ops.Sigmoid(), ops.Tanh())),
)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize(("op", "twin"), TWINS, ids=str)
def test_is_that_of_torch_bit_for_bit(op: sf.Pointwise, twin: nn.Module, dtype: torch.dtype):
    check_twin(op, twin, seeded_randn((9, 7), 0, dtype=dtype))


@pytest.mark.parametrize(("op", "regime", "factor", "dtype"), FAR, ids=str)
def test_agrees_over_a_wide_range(op: sf.Pointwise, regime: str, factor: int, dtype: torch.dtype):
    check_passes(op, factor * in_regime(regime, (33, 19), 0, dtype=dtype))


@pytest.mark.parametrize(
    ("op", "field"), [(ops.ReLU(), "y"), (ops.Sigmoid(), "y"), (ops.Tanh(), "y"), (ops.SiLU(), "x")]
)
def test_saves_one_tensor_itself(op: sf.Pointwise, field: str):
    x = seeded_randn((3, 4), 0)
    y, saved = op.fwd(x)
    assert saved.fields == (field,)
    assert getattr(saved, field) is (y if field == "y" else x)


@pytest.mark.parametrize("op", [ops.ReLU(), ops.Sigmoid(), ops.Tanh()], ids=str)
def test_the_derivative_by_the_output_is_that_of_the_backward(op: sf.Pointwise):
    y = op.fwd(torch.cat((seeded_randn((50,), 0), torch.tensor([math.nan, 0.0]))))[0]
    expected = op.bwd(torch.ones_like(y), op.Saved(y=y))[0]
    torch.testing.assert_close(op.derivative_reference(y), expected, equal_nan=True)
    assert not isinstance(op, ops.ReLU) or torch.equal(op.derivative_reference(y), expected)


def test_the_two_forms_of_gelu_differ():
    x = torch.linspace(-5, 5, 10_001, dtype=F64)
    gap = (ops.GeLU().fwd(x)[0] - ops.GeLU("tanh").fwd(x)[0]).abs().max().item()
    assert 4.6e-4 < gap < 4.8e-4


def test_values_are_those_of_the_formula():
    x = torch.tensor([-2.0, -0.5, 0.0, 1.5], dtype=F64)
    exact = [t * (1 + math.erf(t / math.sqrt(2))) / 2 for t in x.tolist()]
    torch.testing.assert_close(ops.GeLU().fwd(x)[0].tolist(), exact)
    torch.testing.assert_close(ops.QuickGeLU().fwd(x)[0].tolist(), [t / (1 + math.exp(-1.702 * t)) for t in x.tolist()])


def test_both_spellings_are_one_class():
    assert ops.GELU is ops.GeLU


def test_nan_passes_a_relu_and_zero_has_no_slope():
    x = torch.tensor([math.nan, -math.inf, -1.0, -1e-38, 0.0, 2.0, math.inf])
    op = ops.ReLU()
    y, saved = op.fwd(x)
    dx, _ = op.bwd(torch.full_like(x, 3.0), saved)
    assert_bitwise_equal({"y": y, "dx": dx}, {
        "y": torch.tensor([math.nan, 0.0, 0.0, 0.0, 0.0, 2.0, math.inf]),
        "dx": torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0, 3.0, 3.0]),
    })  # fmt: skip


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
def test_the_gradient_of_quickgelu_at_the_largest_numbers_is_a_number(dtype: torch.dtype):
    x = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype)
    act = ops.QuickGeLU()
    dx, _ = act.bwd(torch.tensor([-0.5, -0.5], dtype=dtype), act.fwd(x)[1])
    assert dx.tolist() == [-0.5, 0.0]


def test_a_squared_relu_squares_what_is_positive_and_drops_a_gradient_of_inf_where_it_is_off():
    op, x = ops.SquaredReLU(), torch.tensor([-3.0, -0.1, 0.5, 3.0, math.nan])
    y, saved = op.fwd(x)
    dx, _ = op.bwd(torch.tensor([1.0, 1.0, -2.0, 0.25, 1.0]), saved)
    assert_bitwise_equal({"y": y, "dx": dx}, {
        "y": torch.tensor([0.0, 0.0, 0.25, 9.0, math.nan]),
        "dx": torch.tensor([0.0, 0.0, -2.0, 1.5, math.nan]),
    })  # fmt: skip
    x = torch.tensor([-3.0, 0.0, 0.5, math.nan])
    dx, _ = op.bwd(torch.full_like(x, math.inf), op.Saved(x=x))
    assert_bitwise_equal(dx, torch.tensor([0.0, 0.0, math.inf, math.nan]))


UNITS = [ops.QuickGeLU(), ops.SiLU(), ops.GLU(), ops.SwiGLU(), ops.GEGLU(), ops.GEGLU("tanh"), ops.ReGLU()]


def passes(run, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    (dx,) = torch.autograd.grad(y, x, dy)
    return y.detach(), dx


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: repr(unit))
def test_rounds_once_in_16_bits(unit: sf.UnfusedOperation, dtype: torch.dtype):
    x = seeded_randn((33, 64), 0, dtype=dtype) * 3
    dy = seeded_randn(tuple(unit.infer(tuple(x.shape))), 1, dtype=dtype)
    expected = tuple(t.to(dtype) for t in passes(unit.reference, x.float(), dy.float()))

    def rounded_once(found: tuple[torch.Tensor, ...]) -> None:
        """Where float32 is in the middle of two 16-bit numbers, one of them; a second rounding changes one in ten."""
        for t, own in zip(found, expected, strict=True):
            torch.testing.assert_close(t, own, rtol=torch.finfo(dtype).eps, atol=2**-24)
            assert (t != own).sum() <= 2

    rounded_once(passes(unit.reference, x, dy))
    # In the tails of GeLU neither torch's float32 nor a kernel has all digits of 16 bits, and they differ.
    exact = tuple(t.to(dtype) for t in passes(unit.reference, x.double(), dy.double()))
    for fused, right in zip(passes(sf.Sequential(unit), x, dy), exact, strict=True):
        # Where the derivative is nearly 0, its terms cancel.
        torch.testing.assert_close(fused.float(), right.float(), rtol=torch.finfo(dtype).eps, atol=1e-6)
        differ = (fused != right) & (right.abs() > 1e-4)
        assert differ.float().mean() < 1e-2  # where float32 is close to the middle of two 16-bit numbers
    with sf.fusing(False):
        rounded_once(passes(sf.Sequential(unit), x, dy))
        rounded_once(passes(sf.Sequential(ops.Identity(), unit), x, dy))


def test_an_activation_that_autocast_gives_float32_decides_the_dtype_of_its_gated_unit():
    class Exponential(sf.Pointwise):
        autocast = "float32"

        def reference(self, x: torch.Tensor) -> torch.Tensor:
            return x.exp()

    x = seeded_randn((5, 8), 0, dtype=torch.bfloat16)
    gate, up = x.chunk(2, -1)
    assert_bitwise_equal(sf.Gated(Exponential()).reference(x), (gate.float().exp() * up).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert_bitwise_equal(sf.Gated(Exponential()).reference(x), gate.exp() * up)

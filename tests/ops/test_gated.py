"""The gated units: SwiGLU, GEGLU, ReGLU, GLU."""

import pytest
import torch
import torch.nn.functional as F

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, seeded_randn

from .passes import by_passes, check_passes, gradient

UNITS = {
    "SwiGLU": (ops.SwiGLU(), ops.SiLU()),
    "GEGLU": (ops.GEGLU(), ops.GeLU()),
    "GEGLU tanh": (ops.GEGLU("tanh"), ops.GeLU("tanh")),
    "ReGLU": (ops.ReGLU(), ops.ReLU()),
    "GLU": (ops.GLU(), ops.Sigmoid()),
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


@pytest.mark.parametrize("unit", UNITS)
def test_agrees_for_a_gate_of_one_column(unit: str):
    check_passes(UNITS[unit][0], seeded_randn((7, 2), 0))


@pytest.mark.parametrize("shape", [(3, 5), ()], ids=str)
def test_refuses_an_odd_last_dimension(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match="even last dimension"):
        ops.SwiGLU().infer(shape)


def test_refuses_an_unknown_form_of_gelu():
    with pytest.raises(ValueError, match="approximate must be"):
        ops.GEGLU("erf")


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

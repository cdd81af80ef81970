"""Linear and Bias, forward and backward."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import assert_bitwise_equal, check_fusion, seeded_randn

BOTH = (fusions.LinearBias, fusions.LinearBiasBackward)


@pytest.mark.parametrize("fusion", BOTH)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 7)], ids=str)
def test_takes_the_place_of_what_it_replaces(fusion: type[sf.FusedOperation], shape: tuple[int, ...]):
    assert check_fusion(fusion, seeded_randn(shape, 0)).cases >= 12


@pytest.mark.parametrize("fusion", BOTH)
def test_takes_a_bias_of_its_own_as_well(fusion: type[sf.FusedOperation]):
    check_fusion(fusion, seeded_randn((5, 6), 0), ops.Linear(6, 4, bias=False), ops.Bias(4))


def test_both_passes_of_every_linear_are_fused():
    model = sf.Sequential(ops.Linear(6, 8), ops.GeLU(), ops.Linear(8, 3))
    plan = model.plan(seeded_randn((4, 6), 0))
    assert plan.count("LinearBias") == 2
    assert plan.count("LinearBiasBackward") == 2


def test_refuses_dtypes_that_a_product_does_not_promote():
    model = sf.Sequential(ops.Linear(6, 8, bias=False), ops.Bias(8, dtype=torch.float64))
    x = seeded_randn((4, 6), 0)
    plan = model.plan(x)
    assert plan.count("LinearBias") == 0
    assert any(r.reason == "weight and bias must have one dtype" for r in plan.refused)
    assert model(x).dtype == torch.float64


def test_a_backward_of_two_dtypes_is_left_to_the_operations():
    linear = ops.Linear(16, 2, dtype=torch.float16)
    linear.bias = torch.nn.Parameter(linear.bias.float())
    model = sf.Sequential(ops.SquaredReLU(), linear, ops.GeLU(), fusions=sf.fusions.aten)
    x = seeded_randn((4, 16), 0, dtype=torch.float16).requires_grad_()
    own = torch.autograd.grad(sf.Sequential(*model, fusions=())(x).sum(), (x, *model.parameters()))
    with sf.fusing(on_error="raise"):
        assert any(r.fusion == "LinearBiasBackward" and "one dtype" in r.reason for r in model.plan(x).refused)
        assert_bitwise_equal(torch.autograd.grad(model(x).sum(), (x, *model.parameters())), own)


def test_a_backward_across_processes_takes_one_dtype():
    linear = ops.Linear(6, 8, dtype=torch.bfloat16)
    enter: Any = SimpleNamespace(group=SimpleNamespace(size=2))
    env = sf.Env.of("cpu", dtype=torch.bfloat16)
    for dtype, takes in ((torch.float32, False), (torch.bfloat16, True)):
        fusion = sf.fusions.AllReduceLinearBackward(enter=enter, linear=linear, bias=ops.Bias(8, dtype=dtype))
        assert all(holds for holds, _ in fusion.requires(env)) == takes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_gives_the_bits_of_torch(dtype: torch.dtype):
    model = sf.Sequential(ops.Linear(6, 8))
    twin = torch.nn.Linear(6, 8)
    twin.load_state_dict(model[0].state_dict())
    x = seeded_randn((4, 6), 0, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.plan(x).count("LinearBias") == 1
        y, expected = model(x), twin(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


class Products(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "sum")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("needs", "kernels"), [
    ({"x"}, 1), ({"linear.weight"}, 1), ({"bias.bias"}, 1), ({"x", "linear.weight", "bias.bias"}, 3),
], ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value))  # fmt: skip
def test_computes_the_wanted_gradients_alone(needs: set[str], kernels: int):
    linear = ops.Linear(6, 8)
    fusion = fusions.LinearBiasBackward(linear=linear, bias=linear.expand()[1])
    records = {"linear": ops.Linear.Saved(x=torch.ones(4, 6), weight=linear.weight)}
    with torch.no_grad(), Products() as products:
        fusion.bwd(torch.ones(4, 8), **records, needs=frozenset(needs), main_grads={})
    assert products.count == kernels


def test_gradients_are_as_large_as_dy_is_and_not_a_number_where_it_is_none():
    dy = 2.0**24 * seeded_randn((4, 8), 1)
    dy[1, 3] = torch.nan
    model, x = sf.Sequential(ops.Linear(6, 8)), seeded_randn((4, 6), 0).requires_grad_()
    assert model.plan(x).count("LinearBiasBackward") == 1
    leaves = (x, *model.parameters())
    expected = torch.autograd.grad(torch.nn.functional.linear(*leaves), leaves, dy)
    torch.testing.assert_close(torch.autograd.grad(model(x), leaves, dy), expected, equal_nan=True)


@pytest.mark.parametrize("rows", [(0,), (2, 0)], ids=str)
def test_no_rows_give_zero_gradients(rows: tuple[int, ...]):
    linear = ops.Linear(6, 8)
    fusion = fusions.LinearBiasBackward(linear=linear, bias=linear.expand()[1])
    y, records = fusions.LinearBias(linear=linear, bias=linear.expand()[1]).fwd(torch.zeros(*rows, 6))
    needs = frozenset({"x", "linear.weight", "bias.bias"})
    with torch.no_grad():
        dx, grads = fusion.bwd(torch.zeros_like(y), **records, needs=needs, main_grads={})
    assert dx.shape == (*rows, 6)
    assert torch.equal(grads["linear.weight"], torch.zeros(8, 6))
    assert torch.equal(grads["bias.bias"], torch.zeros(8))

"""The gradients of a weight and of the bias after it in one product."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import LinearBiasBackwardTriton, LinearBiasDropoutAdd
from seqfuse.testing import assert_fused_close, check_fusion, seeded_randn
from tests.fusions.triton.fourways import four_ways


def test_takes_the_place_of_what_it_replaces(device: torch.device):
    print(check_fusion(LinearBiasBackwardTriton, seeded_randn((5, 7), 0).to(device), ops.Linear(7, 6).to(device)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meets_other_forwards_in_the_records(dtype: torch.dtype, device: torch.device):
    fusions = (LinearBiasDropoutAdd, LinearBiasBackwardTriton)
    inner = (ops.Linear(12, 36), ops.Tanh(), ops.Linear(36, 12))
    model = sf.Sequential(ops.Residual(*inner), fusions=fusions).to(device, dtype)
    four_ways(model, seeded_randn((2, 33, 12), 0, dtype=dtype).to(device), *fusions)


def test_only_wanted_gradients_are_made(device: torch.device):
    linear, bias = ops.Linear(6, 9, bias=False).to(device), ops.Bias(9).to(device)
    fusion = LinearBiasBackwardTriton(linear=linear, bias=bias)
    x, dy = seeded_randn((35, 6), 0).to(device), seeded_randn((35, 9), 1).to(device)
    records = {"linear": ops.Linear.Saved(x=x, weight=linear.weight)}
    whole = {"x": dy @ linear.weight, "linear.weight": dy.t() @ x, "bias.bias": dy.sum(0)}
    for size in range(4):
        for needs in itertools.combinations(whole, size):
            dx, grads = fusion.bwd(dy, **records, needs=frozenset(needs), main_grads={})
            made = {name: g for name, g in {"x": dx, **grads}.items() if g is not None}
            torch.testing.assert_close(made, {name: whole[name] for name in needs})


@pytest.mark.parametrize("rows", [(), (5,), (2, 3)], ids=str)
def test_products_of_no_columns_have_the_gradients_of_the_operations(rows: tuple[int, ...], device: torch.device):
    model = sf.Sequential(ops.Linear(6, 0), ops.Linear(0, 9), fusions=LinearBiasBackwardTriton).to(device)
    x, dy = seeded_randn((*rows, 6), 0).to(device).requires_grad_(), seeded_randn((*rows, 9), 1).to(device)
    assert model.plan(x).count("LinearBiasBackwardTriton") == 2
    found: list[tuple[Tensor, ...]] = []
    for fusing in (True, False):
        with sf.fusing(fusing, on_error="raise"):
            found.append(torch.autograd.grad(model(x), (x, *model.parameters()), dy))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("form", ["by columns", "part of a larger one"])
def test_a_buffer_in_more_than_one_piece_is_added_to(form: str, device: torch.device):
    model = sf.Sequential(ops.Linear(6, 9), fusions=LinearBiasBackwardTriton).to(device)
    x, dy = seeded_randn((35, 6), 0).to(device), seeded_randn((35, 9), 1).to(device)
    weight = model[0].weight
    weight.main_grad = (
        torch.ones(6, 9, device=device).t() if form == "by columns" else torch.ones(9, 11, device=device)[:, :6]
    )
    with sf.fusing(on_error="raise"):
        assert model.plan(x).count("LinearBiasBackwardTriton") == 1
        model(x).backward(dy)
    exact: Tensor = dy.double().t() @ x.double() + 1
    assert_fused_close([weight.main_grad.clone()], [dy.t() @ x + 1], [exact])
    torch.testing.assert_close(model[0].bias.grad, dy.sum(0))


@pytest.mark.parametrize(("width", "used"), [(1024, True), (8192, False)], ids=["short rows", "long rows"])
def test_is_used_where_it_pays(width: int, used: bool):
    model = sf.Sequential(ops.Linear(width, 3 * width, device="meta", dtype=torch.bfloat16))
    plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192))
    assert bool(plan.count("LinearBiasBackwardTriton")) == used

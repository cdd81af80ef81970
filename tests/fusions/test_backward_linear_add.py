"""A Linear behind a Fork, whose GEMM of dx starts from the gradient that arrives at the Fork."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import check_fusion, seeded_randn

BOTH = [torch.float32, torch.bfloat16]


def forked(width: int, out: int, bias: bool) -> list[sf.UnfusedOperation]:
    return [ops.Fork("out"), ops.Linear(width, out, bias=bias)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 9), (1, 13)], ids=str)
def test_takes_the_place_of_what_it_replaces(shape: tuple[int, ...], bias: bool):
    assert check_fusion(
        fusions.BackwardLinearAdd, seeded_randn(shape, 0), *forked(shape[-1], 6, bias), dtypes=BOTH
    ).cases


def block(dtype: torch.dtype = torch.float64, bias: bool = True) -> sf.Sequential:
    branch = ops.Residual(ops.Linear(7, 9, bias=bias), ops.Tanh(), ops.Linear(9, 7, bias=bias))
    return sf.Sequential(ops.Tanh(), branch).to(dtype)


def gradients(model: sf.Sequential, x: Tensor, fusing: bool) -> list[Tensor]:
    with sf.fusing(fusing, on_error="raise"):
        return list(torch.autograd.grad(model(x).sum(), [x, *model.parameters()]))  # dy is expanded


WIDE = seeded_randn((14, 14), 0, dtype=torch.float64)
FORMS = {"strided": WIDE[::3, ::2], "expanded": WIDE[:1, :7].expand(5, 7), "transposed": WIDE[:7, :5].t()}


@pytest.mark.parametrize("form", FORMS)
def test_takes_any_strides(form: str):
    model, x = block(), FORMS[form].detach().requires_grad_()
    assert model.plan(x).count("BackwardLinearAdd") == 1
    torch.testing.assert_close(gradients(model, x, True), gradients(model, x, False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_once(dtype: torch.dtype):
    def whole(shape: tuple[int, ...], seed: int) -> Tensor:
        return seeded_randn(shape, seed).mul(40).round()  # float32 holds every sum of products exactly

    dy, weight, d_out = whole((33, 5), 0), whole((5, 7), 1), whole((33, 7), 2)
    linear = ops.Linear(7, 5, bias=False)
    fusion = fusions.BackwardLinearAdd(fork=ops.Fork("out"), linear=linear, bias=None)
    record = ops.Linear.Saved(x=dy.new_empty(33, 7).to(dtype), weight=weight.to(dtype))
    dx, _ = fusion.bwd(
        dy.to(dtype), linear=record, d_fork_out=d_out.to(dtype),
        needs=frozenset({"x"}), main_grads={},
    )  # fmt: skip
    assert torch.equal(dx, (d_out + dy @ weight).to(dtype))
    assert not torch.equal(dx, d_out.to(dtype) + (dy @ weight).to(dtype))


def test_a_gradient_in_another_dtype_is_added_behind_the_gemm():
    linear = ops.Linear(7, 5, bias=False).bfloat16()
    fusion = fusions.BackwardLinearAdd(fork=ops.Fork("out"), linear=linear, bias=None)
    dy, d_out = seeded_randn((4, 5), 0, dtype=torch.bfloat16), seeded_randn((4, 7), 1)
    record = ops.Linear.Saved(x=dy.new_empty(4, 7), weight=linear.weight)
    dx, grads = fusion.bwd(dy, linear=record, d_fork_out=d_out, needs=frozenset({"x"}), main_grads={})
    assert torch.equal(dx, dy @ linear.weight + d_out)
    assert not grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_is_chosen_by_cost_on_a_cpu(dtype: torch.dtype):
    model = block(dtype)
    plan = model.plan(seeded_randn((5, 7), 0, dtype=dtype).requires_grad_())
    assert plan.count("BackwardLinearAdd") == 1
    there = model.plan(env=sf.Env.of("cuda:sm_90", dtype=dtype, rows=4096))
    assert there.count("BackwardLinearAdd") == 0


def test_a_float32_stream_under_autocast_is_left_to_the_operations_and_a_half_one_is_not():
    model, x = block(torch.float32), seeded_randn((5, 7), 0).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        plan, half = model.plan(x), model.plan(x.detach().bfloat16().requires_grad_())
    assert (plan.count("BackwardLinearAdd"), half.count("BackwardLinearAdd")) == (0, 1)
    reasons = [refusal.reason for refusal in plan.refused if refusal.fusion == "BackwardLinearAdd"]
    assert set(reasons) == {"x is cast to bfloat16 inside it, before Linear"}

"""A Linear next to a Scale, whose factor becomes the GEMM's, or after a Fork, whose gradient dx starts from."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.testing import check_fusion, seeded_randn

BOTH = [torch.float32, torch.bfloat16]
BACKWARD = {
    "before": lambda width: [ops.Scale(-0.75), ops.Linear(width, 6, bias=False)],
    "before, with a bias": lambda width: [ops.Scale(0.3), ops.Linear(width, 6)],
    "behind": lambda width: [ops.Linear(width, 6, bias=False), ops.Scale(0.3)],
    "behind a bias": lambda width: [ops.Linear(width, 6), ops.Scale(-1.7)],
}


def forward(width: int) -> list[sf.UnfusedOperation]:
    return [ops.Linear(width, 6, bias=False), ops.Scale(0.3), ops.Add("other")]


@pytest.mark.parametrize("name", BACKWARD)
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 9)], ids=str)
def test_the_backward_takes_the_place_of_what_it_replaces(shape: tuple[int, ...], name: str):
    list_ = BACKWARD[name](shape[-1])
    assert check_fusion(fusions.BackwardLinearScale, seeded_randn(shape, 0), *list_, dtypes=BOTH).cases


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 9), (1, 13)], ids=str)
def test_the_forward_takes_the_place_of_what_it_replaces(shape: tuple[int, ...]):
    x = seeded_randn(shape, 0)
    assert check_fusion(fusions.ForwardLinearScaleAdd, x, *forward(shape[-1]), dtypes=BOTH).cases


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    return seeded_randn(shape, seed).mul(20).round()  # float32 holds every sum exactly


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_result_is_rounded_once(dtype: torch.dtype):
    x, weight, other, dy = whole((33, 5), 0), whole((7, 5), 1), whole((33, 7), 2), whole((33, 7), 3)
    linear, scale = ops.Linear(5, 7, bias=False).to(dtype), ops.Scale(0.75)
    linear.weight.data.copy_(weight)
    y, _ = fusions.ForwardLinearScaleAdd(linear=linear, scale=scale, add=ops.Add("other")).fwd(
        x.to(dtype), add_other=other.to(dtype)
    )
    assert torch.equal(y, (0.75 * (x @ weight.t()) + other).to(dtype))
    assert not torch.equal(y, (0.75 * (x @ weight.t())).to(dtype) + other.to(dtype))
    bias = ops.Bias(7, dtype=dtype)
    dx, grads = fusions.BackwardLinearScale(first=linear, bias=bias, second=scale).bwd(
        dy.to(dtype), first=ops.Linear.Saved(x=x.to(dtype), weight=linear.weight),
        second=ops.Scale.Saved(factor=0.75), needs=frozenset({"x", "first.weight", "bias.bias"}), main_grads={},
    )  # fmt: skip
    assert torch.equal(dx, (0.75 * (dy @ weight)).to(dtype))
    assert torch.equal(grads["first.weight"], (0.75 * (dy.t() @ x)).to(dtype))
    assert torch.equal(grads["bias.bias"], (0.75 * dy.sum(0)).to(dtype))


@pytest.mark.parametrize("factor", [0.0, math.inf], ids=str)
@pytest.mark.parametrize("name", [*BACKWARD, "forward"])
def test_a_factor_that_loses_or_makes_nan_does_so_fused_as_well(name: str, factor: float):
    list_ = forward(7) if name == "forward" else BACKWARD[name](7)
    model = sf.Sequential(*list_)
    for operation in model:
        if isinstance(operation, ops.Scale):
            operation.factor = factor
    x = seeded_randn((5, 7), 0)
    x[0, 0] = math.nan
    channels = {"other": seeded_randn((5, 6), 2)} if name == "forward" else {}
    dy = seeded_randn((5, 6), 1)
    dy[1, 1] = math.nan
    found: list[list[Tensor]] = []
    for fusing in (True, False):
        leaf = x.clone().requires_grad_()
        with sf.fusing(fusing, on_error="raise"):
            y = model(leaf, **channels)
        found.append([y, *torch.autograd.grad(y, [leaf, *model.parameters()], dy)])
    torch.testing.assert_close(*found, equal_nan=True)


def test_what_gets_no_gradient_is_chosen_by_cost_all_the_same():
    model, x = sf.Sequential(*forward(7)), seeded_randn((5, 7), 0)
    with torch.no_grad():
        assert model.plan(x, other=seeded_randn((5, 6), 1)).count("ForwardLinearScaleAdd") == 1


@pytest.mark.parametrize("env", ["cpu", "cuda:sm_90", "cuda:sm_80"])
def test_are_chosen_by_cost(env: str):
    here = sf.Env.of(env, dtype=torch.bfloat16, rows=4096)
    x = torch.empty(4096, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with torch.device("meta"):
        scaled = ops.Residual(ops.Linear(256, 256, bias=False), ops.Scale(0.5))
        model = sf.Sequential(ops.Tanh(), scaled, ops.Scale(0.1), ops.Linear(256, 256)).bfloat16()
    plan = model.plan(x, env=here)
    assert plan.count("ForwardLinearScaleAdd") == 1
    assert plan.count("BackwardLinearScale") >= 1


@pytest.mark.parametrize("list_", [
    [ops.Linear(7, 7, bias=False), ops.Linear(7, 7, bias=False)], [ops.Scale(0.5), ops.Scale(0.5)],
], ids=["two Linears", "two Scales"])  # fmt: skip
def test_two_of_a_kind_are_refused(list_: list[sf.FusableOperation]):
    plan = sf.Sequential(*list_, fusions=fusions.BackwardLinearScale).plan(seeded_randn((5, 7), 0).requires_grad_())
    assert {refusal.reason for refusal in plan.refused} == {"there is no Scale beside the Linear"}


def test_complex_numbers_and_a_residual_of_another_dtype_are_left_to_the_operations():
    model, x = sf.Sequential(*forward(7), fusions=fusions.ForwardLinearScaleAdd), seeded_randn((5, 7), 0)
    plan = model.plan(env=sf.Env.of("cpu", dtype=torch.complex64))
    assert any("complex" in refusal.reason for refusal in plan.refused)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.plan(x, other=seeded_randn((5, 6), 1, dtype=torch.bfloat16)).count("ForwardLinearScaleAdd") == 1
        plan = model.plan(x, other=seeded_randn((5, 6), 1))
    assert [refusal.reason for refusal in plan.refused] == ["the GEMM and what is added to it must have one dtype"]


def test_a_factor_in_the_gemms_saves_reading_and_writing_the_outputs() -> None:
    env = sf.Env.of("cpu", rows=64)
    model = sf.Sequential(ops.Linear(8, 24, bias=False), ops.Scale(2.0), fusions=(fusions.BackwardLinearScale,))
    (step,) = (step for step in model.plan(env=env).backward if step.fused)
    worth = step.operation.saves(env)
    assert (worth.launches, worth.bytes) == (1, 2 * 64 * 24 * 4)


def forked(width: int, out: int, bias: bool) -> list[sf.UnfusedOperation]:
    return [ops.Fork("out"), ops.Linear(width, out, bias=bias)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 9), (1, 13)], ids=str)
def test_behind_a_fork_takes_the_place_of_what_it_replaces(shape: tuple[int, ...], bias: bool):
    assert check_fusion(
        fusions.BackwardLinearAdd, seeded_randn(shape, 0), *forked(shape[-1], 6, bias), dtypes=BOTH
    ).cases


def block(dtype: torch.dtype = torch.float64, bias: bool = True) -> sf.Sequential:
    branch = ops.Residual(ops.Linear(7, 9, bias=bias), ops.Tanh(), ops.Linear(9, 7, bias=bias))
    return sf.Sequential(ops.Tanh(), branch).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_once(dtype: torch.dtype):
    def whole(shape: tuple[int, ...], seed: int) -> Tensor:
        return seeded_randn(shape, seed).mul(40).round()  # float32 holds every sum exactly

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


def apart(width: int, bias: bool = True) -> ops.MergedLinear:
    return ops.MergedLinear.of(*(nn.Linear(width, size, bias) for size in (4, 2, 3)))


@pytest.mark.parametrize("make", [apart, lambda width: ops.MergedLinear(width, (4, 2, 3))], ids=["apart", "one"])
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 9)], ids=str)
def test_several_weights_behind_a_fork_take_the_place_of_what_it_replaces(
    shape: tuple[int, ...], make: Callable[[int], ops.MergedLinear]
):
    x, list_ = seeded_randn(shape, 0), [ops.Fork("out"), make(shape[-1])]
    check_fusion(fusions.BackwardMergedLinearAdd, x, *list_, dtypes=[torch.float32, torch.bfloat16])


def test_a_post_norm_layer_uses_it_on_a_cpu():
    block = ops.Residual(apart(8), ops.Linear(9, 8))
    model = sf.Sequential(ops.LayerNorm(8), block, ops.LayerNorm(8))
    x = seeded_randn((5, 8), 0).requires_grad_()
    assert model.plan(x).count("BackwardMergedLinearAdd") == 1
    leaves, results = [x, *model.parameters()], []
    for fusing in (True, False):
        with sf.fusing(fusing, on_error="raise"):
            results.append(torch.autograd.grad(model(x).square().sum(), leaves))
    torch.testing.assert_close(*results)


def test_a_sum_of_another_dtype_is_made_beside_it():
    fork, linear = ops.Fork("out"), apart(7)
    fusion = fusions.BackwardMergedLinearAdd(fork=fork, linear=linear)
    with torch.no_grad():
        x, dy, d_out = seeded_randn((5, 7), 0), seeded_randn((5, 9), 1), seeded_randn((5, 7), 2, dtype=torch.float64)
        record = linear.fwd(x)[1]
        around = {"linear": record, "needs": frozenset({"x"}), "main_grads": {}}
        dx, _ = fusion.bwd(dy, d_fork_out=d_out, **around)
        torch.testing.assert_close(dx, linear.bwd(dy, record, needs=frozenset({"x"}))[0] + d_out)
    assert dx.dtype is torch.float64

"""A Linear with its neighbors: bias, activation, sum, Scale and Fork, by calls of ATen and one oneDNN primitive."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.fusions import linear as linear_module
from seqfuse.testing import assert_bitwise_equal, check_fusion, seeded_randn
from tests.watching import Calls, saving

BOTH = (fusions.LinearBias, fusions.LinearBiasBackward)


@pytest.mark.parametrize("fusion", BOTH)
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 7)], ids=str)
def test_with_its_bias_takes_the_place_of_what_it_replaces(fusion: type[sf.FusedOperation], shape: tuple[int, ...]):
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


@pytest.mark.parametrize(("needs", "kernels"), [
    ({"x"}, 1), ({"linear.weight"}, 1), ({"bias.bias"}, 1), ({"x", "linear.weight", "bias.bias"}, 3),
], ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else str(value))  # fmt: skip
def test_computes_the_wanted_gradients_alone(needs: set[str], kernels: int):
    linear = ops.Linear(6, 8)
    fusion = fusions.LinearBiasBackward(linear=linear, bias=linear.expand()[1])
    records = {"linear": ops.Linear.Saved(x=torch.ones(4, 6), weight=linear.weight)}
    with torch.no_grad(), Calls() as products:
        fusion.bwd(torch.ones(4, 8), **records, needs=frozenset(needs), main_grads={})
    assert products.count("mm", "addmm", "sum") == kernels


def test_gradients_are_as_large_as_dy_is_and_not_a_number_where_it_is_none():
    dy = 2.0**24 * seeded_randn((4, 8), 1)
    dy[1, 3] = torch.nan
    model, x = sf.Sequential(ops.Linear(6, 8)), seeded_randn((4, 6), 0).requires_grad_()
    assert model.plan(x).count("LinearBiasBackward") == 1
    leaves = (x, *model.parameters())
    expected = torch.autograd.grad(torch.nn.functional.linear(*leaves), leaves, dy)
    torch.testing.assert_close(torch.autograd.grad(model(x), leaves, dy), expected, equal_nan=True)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 7)], ids=str)
def test_with_a_residual_takes_the_place_of_what_it_replaces(shape: tuple[int, ...], bias: bool):
    linear = ops.Linear(shape[-1], 4, bias=bias)
    check_fusion(fusions.LinearBiasAdd, seeded_randn(shape, 0), linear, ops.Add("other"))


def test_closes_a_residual():
    model = sf.Sequential(ops.Residual(ops.LayerNorm(6), ops.Linear(6, 8), ops.GeLU(), ops.Linear(8, 6)))
    x = seeded_randn((5, 6), 0)
    assert model.plan(x).count("LinearBiasAdd") == 1
    y = model(x)
    with sf.fusing(only=[fusions.LinearBias]):
        assert_bitwise_equal(y.detach(), model(x).detach())


def test_a_residual_of_another_dtype_promotes_as_in_torch():
    model = sf.Sequential(ops.Linear(8, 8), ops.Add("other")).bfloat16()
    x, other = seeded_randn((4, 8), 0).bfloat16(), seeded_randn((4, 8), 1)
    assert model.plan(x, other=other).count("LinearBiasAdd") == 1
    y = model(x, other=other)
    assert y.dtype is torch.float32
    torch.testing.assert_close(y, torch.nn.functional.linear(x, model[0].weight, model[0].bias) + other)


@pytest.mark.parametrize("other", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_keeps_the_dtype_of_the_residual(other: torch.dtype):
    model = sf.Sequential(ops.Linear(6, 8), ops.Add("other"))
    x, residual = seeded_randn((5, 6), 0), seeded_randn((5, 8), 1, dtype=other)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.plan(x, other=residual).count("LinearBiasAdd") == 1
        y = model(x, other=residual)
        with sf.fusing(only=[fusions.LinearBias]):
            expected = model(x, other=residual)
    assert y.dtype == other
    assert_bitwise_equal(y.detach(), expected.detach())


@pytest.mark.filterwarnings("ignore::seqfuse.FallbackWarning")
@pytest.mark.parametrize("memory", ["fast", "lean"])  # by torch's calls, and fused
@pytest.mark.parametrize("shape", [(8,), ()], ids=str)
@pytest.mark.parametrize("before", [[], [ops.Scale(0.3)]], ids=str)
def test_another_shape_is_the_error_of_the_add(before: list[sf.UnfusedOperation], shape: Any, memory: Any):
    model = sf.Sequential(ops.Linear(6, 8, bias=not before), *before, ops.Add("other"), memory=memory)
    with pytest.raises(sf.InputError, match="adds tensors of one shape"):
        model(seeded_randn((5, 6), 0), other=torch.ones(shape))


SUPPORTED = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
ACTS = (ops.ReLU(), ops.Sigmoid(), ops.Tanh())
ONEDNN_ACTS = (ops.GeLU("tanh"), ops.SiLU(), ops.Sigmoid(), ops.Tanh())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("act", ACTS, ids=str)
def test_with_an_activation_takes_the_place_of_what_it_replaces(act: sf.Pointwise, bias: bool):
    x = seeded_randn((5, 6), 0)
    check_fusion(fusions.LinearBiasAct, x, ops.Linear(6, 4, bias=bias), act)


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_gives_the_bits_of_the_product_and_the_activation(act: sf.Pointwise):
    model, x = sf.Sequential(ops.Linear(6, 8), act), seeded_randn((5, 6), 0)
    y = model(x)
    with sf.fusing(only=[fusions.LinearBias]):
        assert_bitwise_equal(y.detach(), model(x).detach())


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 6), (6,)], ids=str)
def test_gelu_behind_a_bias_is_one_call(shape: tuple[int, ...]):
    checked = check_fusion(fusions.LinearBiasGeLU, seeded_randn(shape, 0), ops.Linear(6, 4), ops.GeLU())
    assert checked.cases > 6


@pytest.mark.parametrize("act", [ops.ReLU(), ops.GeLU()], ids=str)
def test_the_call_gives_the_bits_of_bias_and_activation(act: sf.Pointwise):
    linear = ops.Linear(6, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        x = seeded_randn((2, 5, 6), 0, dtype=dtype)
        x[0, 0, 0], x[1, 1, 1] = torch.nan, torch.inf
        model = sf.Sequential(linear.to(dtype), act)
        with torch.no_grad():
            y = model(x)
            with sf.fusing(only=[fusions.LinearBias]):
                assert_bitwise_equal(y, model(x))
        assert y[0, 0].isnan().all()


def test_a_relu_that_makes_a_number_of_nan_stays_outside_the_product(monkeypatch: pytest.MonkeyPatch):
    def swallowing(bias: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **_: bool) -> torch.Tensor:
        return torch.addmm(bias, x, weight).nan_to_num(0.0).relu_()

    tried = linear_module._tried_with_nan.__wrapped__
    assert all(tried("cpu", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64))
    monkeypatch.setattr(torch, "_addmm_activation", swallowing)
    assert not tried("cpu", torch.float32)
    monkeypatch.setattr(linear_module, "_epilogue_keeps_nan", lambda *_: False)
    x = seeded_randn((3, 6), 0)
    x[1, 2] = torch.nan
    model = sf.Sequential(ops.Linear(6, 8), ops.ReLU())
    assert model.plan(x).count("LinearBiasAct") == 1
    assert model(x)[1].isnan().all()


@pytest.mark.parametrize(("kind", "approximate", "found"), [
    ("cuda:sm_90", "tanh", True), ("cuda:sm_90", "none", False), ("cpu", "tanh", False), ("cpu", "none", True),
], ids=str)  # fmt: skip
def test_gelu_is_the_one_that_the_call_makes_there(kind: str, approximate: Any, found: bool):
    model = sf.Sequential(ops.Linear(64, 256), ops.GeLU(approximate)).bfloat16()
    env = sf.Env.of(kind, dtype=torch.bfloat16, rows=8192, grad=False)
    model.requires_grad_(False)
    with sf.fusing(exclude=[fusions.LinearBiasActOneDNN]):
        assert (model.plan(env=env).count("LinearBiasGeLU") == 1) is found


def test_on_a_gpu_relu_and_its_bias_cost_nothing_behind_the_product():
    model = sf.Sequential(ops.Linear(1024, 4096), ops.ReLU()).bfloat16()
    plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192))
    assert plan.count("LinearBiasAct") == 1


def test_saves_the_output_and_nothing_beyond_it():
    model, x = sf.Sequential(ops.Linear(6, 8), ops.ReLU()), seeded_randn((5, 6), 0)
    assert model.plan(x).count("LinearBiasAct") == 1
    with saving() as kept:
        y = model(x)
    storages = {t.untyped_storage().data_ptr() for t in kept} - {p.data_ptr() for p in model.parameters()}
    assert storages == {x.data_ptr(), y.data_ptr()}


def test_a_residual_shaped_bias_is_refused_by_its_type():
    model = sf.Sequential(ops.Linear(6, 8, bias=False), ops.Add("other"), ops.ReLU())
    assert model.plan(seeded_randn((5, 6), 0), other=seeded_randn((5, 8), 1)).count("LinearBiasAct") == 0


def test_autocast_gives_what_the_operations_give():
    model, x = sf.Sequential(ops.Linear(6, 8), ops.ReLU()), seeded_randn((5, 6), 0)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        with sf.fusing(only=[fusions.LinearBias]):
            assert_bitwise_equal(y.detach(), model(x).detach())


@pytest.mark.skipif(not SUPPORTED, reason="this CPU has no bfloat16 GEMMs")
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("act", ONEDNN_ACTS, ids=str)
def test_the_onednn_primitive_takes_the_place_of_what_it_replaces(
    act: sf.Pointwise, bias: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(linear_module, "ONEDNN_WORTHWHILE", 0)
    for shape in ((5, 6), (2, 3, 64), (33, 150)):
        linear = ops.Linear(shape[-1], 9, bias=bias)
        checked = check_fusion(
            fusions.LinearBiasActOneDNN, seeded_randn(shape, 0), linear, act, dtypes=(torch.bfloat16,)
        )
        assert checked.cases > 6


def refusals(linear: ops.Linear, act: sf.Pointwise, env: sf.Env) -> list[str]:
    bias = linear.expand()[1] if linear.bias is not None else None
    fusion = fusions.LinearBiasActOneDNN(linear=linear, bias=bias, act=act)
    return [sentence for holds, sentence in fusion.requires(env) if not holds]


@pytest.mark.skipif(not SUPPORTED, reason="this CPU has no bfloat16 GEMMs")
def test_onednn_is_used_where_nothing_needs_a_gradient():
    model = sf.Sequential(ops.Linear(256, 512), ops.GeLU("tanh")).bfloat16()
    x = seeded_randn((64, 256), 0, dtype=torch.bfloat16)
    with torch.no_grad():
        assert model.plan(x).count("LinearBiasActOneDNN") == 1
    assert model.plan(x).count("LinearBiasActOneDNN") == 0
    assert not refusals(model[0], model[1], sf.Env.of("cpu", dtype=torch.bfloat16, rows=64))


@pytest.mark.skipif(not SUPPORTED, reason="this CPU has no bfloat16 GEMMs")
@torch.no_grad()
def test_onednn_is_not_used_while_it_is_off_also_by_an_earlier_plan():
    model = sf.Sequential(ops.Linear(256, 512), ops.SiLU()).bfloat16()
    x = seeded_randn((64, 256), 0, dtype=torch.bfloat16)
    model(x)
    with torch.backends.mkldnn.flags(enabled=False):
        wanted = torch.nn.functional.silu(torch.nn.functional.linear(x, model[0].weight, model[0].bias))
        assert torch.equal(model(x), wanted)
    assert not torch.equal(model(x), wanted)


@pytest.mark.parametrize(("env", "sentence"), [
    (sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=64), "oneDNN runs on the CPU"),
    (sf.Env.of("cpu", dtype=torch.bfloat16, autocast=torch.bfloat16, rows=64), "under autocast"),
    (sf.Env.of("cpu", dtype=torch.bfloat16, rows=1), "too small"),
    (sf.Env.of("cpu", dtype=torch.bfloat16), "too small"),
    (sf.Env.of("cpu", dtype=torch.float32, rows=64), "input, weight and bias must have one dtype"),
], ids=str)  # fmt: skip
def test_onednn_says_where_it_cannot_be_used(env: sf.Env, sentence: str):
    assert any(sentence in refusal for refusal in refusals(ops.Linear(256, 512, dtype=torch.bfloat16), ops.SiLU(), env))


def test_onednn_leaves_the_exact_gelu_to_torch():
    found = refusals(
        ops.Linear(256, 512, dtype=torch.bfloat16), ops.GeLU(), sf.Env.of("cpu", dtype=torch.bfloat16, rows=64)
    )
    assert "the tail of the exact GeLU depends on the rounding of the GEMM" in found


def test_onednn_leaves_float32_to_torch():
    found = refusals(ops.Linear(256, 512), ops.SiLU(), sf.Env.of("cpu", rows=64))
    assert found[0] == "it is for bfloat16: in float32 oneDNN's activations are less accurate"


@pytest.mark.skipif(not SUPPORTED, reason="this CPU has no bfloat16 GEMMs")
def test_relu_is_left_to_torch_because_onednn_swallows_nan():
    x = torch.full((2, 64), float("nan"), dtype=torch.bfloat16)
    weight = torch.ones(64, 64, dtype=torch.bfloat16)
    assert not torch.ops.mkldnn._linear_pointwise(x, weight, None, "relu", [], "").isnan().any()
    kinds = {kind for slot in fusions.LinearBiasActOneDNN.slots for kind in slot.types}
    assert ops.ReLU not in kinds


DTYPES = [torch.float32, torch.bfloat16]
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
    assert check_fusion(fusions.BackwardLinearScale, seeded_randn(shape, 0), *list_, dtypes=DTYPES).cases


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 9), (1, 13)], ids=str)
def test_the_forward_takes_the_place_of_what_it_replaces(shape: tuple[int, ...]):
    x = seeded_randn(shape, 0)
    assert check_fusion(fusions.ForwardLinearScaleAdd, x, *forward(shape[-1]), dtypes=DTYPES).cases


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
        fusions.BackwardLinearAdd, seeded_randn(shape, 0), *forked(shape[-1], 6, bias), dtypes=DTYPES
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

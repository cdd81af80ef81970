"""Linear, Bias and an activation: by ATen in place, and as one oneDNN primitive."""

from typing import Any

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.fusions import linear as linear_module
from seqfuse.testing import assert_bitwise_equal, check_fusion, seeded_randn

SUPPORTED = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
ACTS = (ops.ReLU(), ops.Sigmoid(), ops.Tanh())
ONEDNN_ACTS = (ops.GeLU("tanh"), ops.SiLU(), ops.Sigmoid(), ops.Tanh())


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("act", ACTS, ids=str)
def test_takes_the_place_of_what_it_replaces(act: sf.Pointwise, bias: bool):
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
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
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

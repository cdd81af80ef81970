"""Forward fusions that call their operations but save less, and recompute values bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import LinearBias, RecomputeActivation, RecomputeHeads, RecomputeNorm
from seqfuse.hardware import FLOAT32_SLOWER, RECOMPUTING
from seqfuse.testing import check_fusion, seeded_randn
from tests.selection import in_turn


@pytest.mark.parametrize("norm", [ops.LayerNorm(6), ops.RMSNorm(6), ops.LayerNorm(6, zero_centered=True)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_of_a_norm(norm: nn.Module, bias: bool):
    dtypes = in_turn(bias != isinstance(norm, ops.RMSNorm))
    check_fusion(RecomputeNorm, seeded_randn((2, 5, 6), 0), norm, ops.Linear(6, 7, bias=bias), dtypes=dtypes)


def test_of_a_norm_that_a_residual_begins_behind():
    x, merged = seeded_randn((2, 5, 6), 0), parts(6, 6, 6, 6)
    check_fusion(RecomputeNorm, x, ops.LayerNorm(6), ops.Fork("out"), ops.Linear(6, 7), dtypes=in_turn(0))
    list_ = ops.RMSNorm(6), ops.Fork("residual"), merged, ops.Fork("out"), ops.Attention(2, 2)
    check_fusion(RecomputeHeads, x, *list_, dtypes=[torch.float32])


def test_of_a_norm_that_is_multiplied_and_shifted():
    x, drawn = seeded_randn((2, 5, 6), 0), {"gain": seeded_randn((2, 5, 6), 1), "shift": seeded_randn((2, 5, 6), 2)}
    moved = ops.LayerNorm(6, elementwise_affine=False), ops.Multiply("gain"), ops.Add("shift")
    check_fusion(RecomputeNorm, x, *moved, ops.Linear(6, 7), dtypes=in_turn(1), **drawn)
    scaled = ops.RMSNorm(6), ops.LayerScale(6), ops.Fork("out"), ops.Linear(6, 7)
    check_fusion(RecomputeNorm, x, *scaled, dtypes=in_turn(0))
    check_fusion(RecomputeHeads, x, *moved, parts(6, 6, 6, 6), ops.Attention(2, 2), dtypes=[torch.float32], **drawn)


ACTIVATIONS = [(ops.GeLU(),), (ops.SiLU(), ops.Dropout(0.3)), (ops.SwiGLU(),), (ops.SwiGLU(), ops.Dropout(0.3).eval())]


@pytest.mark.parametrize(("inner", "dtypes"), [*zip(ACTIVATIONS, map(in_turn, range(4)), strict=True)], ids=str)
def test_of_an_activation(inner: tuple[nn.Module, ...], dtypes: Sequence[torch.dtype]):
    width = 4 if isinstance(inner[0], sf.Gated) else 8
    check_fusion(RecomputeActivation, seeded_randn((5, 8), 0), *inner, ops.Linear(width, 7), dtypes=dtypes)


def parts(width: int, *sizes: int, bias: bool = True) -> ops.MergedLinear:
    return ops.MergedLinear.of(*(nn.Linear(width, size, bias) for size in sizes))


@pytest.mark.parametrize("form", ["plain", "qk_norm and rotary"])
def test_of_queries_keys_and_values(form: str):
    heads = [ops.QKNorm(4, 2, 1), ops.RotaryEmbedding(2, 1, style="half")] if form != "plain" else []
    list_ = ops.RMSNorm(6), ops.Linear(6, 16, bias=not heads), *heads, ops.Attention(2, 1, causal=True)
    check_fusion(RecomputeHeads, seeded_randn((2, 5, 6), 0), *list_, dtypes=[torch.float32])


def test_of_queries_keys_and_values_of_several_weights_with_all_inputs_and_outputs():
    turn = ops.RotaryEmbedding(2, 1, style="half", cos="cos", sin="sin")
    heads = ops.QKNorm(4, 2, 1), turn, ops.Fork("out"), ops.Attention(2, 1, mask="mask")
    list_ = ops.RMSNorm(6), parts(6, 8, 4, 4), *heads
    drawn = {name: seeded_randn((5, 4), i) for i, name in enumerate(("cos", "sin"))}
    drawn["mask"] = seeded_randn((5, 5), 2)
    check_fusion(RecomputeHeads, seeded_randn((2, 5, 6), 0), *list_, dtypes=[torch.float32], **drawn)


@pytest.mark.parametrize(
    ("fusion", "list_", "dtypes"),
    [
        (RecomputeNorm, (ops.RMSNorm(6), parts(6, 5, 3)), in_turn(0)),
        (RecomputeActivation, (ops.GeLU(), ops.MergedLinear(6, (5, 1, 3), (True, False, True))), in_turn(1)),
    ],
    ids=["norm", "activation"],
)
def test_before_several_weights(
    fusion: type[sf.FusedOperation], list_: tuple[nn.Module, ...], dtypes: Sequence[torch.dtype]
):
    check_fusion(fusion, seeded_randn((5, 6), 0), *list_, dtypes=dtypes)


@pytest.mark.parametrize("merged", [parts(6, 8, 4, 4), ops.MergedLinear(6, (8, 4, 4))], ids=["apart", "one"])
def test_what_several_weights_made_has_the_same_bits_where_saved_tensors_are_moved(merged: ops.MergedLinear):
    x, found = seeded_randn((2, 6), 0), []
    for memory in ("fast", "lean"):
        list_ = ops.RMSNorm(6), merged, ops.Attention(2, 1)
        model = sf.Sequential(*list_, fusions=RecomputeHeads, memory=memory)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            y = model(x.requires_grad_())
        found.append(torch.autograd.grad(y.sum(), [x, *model.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_bias_behind_several_weights_is_refused():
    list_ = ops.RMSNorm(6), ops.MergedLinear(6, (8, 4, 4)), ops.Bias(16), ops.Attention(2, 1)
    model = sf.Sequential(*list_, fusions=RecomputeHeads, memory="lean")
    (refusal,) = model.plan(seeded_randn((4, 6), 0).requires_grad_()).refused
    assert refusal.reason == "a Bias after a MergedLinear is not part of its GEMM; its parts have their own"


def test_dropped_weights_of_attention_are_dropped_again():
    list_ = ops.LayerNorm(6), ops.Linear(6, 12), ops.Attention(2, 1, dropout=0.4)
    check_fusion(RecomputeHeads, seeded_randn((2, 5, 6), 0), *list_, dtypes=[torch.float32])


class KeepsBoth(sf.Pointwise):
    class Saved(sf.Saved):
        x: torch.Tensor
        y: torch.Tensor

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    def fwd(self, x: torch.Tensor):
        y = torch.tanh(x)
        return y, self.Saved(x=x, y=y)


@pytest.mark.parametrize("act", [ops.ReLU(), KeepsBoth()], ids=["output", "input and output"])
def test_what_keeps_its_output_is_refused(act: nn.Module):
    model = sf.Sequential(act, ops.Linear(8, 8), fusions=RecomputeActivation, memory="lean")
    (refusal,) = model.plan(seeded_randn((4, 8), 0).requires_grad_()).refused
    assert refusal.reason == f"{type(act).__name__} saves its output, which the GEMM after it does too"


@pytest.mark.parametrize(
    ("fusion", "first"), [(RecomputeNorm, ops.LayerNorm(8)), (RecomputeActivation, ops.GeLU())], ids=lambda of: ""
)
def test_a_bias_of_another_dtype_is_refused(fusion: type[sf.FusedOperation], first: nn.Module):
    model = sf.Sequential(first, ops.Linear(8, 8), fusions=fusion, memory="lean")
    model[1].bias = nn.Parameter(model[1].bias.detach().double())
    (refusal,) = model.plan(seeded_randn((4, 8), 0).requires_grad_()).refused
    assert refusal.reason == "weight and bias must have one dtype"


def test_where_nothing_is_saved_it_is_no_candidate():
    model = sf.Sequential(ops.LayerNorm(6), ops.Linear(6, 8), fusions=RecomputeNorm, memory="lean")
    x = seeded_randn((4, 6), 0)
    assert model.plan(x).fused == (1, 0)
    with torch.no_grad():
        plan = model.plan(x)
    assert (plan.fused, plan.refused) == ((0, 0), ())
    model.requires_grad_(False).append(ops.Bias(8))
    assert model.plan(x).refused == ()


def test_what_is_set_or_trained_meanwhile_does_not_change_a_gradient_to_come():
    def grads(meddle: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        list_ = ops.LayerNorm(6), ops.Linear(6, 8), ops.GeLU("tanh"), ops.Linear(8, 6)
        model = sf.Sequential(*list_, fusions=(RecomputeNorm, RecomputeActivation), memory="lean")
        x = seeded_randn((4, 6), 1).requires_grad_()
        assert model.plan(x).fused[0] == 2
        y = model(x)
        if meddle:
            list_[2].approximate, list_[0].eps = "none", 0.5
            for module in (list_[0], list_[1]):
                module.weight = nn.Parameter(torch.zeros_like(module.weight))
        y.sum().backward()
        return [x.grad, *(p.grad for p in list_[3].parameters())]

    assert all(torch.equal(a, b) for a, b in zip(grads(False), grads(True), strict=True))


def test_a_parameter_that_was_changed_in_place_is_an_error():
    model = sf.Sequential(ops.LayerNorm(6), ops.Linear(6, 8), fusions=RecomputeNorm, memory="lean")
    y = model(seeded_randn((4, 6), 1).requires_grad_())
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


HEADS = ops.QKNorm(4, 2, 1), ops.RotaryEmbedding(2, 1, style="half"), ops.Attention(2, 1)


@pytest.mark.parametrize(
    "inner",
    [
        (ops.Linear(6, 8), ops.GeLU()), (parts(6, 5, 3), ops.GeLU()), (ops.MergedLinear(6, (5, 3)), ops.GeLU()),
        (ops.Linear(6, 16), *HEADS), (parts(6, 8, 4, 4), *HEADS),
    ],
    ids=["", "2", "1", "heads", "heads of 2"],
)  # fmt: skip
def test_autocast_is_that_of_the_forward(inner: tuple[nn.Module, ...]):
    list_ = ops.LayerNorm(6), *inner, ops.Linear(8, 6)
    rules = RecomputeNorm, RecomputeActivation, RecomputeHeads, LinearBias
    model = sf.Sequential(*list_, fusions=rules)
    found = []
    for memory in ("fast", "lean"):
        model.memory = memory
        x = seeded_randn((4, 6), 1).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x)
        y.float().sum().backward()
        found.append([x.grad, *[p.grad.clone() for p in model.parameters()]])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_two_records_hold_is_made_twice_and_costs_twice():
    inside = {"norm": ops.RMSNorm(8), "linear": ops.Linear(8, 16, bias=False), "attention": ops.Attention(2, 1)}
    fusion = RecomputeHeads(
        **inside, bias=None, qk_norm=None, rotary=ops.RotaryEmbedding(2, 1, style="half"), fork=None
    )
    norm, linear, rotary, _ = fusion.operations()
    for device, beside in (("cpu", RECOMPUTING), ("cuda:sm_90", 0)):
        env = sf.Env.of(device, rows=64)
        kernels = [operation.traffic(env, False).launches for operation in (norm, norm, linear, rotary)]
        assert fusion.saves(env).launches == -sum(kernels) - beside * len(kernels)


def test_a_gemm_in_float32_is_slower_on_a_gpu_only():
    linear = ops.Linear(64, 64)
    flops = {
        (device, dtype): linear.traffic(sf.Env.of(device, dtype=dtype, rows=64), False).flops
        for device in ("cpu", "cuda:sm_90")
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert flops["cpu", torch.float32] == flops["cpu", torch.bfloat16] == 2 * 64**3
    assert flops["cuda:sm_90", torch.float32] == FLOAT32_SLOWER * flops["cuda:sm_90", torch.bfloat16]

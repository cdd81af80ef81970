"""`LinearBiasPointwise`: torch's GEMM with the bias in it, and the activation behind it by one kernel."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import LinearBias, LinearBiasPointwise
from seqfuse.testing import check_fusion, seeded_randn


@pytest.mark.parametrize("act", [ops.GeLU(), ops.Tanh()], ids=["reads its input", "reads its output"])
def test_agrees_in_every_combination(act: sf.Pointwise, device: torch.device):
    list_ = [operation.to(device) for operation in (ops.Linear(6, 9, bias=False), ops.Bias(9), act)]
    check_fusion(LinearBiasPointwise, seeded_randn((2, 5, 6), 0).to(device), *list_)


def test_is_one_step_of_as_many_kernels_as_the_two_that_it_replaces():
    model = sf.Sequential(ops.Linear(64, 256), ops.GeLU(), fusions=(LinearBias, LinearBiasPointwise)).bfloat16()
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    assert [step.name for step in model.plan(env=there).forward] == ["LinearBiasPointwise"]


def test_applies_under_autocast_and_not_to_a_weight_of_another_dtype():
    model = sf.Sequential(ops.Linear(64, 256), ops.GeLU(), fusions=LinearBiasPointwise)
    assert model.plan(env=sf.Env.of("cuda:sm_90", autocast=torch.bfloat16)).count("LinearBiasPointwise") == 1
    assert model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)).count("LinearBiasPointwise") == 0


@pytest.mark.parametrize("other", ["weight", "bias"])
def test_does_not_apply_where_a_parameter_has_another_dtype(other: str):
    parts = ops.Linear(64, 256, bias=False), ops.Bias(256)
    model = sf.Sequential(*parts, ops.GeLU(), fusions=LinearBiasPointwise).bfloat16()
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)
    assert model.plan(env=there).count("LinearBiasPointwise") == 1
    parts[other == "bias"].float()
    assert model.plan(env=there).count("LinearBiasPointwise") == 0


class Steep(sf.Pointwise):
    """y = slope x, with a slope that is a buffer."""

    @triton.jit
    def value(x, P: tl.constexpr):
        return P[0] * x

    @triton.jit
    def derivative(x, P: tl.constexpr):
        return x * 0.0 + P[0]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slope", torch.tensor(2.0))

    @property
    def P(self) -> tuple[float, ...]:
        return (float(self.slope),)

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return self.slope * x


def test_what_is_kept_of_a_call_follows_the_configuration(device: torch.device):
    linear, bias, act = (operation.to(device) for operation in (ops.Linear(6, 8, bias=False), ops.Bias(8), ops.GeLU()))
    fusion, x = LinearBiasPointwise(linear=linear, bias=bias, act=act), seeded_randn((5, 6), 0).to(device)
    with torch.no_grad():
        for approximate in ("none", "tanh", "none"):
            act.approximate = approximate
            z = linear.fwd(x)[0] + bias.bias
            expected = torch.nn.functional.gelu(z, approximate=approximate)
            torch.testing.assert_close(fusion.fwd(x)[0], expected, atol=2e-6, rtol=1e-6)
        steep = Steep().to(device)
        fusion = LinearBiasPointwise(linear=linear, bias=bias, act=steep)
        for slope in (2.0, 3.0):
            steep.slope.fill_(slope)
            torch.testing.assert_close(fusion.fwd(x)[0], slope * (linear.fwd(x)[0] + bias.bias))

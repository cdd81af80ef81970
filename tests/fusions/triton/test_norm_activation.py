"""A norm and an activation, in one pass each way."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import NormActivation, NormActivationJoint
from seqfuse.testing import assert_bitwise_equal, check_fusion, seeded_randn
from seqfuse.testing.cases import Bench
from seqfuse.testing.tensors import redrawn
from tests.judging import judge_together

BOTH = pytest.mark.parametrize("fusion", [NormActivation, NormActivationJoint], ids=lambda fusion: fusion.__name__)


def norms(kind: str, width: int) -> sf.UnfusedOperation:
    return {
        "layernorm": lambda: ops.LayerNorm(width),
        "no_bias": lambda: ops.LayerNorm(width, bias=False, zero_centered=True),
        "no_weight": lambda: ops.LayerNorm(width, elementwise_affine=False),
        "rmsnorm": lambda: ops.RMSNorm(width, eps=1e-5, zero_centered=True),
    }[kind]()


@BOTH
@pytest.mark.parametrize(
    ("act", "dtype"),
    [(ops.GeLU(), torch.float32), (ops.Sigmoid(), torch.bfloat16)],
    ids=["keeps its input", "keeps its output"],
)
def test_takes_the_place_of_what_it_replaces(
    fusion: type[sf.FusedOperation], act: sf.Pointwise, dtype: torch.dtype, device: torch.device
):
    x = seeded_randn((5, 8), 0).to(device)
    check_fusion(fusion, x, norms("layernorm", 8).to(device), act, dtypes=[dtype])


@BOTH
@pytest.mark.parametrize("kind", ["no_bias", "no_weight", "rmsnorm"])
def test_takes_every_form_of_norm(fusion: type[sf.FusedOperation], kind: str, device: torch.device):
    x = seeded_randn((2, 3, 8), 0).to(device)
    dtypes = [torch.float16 if kind == "rmsnorm" else torch.float32]
    check_fusion(fusion, x, norms(kind, 8).to(device), ops.SiLU(), dtypes=dtypes)


@pytest.mark.parametrize(
    ("kind", "acts", "dtype"),
    [
        ("layernorm", (ops.GeLU(), ops.Scale(-0.5), ops.Tanh()), torch.float32),
        ("rmsnorm", (ops.Scale(2.0), ops.ReLU(), ops.SquaredReLU(), ops.Sigmoid()), torch.float32),
        ("no_bias", (ops.Scale(0.5),), torch.float32),
        ("layernorm", (ops.SiLU(), ops.Sigmoid()), torch.bfloat16),
    ],
    ids=["chain", "more", "a factor", "bfloat16"],
)
def test_takes_several_activations_and_factors(
    kind: str, acts: tuple[sf.UnfusedOperation, ...], dtype: torch.dtype, device: torch.device
):
    x = seeded_randn((5, 8), 0).to(device)
    check_fusion(NormActivationJoint, x, norms(kind, 8).to(device), *acts, dtypes=[dtype])


def test_of_nine_operations_x_alone_is_kept(device: torch.device):
    acts = [ops.SiLU(), ops.Scale(2.0), ops.Tanh(), ops.GeLU(), ops.Scale(0.5), ops.ReLU(), ops.Sigmoid(), ops.SiLU()]
    model = sf.Sequential(ops.LayerNorm(8, bias=False), *acts, fusions=NormActivationJoint).to(device)
    x = seeded_randn((5, 8), 0).to(device).requires_grad_()
    assert len(model.plan(x).forward) == 1
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = model(x)
    assert sorted(t.numel() for t in kept) == [5, 5, 8, 40]  # the statistics, the weight and x
    model[2].factor, model[5].factor = 5.0, 7.0
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    model[2].factor, model[5].factor = 2.0, 0.5
    with sf.fusing(False):
        torch.testing.assert_close(dx, torch.autograd.grad(model(x), x, torch.ones_like(y))[0])


@pytest.mark.parametrize("act", [ops.ReLU, ops.QuickGeLU], ids=lambda act: act.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_trains_a_list_to_the_same_gradients(act: type[sf.Pointwise], dtype: torch.dtype, device: torch.device):
    fusions = (NormActivation, NormActivationJoint)
    model = sf.Sequential(ops.Linear(6, 8), ops.LayerNorm(8), act(), ops.Linear(8, 6), fusions=fusions)
    x, dy = (seeded_randn((20, 6), i, dtype=dtype).to(device) for i in range(2))
    model = model.to(device, dtype)

    def run(
        model: sf.Sequential, only: tuple[type[sf.FusedOperation], ...], dtype: torch.dtype, seed: int
    ) -> list[Tensor]:
        leaf = redrawn(x, seed).to(dtype, copy=True).requires_grad_()
        with sf.fusing(only=only):
            plan, y = model.plan(leaf), model(leaf)
        worth = NormActivationJoint in only or act is ops.ReLU
        assert not only or bool(plan.count(only[0].__name__)) == worth
        return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], dy.to(dtype))]

    wide = copy.deepcopy(model).double()
    others = functools.cache(lambda seed: (run(model, (), dtype, seed), run(wide, (), torch.float64, seed)))
    for fusion in fusions:
        judge_together(lambda seed, fusion=fusion: (run(model, (fusion,), dtype, seed), *others(seed)), 0)


ABOUT_ONE = [
    ops.LayerNorm(8, zero_centered=True),
    ops.LayerNorm(8, bias=False, zero_centered=True),
    ops.RMSNorm(8, zero_centered=True),
]


@pytest.mark.parametrize("norm", ABOUT_ONE, ids=str)
def test_what_is_saved_for_a_backward_of_others_has_the_gain_about_one(norm: Any, device: torch.device):
    norm = copy.deepcopy(norm).to(device)
    for i, p in enumerate(norm.parameters()):
        p.data = seeded_randn(tuple(p.shape), i + 1).to(device)
    x, act = seeded_randn((5, 8), 0).to(device).requires_grad_(), ops.SiLU()
    parameters = [*norm.parameters()]
    dy = seeded_randn((5, 8), 9).to(device)
    expected = torch.autograd.grad(act.reference(norm.reference(x)), [x, *parameters], dy)
    y = Bench(sf.Sequential(norm, act, fusions=()), (NormActivation,))(x)
    torch.testing.assert_close(torch.autograd.grad(y, [x, *parameters], dy), expected)
    with torch.no_grad():
        joint = NormActivationJoint(norm=norm, acts=(act,))
        _, saved = joint.fwd(x.detach())
        torch.testing.assert_close(joint.unfused(saved)["acts"][0].x, norm.reference(x))


def test_training_takes_the_joint_form_and_inference_either(device: torch.device):
    model = sf.Sequential(ops.LayerNorm(8), ops.GeLU(), fusions=(NormActivation, NormActivationJoint)).to(device)
    x = seeded_randn((5, 8), 0).to(device)
    assert model.plan(x).count("NormActivationJoint")
    with torch.no_grad():
        assert model.plan(x).count("NormActivation") == 1


def test_a_variance_that_overflows_gives_zeros(device: torch.device):
    x = 1e30 * seeded_randn((5, 9), 0).to(device)
    model = sf.Sequential(ops.LayerNorm(9), ops.ReLU(), fusions=(NormActivation,)).to(device)
    with torch.no_grad():
        y = model(x)
        with sf.fusing(False):
            assert_bitwise_equal(y, model(x))


@BOTH
def test_an_activation_without_device_functions_is_refused(fusion: type[sf.FusedOperation], device: torch.device):
    class Cube(sf.Pointwise):
        def reference(self, x: Tensor) -> Tensor:
            return x**3

    model = sf.Sequential(ops.LayerNorm(8), Cube(), fusions=(fusion,)).to(device)
    (refusal,) = model.plan(seeded_randn((5, 8), 0).to(device)).refused
    assert refusal.reason == "Cube has no device functions"


@BOTH
def test_an_activation_with_a_parameter_is_refused(fusion: type[sf.FusedOperation], device: torch.device):
    class Sloped(sf.Pointwise):
        """Its device function knows nothing of the slope."""

        value, derivative = ops.SiLU().value, ops.SiLU().derivative

        def __init__(self) -> None:
            super().__init__()
            self.slope = torch.nn.Parameter(torch.tensor(2.0))

        def reference(self, x: Tensor) -> Tensor:
            return self.slope * torch.nn.functional.silu(x)

        def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor | None, sf.Grads]:
            raise NotImplementedError

    model = sf.Sequential(ops.LayerNorm(8), Sloped(), fusions=(fusion,)).to(device)
    (refusal,) = model.plan(seeded_randn((5, 8), 0).to(device)).refused
    assert refusal.reason == "Sloped has parameters, which device functions do not see"


@BOTH
@pytest.mark.parametrize(
    ("norm", "dtype", "reason"),
    [
        (ops.LayerNorm((2, 4)), torch.float32, "one dimension"),
        (ops.LayerNorm(8), torch.float64, "float32, float16 and bfloat16"),
        (ops.RMSNorm(70000, elementwise_affine=False), torch.float32, "columns, not 70,000"),
    ],
    ids=["two dimensions", "float64", "wide"],
)
def test_what_the_kernels_do_not_take_is_refused(
    fusion: type[sf.FusedOperation], norm: sf.UnfusedOperation, dtype: torch.dtype, reason: str
):
    model = sf.Sequential(norm, ops.ReLU(), fusions=(fusion,))
    (refusal,) = model.plan(env=sf.Env.of("cuda:sm_90", dtype=dtype)).refused
    assert reason in refusal.reason

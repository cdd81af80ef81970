"""Bias, an activation or a gated unit, and Linear: both passes, with fewer saved tensors."""

from __future__ import annotations

import pytest
import torch

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.fusions import ActivationLinearJoint
from seqfuse.testing import seeded_randn


def bias(width: int, device: torch.device) -> ops.Bias:
    made = ops.Bias(width)
    torch.nn.init.normal_(made.bias)
    return made.to(device)


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
def test_that_saves_less_takes_a_residual_of_another_dtype(dtypes: tuple[torch.dtype, ...], device: torch.device):
    list_ = [ops.SiLU(), ops.Linear(6, 9), ops.Add("other")]
    model = sf.Sequential(*list_, fusions=ActivationLinearJoint, memory="lean").to(device, dtypes[0])
    shapes = zip(((5, 6), (5, 9)), dtypes, strict=True)
    x, other = (seeded_randn(shape, 0, dtype=t).to(device).requires_grad_() for shape, t in shapes)
    assert model.plan(x, other=other).count("ActivationLinearJoint") == 1
    found: list[tuple[torch.Tensor, ...]] = []
    for fused in (True, False):
        with sf.fusing(fused, on_error="raise"):
            y = model(x, other=other)
            found.append((y, *torch.autograd.grad(y, [x, other, *model.parameters()], seeded_randn((5, 9), 1).to(y))))
    assert [t.dtype for t in found[0]] == [t.dtype for t in found[1]]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_that_saves_less_computes_only_needed_gradients(device: torch.device):
    list_ = [bias(6, device), ops.SiLU(), ops.Linear(6, 9).to(device)]
    model = sf.Sequential(*list_, fusions=ActivationLinearJoint, memory="lean")
    x = seeded_randn((5, 6), 0).to(device)
    operation = model.plan(x.clone().requires_grad_()).backward[0].operation
    assert isinstance(operation, ActivationLinearJoint)
    dy, saved = (
        seeded_randn((5, 9), 1).to(device),
        ActivationLinearJoint.Saved(x=x, bias=model[0].bias, weight=model[2].weight),
    )
    every = "x", "bias.bias", "linear.weight", "out_bias.bias"
    _, whole = operation.bwd(dy, saved, needs=frozenset(every), main_grads={})
    for needs in ({"x"}, {"bias.bias"}, {"linear.weight"}, {"out_bias.bias"}, {"x", "linear.weight"}):
        dx, grads = operation.bwd(dy, saved, needs=frozenset(needs), main_grads={})
        assert {name for name, g in {"x": dx, **grads}.items() if g is not None} == needs
        for name in needs - {"x"}:
            torch.testing.assert_close(grads[name], whole[name])


@pytest.mark.parametrize("gated", [False, True], ids=["GeLU", "SwiGLU"])
def test_a_block_saves_half_of_what_it_saves_otherwise(gated: bool, device: torch.device):
    inner = ops.Linear(32, 256 if gated else 128), ops.SwiGLU() if gated else ops.GeLU("tanh"), ops.Linear(128, 32)
    rules = (*fusions.triton, *fusions.aten)
    model = sf.Sequential(ops.Residual(ops.LayerNorm(32), *inner), fusions=rules).to(device, torch.bfloat16)
    lean = sf.Sequential(*model, fusions=(ActivationLinearJoint, fusions.RecomputeNorm, *rules), memory="lean")
    x = seeded_randn((64, 32), 0, dtype=torch.bfloat16).to(device).requires_grad_()
    plan = lean.plan(x)
    assert plan.count("ActivationLinearJoint") == 1, plan
    saved = {name: one.plan(x).memory.saved for name, one in (("fast", model), ("lean", lean))}
    # x and z, of x, the norm's output, z and h.
    assert saved["lean"] / saved["fast"] == pytest.approx(9 / 14 if gated else 5 / 10, abs=0.02)


def test_that_saves_less_is_refused_where_nothing_would_be_saved():
    def reasons(act: sf.UnfusedOperation, grad: bool = True) -> list[str]:
        fusion = ActivationLinearJoint(bias=None, act=act, linear=ops.Linear(4, 4), out_bias=None, add=None)
        return [why for holds, why in fusion.requires(sf.Env(kernels="triton", grad=grad)) if not holds]

    assert reasons(ops.Tanh()) == ["Tanh saves its output, which the GEMM after it does too"]
    assert reasons(ops.SiLU(), grad=False) == ["where nothing needs a gradient nothing is saved"]
    assert reasons(ops.SiLU()) == []

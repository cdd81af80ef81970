"""The backward of a block's end: activation, Linear, Bias, Dropout and Add in one step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.fusions import BlockEndBackward, LinearBiasDropoutAdd, gemm
from seqfuse.fusions.chain import branch_bwd
from seqfuse.testing import check_fusion, seeded_randn
from seqfuse.testing.tensors import redrawn
from tests.fusions.triton.fourways import four_ways
from tests.judging import judge_together


def bias(width: int, device: torch.device) -> ops.Bias:
    made = ops.Bias(width)
    torch.nn.init.normal_(made.bias)
    return made.to(device)


def test_takes_the_place_of_what_it_replaces(device: torch.device):
    list_ = (bias(6, device), ops.SiLU(), ops.Linear(6, 9).to(device), ops.Dropout(0.3), ops.Add("other"))
    check_fusion(BlockEndBackward, seeded_randn((5, 6), 0).to(device), *list_, dtypes=[torch.float32])


@pytest.mark.parametrize(
    ("act", "between", "out_bias", "after"),
    [
        (ops.ReLU(), (), True, ()),
        (ops.SwiGLU(), (ops.Dropout(0.2),), False, ()),
        (ops.SwiGLU(), (), True, (ops.Dropout(0.4, "downscale_in_infer"),)),
        (ops.Tanh(), (ops.Dropout(1.0),), False, (ops.Dropout(0.4),)),
    ],
    ids=["no dropout", "dropout inside", "gated", "both dropouts"],
)
def test_in_its_other_forms(
    act: sf.UnfusedOperation,
    between: tuple[ops.Dropout, ...],
    out_bias: bool,
    after: tuple[ops.Dropout, ...],
    device: torch.device,
):
    width = 4 if isinstance(act, sf.Gated) else 8
    list_ = (act, *between, ops.Linear(width, 5, bias=out_bias).to(device), *after, ops.Add("other"))
    check_fusion(BlockEndBackward, seeded_randn((2, 3, 8), 0).to(device), *list_, dtypes=[torch.bfloat16])


@pytest.mark.parametrize("p", [0.0, 0.4], ids=["nothing dropped", "dropout"])
def test_the_last_bias_takes_no_pass_of_its_own(p: float, device: torch.device, monkeypatch: pytest.MonkeyPatch):
    inner = (ops.Linear(8, 12), ops.SiLU(), ops.Linear(12, 8), ops.Dropout(p))
    model = sf.Sequential(ops.Residual(*inner), fusions=BlockEndBackward).to(device)
    x = seeded_randn((5, 8), 0).to(device).requires_grad_()
    assert model.plan(x).count("BlockEndBackward") == 1
    y = model(x)
    alone: list[object] = []
    asked = branch_bwd
    monkeypatch.setattr(gemm, "branch_bwd", lambda *given: alone.append(given[-1]) or asked(*given))
    y.backward(seeded_randn((5, 8), 1).to(device))
    assert alone == [p > 0]  # where something is dropped that pass is there, and makes the sum as well
    assert model[0][2].bias.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_meets_the_fused_forward_in_the_records(dtype: torch.dtype, device: torch.device):
    fusions = (LinearBiasDropoutAdd, BlockEndBackward)
    inner = (ops.Linear(12, 36), ops.GeLU("tanh"), ops.Dropout(0.1), ops.Linear(36, 12), ops.Dropout(0.4))
    model = sf.Sequential(ops.Residual(*inner), ops.Tanh(), fusions=fusions).to(device, dtype)
    four_ways(model, seeded_randn((19, 12), 0, dtype=dtype).to(device), *fusions)


def test_of_a_float32_residual(device: torch.device):
    list_ = [ops.Linear(6, 5), ops.SiLU(), ops.Linear(5, 6), ops.Add("other")]
    x, other = seeded_randn((9, 6), 0, dtype=torch.bfloat16).to(device), seeded_randn((9, 6), 1).to(device)
    model = sf.Sequential(*list_, fusions=BlockEndBackward).to(device, torch.bfloat16)

    def run(model: sf.Sequential, only: tuple[type[sf.FusedOperation], ...], seed: int) -> list[torch.Tensor]:
        leaf = redrawn(x, seed).to(model[0].weight.dtype, copy=True).requires_grad_()
        with sf.fusing(only=only, on_error="raise"):
            assert model.plan(leaf, other=other).count("BlockEndBackward") == len(only)
            y = model(leaf, other=other.to(torch.float64) if leaf.dtype is torch.float64 else other)
        return list(torch.autograd.grad(y, [leaf, *model.parameters()], seeded_randn((9, 6), 2).to(y)))

    exact = copy.deepcopy(model).double()
    judge_together(lambda seed: (run(model, (BlockEndBackward,), seed), run(model, (), seed), run(exact, (), seed)), 0)


def test_only_wanted_gradients_are_made(device: torch.device):
    operations = (bias(6, device), ops.SiLU(), ops.Linear(6, 9, bias=False).to(device), bias(9, device))
    fusion = BlockEndBackward(
        bias=operations[0], act=operations[1], act_dropout=None, linear=operations[2], out_bias=operations[3],
        dropout=None, add=ops.Add("other"),
    )  # fmt: skip
    x, dy = seeded_randn((5, 6), 0).to(device), seeded_randn((5, 9), 1).to(device)
    records = {
        "act": ops.SiLU.Saved(x=x),
        "act_dropout": None,
        "linear": ops.Linear.Saved(x=x, weight=operations[2].weight),
        "dropout": None,
    }
    for needs in ({"x"}, {"bias.bias"}, {"linear.weight"}, {"out_bias.bias"}, {"add.other"}, {"x", "out_bias.bias"}):
        dx, grads = fusion.bwd(dy, **records, needs=frozenset(needs), main_grads={})
        assert {name for name, g in {"x": dx, **grads}.items() if g is not None} == needs


MUTANTS = {
    "no mask after the product": ("self.out_bias, self.dropout, dropout, branch", "self.out_bias, None, None, branch"),
    "no mask before the product": ("act, self.act_dropout, act_dropout, needs", "act, None, None, needs"),
    "dropout in the residual's gradient": ('"add.other": dy if', '"add.other": d if'),
}


def test_the_sum_of_another_tensor_is_found(
    device: torch.device, mutant: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
):
    changed = mutant(gemm, 'grads["out_bias.bias"] = made.dy_sum', 'grads["out_bias.bias"] = -made.dy_sum')
    monkeypatch.setattr(gemm, "unit_bwd", changed.unit_bwd)
    list_ = (ops.Tanh(), ops.Linear(6, 9).to(device), ops.Add("other"))
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(BlockEndBackward, seeded_randn((5, 6), 0).to(device), *list_, dtypes=[torch.float32])


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_fusion_is_found(name: str, device: torch.device, mutant: Callable[..., ModuleType]):
    changed = mutant(gemm, *MUTANTS[name])
    list_ = (ops.Tanh(), ops.Dropout(0.3), ops.Linear(6, 9).to(device), ops.Dropout(0.4), ops.Add("other"))
    with pytest.raises((AssertionError, sf.PluginError)):
        check_fusion(changed.BlockEndBackward, seeded_randn((5, 6), 0).to(device), *list_, dtypes=[torch.float32])

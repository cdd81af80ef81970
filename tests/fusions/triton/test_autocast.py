"""Layers under autocast: the kernels take part, dtypes are torch's, errors those of the operations."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import seqfuse as sf
from seqfuse import nn as layers
from seqfuse import ops
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from seqfuse.testing.tensors import redrawn
from tests.judging import judge_together

HALVES = pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


def gpt(width: int = 16, **around: Any) -> sf.Sequential:
    return layers.TransformerLayer(width, 2, causal=True, **around)


def llama(width: int = 16, **around: Any) -> sf.Sequential:
    norm = functools.partial(ops.RMSNorm, eps=1e-5)
    rotary = functools.partial(ops.RotaryEmbedding, style="half")
    shape: dict[str, Any] = {"hidden_dim": 11 * width // 4, "activation": ops.SwiGLU, "norm": norm, "bias": False}
    return layers.TransformerLayer(width, 2, 1, causal=True, rotary=rotary, **shape, **around)


MODELS = pytest.mark.parametrize(
    "make", [gpt, functools.partial(gpt, dropout=0.25), llama], ids=["gpt", "dropout", "llama"]
)


def passes(model: sf.Sequential, x: Tensor, half: torch.dtype | None, enabled: bool) -> dict[str, Tensor]:
    """Output and every gradient, with the plans of the default fusions or without any."""
    torch.manual_seed(3)
    leaf = x.clone().requires_grad_()
    with sf.fusing(enabled, on_error="raise"), torch.autocast(x.device.type, half, half is not None):
        y = model(leaf)
    dy = seeded_randn(tuple(y.shape), 1).to(x.device)
    wanted = {"x": leaf, **dict(model.named_parameters())}
    grads = torch.autograd.grad(y, list(wanted.values()), dy.to(y.dtype))
    return {"y": y.detach(), **{f"d {name}": g for name, g in zip(wanted, grads, strict=True)}}


def judge_passes(model: Any, exact: Any, x: Tensor, half: torch.dtype) -> None:
    """Fused and not fused, under autocast, against float64."""

    def measure(seed: int) -> tuple[dict[str, Tensor], ...]:
        drawn = redrawn(x, seed)
        runs = [passes(model, drawn, half, enabled) for enabled in (True, False)]
        assert {t.dtype for run in runs for t in run.values()} == {torch.float32}
        return (*runs, passes(exact, drawn.double(), None, False))

    judge_together(measure, 0)


@HALVES
@MODELS
def test_a_layer_gives_what_its_operations_give(make: Any, half: torch.dtype, device: torch.device):
    model, x = make().to(device), seeded_randn((2, 5, 16), 0).to(device)
    exact = copy.deepcopy(model).double()
    with torch.autocast(device.type, half):
        plan = model.plan(x.requires_grad_())
    assert sum(bool(step.fused and step.operation.kernels) for step in plan.forward) >= 2
    assert sum(bool(step.fused and step.operation.kernels) for step in plan.backward) >= 3
    judge_passes(model, exact, x, half)


@pytest.mark.parametrize("make", [gpt, llama])
def test_a_layer_that_saves_little_gives_what_its_operations_give(make: Any, device: torch.device):
    model, x = make().to(device), seeded_randn((2, 5, 16), 0).to(device)
    exact = copy.deepcopy(model).double()
    model.memory = "lean"
    with torch.autocast(device.type, torch.bfloat16):
        plan = model.plan(x.requires_grad_())
    assert sum(step.joint for step in plan.forward) == 1
    judge_passes(model, exact, x, torch.bfloat16)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_gives_the_same_gradients(reentrant: bool, device: torch.device):
    model, x = gpt(dropout=0.25).to(device), seeded_randn((2, 5, 16), 0).to(device)
    found: list[list[Tensor]] = []
    for saving in (False, True):
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()
        with torch.autocast(device.type, torch.bfloat16), sf.fusing(on_error="raise"):
            y: Any = checkpoint(model, leaf, use_reentrant=reentrant) if saving else model(leaf)
        model.zero_grad(set_to_none=True)
        y.square().sum().backward()
        found.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    assert_bitwise_equal(*found)


def test_a_region_without_autocast_inside_one_and_calls_after_the_first(device: torch.device):
    model, x = llama().to(device), seeded_randn((2, 5, 16), 0).to(device)
    half = torch.bfloat16
    off, on = passes(model, x, None, True), passes(model, x, half, True)
    for _ in range(2):  # interpreted at first, then generated code
        with torch.autocast(device.type, half):
            assert_bitwise_equal(passes(model, x, None, True), off)
        assert_bitwise_equal(passes(model, x, half, True), on)
    assert not torch.equal(on["y"], off["y"])

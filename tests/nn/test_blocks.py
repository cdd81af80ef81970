"""Blocks of attention and feed-forward in every arrangement, against their math in torch functions."""

from __future__ import annotations

import copy
import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.nn import FeedForward, MultiHeadAttention, TransformerLayer
from seqfuse.testing import assert_bitwise_equal, seeded_randn
from seqfuse.testing.judge import judge

WIDTH, HIDDEN, HEADS = 12, 20, 3
Parameters = dict[str, Tensor]


def gated(act: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: act(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


ACTIVATIONS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "GeLU": (ops.GeLU, F.gelu),
    "tanh GeLU": (functools.partial(ops.GeLU, "tanh"), functools.partial(F.gelu, approximate="tanh")),
    "ReLU": (ops.ReLU, F.relu),
    "SiLU": (ops.SiLU, F.silu),
    "QuickGeLU": (ops.QuickGeLU, lambda x: x * (1.702 * x).sigmoid()),
    "SquaredReLU": (ops.SquaredReLU, lambda x: x.relu().square()),
    "Sigmoid": (ops.Sigmoid, torch.sigmoid),
    "Tanh": (ops.Tanh, torch.tanh),
    "SwiGLU": (ops.SwiGLU, gated(F.silu)),
    "GEGLU": (ops.GEGLU, gated(F.gelu)),
    "ReGLU": (ops.ReGLU, gated(F.relu)),
    "GLU": (ops.GLU, gated(torch.sigmoid)),
}
NORMS: dict[str, tuple[Any, Callable[..., Tensor]]] = {
    "LayerNorm": (ops.LayerNorm, lambda x, p: F.layer_norm(x, (WIDTH,), p["weight"], p["bias"])),
    "RMSNorm": (functools.partial(ops.RMSNorm, eps=1e-6), lambda x, p: F.rms_norm(x, (WIDTH,), p["weight"], 1e-6)),
}
each_arrangement = pytest.mark.parametrize(
    ("pre", "residual"), [(a, b) for a in (True, False) for b in (True, False)],
    ids=lambda flag: str(flag),
)  # fmt: skip


def under(parameters: Parameters, prefix: str) -> Parameters:
    return {name.removeprefix(prefix): p for name, p in parameters.items() if name.startswith(prefix)}


def assembled(mixer: nn.Module, norm: Any, *, pre: bool, residual: bool) -> sf.Sequential:
    inside = OrderedDict[str, nn.Module](norm=norm(WIDTH)) if pre else OrderedDict[str, nn.Module]()
    inside["mixer"] = mixer
    block = ops.Residual(inside) if residual else sf.Sequential(inside)
    model = sf.Sequential(OrderedDict(block=block) if pre else OrderedDict(block=block, norm=norm(WIDTH)))
    for i, p in enumerate(model.parameters()):
        p.data = 0.5 * seeded_randn(tuple(p.shape), 30 + i)
    return model


def plainly(mix: Any, norm: Any, p: Parameters, x: Tensor, *, pre: bool, residual: bool) -> Tensor:
    y = mix(norm(x, under(p, "block.norm.")) if pre else x, under(p, "block.mixer."))
    y = x + y if residual else y
    return y if pre else norm(y, under(p, "norm."))


def agree(model: sf.Sequential, plain: Callable[[Parameters, Tensor], Tensor]) -> None:
    """Fused and unfused within tolerance, and both against the math: y, and the gradients of x and of each
    parameter."""
    wide = copy.deepcopy(model).double()

    def results(owner: nn.Module, call: Callable[[Tensor], Tensor], seed: int, dtype: torch.dtype) -> Parameters:
        x = seeded_randn((2, 17, WIDTH), seed).to(dtype).requires_grad_()
        y = call(x)
        named = {"x": x, **dict(owner.named_parameters())}
        grads = torch.autograd.grad(y, list(named.values()), seeded_randn(tuple(y.shape), seed + 1).to(dtype))
        return {"y": y.detach(), **dict(zip(named, grads, strict=True))}

    def measure(seed: int) -> tuple[Parameters, Parameters, Parameters]:
        fused = results(model, model, seed, torch.float32)
        with sf.fusing(False):
            unfused = results(model, model, seed, torch.float32)
        return fused, unfused, results(wide, lambda x: plain(dict(wide.named_parameters()), x), seed, torch.float64)

    judge(measure, 1)
    exact = measure(1)[2]
    for found in (results(wide, wide, 1, torch.float64), results(wide, sf.fusing(False)(wide), 1, torch.float64)):
        torch.testing.assert_close(found, exact, atol=1e-10, rtol=1e-10)


def attend(x: Tensor, p: Parameters) -> Tensor:
    qkv = F.linear(x, p["qkv.weight"], p.get("qkv.bias"))
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(-3, -2) for t in qkv.chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2)
    return F.linear(y, p["out.weight"], p.get("out.bias"))


@each_arrangement
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_block_of_attention_is_its_math(norm: str, bias: bool, pre: bool, residual: bool):
    made, math = NORMS[norm]
    model = assembled(MultiHeadAttention(WIDTH, HEADS, bias=bias, causal=True), made, pre=pre, residual=residual)
    agree(model, lambda p, x: plainly(attend, math, p, x, pre=pre, residual=residual))


@pytest.mark.parametrize(
    ("activation", "pre", "residual"),
    [
        pytest.param(act, pre, residual, marks=[pytest.mark.full] * ((i + pre + residual) % 2))
        for i, act in enumerate(ACTIVATIONS)
        for pre, residual in itertools.product((True, False), repeat=2)
    ],
)
def test_a_feed_forward_block_is_its_math(activation: str, pre: bool, residual: bool):
    act, value = ACTIVATIONS[activation]
    norm, math = NORMS["LayerNorm" if pre else "RMSNorm"]

    def mix(x: Tensor, p: Parameters) -> Tensor:
        return F.linear(value(F.linear(x, p["up.weight"], p.get("up.bias"))), p["down.weight"], p.get("down.bias"))

    model = assembled(FeedForward(WIDTH, HIDDEN, act, bias=residual), norm, pre=pre, residual=residual)
    agree(model, lambda p, x: plainly(mix, math, p, x, pre=pre, residual=residual))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("norm", NORMS)
def test_each_parameter_there_is_gets_a_gradient_and_nothing_else(norm: str, bias: bool):
    layer = TransformerLayer(WIDTH, HEADS, bias=bias, norm=NORMS[norm][0], qk_norm=True)
    frozen = [p for name, p in layer.named_parameters() if "norm" in name]
    assert (None not in {m.bias for m in layer.modules() if isinstance(m, ops.Linear)}) == bias
    x = seeded_randn((2, 5, WIDTH), 0)
    layer(x).sum().backward()
    assert x.grad is None
    assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())
    first = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    for p in frozen:
        p.requires_grad_(False)
    layer(x).sum().backward()
    assert {name for name, p in layer.named_parameters() if p.grad is None} == {n for n in first if "norm" in n}
    assert_bitwise_equal(*({n: g for n, g in of.items() if "norm" not in n} for of in (
        {n: p.grad for n, p in layer.named_parameters()}, first,
    )))  # fmt: skip


def test_weights_and_hidden_numbers_are_dropped_by_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, list[int]] = {}
    for operation in (ops.Attention, ops.Dropout):

        def noted(self: Any, *args: Any, plain: Any = operation.fwd, seed: Tensor | None = None, **kwargs: Any) -> Any:
            seen.setdefault(type(self).__name__, []).append(int(seed))
            return plain(self, *args, seed=seed, **kwargs)

        monkeypatch.setattr(operation, "fwd", noted)
    layer = TransformerLayer(WIDTH, HEADS, dropout=0.2, attention_dropout=0.2, hidden_dropout=0.2)
    with sf.fusing(False):
        layer(seeded_randn((2, 5, WIDTH), 0))
    assert {name: len(seeds) for name, seeds in seen.items()} == {"Attention": 1, "Dropout": 3}
    assert len({seed for seeds in seen.values() for seed in seeds}) == 4

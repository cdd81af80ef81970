"""Layers of transformers beside those of torch on the same parameters."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.nn import FeedForward, MultiHeadAttention, TransformerLayer, TransformerStack, from_torch
from seqfuse.testing import seeded_randn
from seqfuse.testing.judge import judge_together

ROTARY = functools.partial(ops.RotaryEmbedding, style="half")


def randomized(module: nn.Module) -> nn.Module:
    for index, parameter in enumerate(module.parameters()):
        parameter.data = 0.3 * seeded_randn(tuple(parameter.shape), 30 + index, dtype=parameter.dtype)
    return module


def results(run: Any, module: nn.Module, x: Tensor, seed: int = 0) -> dict[str, Tensor]:
    """y, dx and the gradient of every parameter of `module`, by its name there."""
    x = x.detach().requires_grad_()
    y = run(x)
    dy = seeded_randn(tuple(y.shape), 9 + seed, dtype=torch.bfloat16).to(y.dtype)
    names, owners = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad(y, [x, *owners], dy)
    return {"y": y.detach(), "dx": grads[0], **dict(zip(names, grads[1:], strict=True))}


def agree(mine: nn.Module, its: nn.Module, dtype: torch.dtype, *, ours: dict[str, Any], theirs: Any) -> None:
    """The layer, on the parameters of a torch module, beside it in this dtype and in float64."""
    exact = copy.deepcopy(its).double()
    wide = {name: t.double() if t.is_floating_point() else t for name, t in ours.items()}

    def measure(seed: int) -> tuple[dict[str, Tensor], ...]:
        x = seeded_randn((2, 18, 24), seed, dtype=dtype)
        return (
            results(lambda t: mine(t, **ours), its, x, seed),
            results(lambda t: theirs(its, t, ours), its, x, seed),
            results(lambda t: theirs(exact, t, wide), exact, x.double(), seed),
        )

    judge_together(measure, 0)


def call_attention(module: Any, x: Tensor, given: dict[str, Tensor]) -> Tensor:
    mask = given.get("m")
    hidden = mask if mask is None or mask.is_floating_point() else ~mask
    return module(x, x, x, attn_mask=hidden, need_weights=False)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_attention_is_that_of_torch(kind: str | None, bias: bool, dtype: torch.dtype):
    its = randomized(nn.MultiheadAttention(24, 4, bias=bias, batch_first=True, dtype=dtype))
    mine = from_torch(its, **({} if kind is None else {"mask": "m"}))
    drawn = seeded_randn((18, 18), 2)
    drawn.fill_diagonal_(1)
    masks: dict[str | None, Any] = {None: {}, "bool": {"m": drawn > -0.5}, "float": {"m": drawn.to(dtype)}}
    agree(mine, its, dtype, ours=masks[kind], theirs=call_attention)
    assert mine.qkv.weight is its.in_proj_weight
    assert mine.out.weight is its.out_proj.weight


def call_layer(module: Any, x: Tensor, given: dict[str, Tensor]) -> Tensor:
    mask = given.get("m")
    return module(x, None if mask is None else ~mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [F.relu, F.gelu, nn.GELU("tanh")], ids=["relu", "gelu", "gelu tanh"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_layer_is_that_of_torch(norm_first: bool, bias: bool, activation: Any, dtype: torch.dtype):
    its: Any = randomized(
        nn.TransformerEncoderLayer(
            24, 4, 40, 0.0, activation, batch_first=True, norm_first=norm_first, bias=bias, dtype=dtype
        )
    )
    if activation is F.relu and dtype is torch.bfloat16:
        pytest.skip("one rounding more or less moves a number across the corner, where the gradient jumps")
    seen = torch.ones(18, 18, dtype=torch.bool).tril()
    agree(from_torch(its, mask="m"), its, dtype, ours={"m": seen}, theirs=call_layer)
    causal = from_torch(its, causal=True)
    if dtype is torch.float32:
        x = seeded_randn((2, 18, 24), 0)
        torch.testing.assert_close(causal(x), its(x, ~seen))
    assert {id(p) for p in causal.parameters()} == {id(p) for p in its.parameters()}


def test_a_stack_is_the_encoder_of_torch():
    layer = nn.TransformerEncoderLayer(24, 4, 40, 0.0, batch_first=True, norm_first=True)
    its: Any = randomized(nn.TransformerEncoder(layer, 3, nn.LayerNorm(24, 0.1), enable_nested_tensor=False))
    mine = from_torch(its)
    agree(mine, its, torch.float32, ours={}, theirs=call_layer)
    assert list(mine.state_dict())[-2:] == ["norm.weight", "norm.bias"]
    optimizer = torch.optim.SGD(mine.parameters(), 0.1)
    x = seeded_randn((2, 18, 24), 1)
    mine(x).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(mine(x), its(x))


def test_dropout_is_on_in_training_alone_and_repeats_under_a_seed():
    layer = TransformerLayer(16, 2, dropout=0.2, attention_dropout=0.2, hidden_dropout=0.2)
    x = seeded_randn((2, 9, 16), 0)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return layer(x)

    assert torch.equal(run(1), run(1))
    assert not torch.allclose(run(1), run(2))
    layer.eval()
    assert torch.equal(run(1), run(2))


FORMS: dict[str, dict[str, Any]] = {
    "GPT": {
        "activation": functools.partial(ops.GeLU, "tanh"), "causal": True, "dropout": 0.1, "attention_dropout": 0.1,
    },
    "Llama": {
        "kv_heads": 2, "activation": ops.SwiGLU, "norm": ops.RMSNorm, "bias": False, "rotary": ROTARY, "causal": True,
        "hidden_dim": 40,
    },
    "Qwen": {
        "kv_heads": 1, "activation": ops.GEGLU, "norm": ops.RMSNorm, "qk_norm": True, "rotary": ROTARY, "head_dim": 6,
    },
    "post": {"pre_norm": False, "activation": ops.ReLU, "dropout": 0.1, "window": 3},
    "scaled": {"residual_scale": 0.5, "activation": ops.SquaredReLU, "softcap": 5.0, "causal": True},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_fused_and_unfused_layers_agree(form: str):
    torch.manual_seed(0)
    stack = TransformerStack(2, 24, 4, **FORMS[form])
    exact = copy.deepcopy(stack).double()

    def run(module: nn.Module, fused: bool, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        def seeded(x: Tensor) -> Tensor:
            torch.manual_seed(4)
            with sf.fusing(fused):
                return module(x)

        return results(seeded, module, seeded_randn((2, 17, 24), seed).to(dtype), seed)

    judge_together(
        lambda seed: (run(stack, True, seed), run(stack, False, seed), run(exact, False, seed, torch.float64)), 0
    )


@pytest.mark.parametrize("form", FORMS)
def test_layers_behave_as_containers(form: str):
    stack = TransformerStack(2, 24, 4, **FORMS[form]).eval()
    x = seeded_randn((1, 5, 24), 0)
    y = stack(x)
    assert torch.equal(copy.deepcopy(stack)(x), y)
    other = TransformerStack(2, 24, 4, **FORMS[form]).eval()
    other.load_state_dict(stack.state_dict(), strict=True)
    assert torch.equal(other(x), y)
    plan = stack.plan(x)
    assert not plan.alone
    assert any(len(step.covers) > 1 for step in plan.forward)
    torch.testing.assert_close(sf.Sequential(*stack)(x), y)
    torch.testing.assert_close(stack[1:](stack[:1](x)), y)
    assert torch.equal(pickle.loads(pickle.dumps(stack))(x), y)


def test_keys_say_what_a_parameter_is_for():
    assert list(TransformerLayer(8, 2).state_dict()) == [
        "attention.norm.weight", "attention.norm.bias", "attention.mixer.qkv.weight", "attention.mixer.qkv.bias",
        "attention.mixer.out.weight", "attention.mixer.out.bias", "feedforward.norm.weight", "feedforward.norm.bias",
        "feedforward.mixer.up.weight", "feedforward.mixer.up.bias", "feedforward.mixer.down.weight",
        "feedforward.mixer.down.bias",
    ]  # fmt: skip
    assert FeedForward(8, 12, ops.SwiGLU, bias=False).up.weight.shape == (24, 8)
    assert MultiHeadAttention(8, 4, 2).qkv.weight.shape == (16, 8)


def test_what_has_no_layer_is_refused():
    with pytest.raises(TypeError, match="no layer here stands for Linear"):
        from_torch(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="bias_k, bias_v"):
        from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    with pytest.raises(ValueError, match="kdim or vdim"):
        from_torch(nn.MultiheadAttention(8, 2, kdim=4))
    with pytest.raises(TypeError, match="activation"):
        from_torch(nn.TransformerEncoderLayer(8, 2, activation=torch.tanh))
    with pytest.raises(ValueError, match="heads must divide embed_dim, got 3 and 8"):
        MultiHeadAttention(8, 3)

"""Transformer layers compared with torch's on the same parameters."""

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
from tests.judging import judge_together

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
    """The layer on the parameters of a torch module, compared with it in this dtype and in float64."""
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


def attention_like(its: Any, **attention: Any) -> MultiHeadAttention:
    """Attention on the parameters of torch's."""
    bias = its.in_proj_bias is not None
    mine = MultiHeadAttention(its.embed_dim, its.num_heads, bias=bias, dropout=its.dropout, device="meta", **attention)
    qkv: Any = mine.qkv
    qkv.weight, qkv.bias = its.in_proj_weight, its.in_proj_bias
    take(mine.out, its.out_proj)
    return mine


def layer_like(its: Any, activation: Any = ops.ReLU, **attention: Any) -> TransformerLayer:
    """A layer on the parameters of torch's."""
    own, bias = its.self_attn, its.linear1.bias is not None
    mine: Any = TransformerLayer(
        own.embed_dim, own.num_heads, hidden_dim=its.linear1.out_features, activation=activation,
        norm=functools.partial(ops.LayerNorm, bias=bias), pre_norm=its.norm_first, bias=bias,
        dropout=its.dropout.p, hidden_dropout=its.dropout.p, device="meta", **attention,
    )  # fmt: skip
    first, second = mine.attention, mine.feedforward
    first.mixer = attention_like(own, **attention)
    norms = (first.norm, second.norm) if its.norm_first else (mine.attention_norm, mine.feedforward_norm)
    take(second.mixer.up, its.linear1)
    take(second.mixer.down, its.linear2)
    take(norms[0], its.norm1)
    take(norms[1], its.norm2)
    return mine


def take(mine: Any, its: Any) -> None:
    mine.weight = its.weight
    if its.bias is not None:
        mine.bias = its.bias


def call_attention(module: Any, x: Tensor, given: dict[str, Tensor]) -> Tensor:
    mask = given.get("m")
    hidden = mask if mask is None or mask.is_floating_point() else ~mask
    return module(x, x, x, attn_mask=hidden, need_weights=False)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_attention_is_that_of_torch(kind: str | None, bias: bool, dtype: torch.dtype):
    its = randomized(nn.MultiheadAttention(24, 4, bias=bias, batch_first=True, dtype=dtype))
    mine: Any = attention_like(its, **({} if kind is None else {"mask": "m"}))
    drawn = seeded_randn((18, 18), 2)
    drawn.fill_diagonal_(1)
    masks: dict[str | None, Any] = {None: {}, "bool": {"m": drawn > -0.5}, "float": {"m": drawn.to(dtype)}}
    agree(mine, its, dtype, ours=masks[kind], theirs=call_attention)
    assert mine.qkv.weight is its.in_proj_weight
    assert mine.out.weight is its.out_proj.weight


def call_layer(module: Any, x: Tensor, given: dict[str, Tensor]) -> Tensor:
    mask = given.get("m")
    return module(x, None if mask is None else ~mask)


ACTIVATIONS: dict[str, tuple[Any, Any]] = {
    "relu": (F.relu, ops.ReLU), "gelu": (F.gelu, ops.GeLU),
    "gelu tanh": (nn.GELU("tanh"), functools.partial(ops.GeLU, "tanh")),
}  # fmt: skip


# In bfloat16 one rounding more or less moves a number across the corner of ReLU, where the gradient jumps.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}-{dtype}")
        for name in ACTIVATIONS
        for dtype in (torch.float32, torch.bfloat16)
        if (name, dtype) != ("relu", torch.bfloat16)
    ],
)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_layer_is_that_of_torch(norm_first: bool, bias: bool, name: str, dtype: torch.dtype):
    activation, own = ACTIVATIONS[name]
    its: Any = randomized(
        nn.TransformerEncoderLayer(
            24, 4, 40, 0.0, activation, batch_first=True, norm_first=norm_first, bias=bias, dtype=dtype
        )
    )
    seen = torch.ones(18, 18, dtype=torch.bool).tril()
    agree(layer_like(its, own, mask="m"), its, dtype, ours={"m": seen}, theirs=call_layer)
    causal = layer_like(its, own, causal=True)
    if dtype is torch.float32:
        x = seeded_randn((2, 18, 24), 0)
        torch.testing.assert_close(causal(x), its(x, ~seen))
    assert {id(p) for p in causal.parameters()} == {id(p) for p in its.parameters()}


def test_layers_in_a_row_and_a_norm_are_those_of_torch():
    layers = [nn.TransformerEncoderLayer(24, 4, 40, 0.0, batch_first=True, norm_first=True) for _ in range(3)]
    its: Any = randomized(nn.Sequential(*layers, nn.LayerNorm(24, 0.1)))
    mine = sf.Sequential(*map(layer_like, its[:3]), from_torch(its[3]))
    agree(mine, its, torch.float32, ours={}, theirs=lambda module, x, given: module(x))
    assert list(mine.state_dict())[-2:] == ["3.weight", "3.bias"]
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
    assert not plan.eager
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


def plain() -> nn.Sequential:
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU("tanh"), nn.Dropout(0.2), nn.Linear(16, 8, False))
    acts = nn.Sequential(nn.ReLU(inplace=True), nn.SiLU(), nn.Sigmoid(), nn.Tanh(), nn.GELU(), nn.Identity())
    norms = [nn.RMSNorm(8, 1e-3), nn.LayerNorm(8, 1e-3, False), nn.LayerNorm(8, bias=False)]
    return nn.Sequential(nn.Embedding(20, 8, padding_idx=1), block, *norms, acts, nn.Linear(8, 20))


def test_a_sequential_of_torch_becomes_one_of_operations_on_its_parameters():
    its = randomized(plain())
    mine = from_torch(its)
    assert isinstance(mine, sf.Sequential)
    x = torch.randint(20, (2, 5), generator=torch.Generator().manual_seed(1))
    assert not mine.plan(x).eager
    assert {id(p) for p in mine.parameters()} == {id(p) for p in its.parameters()}
    assert all(mine.get_parameter(name) is p for name, p in its.named_parameters())
    assert mine.training
    mine, its = from_torch(its.eval()), its.eval()
    assert not mine.training
    y, wanted, leaves = mine(x), its(x), list(its.parameters())
    torch.testing.assert_close(y, wanted)
    dy = seeded_randn(tuple(y.shape), 3)
    found = torch.autograd.grad(y, leaves, dy)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaves, dy))


def test_a_layer_of_torch_drops_where_torch_does():
    mine = layer_like(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25))
    assert [m.p for m in mine.modules() if isinstance(m, ops.Dropout)] == [0.25] * 3
    assert [m.dropout for m in mine.modules() if isinstance(m, ops.Attention)] == [0.25]


@pytest.mark.parametrize("module", [nn.Linear(4, 3), nn.RMSNorm(4), nn.Tanh(), nn.GLU(), nn.Dropout(0.4)], ids=str)
def test_one_module_becomes_one_operation(module: nn.Module):
    mine = from_torch(module.eval())
    assert type(mine) is getattr(ops, type(module).__name__)
    assert list(mine.parameters()) == list(module.parameters())
    x = seeded_randn((5, 4), 0)
    torch.testing.assert_close(mine(x), module(x))


BRANCHES = {
    "before and after": {"branch_norm": True},
    "after alone": {"pre_norm": None, "branch_norm": True},
    "none": {"pre_norm": None},
}


@pytest.mark.parametrize("name", BRANCHES)
def test_norms_stand_where_they_are_asked_for(name: str):
    how = BRANCHES[name]
    layer: Any = randomized(TransformerLayer(16, 4, 2, norm=ops.RMSNorm, activation=ops.SwiGLU, **how))
    x = seeded_randn((2, 5, 16), 0)
    expected = x
    for branch in (layer.attention, layer.feedforward):
        inner = branch.mixer(branch.norm(expected) if "pre_norm" not in how else expected)
        expected = expected + (branch.branch_norm(inner) if "branch_norm" in how else inner)
    torch.testing.assert_close(layer(x), expected)
    names = {part.split(".")[1] for part in layer.state_dict()}
    assert ("norm" in names, "branch_norm" in names) == ("pre_norm" not in how, "branch_norm" in how)
    stack = TransformerStack(1, 16, 4, **how)
    assert "norm" in dict(stack.named_children())


def test_queries_keys_and_values_may_have_a_bias_alone():
    keys = [key for key in TransformerLayer(8, 2, bias=False, qkv_bias=True).state_dict() if key.endswith("bias")]
    assert keys == ["attention.norm.bias", "attention.mixer.qkv.bias", "feedforward.norm.bias"]
    keys = [
        key for key in TransformerLayer(8, 2, qkv_bias=False, norm=ops.RMSNorm).state_dict() if key.endswith("bias")
    ]
    assert keys == ["attention.mixer.out.bias", "feedforward.mixer.up.bias", "feedforward.mixer.down.bias"]


def test_merged_weights_give_what_packed_ones_give():
    packed: Any = randomized(TransformerLayer(16, 4, 2, activation=ops.SwiGLU, hidden_dim=12))
    merged: Any = TransformerLayer(16, 4, 2, activation=ops.SwiGLU, hidden_dim=12, merged=True)
    state = packed.state_dict()
    for path, sizes in (("attention.mixer.qkv", [16, 8, 8]), ("feedforward.mixer.up", [12, 12])):
        for kind in ("weight", "bias"):
            whole = state.pop(f"{path}.{kind}").split(sizes)
            state |= {f"{path}.{kind}_{i}": part for i, part in enumerate(whole)}
    merged.load_state_dict(state, strict=True)
    x = seeded_randn((2, 5, 16), 0)
    torch.testing.assert_close(merged(x), packed(x))
    assert type(FeedForward(8, merged=True).up) is ops.Linear
    with pytest.raises(sf.InputError, match="SF106 FeedForward: gate and up of SwiGLU are interleaved"):
        FeedForward(8, activation=functools.partial(ops.SwiGLU, packing="interleaved"), merged=True)
    one = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=one, rank=0, world_size=1)
    try:
        for layer in (FeedForward, functools.partial(MultiHeadAttention, heads=2)):
            with pytest.raises(sf.InputError, match=r"SF106.*not divided among processes"):
                layer(8, merged=True, group=torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrong", [2.5, "yes", [1]])
def test_a_norm_of_queries_and_keys_is_asked_for_by_a_flag_or_made_by_a_function(wrong: Any):
    with pytest.raises(sf.InputError, match=r"SF106 .*: qk_norm must be True or False or a class or function"):
        MultiHeadAttention(8, 2, qk_norm=wrong)
    assert "qk_norm" in dict(MultiHeadAttention(8, 2, qk_norm=True).named_children())


def test_the_norm_of_queries_and_keys_may_be_made_otherwise():
    make = functools.partial(ops.QKNorm, eps=0.1, zero_centered=True, full_width=True)
    layer: Any = TransformerLayer(8, 2, qk_norm=make)
    norm = layer.attention.mixer.qk_norm
    assert (norm.eps, norm.zero_centered, tuple(norm.q_weight.shape)) == (0.1, True, (8,))
    assert MultiHeadAttention(8, 2, qk_norm=True).qk_norm.eps == 1e-6


def test_what_has_no_layer_is_refused():
    with pytest.raises(ValueError, match="heads must divide embed_dim, got 3 and 8"):
        MultiHeadAttention(8, 3)

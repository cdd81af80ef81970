"""Transformer blocks as written by users of torch and as built of operations, and Hugging Face models, by size."""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclasses.dataclass(frozen=True)
class Spec:
    """The sizes of a layer, and its kind."""

    H: int  # width
    F: int  # width of the feed-forward block
    heads: int  # of queries
    kv_heads: int
    head_dim: int
    llama: bool  # RMSNorm, SwiGLU, rotary positions and no biases; else LayerNorm, GeLU and biases
    dropout: float = 0.0  # of the output of each block

    @property
    def packed(self) -> int:
        """Width of queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


class Functions(NamedTuple):
    """Functions that peers replace by their kernels."""

    rms_norm: Callable[..., Tensor] = lambda x, w, eps: F.rms_norm(x, w.shape, w, eps)
    layer_norm: Callable[..., Tensor] = lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps)
    swiglu: Callable[..., Tensor] = lambda gate, up: F.silu(gate) * up


class Norm(nn.Module):
    def __init__(self, spec: Spec, functions: Functions, made: dict[str, Any]) -> None:
        super().__init__()
        self.functions = functions
        self.weight = nn.Parameter(torch.ones(spec.H, **made))
        self.bias = None if spec.llama else nn.Parameter(torch.zeros(spec.H, **made))

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.functions.rms_norm(x, self.weight, 1e-6)
        return self.functions.layer_norm(x, self.weight, self.bias, 1e-5)


class FeedForward(nn.Module):
    def __init__(self, spec: Spec, functions: Functions, made: dict[str, Any]) -> None:
        super().__init__()
        self.gated, self.functions = spec.llama, functions
        self.up = nn.Linear(spec.H, 2 * spec.F if spec.llama else spec.F, not spec.llama, **made)
        self.down = nn.Linear(spec.F, spec.H, not spec.llama, **made)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(self.functions.swiglu(*h.chunk(2, -1)) if self.gated else F.gelu(h))


class Attention(nn.Module):
    def __init__(self, spec: Spec, made: dict[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        self.qkv = nn.Linear(spec.H, spec.packed, not spec.llama, **made)
        self.out = nn.Linear(spec.heads * spec.head_dim, spec.H, not spec.llama, **made)

    def forward(self, x: Tensor) -> Tensor:
        spec = self.spec
        heads = self.qkv(x).unflatten(-1, (-1, spec.head_dim)).transpose(-3, -2)
        q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads], -3)
        if spec.llama:
            cos, sin = angles(x.shape[-2], spec.head_dim, x)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=spec.kv_heads != spec.heads)
        return self.out(y.transpose(-3, -2).flatten(-2))


class Block(nn.Module):
    """x + dropout(mixer(norm x))."""

    def __init__(self, norm: nn.Module, mixer: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm, self.mixer, self.p = norm, mixer, dropout

    def forward(self, x: Tensor) -> Tensor:
        y = self.mixer(self.norm(x))
        return x + (F.dropout(y, self.p, self.training) if self.p else y)


class Stack(nn.Sequential):
    """Layers and a final norm; after `checkpoint`, each layer runs again in the backward pass."""

    run: Callable[..., Tensor] = staticmethod(lambda layer, x: layer(x))

    def checkpoint(self, **how: Any) -> Stack:
        self.run = functools.partial(checkpoint, **how)
        return self

    def forward(self, x: Tensor) -> Tensor:
        *layers, norm = self.children()
        for one in layers:
            x = self.run(one, x)
        return norm(x)


def angles(length: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position and pair, [S, D / 2], computed in each forward as in Hugging Face's layers."""
    compute = torch.promote_types(like.dtype, torch.float32)
    powers = torch.arange(0, size, 2, device=like.device, dtype=torch.float64) / -size
    a = torch.outer(torch.arange(length, device=like.device, dtype=compute), (10000.0**powers).to(compute))
    return a.cos(), a.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [*, S, D] by halves, in the dtype of the angles."""
    first, second = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def build(what: str, spec: Spec, functions: Functions | None = None, layers: int = 1, **made: Any) -> nn.Module:
    """A model: "feedforward", "attention", "layer" or "stack" (layers and a final norm)."""
    own = functions or Functions()

    def block(part: str) -> Block:
        mixer = Attention(spec, made) if part == "attention" else FeedForward(spec, own, made)
        return Block(Norm(spec, own, made), mixer, spec.dropout)

    both = ("attention", "feedforward")
    if what in both:
        return nn.Sequential(block(what))
    parts = [nn.Sequential(OrderedDict((part, block(part)) for part in both)) for _ in range(layers)]
    if what == "layer":
        return parts[0]
    return Stack(OrderedDict([*((str(i), part) for i, part in enumerate(parts)), ("norm", Norm(spec, own, made))]))


def fused(what: str, spec: Spec, layers: int = 1, **made: Any) -> Any:
    """The same model built of operations, with the same keys."""
    import seqfuse as sf
    from seqfuse import ops

    kinds: dict[str, Any] = {"norm": functools.partial(ops.LayerNorm, eps=1e-5), "activation": ops.GeLU}
    if spec.llama:
        kinds = {
            "norm": functools.partial(ops.RMSNorm, eps=1e-6), "activation": ops.SwiGLU, "bias": False,
            "rotary": functools.partial(ops.RotaryEmbedding, style="half"),
        }  # fmt: skip
    how: dict[str, Any] = {
        "kv_heads": spec.kv_heads, "head_dim": spec.head_dim, "hidden_dim": spec.F, "dropout": spec.dropout,
        "causal": True, **kinds, **made,
    }  # fmt: skip
    if what == "stack":
        return sf.nn.TransformerStack(layers, spec.H, spec.heads, **how)
    layer = sf.nn.TransformerLayer(spec.H, spec.heads, **how)
    return layer if what == "layer" else sf.Sequential(getattr(layer, what))


USUAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
# The names of width, layers, heads, hidden width and positions in configurations, and of dropouts.
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Llama": (NAMES, ("attention_dropout",)),
    "GPT2": (("n_embd", "n_layer", "n_head", "n_inner", "n_positions"), ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "Bert": (NAMES, ("hidden_dropout_prob", "attention_probs_dropout_prob")),
}


def hugging(
    name: str, width: int, layers: int, positions: int, heads: int = 4, hidden: int | None = None, vocabulary: int = 32,
    dropouts: Sequence[float] = (0.0, 0.0, 0.0), **more: Any,
) -> nn.Module:  # fmt: skip
    """A Hugging Face model by the name of its class; `more`: other configuration values."""
    import transformers

    family = next(family for family in FAMILIES if name.startswith(family))
    sizes, rates = FAMILIES[family]
    numbers = (width, layers, heads, hidden or width * (7 if family == "Llama" else 8) // 2, positions)
    given = dict(zip(sizes, numbers, strict=True)) | dict(zip(rates, dropouts, strict=False))
    given |= {"num_key_value_heads": 2} if family == "Llama" else {}
    config = getattr(transformers, f"{family}Config")(vocab_size=vocabulary, **USUAL, **given | more)
    how = {"add_pooling_layer": False} if family == "Bert" else {}
    return getattr(transformers, name)(config, **how)


def mixtral(width: int, hidden: int, used: str, count: int = 8, top_k: int = 2) -> Any:
    """Router and experts of a layer of Mixtral, with one of the implementations of experts."""
    from transformers.models.mixtral import modeling_mixtral

    config = modeling_mixtral.MixtralConfig(
        hidden_size=width, intermediate_size=hidden, num_local_experts=count, num_experts_per_tok=top_k,
        experts_implementation=used,
    )  # fmt: skip
    layer = modeling_mixtral.MixtralSparseMoeBlock(config)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.1)
    return layer

"""Transformers that you know, as layers of seqfuse, without weights: what would be fused on a GPU that is not here?

Each function makes the layers of a model on the device "meta", which holds no numbers and needs no memory:

    seqfuse plan examples/models.py:llama3_8b --input 8x1024x4096:bf16 --device cuda:sm_90 --output llama.svg

Queries, keys and values have a weight each, and so have gate and up, as in the checkpoints.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import seqfuse as sf
from seqfuse import ops
from seqfuse.nn import TransformerLayer, TransformerStack

SIX = ("gpt2", "llama3_8b", "bert_base", "vit_b16", "qwen3_06b", "gemma3_1b")


def gpt2(layers: int = 12) -> sf.Sequential:
    """LayerNorm, GeLU, biases. Radford et al. 2019."""
    gelu = partial(ops.GeLU, "tanh")
    return TransformerStack(layers, 768, 12, activation=gelu, causal=True, device="meta")


def llama3_8b(layers: int = 32) -> sf.Sequential:
    """RMSNorm, SwiGLU, RoPE, 8 heads of keys for 32 of queries (GQA). arXiv:2407.21783."""
    rotary = partial(ops.RotaryEmbedding, style="half", base=500000.0)
    sizes: dict[str, Any] = {"kv_heads": 8, "hidden_dim": 14336}
    return TransformerStack(layers, 4096, 32, **sizes, **llama_like(1e-5), rotary=rotary)


def bert_base(layers: int = 12) -> sf.Sequential:
    """LayerNorm after each residual sum, GeLU, biases, attention to both sides. arXiv:1810.04805."""
    norm = partial(ops.LayerNorm, eps=1e-12)
    return TransformerStack(layers, 768, 12, norm=norm, pre_norm=False, device="meta")


def vit_b16(layers: int = 12) -> sf.Sequential:
    """LayerNorm, GeLU, biases, attention to all patches. arXiv:2010.11929."""
    return TransformerStack(layers, 768, 12, norm=partial(ops.LayerNorm, eps=1e-12), device="meta")


def qwen3_06b(layers: int = 28) -> sf.Sequential:
    """Like Llama, with an RMSNorm of each head's queries and keys. arXiv:2505.09388."""
    rotary = partial(ops.RotaryEmbedding, style="half", base=1e6)
    sizes: dict[str, Any] = {"kv_heads": 8, "head_dim": 128, "hidden_dim": 3072}
    qk_norm = partial(ops.QKNorm, eps=1e-6)
    return TransformerStack(layers, 1024, 16, **sizes, **llama_like(1e-6), rotary=rotary, qk_norm=qk_norm)


def gemma3_1b(layers: int = 26) -> sf.Sequential:
    """GeGLU, norms at both ends of each branch, sliding windows of 512 in five of six layers. arXiv:2503.19786."""
    sizes: dict[str, Any] = {"kv_heads": 1, "head_dim": 256, "hidden_dim": 6912}
    shared: dict[str, Any] = llama_like(1e-6) | {
        "norm": partial(ops.RMSNorm, eps=1e-6, zero_centered=True),
        "qk_norm": partial(ops.QKNorm, eps=1e-6, zero_centered=True),
        "activation": partial(ops.GEGLU, "tanh"),
        "branch_norm": True,
    }
    blocks: list[sf.Sequential] = []
    for index in range(layers):
        is_local = (index + 1) % 6 != 0
        rotary = partial(ops.RotaryEmbedding, style="half", base=1e4 if is_local else 1e6)
        window = 512 if is_local else None
        blocks.append(TransformerLayer(1152, 4, **sizes, **shared, rotary=rotary, window=window))
    return sf.Sequential(*blocks)


def llama_like(eps: float) -> dict[str, Any]:
    norm = partial(ops.RMSNorm, eps=eps)
    return {"norm": norm, "activation": ops.SwiGLU, "bias": False, "causal": True, "merged": True, "device": "meta"}


if __name__ == "__main__":
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)
    for name in SIX:
        plan = globals()[name]().bfloat16().plan(env=there)
        print(f"{name}: {len(plan.names)} operations in {len(plan.forward)} + {len(plan.backward)} steps")

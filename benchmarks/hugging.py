"""Models of Hugging Face, by sizes alone: without caches, and without dropout unless it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers
from torch import nn

USUAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
# The names of width, layers, heads, width inside and positions, and of dropouts.
NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
FAMILIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Llama": (NAMES, ("attention_dropout",)),
    "GPT2": (("n_embd", "n_layer", "n_head", "n_inner", "n_positions"), ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "Bert": (NAMES, ("hidden_dropout_prob", "attention_probs_dropout_prob")),
}


def model(
    name: str, width: int, layers: int, positions: int, heads: int = 4, hidden: int | None = None, vocabulary: int = 32,
    dropouts: Sequence[float] = (0.0, 0.0, 0.0), **more: Any,
) -> nn.Module:  # fmt: skip
    """A model by the name of its class; `more` is of its configuration."""
    family = next(family for family in FAMILIES if name.startswith(family))
    sizes, rates = FAMILIES[family]
    numbers = (width, layers, heads, hidden or width * (7 if family == "Llama" else 8) // 2, positions)
    given = dict(zip(sizes, numbers, strict=True)) | dict(zip(rates, dropouts, strict=False))
    given |= {"num_key_value_heads": 2} if family == "Llama" else {}
    config = getattr(transformers, f"{family}Config")(vocab_size=vocabulary, **USUAL, **given | more)
    how = {"add_pooling_layer": False} if family == "Bert" else {}
    return getattr(transformers, name)(config, **how)


def experts(width: int, hidden: int, used: str) -> nn.Module:
    """The router and the 8 experts of a layer of Mixtral, by one of the implementations of experts."""
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = transformers.MixtralConfig(
        hidden_size=width, intermediate_size=hidden, num_local_experts=8, num_experts_per_tok=2,
        experts_implementation=used,
    )  # fmt: skip
    layer = MixtralSparseMoeBlock(config)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.1)
    return layer

"""Models of Hugging Face, by sizes alone: without caches, and without dropout unless it is asked for."""

from __future__ import annotations

from typing import Any

import transformers
from torch import nn

USUAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
NAMES: dict[str, tuple[str, ...]] = {
    "Llama": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
              "max_position_embeddings"),
    "GPT2": ("n_embd", "n_layer", "n_head", "n_inner", "n_positions"),
    "Bert": ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
             "max_position_embeddings"),
}  # fmt: skip
DROPOUTS = {
    "Llama": ("attention_dropout",),
    "GPT2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "Bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}


def model(
    family: str, width: int, layers: int, heads: int = 4, hidden: int | None = None, positions: int = 2048,
    head: str = "Model", vocabulary: int = 32, **more: Any,
) -> nn.Module:  # fmt: skip
    """A model, or with `head="ForCausalLM"` and the like one with a head; `more` is of its configuration."""
    sizes = (width, layers, heads, hidden or width * (7 if family == "Llama" else 8) // 2, positions)
    given = dict(zip(NAMES[family], sizes, strict=True)) | dict.fromkeys(DROPOUTS[family], 0.0)
    given |= {"num_key_value_heads": 2} if family == "Llama" else {}
    config = getattr(transformers, f"{family}Config")(vocab_size=vocabulary, **USUAL, **given | more)
    how = {"add_pooling_layer": False} if family == "Bert" else {}
    return getattr(transformers, f"{family}{head}")(config, **how)


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

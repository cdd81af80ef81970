"""GPT-2 and Llama of Hugging Face as one `Sequential`."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import ops
from ..fuser.sequential import Sequential
from ..nn import TransformerStack, pack_qkv

_GELUS: dict[str, Literal["none", "tanh"]] = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


def from_huggingface(model: nn.Module) -> Sequential:
    """A model of tokens to logits with the weights of a `GPT2LMHeadModel` or a `LlamaForCausalLM`, copied.

    x: tokens [*, S], y: logits [*, S, V].  Keys: `embedding`, `positions` (GPT-2), `dropout` (if any), `layers`,
    `head`.
    A head tied to the embedding stays tied. Dropped elements are others than Hugging Face's.

    Raises:
        TypeError: for a model of another class.
        ValueError: for a configuration that no layer here has, naming it.
    """
    made = {"GPT2LMHeadModel": _gpt2, "LlamaForCausalLM": _llama}
    for kind in type(model).__mro__:
        if kind.__name__ in made:
            config: Any = model.config
            mine, convert = made[kind.__name__](config, next(model.parameters()))
            mine.load_state_dict(convert(model.state_dict()), strict=True)
            if config.tie_word_embeddings:
                head: Any = mine.head
                head.weight = mine.embedding.weight
            return mine.train(model.training)
    raise TypeError(f"no model here stands for {type(model).__name__}; there are those of {', '.join(made)}")


def gpt2_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of a `GPT2LMHeadModel`, or gradients by its names, under the names of `from_huggingface`.

    Its products hold their weights as [in, out]; these are [out, in].
    """
    new: dict[str, Tensor] = {}
    names = {
        "ln_1": "attention.norm", "attn.c_attn": "attention.mixer.qkv", "attn.c_proj": "attention.mixer.out",
        "ln_2": "feedforward.norm", "mlp.c_fc": "feedforward.mixer.up", "mlp.c_proj": "feedforward.mixer.down",
    }  # fmt: skip
    whole = {"transformer.wte": "embedding", "transformer.wpe": "positions", "transformer.ln_f": "layers.norm",
             "lm_head": "head"}  # fmt: skip
    for key, value in state.items():
        stem, _, kind = key.rpartition(".")
        if stem in whole:
            new[f"{whole[stem]}.{kind}"] = value
        elif stem.startswith("transformer.h."):
            _, _, index, part = stem.split(".", 3)
            if part in names:  # the rest are buffers
                turned = value.t() if part not in ("ln_1", "ln_2") and kind == "weight" else value
                new[f"layers.{index}.{names[part]}.{kind}"] = turned
    return new


def llama_state(state: Mapping[str, Tensor], heads: int, kv_heads: int) -> dict[str, Tensor]:
    """The state of a `LlamaForCausalLM`, or gradients by its names, under the names of `from_huggingface`.

    Queries, keys and values are packed, and so are gate and up.
    """
    new: dict[str, Tensor] = {}
    whole = {"model.embed_tokens": "embedding", "model.norm": "layers.norm", "lm_head": "head"}
    alike = {"self_attn.o_proj": "attention.mixer.out", "mlp.down_proj": "feedforward.mixer.down",
             "input_layernorm": "attention.norm", "post_attention_layernorm": "feedforward.norm"}  # fmt: skip
    for key, value in state.items():
        stem, _, kind = key.rpartition(".")
        if stem in whole:
            new[f"{whole[stem]}.{kind}"] = value
        elif stem.startswith("model.layers."):
            _, _, index, part = stem.split(".", 3)
            at, beside = f"layers.{index}", f"model.layers.{index}"
            if part in alike:
                new[f"{at}.{alike[part]}.{kind}"] = value
            elif part == "self_attn.q_proj":
                three = [state[f"{beside}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
                new[f"{at}.attention.mixer.qkv.{kind}"] = pack_qkv(three, "separate", heads, kv_heads)
            elif part == "mlp.gate_proj":
                new[f"{at}.feedforward.mixer.up.{kind}"] = torch.cat((value, state[f"{beside}.mlp.up_proj.{kind}"]))
    return new


def _gpt2(config: Any, like: Tensor) -> tuple[Any, Any]:
    unlike = [name for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention") if getattr(config, name)]
    unlike += [] if config.scale_attn_weights else ["scale_attn_weights=False"]
    unlike += [] if config.activation_function in _GELUS else [f"activation_function={config.activation_function!r}"]
    if unlike:
        raise ValueError(f"no layer here has {', '.join(unlike)}")
    made: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["embedding"] = ops.Embedding(config.vocab_size, config.n_embd, **made)
    parts["positions"] = ops.PositionEmbedding(config.n_positions, config.n_embd, **made)
    if config.embd_pdrop:
        parts["dropout"] = ops.Dropout(config.embd_pdrop)
    parts["layers"] = TransformerStack(
        config.n_layer,
        config.n_embd,
        config.n_head,
        hidden_dim=config.n_inner or 4 * config.n_embd,
        activation=functools.partial(ops.GeLU, _GELUS[config.activation_function]),
        norm=functools.partial(ops.LayerNorm, eps=config.layer_norm_epsilon),
        causal=True,
        dropout=config.resid_pdrop,
        attention_dropout=config.attn_pdrop,
        **made,
    )
    parts["head"] = ops.Linear(config.n_embd, config.vocab_size, bias=False, **made)
    return Sequential(parts), gpt2_state


def _llama(config: Any, like: Tensor) -> tuple[Any, Any]:
    rotary: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rotary.get("rope_type", "default")
    unlike = [] if kind == "default" else [f"rope_type={kind!r}"]
    unlike += [] if config.hidden_act == "silu" else [f"hidden_act={config.hidden_act!r}"]
    unlike += ["biases of one kind alone"] if config.attention_bias != config.mlp_bias else []
    if unlike:
        raise ValueError(f"no layer here has {', '.join(unlike)}")
    base = rotary.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    made: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["embedding"] = ops.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id, **made)
    parts["layers"] = TransformerStack(
        config.num_hidden_layers,
        config.hidden_size,
        heads,
        kv_heads=shared,
        head_dim=getattr(config, "head_dim", None),
        hidden_dim=config.intermediate_size,
        activation=ops.SwiGLU,
        norm=functools.partial(ops.RMSNorm, eps=config.rms_norm_eps),
        bias=config.mlp_bias,
        rotary=functools.partial(ops.RotaryEmbedding, style="half", base=base),
        causal=True,
        attention_dropout=config.attention_dropout,
        **made,
    )
    parts["head"] = ops.Linear(config.hidden_size, config.vocab_size, bias=False, **made)
    return Sequential(parts), functools.partial(llama_state, heads=heads, kv_heads=shared)

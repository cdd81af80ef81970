"""Converts GPT-2, Llama and similar decoders of Hugging Face to a `Sequential`."""

from __future__ import annotations

import copy
import functools
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import Sequential, ops
from ..nn import TransformerStack, pack_qkv
from ._unaltered import check_unaltered

_LIKE_LLAMA = ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3", "Olmo2")
_GELUS: dict[str, Literal["none", "tanh"]] = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "none"}


# Attributes set by loading, training and saving, and the choice of an attention kernel.
_ASIDE = (
    "_attn_implementation", "_auto_class", "_is_hf_initialized", "_use_kernels", "_weight_conversions",
    "generation_config", "is_parallelizable", "kernel_config", "loss_type", "model_parallel", "model_tags",
    "name_or_path", "warnings_issued",
)  # fmt: skip


def from_huggingface(model: nn.Module) -> Sequential:
    """Build a seqfuse model from a Hugging Face decoder, with copies of its weights, packed.

    Supports `GPT2LMHeadModel`, `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM`, `Qwen3ForCausalLM`,
    `Phi3ForCausalLM` and `Olmo2ForCausalLM`.

    x: token ids [*, S], y: logits [*, S, V].  State-dict keys: `embedding`, `positions` (GPT-2), `dropout` (if any),
    `layers`, `head`.
    Tied weights stay tied, frozen weights stay frozen. Dropout masks differ from Hugging Face's. There is no attention
    mask: pad on the right. `pad_token_id` is that of the configuration, or `None` if prompts begin with this token.

    The model must be as built by its class from its configuration, without replaced modules, hooks, an overridden
    `forward`, parametrizations, other attributes or buffers, manually tied or untied weights, or parts in another mode,
    dtype or device.

    Args:
        model: the model.

    Raises:
        TypeError: for a model of another class.
        ValueError: for an unsupported configuration, or a modified model, with the difference.
    """
    made = {"GPT2LMHeadModel": _gpt2, **dict.fromkeys((f"{name}ForCausalLM" for name in _LIKE_LLAMA), _llama)}
    kind = type(model)
    if kind.__name__ not in made or not kind.__module__.startswith("transformers.models."):
        known = ", ".join(made)
        raise TypeError(f"there is no model for {kind.__name__} of {kind.__module__}, only for {known}")
    config: Any = model.config
    mine, convert, buffers = made[kind.__name__](config, next(model.parameters()))
    _check_functions(kind, config)
    fresh = _fresh(kind, config)
    check_unaltered(model, fresh, buffers=buffers, aside=_ASIDE)
    _check_parameters(model, fresh)
    mine.load_state_dict(convert(model.state_dict()), strict=True)
    if config.tie_word_embeddings:
        head: Any = mine.head
        head.weight = mine.embedding.weight
    _freeze(mine, model, convert)
    mine.pad_token_id = None if config.pad_token_id == config.bos_token_id else config.pad_token_id
    return mine.train(model.training)


def _fresh(kind: type[Any], config: Any) -> nn.Module:
    """A model as its class builds it from a configuration, on meta."""
    own = copy.deepcopy(config)
    own._attn_implementation = "eager"  # available everywhere
    with torch.device("meta"):
        fresh: nn.Module = kind(own)
    for module in fresh.modules():
        if "config" in vars(module):
            vars(module)["config"] = config  # the given configuration, for the comparison of attributes
    return fresh


def _check_functions(kind: type[Any], config: Any) -> None:
    """Raise if transformers' attention or rotary embedding was replaced."""
    home: Any = sys.modules[kind.__module__]
    attention = home.ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, home.eager_attention_forward)
    for function in (attention, getattr(home, "apply_rotary_pos_emb", None)):
        if function is not None and not function.__module__.startswith("transformers."):
            by = f"{function.__module__}.{function.__qualname__}"
            raise ValueError(f"{kind.__name__} was altered: it computes by {by}, not by a function of transformers")


def _check_parameters(model: nn.Module, fresh: nn.Module) -> None:
    """Raise for weights tied differently than configured, or with hooks, which copies would lose."""
    wanted = _ties(fresh)
    for name, tied in _ties(model).items():
        if tied != wanted[name]:
            which = ("not tied" if tied == name else f"tied to {tied}") + f", its configuration says {wanted[name]}"
            raise ValueError(f"{type(model).__name__} was altered: {name} is {which}")
        parameter: Any = model.get_parameter(name)
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ValueError(f"{type(model).__name__} was altered: {name} has hooks; remove them, or convert it before")


def _ties(model: nn.Module) -> dict[str, str]:
    """The first name of each parameter, by all its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def _freeze(mine: nn.Module, its: nn.Module, convert: Any) -> None:
    """Freeze the parameters that are copies of frozen ones."""

    def wanting(which: bool) -> dict[str, Tensor]:
        given = its.named_parameters(remove_duplicate=False)
        return convert(
            {name: torch.empty(p.shape, device="meta", requires_grad=p.requires_grad is which) for name, p in given}
        )

    trained, frozen = wanting(True), wanting(False)
    for name, parameter in mine.named_parameters():
        if trained[name].requires_grad and frozen[name].requires_grad:
            raise ValueError(f"of the weights that are packed in {name} some are frozen, and some are not")
        parameter.requires_grad_(trained[name].requires_grad)


def gpt2_state(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state, or gradients by name, of a `GPT2LMHeadModel`, with the names of `from_huggingface`.

    Weights of GEMMs are transposed from [in, out] to [out, in].
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
                # Of a vector, such as the weight of a norm, `t` returns the vector.
                new[f"layers.{index}.{names[part]}.{kind}"] = value.t() if kind == "weight" else value
    return new


def llama_state(state: Mapping[str, Tensor], heads: int, kv_heads: int) -> dict[str, Tensor]:
    """The state, or gradients by name, of a `LlamaForCausalLM` or similar model, with the names of `from_huggingface`.

    Weights of queries, keys and values are packed, and so are those of gate and up.
    """
    new: dict[str, Tensor] = {}
    whole = {"model.embed_tokens": "embedding", "model.norm": "layers.norm", "lm_head": "head"}
    alike = {
        "self_attn.o_proj": "attention.mixer.out", "self_attn.qkv_proj": "attention.mixer.qkv",
        "mlp.down_proj": "feedforward.mixer.down", "mlp.gate_up_proj": "feedforward.mixer.up",
        "input_layernorm": "attention.norm", "post_attention_layernorm": "feedforward.norm",
    }  # fmt: skip
    if any(".post_feedforward_layernorm." in key for key in state):
        alike |= {"post_attention_layernorm": "attention.branch_norm"}
        alike |= {"post_feedforward_layernorm": "feedforward.branch_norm"}
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
            elif part in ("self_attn.q_norm", "self_attn.k_norm"):
                new[f"{at}.attention.mixer.qk_norm.{part.removeprefix('self_attn.')[0]}_{kind}"] = value
            elif part == "mlp.gate_proj":
                new[f"{at}.feedforward.mixer.up.{kind}"] = torch.cat((value, state[f"{beside}.mlp.up_proj.{kind}"]))
    return new


def _gpt2(config: Any, like: Tensor) -> tuple[Any, Any, dict[str, Tensor]]:
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
    return Sequential(parts), gpt2_state, {}


def _llama(config: Any, like: Tensor) -> tuple[Any, Any, dict[str, Tensor]]:
    rotary: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = rotary.get("rope_type", "default")
    unlike = [] if kind == "default" else [f"rope_type={kind!r}"]
    unlike += [] if config.hidden_act == "silu" else [f"hidden_act={config.hidden_act!r}"]
    unlike += (
        ["sliding windows of some layers"]
        if "sliding_attention" in (getattr(config, "layer_types", None) or ())
        else []
    )
    if unlike:
        raise ValueError(f"no layer here has {', '.join(unlike)}")
    base = rotary.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    family = config.model_type
    attention_bias = bool(getattr(config, "attention_bias", False))
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    turned = int(size * (rotary.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1))
    norm, how = functools.partial(ops.RMSNorm, eps=config.rms_norm_eps), dict[str, Any]()
    if family in ("qwen3", "olmo2"):
        how["qk_norm"] = functools.partial(ops.QKNorm, eps=config.rms_norm_eps, full_width=family == "olmo2")
    if family == "olmo2":
        how |= {"pre_norm": None, "branch_norm": True}
    if family in ("mistral", "phi3"):
        how["window"] = config.sliding_window
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
        norm=norm,
        bias=bool(getattr(config, "mlp_bias", False)),
        qkv_bias=attention_bias or family == "qwen2",
        out_bias=attention_bias,
        rotary=functools.partial(
            ops.RotaryEmbedding, style="half", base=base, rotary_dim=None if turned == size else turned
        ),
        causal=True,
        dropout=config.resid_pdrop if family == "phi3" else 0.0,
        attention_dropout=config.attention_dropout,
        **how,
        **made,
    )
    parts["head"] = ops.Linear(config.hidden_size, config.vocab_size, bias=False, **made)
    angles = float(base) ** (torch.arange(0, turned, 2, dtype=torch.float64) / -turned)
    buffers = {f"model.rotary_emb.{name}": angles for name in ("inv_freq", "original_inv_freq")}
    return Sequential(parts), functools.partial(llama_state, heads=heads, kv_heads=shared), buffers

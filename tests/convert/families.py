"""Tiny models of common families, built from their configurations, with inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from seqfuse.testing import seeded_randn

transformers = pytest.importorskip("transformers")

VOCABULARY = 64
_SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DEEP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, **_SIZES,
}  # fmt: skip
_GQA = {**_DEEP, "num_key_value_heads": 2}
_TWO = {"num_hidden_layers": 2}  # where layers differ, or where tests look at chains across their boundary
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Family(NamedTuple):
    """A model and the arguments of its call."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


def _tokens(**more: Any) -> dict[str, Any]:
    drawn = torch.randint(3, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": drawn, **more}


def _pair() -> dict[str, Any]:
    return {**_tokens(), "decoder_input_ids": _tokens()["input_ids"][:, :5]}


def _image() -> dict[str, Any]:
    return {"pixel_values": seeded_randn((2, 3, 16, 16), 5)}


def _large_image() -> dict[str, Any]:
    return {"pixel_values": seeded_randn((2, 3, 64, 64), 5)}


def _made(model: str, config: str, inputs: Callable[[], dict[str, Any]] = _tokens, **given: Any) -> Family:
    def build() -> nn.Module:
        return getattr(transformers, model)(getattr(transformers, config)(**given))

    return Family(build, inputs)


class Encoder(nn.TransformerEncoder):
    def forward(self, src: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(src)


class Mixer(nn.Module):
    """MLP-Mixer: GEMMs along patches and along features, the latter with a LayerScale."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.patches = nn.ModuleList(_mlp(8, 16) for _ in range(2))
        self.features = nn.ModuleList(_mlp(32, 64) for _ in range(2))
        self.gain = nn.Parameter(torch.full((32,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        for i, (patches, features) in enumerate(zip(self.patches, self.features, strict=True)):
            x = x + patches(self.norms[2 * i](x).transpose(1, 2)).transpose(1, 2)
            x = x + features(self.norms[2 * i + 1](x)) * self.gain
        return x


def _mlp(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def _layer(kind: type[nn.Module], **more: Any) -> nn.Module:
    return kind(32, 4, 64, dropout=0.0, batch_first=True, **more)


_SCALED = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "gpt2": _made(
        "GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, **_SIZES,
    ),
    "llama": _made("LlamaForCausalLM", "LlamaConfig", **{**_GQA, **_TWO}),
    "llama 3.1": _made("LlamaForCausalLM", "LlamaConfig", rope_parameters=_SCALED, **_GQA),
    "mistral": _made("MistralForCausalLM", "MistralConfig", sliding_window=4, **_GQA),
    "qwen2": _made("Qwen2ForCausalLM", "Qwen2Config", **_GQA),
    "qwen3": _made("Qwen3ForCausalLM", "Qwen3Config", head_dim=8, **_GQA),
    "gemma2": _made("Gemma2ForCausalLM", "Gemma2Config", head_dim=8, **{**_GQA, **_TWO}),
    "gemma3": _made("Gemma3ForCausalLM", "Gemma3TextConfig", head_dim=8, **_GQA),
    "phi3": _made("Phi3ForCausalLM", "Phi3Config", **_GQA),
    "bert": _made("BertModel", "BertConfig", **{**_DEEP, **_TWO}, **_NO_DROPOUT),
    "bert, padded": _made(
        "BertModel", "BertConfig", lambda: _tokens(attention_mask=torch.tensor([[1] * 7, [1] * 4 + [0] * 3])),
        **_DEEP, **_NO_DROPOUT,
    ),
    "roberta": _made("RobertaModel", "RobertaConfig", **_DEEP, **_NO_DROPOUT),
    "distilbert": _made(
        "DistilBertModel", "DistilBertConfig", dim=32, hidden_dim=64, n_layers=2, n_heads=4, dropout=0.0,
        attention_dropout=0.0, **_SIZES,
    ),
    "vit": _made(
        "ViTModel", "ViTConfig", _image, image_size=16, patch_size=4,
        **{k: v for k, v in _DEEP.items() if k not in _SIZES}, **_NO_DROPOUT,
    ),
    "clip": _made("CLIPTextModel", "CLIPTextConfig", **_DEEP),
    "clip vision": _made(
        "CLIPVisionModel", "CLIPVisionConfig", _image, image_size=16, patch_size=4,
        **{k: v for k, v in _DEEP.items() if k not in _SIZES},
    ),
    "opt": _made(
        "OPTForCausalLM", "OPTConfig", ffn_dim=64, word_embed_proj_dim=32, dropout=0.0, max_position_embeddings=32,
        **{k: v for k, v in _DEEP.items() if k != "intermediate_size"},
    ),
    "t5": _made(
        "T5Model", "T5Config", _pair, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        **_SIZES,
    ),
    "mixtral": _made("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **_GQA),
    "gpt-neox": _made("GPTNeoXForCausalLM", "GPTNeoXConfig", **_DEEP),
    "falcon": _made(
        "FalconForCausalLM", "FalconConfig", **{k: v for k, v in _DEEP.items() if k != "intermediate_size"}
    ),
    "olmo2": _made("Olmo2ForCausalLM", "Olmo2Config", **_GQA),
    "mlp-mixer": Family(Mixer, lambda: {"x": seeded_randn((2, 8, 32), 3)}),
    "torch encoder": Family(
        lambda: Encoder(_layer(nn.TransformerEncoderLayer), 2), lambda: {"src": seeded_randn((2, 7, 32), 3)}
    ),
    "torch decoder": Family(
        lambda: nn.TransformerDecoder(_layer(nn.TransformerDecoderLayer), 2),
        lambda: {"tgt": seeded_randn((2, 7, 32), 3), "memory": seeded_randn((2, 5, 32), 4)},
    ),
    "convnext": _made(
        "ConvNextModel", "ConvNextConfig", _large_image, patch_size=4, hidden_sizes=[8, 16, 16, 16],
        depths=[1, 1, 1, 1],
    ),
}  # fmt: skip


def randomized(model: nn.Module) -> nn.Module:
    """The model with signed, asymmetric parameters from a fixed seed."""
    for index, parameter in enumerate(model.parameters()):
        drawn = seeded_randn(tuple(parameter.shape), 40 + index)
        parameter.data += 0.05 * drawn + 0.01
    return model


def tensor_of(out: Any) -> Tensor:
    """The output from which a model's loss would be computed."""
    if isinstance(out, Tensor):
        return out
    return next(value for value in (out.values() if hasattr(out, "values") else out) if isinstance(value, Tensor))


def passes(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor | None]:
    """The output of a model, and the gradient of each parameter."""
    y = tensor_of(model(**inputs))
    model.zero_grad()
    (y * seeded_randn(tuple(y.shape), 9)).sum().backward()
    return {"y": y.detach(), **{name: p.grad for name, p in model.named_parameters()}}

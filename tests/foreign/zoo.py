"""Tiny models of other packages, each with the arguments of its call."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Foreign:
    """A model of another package.

    Attributes:
        package: whose model it is.
        name: how the table calls it.
        make: builds the model and the arguments of its call.
    """

    package: str
    name: str
    make: Callable[[], Made]


ZOO: list[Foreign] = []


def _model(
    package: str,
    name: str,
    build: Callable[[], nn.Module],
    args: Callable[[], tuple[Any, ...]] = tuple,
    named: Callable[[], dict[str, Any]] = dict,
) -> None:
    ZOO.append(Foreign(package, name, lambda: (build(), args(), named())))


def _of(path: str) -> Any:
    """A class or function by its module and name; packages that are not installed are missed where a model is built."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _images(size: int = 32, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, size, size)


def _image() -> tuple[Tensor]:
    return (_images(),)


def _tokens(length: int = 16, vocabulary: int = 64, batch: int = 2) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def _text() -> tuple[Tensor]:
    return (_tokens(),)


def _rows() -> tuple[Tensor]:
    return (torch.randn(2, 16, 32),)


# transformers --------------------------------------------------------------------------------------------------------

_TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GQA = {**_TEXT, "num_key_value_heads": 2}
_SEQ2SEQ = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
_IMAGE = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_labels": 5,
}  # fmt: skip

_CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "mpt": ("MptForCausalLM", {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2}),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64,
            "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64,
        },
    ),
    "gpt-j": ("GPTJForCausalLM", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "codegen": ("CodeGenForCausalLM", {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "stablelm": ("StableLmForCausalLM", _GQA),
    "phi": ("PhiForCausalLM", _TEXT),
    "persimmon": ("PersimmonForCausalLM", _TEXT),
    "cohere": ("CohereForCausalLM", _GQA),
    "glm": ("GlmForCausalLM", {**_GQA, "head_dim": 8}),
    "nemotron": ("NemotronForCausalLM", {**_GQA, "head_dim": 8}),
    "granite": ("GraniteForCausalLM", _GQA),
    "gpt-oss": ("GptOssForCausalLM", {**_GQA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {
            **_TEXT, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2, "n_routed_experts": 4, "n_group": 2,
            "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {**_GQA, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "xglm": (
        "XGLMForCausalLM",
        {"vocab_size": 64, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4},
    ),
    "biogpt": ("BioGptForCausalLM", _TEXT),
    "starcoder2": ("Starcoder2ForCausalLM", _GQA),
    "mamba": ("MambaForCausalLM", {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8}),
}  # fmt: skip
_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "electra": ("ElectraModel", {**_TEXT, "embedding_size": 16}),
    "albert": ("AlbertModel", {**_TEXT, "embedding_size": 16}),
    "xlnet": ("XLNetModel", {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "deberta-v2": (
        "DebertaV2Model",
        {**_TEXT, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
    ),
    "mpnet": ("MPNetModel", {**_TEXT, "pad_token_id": 1}),
    "modernbert": ("ModernBertModel", {**_TEXT, "cls_token_id": 1, "sep_token_id": 2}),
    "roformer": ("RoFormerModel", _TEXT),
    "squeezebert": ("SqueezeBertModel", {**_TEXT, "embedding_size": 32, "q_groups": 1, "k_groups": 1, "v_groups": 1,
                                         "post_attention_groups": 1, "intermediate_groups": 1, "output_groups": 1}),
    "convbert": ("ConvBertModel", {**_TEXT, "embedding_size": 32, "head_ratio": 2}),
}  # fmt: skip
_VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "beit": ("BeitForImageClassification", {**_IMAGE, "use_relative_position_bias": True}),
    "dinov2": ("Dinov2ForImageClassification", {**_IMAGE, "mlp_ratio": 2}),
    "deit": ("DeiTForImageClassification", _IMAGE),
    "hf-swin": ("SwinForImageClassification", {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}),
    "siglip": ("SiglipVisionModel", _IMAGE),
    "segformer": ("SegformerForImageClassification", {
        "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2], "sr_ratios": [2, 1],
        "patch_sizes": [7, 3], "strides": [4, 2], "num_encoder_blocks": 2, "mlp_ratios": [2, 2]}),
}  # fmt: skip


def _transformers(kind: str, config: dict[str, Any]) -> nn.Module:
    made = _of(f"transformers.{kind}")
    given = made.config_class(**config)
    for key, value in vars(given).items():
        if "drop" in key and isinstance(value, float):
            setattr(given, key, 0.0)
    return made(given)


def _of_transformers(name: str, kind: str, config: dict[str, Any], call: Callable[[], dict[str, Any]]) -> None:
    _model("transformers", name, functools.partial(_transformers, kind, config), named=call)


for _name, _given in _CAUSAL.items():
    _of_transformers(_name, *_given, lambda: {"input_ids": _tokens(), "use_cache": False})
for _name, _given in _ENCODERS.items():
    _of_transformers(_name, *_given, lambda: {"input_ids": _tokens()})
for _name, _given in _VISION.items():
    _of_transformers(_name, *_given, lambda: {"pixel_values": _images()})
for _name, _kind in (("bart", "BartModel"), ("pegasus", "PegasusModel")):
    _of_transformers(_name, _kind, _SEQ2SEQ, lambda: {"input_ids": _tokens(), "decoder_input_ids": _tokens(12)})
_of_transformers(
    "whisper", "WhisperModel", {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
    lambda: {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": _tokens(12)},
)  # fmt: skip


# timm ----------------------------------------------------------------------------------------------------------------

_VIT = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_TIMM: dict[str, dict[str, Any]] = {
    "vit_base_patch16_224": _VIT,
    "deit3_base_patch16_224": _VIT,
    "beit_base_patch16_224": {**_VIT, "use_rel_pos_bias": True},
    "cait_s24_224": {**_VIT, "depth_token_only": 1},
    "eva02_tiny_patch14_224": _VIT,
    "xcit_nano_12_p8_224": {"embed_dim": 32, "depth": 1, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {
        "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4), "window_size": 4, "patch_size": 2},
    "swinv2_tiny_window8_256": {
        "embed_dim": 16, "depths": (2, 1), "num_heads": (2, 4), "window_size": 4, "patch_size": 2},
    "naflexvit_base_patch16_gap": {"embed_dim": 32, "depth": 1, "num_heads": 4, "patch_size": 8},
}  # fmt: skip


def _timm(name: str, config: dict[str, Any]) -> nn.Module:
    sized = {} if name.startswith("naflex") else {"img_size": 32}
    return _of("timm.create_model")(name, num_classes=5, **sized, **config)


for _name, _config in _TIMM.items():
    _model("timm", _name, functools.partial(_timm, _name, _config), _image)


_MLPS = {"mixer": {}, "gluMlp mixer": {"mlp_layer": "GluMlp"}, "gmlp": {"block_layer": "SpatialGatingBlock"},
         "resmlp": {"block_layer": "ResBlock"}}  # fmt: skip


def _mixer(name: str, config: dict[str, str]) -> nn.Module:
    from timm import layers
    from timm.models import mlp_mixer

    found = {key: getattr(mlp_mixer, kind, None) or getattr(layers, kind) for key, kind in config.items()}
    found |= {"mlp_ratio": 2} if "block_layer" in config else {}
    found |= {"mlp_layer": layers.GatedMlp} if name == "gmlp" else {}
    return mlp_mixer.MlpMixer(num_classes=5, img_size=32, patch_size=8, num_blocks=2, embed_dim=32, **found)


for _name, _config in _MLPS.items():
    _model("timm", _name, functools.partial(_mixer, _name, _config), _image)
_model(
    "timm", "convnext",
    lambda: _of("timm.models.convnext.ConvNeXt")(num_classes=5, depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)),
    lambda: (_images(64),),
)  # fmt: skip
_model(
    "timm", "block_with_layer_scale",
    lambda: _of("timm.models.vision_transformer.Block")(32, 4, qkv_bias=True, qk_norm=True, init_values=0.1), _rows,
)  # fmt: skip


# x-transformers ------------------------------------------------------------------------------------------------------

_X: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary, rmsnorm, swiglu": {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_swish": True, "ff_glu": True},
    "alibi, kv heads": {"alibi_pos_bias": True, "attn_kv_heads": 2},
    "qk norm, flash": {"attn_qk_norm": True, "attn_flash": True, "rotary_pos_emb": True},
    "relative bias, scalenorm": {"rel_pos_bias": True, "use_scalenorm": True},
    "simple rmsnorm, relu2": {"use_simple_rmsnorm": True, "ff_relu_squared": True, "attn_flash": True},
}


def _x(config: dict[str, Any]) -> nn.Module:
    layers = _of("x_transformers.Decoder")(dim=32, depth=2, heads=4, attn_dim_head=8, **config)
    return _of("x_transformers.TransformerWrapper")(num_tokens=64, max_seq_len=32, attn_layers=layers)


for _name, _config in _X.items():
    _model("x-transformers", _name, functools.partial(_x, _config), _text)


# vit-pytorch ---------------------------------------------------------------------------------------------------------

_VP = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64,
       "dim_head": 8}  # fmt: skip
_VIT_PYTORCH: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("vit_pytorch.vit.ViT", _VP),
    "SimpleViT": ("vit_pytorch.simple_vit.SimpleViT", _VP),
    "SimpleViT with qk norm": ("vit_pytorch.simple_vit_with_qk_norm.SimpleViT", _VP),
    "DeepViT": ("vit_pytorch.deepvit.DeepViT", _VP),
    "CaiT": ("vit_pytorch.cait.CaiT", {**_VP, "cls_depth": 1}),
    "parallel ViT": ("vit_pytorch.parallel_vit.ViT", _VP),
    "small dataset ViT": ("vit_pytorch.vit_for_small_dataset.ViT", _VP),
}
for _name, (_path, _config) in _VIT_PYTORCH.items():
    _model("vit-pytorch", _name, lambda path=_path, config=_config: _of(path)(**config), _image)


# litgpt, torchtune ---------------------------------------------------------------------------------------------------

_LIT: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {"n_query_groups": 2},
    "pythia-160m": {},
    "Gemma-2b": {"n_query_groups": 1},
    "phi-2": {},
    "Qwen3-0.6B": {"n_query_groups": 2, "head_size": 8},
    "OLMo-2-1124-7B": {"n_query_groups": 4},
}


def _litgpt(name: str, config: dict[str, Any]) -> nn.Module:
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 32, "padded_vocab_size": 64}
    return _of("litgpt.GPT")(_of("litgpt.Config").from_name(name, intermediate_size=64, **{**sizes, **config}))


for _name, _config in _LIT.items():
    _model("litgpt", _name, functools.partial(_litgpt, _name, _config), _text)

_TUNE = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 32,
         "intermediate_dim": 64}  # fmt: skip
for _name, _config in {"llama3": {}, "qwen2": {}, "mistral": {}, "gemma": {"head_dim": 8}}.items():
    _path = f"torchtune.models.{_name}.{_name}"
    _model("torchtune", _name, lambda path=_path, config=_config: _of(path)(**_TUNE, **config), _text)


# diffusers -----------------------------------------------------------------------------------------------------------

_model(
    "diffusers", "dit",
    lambda: _of("diffusers.DiTTransformer2DModel")(
        num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_size=8, num_embeds_ada_norm=10),
    lambda: (torch.randn(2, 4, 8, 8),),
    lambda: {"timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([1, 2]), "return_dict": False},
)  # fmt: skip
_model(
    "diffusers", "sd3",
    lambda: _of("diffusers.SD3Transformer2DModel")(
        sample_size=8, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16,
        caption_projection_dim=32, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8),
    lambda: (torch.randn(2, 4, 8, 8),),
    lambda: {"encoder_hidden_states": torch.randn(2, 6, 16), "pooled_projections": torch.randn(2, 16),
             "timestep": torch.tensor([3, 5]), "return_dict": False},
)  # fmt: skip
_model(
    "diffusers", "flux",
    lambda: _of("diffusers.FluxTransformer2DModel")(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8)),
    lambda: (torch.randn(2, 16, 4),),
    lambda: {"encoder_hidden_states": torch.randn(2, 6, 16), "pooled_projections": torch.randn(2, 16),
             "timestep": torch.tensor([0.3, 0.5]), "img_ids": torch.randint(0, 4, (16, 3)).float(),
             "txt_ids": torch.zeros(6, 3), "return_dict": False},
)  # fmt: skip
_model(
    "diffusers", "pixart",
    lambda: _of("diffusers.PixArtTransformer2DModel")(
        num_attention_heads=4, attention_head_dim=8, num_layers=2, cross_attention_dim=32, sample_size=8,
        caption_channels=16, use_additional_conditions=False, out_channels=4),
    lambda: (torch.randn(2, 4, 8, 8),),
    lambda: {"encoder_hidden_states": torch.randn(2, 6, 16), "timestep": torch.tensor([3, 5]),
             "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "return_dict": False},
)  # fmt: skip
_model(
    "diffusers", "transformer block, geglu",
    lambda: _of("diffusers.models.attention.BasicTransformerBlock")(32, 4, 8, cross_attention_dim=16), _rows,
    lambda: {"encoder_hidden_states": torch.randn(2, 6, 16)},
)  # fmt: skip
_model(
    "diffusers", "wan",
    lambda: _of("diffusers.WanTransformer3DModel")(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=48, num_layers=1, rope_max_seq_len=16),
    lambda: (torch.randn(2, 4, 2, 8, 8),),
    lambda: {"timestep": torch.tensor([3, 5]), "encoder_hidden_states": torch.randn(2, 6, 16), "return_dict": False},
)  # fmt: skip


# open_clip, esm, torchvision, torchaudio -----------------------------------------------------------------------------


def _clip() -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=2)
    return CLIP(16, vision, text)


def _coca() -> nn.Module:
    from open_clip.coca_model import CoCa, MultimodalCfg
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=1, width=32, head_width=8, patch_size=8, image_size=32, attentional_pool=True,
                           attn_pooler_heads=4, output_tokens=True)  # fmt: skip
    text = CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=1, embed_cls=True,
                       output_tokens=True)  # fmt: skip
    return CoCa(
        32, MultimodalCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=1, mlp_ratio=2), text, vision
    )


for _name, _build in (("clip", _clip), ("coca", _coca)):
    _model("open_clip", _name, _build, lambda: (_images(), _tokens(12)))
_model(
    "fair-esm", "esm2", lambda: _of("esm.model.esm2.ESM2")(num_layers=2, embed_dim=32, attention_heads=4),
    lambda: (_tokens(vocabulary=24),),
)  # fmt: skip
_model(
    "torchvision",
    "vit",
    lambda: _of("torchvision.models.VisionTransformer")(32, 8, 2, 4, 32, 64, num_classes=5),
    _image,
)


def _swin(**how: Any) -> nn.Module:
    sizes = [2, 2], 16, [2, 1], [2, 4], [4, 4]
    return _of("torchvision.models.SwinTransformer")(*sizes, num_classes=5, stochastic_depth_prob=0.0, **how)


_SWIN = "torchvision.models.swin_transformer"
_model("torchvision", "swin", _swin, _image)
_model(
    "torchvision", "swin_v2",
    lambda: _swin(block=_of(f"{_SWIN}.SwinTransformerBlockV2"), downsample_layer=_of(f"{_SWIN}.PatchMergingV2")),
    _image,
)  # fmt: skip
_model(
    "torchaudio", "conformer", lambda: _of("torchaudio.models.Conformer")(32, 4, 64, 1, 3),
    lambda: (torch.randn(2, 16, 32), torch.tensor([16, 12])),
)  # fmt: skip
_model(
    "torchaudio", "wav2vec2",
    lambda: _of("torchaudio.models.wav2vec2_model")(
        extractor_mode="layer_norm", extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)], extractor_conv_bias=False,
        encoder_embed_dim=32, encoder_projection_dropout=0.0, encoder_pos_conv_kernel=4, encoder_pos_conv_groups=2,
        encoder_num_layers=2, encoder_num_heads=4, encoder_attention_dropout=0.0, encoder_ff_interm_features=64,
        encoder_ff_interm_dropout=0.0, encoder_dropout=0.0, encoder_layer_norm_first=True, encoder_layer_drop=0.0,
        aux_num_out=8),
    lambda: (torch.randn(2, 400),),
)  # fmt: skip


# tables, graphs, sound, sets -----------------------------------------------------------------------------------------

_model(
    "rtdl_revisiting_models", "ft_transformer",
    lambda: _of("rtdl_revisiting_models.FTTransformer")(
        n_cont_features=4, cat_cardinalities=[3, 5], d_out=2, n_blocks=2, d_block=32, attention_n_heads=4,
        attention_dropout=0.0, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0),
    lambda: (torch.randn(16, 4), torch.randint(0, 3, (16, 2))),
)  # fmt: skip
_model(
    "rtdl_revisiting_models", "ResNet",
    lambda: _of("rtdl_revisiting_models.ResNet")(
        d_in=8, d_out=2, n_blocks=2, d_block=32, d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0),
    lambda: (torch.randn(16, 8),),
)  # fmt: skip
_model(
    "tab-transformer-pytorch", "tab_transformer",
    lambda: _of("tab_transformer_pytorch.FTTransformer")(
        categories=(3, 5), num_continuous=4, dim=32, depth=2, heads=4, dim_head=8),
    lambda: (torch.randint(0, 3, (8, 2)), torch.randn(8, 4)),
)  # fmt: skip
_model(
    "tabm", "tabm",
    lambda: _of("tabm.TabM")(
        n_num_features=8, d_out=2, n_blocks=2, d_block=32, k=4, dropout=0.0, start_scaling_init="normal"),
    lambda: (torch.randn(16, 8),),
)  # fmt: skip


def _gps() -> nn.Module:
    from torch_geometric.nn import GINConv, GPSConv

    mlp = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return GPSConv(32, GINConv(mlp), heads=4, norm="layer_norm")


_model("torch_geometric", "gps", _gps, lambda: (torch.randn(12, 32), torch.randint(0, 12, (2, 30))))
_model(
    "performer-pytorch", "performer",
    lambda: _of("performer_pytorch.PerformerLM")(
        num_tokens=64, max_seq_len=32, dim=32, depth=1, heads=4, dim_head=8, nb_features=16, ff_glu=True,
        feature_redraw_interval=None, auto_check_redraw=False),
    lambda: (_tokens(32),),
)  # fmt: skip
_model(
    "perceiver-pytorch", "perceiver",
    lambda: _of("perceiver_pytorch.Perceiver")(
        num_freq_bands=2, depth=1, max_freq=4.0, num_latents=8, latent_dim=32, latent_heads=4, cross_dim_head=8,
        latent_dim_head=8, num_classes=5),
    lambda: (torch.randn(2, 8, 8, 3),),
)  # fmt: skip
_model(
    "conformer", "conformer_block",
    lambda: _of("conformer.ConformerBlock")(dim=32, dim_head=8, heads=4, ff_mult=2, conv_kernel_size=3), _rows,
)  # fmt: skip
_model(
    "local-attention", "local_transformer",
    lambda: _of("local_attention.LocalTransformer")(
        num_tokens=64, dim=32, depth=1, max_seq_len=32, dim_head=8, heads=4, ff_mult=2, local_attn_window_size=8,
        causal=True, num_residual_streams=1),
    _text,
)  # fmt: skip
_model(
    "soft-moe-pytorch", "soft_moe",
    lambda: _of("soft_moe_pytorch.SoftMoE")(dim=32, seq_len=16, num_experts=2, expert_mult=2, geglu=True), _rows,
)  # fmt: skip
_MAMBA = "mambapy.mamba.Mamba"
_model(
    "mambapy", "mamba",
    lambda: _of(_MAMBA)(_of(f"{_MAMBA}Config")(d_model=32, n_layers=1, d_state=8, pscan=False)),
    lambda: (torch.randn(2, 8, 32),),
)  # fmt: skip
_CONFORMER = "speechbrain.lobes.models.transformer.Conformer.ConformerEncoder"
_model(
    "speechbrain", "speech_conformer",
    lambda: _of(_CONFORMER)(1, 32, 64, 4, kernel_size=3, attention_type="regularMHA"), _rows,
)  # fmt: skip
_model(
    "espnet", "espnet_encoder",
    lambda: _of("espnet.nets.pytorch_backend.transformer.encoder.Encoder")(
        idim=8, attention_dim=32, attention_heads=4, linear_units=64, num_blocks=2, input_layer="linear",
        dropout_rate=0.0, positional_dropout_rate=0.0),
    lambda: (torch.randn(2, 16, 8), torch.ones(2, 1, 16, dtype=torch.bool)),
)  # fmt: skip


def chosen(words: list[str]) -> Iterator[Foreign]:
    """The models whose package or name contains one of these words; all models for no words."""
    for model in ZOO:
        label = f"{model.package}: {model.name}"
        if not words or any(word in label for word in words):
            yield model

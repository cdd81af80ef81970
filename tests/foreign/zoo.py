"""Tiny models of other packages, each built by a function that returns a module and the arguments of its call."""

from __future__ import annotations

import dataclasses
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


def _model(package: str, name: str = "") -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        ZOO.append(Foreign(package, name or make.__name__.strip("_"), make))
        return make

    return add


def _images(size: int = 32, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, size, size)


def _tokens(length: int = 16, vocabulary: int = 64, batch: int = 2) -> Tensor:
    return torch.randint(3, vocabulary, (batch, length))


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


def _of_transformers(name: str, kind: str, config: dict[str, Any], call: Callable[[], dict[str, Any]]) -> None:
    def make() -> Made:
        import transformers

        made = getattr(transformers, kind)
        given = made.config_class(**config)
        for key, value in vars(given).items():
            if "drop" in key and isinstance(value, float):
                setattr(given, key, 0.0)
        return made(given), (), call()

    ZOO.append(Foreign("transformers", name, make))


for _name, (_kind, _config) in _CAUSAL.items():
    _of_transformers(_name, _kind, _config, lambda: {"input_ids": _tokens(), "use_cache": False})
for _name, (_kind, _config) in _ENCODERS.items():
    _of_transformers(_name, _kind, _config, lambda: {"input_ids": _tokens()})
for _name, (_kind, _config) in _VISION.items():
    _of_transformers(_name, _kind, _config, lambda: {"pixel_values": _images()})
_of_transformers("bart", "BartModel", _SEQ2SEQ, lambda: {"input_ids": _tokens(), "decoder_input_ids": _tokens(12)})
_of_transformers("pegasus", "PegasusModel", _SEQ2SEQ, lambda: {
    "input_ids": _tokens(), "decoder_input_ids": _tokens(12)})  # fmt: skip
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


def _of_timm(name: str, config: dict[str, Any]) -> None:
    def make() -> Made:
        import timm

        sized = {} if name.startswith("naflex") else {"img_size": 32}
        return timm.create_model(name, num_classes=5, **sized, **config), (_images(),), {}

    ZOO.append(Foreign("timm", name, make))


for _name, _config in _TIMM.items():
    _of_timm(_name, _config)


_MLPS = {"mixer": {}, "gluMlp mixer": {"mlp_layer": "GluMlp"}, "gmlp": {"block_layer": "SpatialGatingBlock"},
         "resmlp": {"block_layer": "ResBlock"}}  # fmt: skip


def _of_mixer(name: str, config: dict[str, str]) -> None:
    def make() -> Made:
        from timm import layers
        from timm.models import mlp_mixer

        found = {key: getattr(mlp_mixer, kind, None) or getattr(layers, kind) for key, kind in config.items()}
        found |= {"mlp_ratio": 2} if "block_layer" in config else {}
        found |= {"mlp_layer": layers.GatedMlp} if name == "gmlp" else {}
        made = mlp_mixer.MlpMixer(num_classes=5, img_size=32, patch_size=8, num_blocks=2, embed_dim=32, **found)
        return made, (_images(),), {}

    ZOO.append(Foreign("timm", name, make))


for _name, _config in _MLPS.items():
    _of_mixer(_name, _config)


@_model("timm")
def convnext() -> Made:
    from timm.models.convnext import ConvNeXt

    return ConvNeXt(num_classes=5, depths=(1, 1, 1, 1), dims=(8, 16, 16, 32)), (_images(64),), {}


@_model("timm")
def block_with_layer_scale() -> Made:
    from timm.models.vision_transformer import Block

    return Block(32, 4, qkv_bias=True, qk_norm=True, init_values=0.1), (torch.randn(2, 16, 32),), {}


# x-transformers ------------------------------------------------------------------------------------------------------

_X: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary, rmsnorm, swiglu": {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_swish": True, "ff_glu": True},
    "alibi, kv heads": {"alibi_pos_bias": True, "attn_kv_heads": 2},
    "qk norm, flash": {"attn_qk_norm": True, "attn_flash": True, "rotary_pos_emb": True},
    "relative bias, scalenorm": {"rel_pos_bias": True, "use_scalenorm": True},
    "simple rmsnorm, relu2": {"use_simple_rmsnorm": True, "ff_relu_squared": True, "attn_flash": True},
}


def _of_x(name: str, config: dict[str, Any]) -> None:
    def make() -> Made:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **config)
        return TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers), (_tokens(),), {}

    ZOO.append(Foreign("x-transformers", name, make))


for _name, _config in _X.items():
    _of_x(_name, _config)


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


def _of_vit_pytorch(name: str, path: str, config: dict[str, Any]) -> None:
    def make() -> Made:
        module, _, kind = path.rpartition(".")
        return getattr(_imported(module), kind)(**config), (_images(),), {}

    ZOO.append(Foreign("vit-pytorch", name, make))


def _imported(module: str) -> Any:
    import importlib

    return importlib.import_module(module)


for _name, (_path, _config) in _VIT_PYTORCH.items():
    _of_vit_pytorch(_name, _path, _config)


# litgpt, torchtune ---------------------------------------------------------------------------------------------------

_LIT: dict[str, dict[str, Any]] = {
    "Llama-3-8B": {"n_query_groups": 2},
    "pythia-160m": {},
    "Gemma-2b": {"n_query_groups": 1},
    "phi-2": {},
    "Qwen3-0.6B": {"n_query_groups": 2, "head_size": 8},
    "OLMo-2-1124-7B": {"n_query_groups": 4},
}


def _of_litgpt(name: str, config: dict[str, Any]) -> None:
    def make() -> Made:
        from litgpt import GPT, Config

        sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 32, "padded_vocab_size": 64}
        return GPT(Config.from_name(name, intermediate_size=64, **{**sizes, **config})), (_tokens(),), {}

    ZOO.append(Foreign("litgpt", name, make))


for _name, _config in _LIT.items():
    _of_litgpt(_name, _config)

_TUNE = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "max_seq_len": 32,
         "intermediate_dim": 64}  # fmt: skip
for _name, _config in {"llama3": {}, "qwen2": {}, "mistral": {}, "gemma": {"head_dim": 8}}.items():

    def _make(name: str = _name, config: dict[str, Any] = _config) -> Made:
        return getattr(_imported(f"torchtune.models.{name}"), name)(**_TUNE, **config), (_tokens(),), {}

    ZOO.append(Foreign("torchtune", _name, _make))


# diffusers -----------------------------------------------------------------------------------------------------------


@_model("diffusers")
def dit() -> Made:
    from diffusers import DiTTransformer2DModel

    made = DiTTransformer2DModel(num_attention_heads=4, attention_head_dim=8, num_layers=2, sample_size=8,
                                 num_embeds_ada_norm=10)  # fmt: skip
    called = {"timestep": torch.tensor([3, 5]), "class_labels": torch.tensor([1, 2]), "return_dict": False}
    return made, (torch.randn(2, 4, 8, 8),), called


@_model("diffusers")
def sd3() -> Made:
    from diffusers import SD3Transformer2DModel

    made = SD3Transformer2DModel(
        sample_size=8, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=16,
        caption_projection_dim=32, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    )  # fmt: skip
    called = {"encoder_hidden_states": torch.randn(2, 6, 16), "pooled_projections": torch.randn(2, 16),
              "timestep": torch.tensor([3, 5]), "return_dict": False}  # fmt: skip
    return made, (torch.randn(2, 4, 8, 8),), called


@_model("diffusers")
def flux() -> Made:
    from diffusers import FluxTransformer2DModel

    made = FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    called = {
        "encoder_hidden_states": torch.randn(2, 6, 16), "pooled_projections": torch.randn(2, 16),
        "timestep": torch.tensor([0.3, 0.5]), "img_ids": torch.randint(0, 4, (16, 3)).float(),
        "txt_ids": torch.zeros(6, 3), "return_dict": False,
    }  # fmt: skip
    return made, (torch.randn(2, 16, 4),), called


@_model("diffusers")
def pixart() -> Made:
    from diffusers import PixArtTransformer2DModel

    made = PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=8, num_layers=2, cross_attention_dim=32, sample_size=8,
        caption_channels=16, use_additional_conditions=False, out_channels=4,
    )  # fmt: skip
    called = {"encoder_hidden_states": torch.randn(2, 6, 16), "timestep": torch.tensor([3, 5]),
              "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "return_dict": False}  # fmt: skip
    return made, (torch.randn(2, 4, 8, 8),), called


@_model("diffusers", "transformer block, geglu")
def basic_block() -> Made:
    from diffusers.models.attention import BasicTransformerBlock

    made = BasicTransformerBlock(32, 4, 8, cross_attention_dim=16)
    return made, (torch.randn(2, 16, 32),), {"encoder_hidden_states": torch.randn(2, 6, 16)}


@_model("diffusers")
def wan() -> Made:
    from diffusers import WanTransformer3DModel

    made = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=48, num_layers=1, rope_max_seq_len=16,
    )  # fmt: skip
    called = {"timestep": torch.tensor([3, 5]), "encoder_hidden_states": torch.randn(2, 6, 16), "return_dict": False}
    return made, (torch.randn(2, 4, 2, 8, 8),), called


# open_clip, esm, torchvision, torchaudio -----------------------------------------------------------------------------


@_model("open_clip")
def clip() -> Made:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=32)
    text = CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=2)
    return CLIP(16, vision, text), (_images(), _tokens(12)), {}


@_model("open_clip")
def coca() -> Made:
    from open_clip.coca_model import CoCa, MultimodalCfg
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=1, width=32, head_width=8, patch_size=8, image_size=32, attentional_pool=True,
                           attn_pooler_heads=4, output_tokens=True)  # fmt: skip
    text = CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=1, embed_cls=True,
                       output_tokens=True)  # fmt: skip
    multimodal = MultimodalCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=1, mlp_ratio=2)
    return CoCa(32, multimodal, text, vision), (_images(), _tokens(12)), {}


@_model("fair-esm")
def esm2() -> Made:
    from esm.model.esm2 import ESM2

    return ESM2(num_layers=2, embed_dim=32, attention_heads=4), (_tokens(vocabulary=24),), {}


@_model("torchvision")
def vit() -> Made:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 2, 4, 32, 64, num_classes=5), (_images(),), {}


@_model("torchvision")
def swin() -> Made:
    from torchvision.models import SwinTransformer

    made = SwinTransformer([2, 2], 16, [2, 1], [2, 4], [4, 4], num_classes=5, stochastic_depth_prob=0.0)
    return made, (_images(),), {}


@_model("torchvision")
def swin_v2() -> Made:
    from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformer, SwinTransformerBlockV2

    made = SwinTransformer([2, 2], 16, [2, 1], [2, 4], [4, 4], num_classes=5, stochastic_depth_prob=0.0,
                           block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)  # fmt: skip
    return made, (_images(),), {}


@_model("torchaudio")
def conformer() -> Made:
    from torchaudio.models import Conformer

    return Conformer(32, 4, 64, 1, 3), (torch.randn(2, 16, 32), torch.tensor([16, 12])), {}


@_model("torchaudio")
def wav2vec2() -> Made:
    from torchaudio.models import wav2vec2_model

    made = wav2vec2_model(
        extractor_mode="layer_norm", extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)], extractor_conv_bias=False,
        encoder_embed_dim=32, encoder_projection_dropout=0.0, encoder_pos_conv_kernel=4, encoder_pos_conv_groups=2,
        encoder_num_layers=2, encoder_num_heads=4, encoder_attention_dropout=0.0, encoder_ff_interm_features=64,
        encoder_ff_interm_dropout=0.0, encoder_dropout=0.0, encoder_layer_norm_first=True, encoder_layer_drop=0.0,
        aux_num_out=8,
    )  # fmt: skip
    return made, (torch.randn(2, 400),), {}


# tables, graphs, sound, sets -----------------------------------------------------------------------------------------


@_model("rtdl_revisiting_models")
def ft_transformer() -> Made:
    from rtdl_revisiting_models import FTTransformer

    made = FTTransformer(
        n_cont_features=4, cat_cardinalities=[3, 5], d_out=2, n_blocks=2, d_block=32, attention_n_heads=4,
        attention_dropout=0.0, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip
    return made, (torch.randn(16, 4), torch.randint(0, 3, (16, 2))), {}


@_model("rtdl_revisiting_models", "ResNet")
def rtdl_resnet() -> Made:
    from rtdl_revisiting_models import ResNet

    made = ResNet(d_in=8, d_out=2, n_blocks=2, d_block=32, d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0)
    return made, (torch.randn(16, 8),), {}


@_model("tab-transformer-pytorch")
def tab_transformer() -> Made:
    from tab_transformer_pytorch import FTTransformer

    made = FTTransformer(categories=(3, 5), num_continuous=4, dim=32, depth=2, heads=4, dim_head=8)
    return made, (torch.randint(0, 3, (8, 2)), torch.randn(8, 4)), {}


@_model("tabm")
def tabm() -> Made:
    from tabm import TabM

    made = TabM(n_num_features=8, d_out=2, n_blocks=2, d_block=32, k=4, dropout=0.0, start_scaling_init="normal")
    return made, (torch.randn(16, 8),), {}


@_model("torch_geometric")
def gps() -> Made:
    from torch_geometric.nn import GINConv, GPSConv

    mlp = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    edges = torch.randint(0, 12, (2, 30))
    return GPSConv(32, GINConv(mlp), heads=4, norm="layer_norm"), (torch.randn(12, 32), edges), {}


@_model("performer-pytorch")
def performer() -> Made:
    from performer_pytorch import PerformerLM

    made = PerformerLM(num_tokens=64, max_seq_len=32, dim=32, depth=1, heads=4, dim_head=8, nb_features=16,
                       ff_glu=True, feature_redraw_interval=None, auto_check_redraw=False)  # fmt: skip
    return made, (_tokens(32),), {}


@_model("perceiver-pytorch")
def perceiver() -> Made:
    from perceiver_pytorch import Perceiver

    made = Perceiver(num_freq_bands=2, depth=1, max_freq=4.0, num_latents=8, latent_dim=32, latent_heads=4,
                     cross_dim_head=8, latent_dim_head=8, num_classes=5)  # fmt: skip
    return made, (torch.randn(2, 8, 8, 3),), {}


@_model("conformer")
def conformer_block() -> Made:
    from conformer import ConformerBlock

    return ConformerBlock(dim=32, dim_head=8, heads=4, ff_mult=2, conv_kernel_size=3), (torch.randn(2, 16, 32),), {}


@_model("local-attention")
def local_transformer() -> Made:
    from local_attention import LocalTransformer

    made = LocalTransformer(num_tokens=64, dim=32, depth=1, max_seq_len=32, dim_head=8, heads=4, ff_mult=2,
                            local_attn_window_size=8, causal=True, num_residual_streams=1)  # fmt: skip
    return made, (_tokens(16),), {}


@_model("soft-moe-pytorch")
def soft_moe() -> Made:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(dim=32, seq_len=16, num_experts=2, expert_mult=2, geglu=True), (torch.randn(2, 16, 32),), {}


@_model("mambapy")
def mamba() -> Made:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=32, n_layers=1, d_state=8, pscan=False)), (torch.randn(2, 8, 32),), {}


@_model("speechbrain")
def speech_conformer() -> Made:
    from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder

    made = ConformerEncoder(1, 32, 64, 4, kernel_size=3, attention_type="regularMHA")
    return made, (torch.randn(2, 16, 32),), {}


@_model("espnet")
def espnet_encoder() -> Made:
    from espnet.nets.pytorch_backend.transformer.encoder import Encoder

    made = Encoder(idim=8, attention_dim=32, attention_heads=4, linear_units=64, num_blocks=2, input_layer="linear",
                   dropout_rate=0.0, positional_dropout_rate=0.0)  # fmt: skip
    return made, (torch.randn(2, 16, 8), torch.ones(2, 1, 16, dtype=torch.bool)), {}


def chosen(words: list[str]) -> Iterator[Foreign]:
    """The models whose package or name contains one of these words; all models for no words."""
    for model in ZOO:
        label = f"{model.package}: {model.name}"
        if not words or any(word in label for word in words):
            yield model

"""Altered models of Hugging Face: alterations that cannot be converted are refused by name, never ignored."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from seqfuse.integrations.huggingface import from_huggingface
from tests.alterations import Doubled, Quantized, Twice, at, patched, twice
from tests.integrations.test_huggingface import gpt2, llama

transformers = pytest.importorskip("transformers")

X = torch.randint(3, 61, (2, 7), generator=torch.Generator().manual_seed(3))


def replaced(path: str) -> Callable[[Any], None]:
    """A module that replaces another and contains it."""
    return lambda m: m.set_submodule(path, Twice(m.get_submodule(path)))


def having(path: str, **attributes: Any) -> Callable[[Any], None]:
    return lambda m: m.get_submodule(path).__dict__.update(attributes)


def quiet(change: Callable[[Any], object]) -> Callable[[Any], object]:
    def alter(module: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            change(module)

    return alter


MLP, NORM, ATTN, ROTARY = (
    "model.layers.1.mlp",
    "model.layers.1.input_layernorm",
    "model.layers.1.self_attn",
    "model.rotary_emb",
)
Q = f"{ATTN}.q_proj"
OWN = transformers.LlamaConfig(attn_implementation="sdpa")  # by default its softmax is rounded to float32
LLAMA: dict[str, tuple[Callable[[Any], object], str]] = {
    "a forward hook": (at(MLP, lambda m: m.register_forward_hook(twice)), rf"{MLP} has hooks \(_forward_hooks\)"),
    "a pre-hook": (at(NORM, lambda m: m.register_forward_pre_hook(twice)), rf"{NORM} has hooks \(_forward_pre_hooks\)"),
    "a hook of the model": (lambda m: m.register_forward_hook(lambda *_: None), r"it has hooks \(_forward_hooks\)"),
    "a backward hook": (at(MLP, lambda m: m.register_full_backward_hook(lambda *_: None)), f"{MLP} has hooks"),
    "a backward pre-hook": (at(MLP, lambda m: m.register_full_backward_pre_hook(lambda *_: None)), f"{MLP} has hooks"),
    "a hook of state": (at(MLP, lambda m: m.register_state_dict_post_hook(lambda *_: None)), f"{MLP} has hooks"),
    "a forward of an instance": (at(MLP, patched), f"{MLP} has its own forward"),
    "compiled": (having(MLP, _compiled_call_impl=twice), f"{MLP} has _compiled_call_impl=.*, which was added"),
    "another class of an instance": (
        at(Q, lambda m: setattr(m, "__class__", type("L", (nn.Linear,), {}))), f"{Q} is a .*L, not"
    ),
    "an activation": (
        at(MLP, lambda m: setattr(m, "act_fn", nn.ReLU())), f"{MLP}.act_fn is a torch.*ReLU, not a transf"
    ),
    "eps of a norm": (having(NORM, variance_epsilon=0.1), f"{NORM} has variance_epsilon=0.1, not 1e-06"),
    "eps of the configuration": (
        lambda m: setattr(m.config, "rms_norm_eps", 0.1), "has variance_epsilon=1e-06, not 0.1"
    ),
    "a configuration of its own": (
        lambda m: setattr(m.get_submodule(ATTN), "config", OWN), f"{ATTN} has config="
    ),
    "the scale of attention": (having(ATTN, scaling=1.0), f"{ATTN} has scaling=1.0, not 0.35"),
    "heads in a group": (having(ATTN, num_key_value_groups=1), f"{ATTN} has num_key_value_groups=1, not 2"),
    "the size of a head": (having(ATTN, head_dim=4), f"{ATTN} has head_dim=4, not 8"),
    "dropout of attention": (having(ATTN, attention_dropout=0.5), f"{ATTN} has attention_dropout=0.5, not 0.0"),
    "not causal": (having(ATTN, is_causal=False), f"{ATTN} has is_causal=False, not True"),
    "a sliding window": (having(ATTN, sliding_window=2), f"{ATTN} has sliding_window=2, which was added"),
    "a missing attribute": (at(ATTN, lambda m: delattr(m, "is_causal")), f"{ATTN} has no is_causal"),
    "angles": (at(ROTARY, lambda m: m.inv_freq.mul_(0.5)), f"{ROTARY}.inv_freq does not hold what the settings say"),
    "rounded angles": (lambda m: m.bfloat16(), "inv_freq does not hold .*bfloat16: a cast of the model rounds it"),
    "the scale of a rotation": (having(ROTARY, attention_scaling=2.0), f"{ROTARY} has attention_scaling=2.0, not 1.0"),
    "the kind of a rotation": (having(ROTARY, rope_type="dynamic"), f"{ROTARY} has rope_type='dynamic', not 'default'"),
    "an adapter": (replaced(Q), rf"{Q} is a tests\..*Twice, not a torch.nn.modules.linear.Linear"),
    "a norm of another kind": (lambda m: m.set_submodule(NORM, nn.Identity()), f"{NORM} is a torch.*Identity, not a"),
    "a parametrization": (
        at(Q, lambda m: parametrize.register_parametrization(m, "weight", Doubled())), f"{Q} is a .*ParametrizedLinear"
    ),
    "a weight norm": (at(Q, quiet(nn.utils.weight_norm)), f"{Q} has hooks"),
    "a weight norm by parametrization": (
        at(Q, nn.utils.parametrizations.weight_norm), f"{Q} is a .*ParametrizedLinear"
    ),
    "a spectral norm": (at(Q, nn.utils.spectral_norm), f"{Q} has hooks"),
    "pruned": (at(Q, lambda m: prune.l1_unstructured(m, "weight", 0.5)), f"{Q} has hooks"),
    "a quantized weight": (
        at(Q, lambda m: setattr(m, "weight", Quantized(m.weight.data))), f"{Q}.weight is a .*Quantized, no plain"
    ),
    "a bias": (at(Q, lambda m: setattr(m, "bias", nn.Parameter(torch.ones(32)))), f"{Q}.bias is a parameter that was"),
    "a weight of another shape": (
        at(Q, lambda m: setattr(m, "weight", nn.Parameter(torch.ones(64, 32)))),
        rf"{Q}.weight has shape \(64, 32\), not \(32, 32",
    ),
    "no weight": (at(NORM, lambda m: setattr(m, "weight", None)), f"{NORM}.weight is not a parameter any more"),
    "a module beside": (
        at(MLP, lambda m: m.add_module("adapter", nn.Linear(2, 2))), f"{MLP}.adapter is a .*that was added"
    ),
    "a buffer beside": (
        at(MLP, lambda m: m.register_buffer("b", torch.ones(2))), f"{MLP}.b is a buffer that was added"
    ),
    "a parameter beside": (
        lambda m: m.register_parameter("soft", nn.Parameter(torch.ones(2))), "soft is a parameter that was added"
    ),
    "a layer less": (lambda m: m.model.layers.__delitem__(1), "model.layers.1 is missing"),
    "a layer more": (lambda m: m.model.layers.append(llama().model.layers[0]), "model.layers.2 is a .* that was added"),
    "layers in another order": (
        lambda m: setattr(m.model, "layers", nn.ModuleList(reversed(m.model.layers))), "has layer_idx=1, not 0"
    ),
    "a layer twice": (
        lambda m: m.model.layers.__setitem__(1, m.model.layers[0]), "model.layers.1.* has layer_idx=0, not 1"
    ),
    "a weight twice": (
        lambda m: setattr(m.model.layers[1].mlp.up_proj, "weight", m.model.layers[0].mlp.up_proj.weight),
        "layers.1.mlp.up_proj.weight is tied to model.layers.0.mlp.up_proj.weight, its configuration says",
    ),
    "a head tied by hand": (
        lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight), "lm_head.weight is tied to model.embed_tok"
    ),
    "a part in evaluation": (at(MLP, lambda m: m.eval()), f"{MLP} is in evaluation mode, unlike the whole"),
    "a part in another dtype": (
        at(Q, lambda m: m.double()), f"{Q}.weight is torch.float64 on cpu, and the first parameter"
    ),
    "a part on another device": (at(Q, lambda m: m.to("meta")), f"{Q}.weight is torch.float32 on meta"),
    "a hook of a weight": (at(Q, lambda m: m.weight.register_hook(twice)), f"{Q}.weight has hooks"),
    "a hook behind a gradient": (
        at(Q, lambda m: m.weight.register_post_accumulate_grad_hook(lambda p: None)), f"{Q}.weight has hooks"
    ),
    "a limit on the embedding": (having("model.embed_tokens", max_norm=0.1), "embed_tokens has max_norm=0.1, not None"),
    "gradients of the embedding": (
        having("model.embed_tokens", scale_grad_by_freq=True), "scale_grad_by_freq=True, not"
    ),
    "a padding token": (having("model.embed_tokens", padding_idx=5), "embed_tokens has padding_idx=5, not None"),
    "checkpointing": (having("model", gradient_checkpointing=True), "has gradient_checkpointing=True, not False"),
    "queries frozen, keys not": (
        at(Q, lambda m: m.requires_grad_(False)), "attention.mixer.qkv.weight some are frozen"
    ),
}  # fmt: skip
BLOCK = "transformer.h.1"
GPT2: dict[str, tuple[Callable[[Any], object], str]] = {
    "a forward hook": (at(f"{BLOCK}.mlp", lambda m: m.register_forward_hook(twice)), f"{BLOCK}.mlp has hooks"),
    "a forward of an instance": (at(f"{BLOCK}.mlp.c_fc", patched), f"{BLOCK}.mlp.c_fc has its own forward"),
    "an activation": (
        at(f"{BLOCK}.mlp", lambda m: setattr(m, "act", nn.ReLU())), f"{BLOCK}.mlp.act is a torch.*ReLU, not"
    ),
    "eps of a norm": (having(f"{BLOCK}.ln_1", eps=0.1), f"{BLOCK}.ln_1 has eps=0.1, not 1e-05"),
    "a norm without weights": (
        lambda m: m.set_submodule(f"{BLOCK}.ln_1", nn.LayerNorm(32, elementwise_affine=False)),
        f"{BLOCK}.ln_1 has elementwise_affine=False, not True",
    ),
    "dropout of a layer": (having(f"{BLOCK}.mlp.dropout", p=0.5), f"{BLOCK}.mlp.dropout has p=0.5, not 0.0"),
    "dropout of attention": (having(f"{BLOCK}.attn.attn_dropout", p=0.5), "attn.attn_dropout has p=0.5, not 0.0"),
    "the number of heads": (
        having(f"{BLOCK}.attn", num_heads=2, head_dim=16), f"{BLOCK}.attn has num_heads=2, not 4; {BLOCK}"
    ),
    "the scale of attention": (having(f"{BLOCK}.attn", scaling=1.0), f"{BLOCK}.attn has scaling=1.0, not 0.35"),
    "scaled by its layer": (
        having(f"{BLOCK}.attn", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"
    ),
    "an untied head": (
        lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.data.clone())),
        "lm_head.weight is not tied, its configuration says transformer.wte.weight",
    ),
    "an adapter": (replaced(f"{BLOCK}.attn.c_attn"), f"{BLOCK}.attn.c_attn is a .*Twice, not a transformers.*Conv1D"),
}  # fmt: skip
ALTERED = {
    **{f"llama, {name}": (llama, *case) for name, case in LLAMA.items()},
    **{f"gpt2, {name}": (gpt2, *case) for name, case in GPT2.items()},
}


@pytest.mark.parametrize("name", ALTERED)
def test_what_was_altered_is_refused_by_name(name: str) -> None:
    make, alter, says = ALTERED[name]
    model = make()
    alter(model)
    with pytest.raises(ValueError, match=says):
        from_huggingface(model)


def test_a_function_with_arguments_is_compared_with_them() -> None:
    model: Any = gpt2(n_layer=1, activation_function="gelu_pytorch_tanh")
    from_huggingface(model)
    model.transformer.h[0].mlp.act.act = functools.partial(nn.functional.gelu, approximate="none")
    with pytest.raises(ValueError, match=r"mlp\.act has act=functools\.partial.*, not functools\.partial"):
        from_huggingface(model)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_subclass_is_refused(make: Callable[..., Any]) -> None:
    model: Any = make()
    model.__class__ = type(f"{type(model).__name__}", (type(model),), {"forward": lambda *given, **named: None})
    with pytest.raises(TypeError, match=r"there is no model for \w+ of tests\.integrations"):
        from_huggingface(model)


def sine(*given: Any, **named: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize(
    "what", ["LlamaMLP.forward", "apply_rotary_pos_emb", "eager_attention_forward", "LlamaRMSNorm"]
)
def test_what_was_put_in_the_place_of_code_of_transformers_is_refused(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = "transformers.models.llama.modeling_llama"
    other = type(what, (transformers.models.llama.modeling_llama.LlamaRMSNorm,), {}) if what == "LlamaRMSNorm" else sine
    monkeypatch.setattr(f"{home}.{what}", other)
    model = llama(num_hidden_layers=1, attn_implementation="eager")
    says = "whose class or its forward was replaced" if what.startswith("Llama") else r"computes by tests\..*\.sine"
    with pytest.raises(ValueError, match=says):
        from_huggingface(model)


def test_attention_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = llama(num_hidden_layers=1)
    functions = type(transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS)._global_mapping
    monkeypatch.setitem(functions, model.config._attn_implementation, sine)
    with pytest.raises(ValueError, match=r"was altered: it computes by tests\..*\.sine"):
        from_huggingface(model)


KEPT: dict[str, Callable[[Any], object]] = {
    "other numbers": lambda m: m.lm_head.weight.data.mul_(2),
    "other parameters": lambda m: setattr(m.lm_head, "weight", nn.Parameter(m.lm_head.weight.data * 2)),
    "evaluation": lambda m: m.eval(),
    "frozen": lambda m: m.requires_grad_(False),
    "a frozen part": lambda m: m.model.layers[0].requires_grad_(False),
    "a hook that was removed": lambda m: m.model.layers[0].register_full_backward_hook(lambda *_: None).remove(),
    "another kernel of attention": lambda m: m.set_attn_implementation("eager"),
    "float64": lambda m: m.double(),
    "another activation of the same kind": at("model.layers.0.mlp", lambda m: setattr(m, "act_fn", type(m.act_fn)())),
}  # fmt: skip


@pytest.mark.parametrize("alter", KEPT.values(), ids=KEPT.keys())
def test_what_is_taken_over_is_the_same_model(alter: Callable[[Any], object]) -> None:
    model: Any = llama()
    alter(model)
    mine = from_huggingface(model)
    torch.testing.assert_close(mine(X).float(), model(X).logits.float())  # norms there are float32, whatever the dtype
    assert mine.training is model.training
    wanting = {name for name, p in mine.named_parameters() if p.requires_grad}
    first = {name for name, _ in mine.named_parameters() if name.startswith("layers.0.")}
    everything = {name for name, _ in mine.named_parameters()}
    assert wanting == {KEPT["frozen"]: set(), KEPT["a frozen part"]: everything - first}.get(alter, everything)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_a_model_that_was_saved_and_loaded_is_taken(make: Callable[..., Any], tmp_path: Any) -> None:
    make().save_pretrained(tmp_path)
    for how in ({}, {"dtype": torch.bfloat16}):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **how)
        close = {"atol": 0.1, "rtol": 0.02} if how.get("dtype") else {}
        torch.testing.assert_close(from_huggingface(model)(X), model(X).logits, **close)


def test_conversion_draws_nothing_and_leaves_the_model_as_it_was() -> None:
    model: Any = llama(num_hidden_layers=1)
    before, config = {n: (p, p._version) for n, p in model.named_parameters()}, model.config.to_dict()
    from_huggingface(model)
    assert {n: (p, p._version) for n, p in model.named_parameters()} == before
    assert model.config.to_dict() == config
    assert all(m.config is model.config for m in model.modules() if hasattr(m, "config"))

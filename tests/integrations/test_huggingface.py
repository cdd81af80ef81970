"""GPT-2, Llama and its relatives compared with Hugging Face's own, from small random configurations."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.inference import generate
from seqfuse.integrations.huggingface import from_huggingface, gpt2_state, llama_state
from seqfuse.testing import seeded_randn
from tests.judging import judge_together

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(**changed: Any) -> nn.Module:
    usual = {"n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_embd=32, n_head=4, n_positions=40, **SIZES, **{**usual, **changed})
    return randomized(transformers.GPT2LMHeadModel(config))


def llama(family: str = "Llama", **changed: Any) -> nn.Module:
    config = getattr(transformers, f"{family}Config")(
        **{
            "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 2, "tie_word_embeddings": False, **SIZES, **changed,
        }
    )  # fmt: skip
    return randomized(getattr(transformers, f"{family}ForCausalLM")(config))


def randomized(model: nn.Module) -> nn.Module:
    for index, parameter in enumerate(model.parameters()):
        parameter.data = 0.3 * seeded_randn(tuple(parameter.shape), 40 + index)
    return model


LIKE_LLAMA = functools.partial(llama_state, heads=4, kv_heads=2)
CONVERT = {"gpt2": gpt2_state, **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2"), LIKE_LLAMA)}
MODELS = {
    "gpt2": lambda: gpt2(n_inner=48),
    "llama": llama,
    "llama, tied, wide heads": lambda: llama(tie_word_embeddings=True, head_dim=12),
    "llama, biases": lambda: llama(attention_bias=True, mlp_bias=True, rope_theta=500.0),
    "llama, biases of attention": lambda: llama(attention_bias=True),
    "mistral": lambda: llama("Mistral", sliding_window=5),
    "mistral, all keys": lambda: llama("Mistral", sliding_window=None, head_dim=12),
    "qwen2": lambda: llama("Qwen2"),
    "qwen3": lambda: llama("Qwen3", head_dim=12, rms_norm_eps=1e-3),
    "phi3": lambda: llama("Phi3", resid_pdrop=0.0, pad_token_id=0, sliding_window=7),
    "phi3, part of a head": lambda: llama("Phi3", resid_pdrop=0.0, pad_token_id=0, partial_rotary_factor=0.5),
    "olmo2": lambda: llama("Olmo2", rms_norm_eps=1e-3),
}


DRAWS = 16
"""An error may be almost all in one element if the input of a norm is large: many draws average it."""


def tokens(seed: int) -> Tensor:
    """Every token, so that each row of the embedding has a gradient in each draw, and one token twice."""
    order = torch.randperm(61, generator=torch.Generator().manual_seed(seed))
    return torch.cat((order, order[:1])).view(2, 31)


def results(model: nn.Module, x: Tensor, kind: str | None) -> dict[str, Tensor]:
    """Logits and every gradient, under the names of the model here."""
    model.zero_grad()
    out = model(x)
    y = out if kind is None else out.logits
    F.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    named = grads if kind is None else CONVERT[kind](grads)
    return {"y": y.detach(), **{name: named[name] for name in sorted(named)}}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_all_gradients_are_those_of_hugging_face(name: str):
    its, kind = MODELS[name](), name.partition(",")[0]
    mine, exact = from_huggingface(its), copy.deepcopy(its).double()

    def measure(seed: int) -> tuple[dict[str, Tensor], ...]:
        x = tokens(seed)
        return results(mine, x, None), results(its, x, kind), results(exact, x, kind)

    judge_together(measure, 1, DRAWS)
    found, _, _ = measure(1)
    assert sum(p.numel() for p in mine.parameters()) == sum(p.numel() for p in its.parameters())
    assert len(found) == 1 + len(list(mine.parameters()))
    assert not mine.plan(torch.zeros(1, 20, dtype=torch.long)).eager


def test_dropout_rates_are_taken_over():
    mine: Any = from_huggingface(gpt2(resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3))
    rates = [m.p for m in mine.modules() if isinstance(m, ops.Dropout)]
    assert rates == [0.2] + 4 * [0.1]
    assert {m.dropout for m in mine.modules() if isinstance(m, ops.Attention)} == {0.3}
    assert isinstance(mine, sf.Sequential)
    mine = from_huggingface(llama("Phi3", pad_token_id=0, resid_pdrop=0.1, attention_dropout=0.3))
    assert [m.p for m in mine.modules() if isinstance(m, ops.Dropout)] == 4 * [0.1]
    assert {m.dropout for m in mine.modules() if isinstance(m, ops.Attention)} == {0.3}


@pytest.mark.parametrize("make", [gpt2, llama])
def test_left_padded_prompts_are_refused_where_the_configuration_says_what_pads(make: Any) -> None:
    x = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    with pytest.raises(ValueError, match="prompt 0 begins with the padding token 0"):
        generate(from_huggingface(make(pad_token_id=0).eval()), x, 2)
    generate(from_huggingface(make(pad_token_id=1).eval()), torch.ones_like(x), 2)  # a prompt begins with it


ALTERED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Mistral": ("model.layers.1.mlp.act_fn", {"forward": torch.relu}, "act_fn has its own forward"),
    "Qwen2": ("model.layers.1.self_attn", {"scaling": 1.0}, "self_attn has scaling=1.0"),
    "Qwen3": ("model.layers.1.self_attn.q_norm", {"variance_epsilon": 0.1}, "q_norm has variance_epsilon=0.1"),
    "Phi3": ("model.layers.0.resid_mlp_dropout", {"p": 0.5}, "resid_mlp_dropout has p=0.5"),
    "Olmo2": ("model.layers.0.post_feedforward_layernorm", {"variance_epsilon": 0.1}, "has variance_epsilon=0.1"),
}


@pytest.mark.parametrize("family", ALTERED)
def test_a_relative_of_llama_that_was_altered_is_refused(family: str):
    path, attributes, says = ALTERED[family]
    model = llama(family, pad_token_id=0)
    vars(model.get_submodule(path)).update(attributes)
    with pytest.raises(ValueError, match=says):
        from_huggingface(model)


def test_generates_what_a_relative_of_llama_generates():
    theirs = llama("Qwen2", pad_token_id=0).eval()
    x = torch.tensor([[5, 6, 7, 8]])
    y = generate(from_huggingface(theirs), x, 6)
    wanted = theirs.generate(x, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(y[:, : wanted.shape[1]], wanted)


def test_what_has_no_layer_is_refused():
    with pytest.raises(ValueError, match="sliding windows of some layers"):
        from_huggingface(llama("Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1))
    with pytest.raises(TypeError, match="there is no model for Linear"):
        from_huggingface(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="activation_function='relu'"):
        from_huggingface(gpt2(activation_function="relu"))
    with pytest.raises(ValueError, match="hidden_act='gelu'"):
        from_huggingface(llama(hidden_act="gelu"))
    with pytest.raises(ValueError, match="rope_type='linear'"):
        from_huggingface(llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}))

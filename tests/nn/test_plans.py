"""Plans of N transformer layers on a GPU: N times the same steps, and one fusion across each boundary."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.integrations.huggingface import from_huggingface
from seqfuse.nn import TransformerStack

ROWS, WIDTH = 8192, 1024
ROTARY = functools.partial(ops.RotaryEmbedding, style="half")
GPT: dict[str, Any] = {}
LLAMA: dict[str, Any] = {
    "kv_heads": 4, "activation": ops.SwiGLU, "bias": False, "qk_norm": True, "rotary": ROTARY,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _without_data():
    with torch.device("meta"):
        yield


def plan_of(model: sf.Sequential, x: torch.Tensor, grad: bool) -> sf.Plan:
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, grad=grad, rows=ROWS)
    return model.bfloat16().train(grad).plan(x, env=env)


def unfused(cover: Any) -> set[str]:
    return {step.name for step in cover if not step.fused}


@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("norm", [ops.LayerNorm, ops.RMSNorm])
@pytest.mark.parametrize("pre", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("form", [GPT, LLAMA], ids=["GPT", "Llama"])
def test_each_layer_fuses_alike_and_with_the_next(form: dict[str, Any], pre: bool, norm: Any, grad: bool, layers: int):
    stack = TransformerStack(
        layers, WIDTH, 16, pre_norm=pre, norm=norm, causal=True, dropout=0.1, final_norm=False, **form
    )
    x = torch.empty(8, ROWS // 8, WIDTH, dtype=torch.bfloat16, requires_grad=grad)
    plan = plan_of(stack, x, grad)
    # The end of each block with the next norm, which the last block of a pre-norm layer has in the next layer.
    assert plan.count("BlockBoundary") == 2 * layers - pre
    gated = form is LLAMA
    assert plan.count("BiasGated" if gated else "LinearBiasPointwise") == layers
    heads = "BiasQKNormRotary" if grad else "BiasQKNormRotaryAttention"
    assert plan.count(heads) == layers * gated
    # The last block of pre-norm layers ends the sequence. In inference its dropout is off, so its bias is the GEMM's.
    assert plan.count("BiasDropoutAdd") == (pre and grad)
    assert plan.count("LinearBias") == (0 if gated else layers + (pre and not grad))
    # A dropout that is off computes nothing, and neither does a fork.
    assert unfused(plan.forward) <= {
        "Fork",
        norm.__name__,
        "Linear",
        "Attention",
        *([] if grad else ["Dropout", "Add"]),
    }
    if grad:
        assert plan.count("BlockBoundaryBackward") == 2 * layers - pre
        assert_backward_is_fused(plan, layers, norms=2 * layers)
        assert plan.count("BiasQKNormRotaryBackward") == layers * gated


def assert_backward_is_fused(plan: sf.Plan, layers: int, *, norms: int, alone: str = "") -> None:
    """Each norm is fused with the sum before it, if any, each activation with the bias before it."""
    assert unfused(plan.backward) <= {"Linear", "Attention", "Fork", "Add", "Embedding", "PositionEmbedding", alone}
    assert plan.count("BlockBoundaryBackward") + plan.count("NormBackward") == norms
    assert plan.count("PointwiseChainBackward") + plan.count("BiasGatedBackward") == layers


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_converted_model_has_the_same_fusions(kind: str):
    """Llama has separate GEMMs for queries, keys and values; GPT-2 one, with another layout."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        its: nn.Module = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=WIDTH, n_head=16, n_layer=3, n_positions=ROWS, **sizes)
        )
    else:
        its = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=WIDTH, intermediate_size=2816, num_attention_heads=16, num_key_value_heads=4,
                num_hidden_layers=3, **sizes,
            )
        )  # fmt: skip
    tokens = torch.empty(8, ROWS // 8, dtype=torch.int64)
    plan = plan_of(from_huggingface(its), tokens, True)
    gated = kind == "llama"
    # The sum at the end of each block is fused with the next norm.
    assert plan.count("BlockBoundary") == 6
    assert plan.count("BiasGated" if gated else "LinearBiasPointwise") == 3
    # After an embedding a Dropout is one kernel by itself.
    assert_backward_is_fused(plan, 3, norms=7, alone="" if gated else "Dropout")

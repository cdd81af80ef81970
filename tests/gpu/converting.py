"""Models of Hugging Face with random parameters, their passes, and the error bound for a whole model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu.blocks import Float64
from torch import Tensor, nn

from seqfuse.testing import seeded_randn
from seqfuse.testing.judge import mismatch_of

transformers = pytest.importorskip("transformers")

HERE = torch.cuda.is_available()
W, HEADS, SHAPE, VOCABULARY = (1024, 16, (2, 512), 1000) if HERE else (32, 4, (2, 9), 64)
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
DEEP: dict[str, Any] = {
    "hidden_size": W, "intermediate_size": 3 * W, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "max_position_embeddings": 1024,
}  # fmt: skip
GQA = {**DEEP, **SIZES, "num_key_value_heads": HEADS // 4}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5: dict[str, Any] = {
    "d_model": W, "d_kv": W // HEADS, "d_ff": 3 * W, "num_layers": 2, "num_heads": HEADS, "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu", **SIZES,
}  # fmt: skip
MODES = ("float32", "bfloat16", "autocast")


def gpt2(dropout: float = 0.0, head: str = "GPT2Model") -> Any:
    config = transformers.GPT2Config(
        n_embd=W, n_layer=2, n_head=HEADS, n_positions=1024, resid_pdrop=dropout, embd_pdrop=dropout,
        attn_pdrop=dropout, **SIZES,
    )  # fmt: skip
    return getattr(transformers, head)(config)


def llama(head: str = "LlamaModel", **more: Any) -> Any:
    return getattr(transformers, head)(transformers.LlamaConfig(**{**GQA, **more}))


FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": gpt2,
    "llama": llama,
    "mistral": lambda: transformers.MistralModel(transformers.MistralConfig(sliding_window=SHAPE[1] // 4, **GQA)),
    "bert": lambda: transformers.BertModel(
        transformers.BertConfig(**DEEP, **SIZES, **NO_DROPOUT), add_pooling_layer=False
    ),
    "gemma2": lambda: transformers.Gemma2Model(
        transformers.Gemma2Config(head_dim=W // HEADS, sliding_window=SHAPE[1] // 4, **GQA)
    ),
    "t5": lambda: transformers.T5Model(transformers.T5Config(**T5)),
    "vit": lambda: transformers.ViTModel(
        transformers.ViTConfig(image_size=224 if HERE else 16, patch_size=16 if HERE else 4, **DEEP, **NO_DROPOUT),
        add_pooling_layer=False,
    ),
}


def built(make: Callable[[], Any], device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """A model with signed, asymmetric parameters."""
    torch.manual_seed(0)
    model = make().to(device, dtype).train()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            drawn = seeded_randn(tuple(p.shape), i).to(p)
            p.add_(0.3 * drawn if p.ndim == 1 else 0.01 * drawn)
    return model


def tokens(device: torch.device, seed: int = 1, shape: tuple[int, int] = SHAPE) -> Tensor:
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed)).to(device)


def inputs_of(family: str, device: torch.device, seed: int = 1) -> dict[str, Any]:
    if family == "vit":
        size = 224 if HERE else 16
        return {"pixel_values": seeded_randn((2, 3, size, size), seed).to(device)}
    given: dict[str, Any] = {"input_ids": tokens(device, seed)}
    if family == "t5":
        given["decoder_input_ids"] = tokens(device, seed + 1, (SHAPE[0], SHAPE[1] // 2))
    return given


def passes(model: nn.Module, given: dict[str, Any], seed: int = 2) -> dict[str, Tensor | None]:
    """The last hidden state, and every gradient."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    given = {n: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in given.items()}
    with Float64() if dtype is torch.float64 else contextlib.nullcontext():
        y = model(**given)[0]
    y.backward(seeded_randn(tuple(y.shape), seed).to(y))
    return {"y": y.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def held_to_the_rule(measure: Callable[[int], tuple[Any, ...]]) -> None:
    """The error bound of one operation holds the thousands of rows and elements of a model's gradients, some of which
    miss it by chance: behind causal attention a row of a gradient of queries is mostly that of one early token. What is
    wrong misses it with each of three seeds: a tensor by all its elements, or the same row, column or element of it.

    `measure` gives what was converted, eager's, that in float64, and eager's again by other libraries.
    """
    wrong: set[tuple[str, ...]] | None = None
    for seed in (1, 11, 21):
        found, eager, exact, *others = measure(seed)
        missed = mismatch_of(found, eager, exact, others)
        if missed is None:
            return
        places = {
            (check.tensor, check.part, *([check.where] if check.part in ("tile", "element") else []))
            for check in missed.report.failures
        }
        if any(part == "structure" for _, part, *_ in places):
            raise missed
        wrong = places if wrong is None else wrong & places
        if not wrong:
            return
    raise AssertionError(f"missed with each seed: {sorted(wrong or ())}")


def fused(conversion: Any) -> int:
    """The number of fused steps in the chains' latest plans."""
    return sum(sum(region.plan.fused) for graph in conversion.graphs for region in graph.regions)


@contextlib.contextmanager
def other_library() -> Iterator[None]:
    """GEMMs by the other of cuBLAS's two libraries, which adds in other orders."""
    choose: Any = torch.backends.cuda.preferred_blas_library
    before = str(choose()).rpartition(".")[2].lower()
    choose("cublas" if before.endswith("lt") else "cublaslt")
    try:
        yield
    finally:
        choose(before)

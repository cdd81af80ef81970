"""Models of Hugging Face as they are, compiled, with Liger's kernels, and converted."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import plain
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import seqfuse as sf

from .blocks import again, drawn, flops, passes, trained
from .case import Case, Contender, Inputs, Run
from .peers import compiled, module
from .sizes import Model, Sizes

BERT = Model(1024, 4096, 16, 16, 64, False, name="bert-large")
GROUP, LAYERS = "converted: forward + backward", 2


class Float64(TorchFunctionMode):
    """Casts to float32 give float64: models that cast norms or softmax would make the reference a float32 one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda v: torch.float64 if v is torch.float32 else v, (args, kwargs or {}))
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


class OfVectors(nn.Module):
    """A model of Hugging Face without its embeddings: x [B, S, H] to the last hidden state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        with Float64() if x.dtype is torch.float64 else contextlib.nullcontext():
            return self.inner(inputs_embeds=x).last_hidden_state


def converted(model: OfVectors, **options: Any) -> OfVectors:
    # Rows are measured at one shape and checked at a smaller one, which must not make sizes of the graph symbols.
    torch._dynamo.config.automatic_dynamic_shapes = False  # pyright: ignore[reportPrivateUsage]
    sf.convert(model.inner, **options)
    return model


def with_liger(model: OfVectors) -> Callable[[Tensor], Tensor]:
    """A Llama with Liger's kernels, whose patch of RoPE, a function that all Llamas call, lasts for its calls alone."""
    library: Any = module("liger_kernel.transformers")
    theirs: Any = module("transformers.models.llama.modeling_llama")
    before = dict(vars(theirs))
    library.apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=model.inner)
    rope = theirs.apply_rotary_pos_emb
    vars(theirs).update(before)
    model.inner.norm.in_place = False  # it would write over the gradient that all contenders are given

    def run(x: Tensor) -> Tensor:
        theirs.apply_rotary_pos_emb = rope
        try:
            return model(x)
        finally:
            theirs.apply_rotary_pos_emb = before["apply_rotary_pos_emb"]

    run.parameters = model.parameters  # pyright: ignore[reportFunctionMemberAccess]
    return run


def without_zeros(contender: Contender, model: Callable[[], nn.Module]) -> Contender:
    """Without gradients of keys' biases, which are zero but for roundings: softmax subtracts what they add."""

    def prepare(inputs: Inputs) -> Run:
        call, names = contender.prepare(inputs), [name for name, _ in model().named_parameters()]
        zeros = {2 + i for i, name in enumerate(names) if name.endswith("key.bias")}
        return lambda: [t for i, t in enumerate(call()) if i not in zeros]

    return dataclasses.replace(contender, prepare=prepare)


def cases(sizes: Sizes) -> Iterator[Case]:
    """Layers of three models, forward and backward."""
    if importlib.util.find_spec("transformers") is not None:
        named = {model.name: model for model in sizes.models}
        bert = BERT if sizes.device.type == "cuda" else dataclasses.replace(sizes.models[0], name="bert")
        yield _passes(sizes, named.get("llama3-8b", sizes.models[-1]), "Llama", 1, sizes.sequence)
        yield _passes(sizes, named.get("gpt2-xl", sizes.models[0]), "GPT2", 1, sizes.sequence)
        yield _passes(sizes, bert, "Bert", 2, 512)


def _passes(sizes: Sizes, model: Model, family: str, priority: int, sequence: int) -> Case:
    rows, length = sizes.tokens[0], min(sequence, sizes.tokens[0])

    @functools.cache
    def eager() -> OfVectors:
        torch.manual_seed(0)
        more = {"num_key_value_heads": model.kv_heads, "head_dim": model.head_dim} if family == "Llama" else {}
        with torch.device(sizes.device):
            inner: Any = plain.hugging(
                f"{family}Model", model.H, LAYERS, length, model.heads, model.F, vocabulary=64, **more
            )
        with torch.no_grad():
            for p in inner.to(sizes.dtype).train().parameters():
                if p.ndim == 1:  # those that start from zero or one would hide errors
                    p.add_(torch.randn_like(p), alpha=0.1)
        inner.get_input_embeddings().requires_grad_(False)
        return OfVectors(inner)

    there = model.llama and module("liger_kernel.transformers") is not None
    models = {
        "seqfuse": lambda: converted(again(eager())), "eager": eager,
        "seqfuse lean": lambda: converted(again(eager()), memory="lean"),
        "compile": (lambda: compiled(again(eager()), sizes.compile_modes[0])) if sizes.compile_modes else None,
        "liger": (lambda: with_liger(again(eager()))) if there else None,
    }  # fmt: skip
    return passes(
        GROUP, f"{model.name} x {LAYERS} {rows}", sizes, model, rows, models, lambda: copy.deepcopy(eager()).double(),
        how=lambda make, within: without_zeros(trained(make, within), eager), priority=priority,
        make=drawn(dataclasses.replace(sizes, sequence=length), model, "x", "dy"),
        # Rows of gradients of queries are mostly one early token's: tests/gpu judges these over several draws.
        judged=lambda outputs: outputs[:2], flops=3 * LAYERS * flops("layer", model, rows, length),
        shape={"layers": LAYERS},
    )  # fmt: skip

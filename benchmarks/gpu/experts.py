"""Experts of a mixture forward and backward, for tokens whose experts are chosen, beside Hugging Face's and a loop.

The router is left out: its scores differ by roundings, and with them the experts of some tokens.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops import _grouped

from .blocks import Models, passes, trained
from .case import Case, Inputs, Outputs, generator, normal
from .peers import module
from .sizes import Mixture, Sizes

GROUP = "experts"


class Loop(nn.Module):
    """Each expert by itself: its tokens are found, which the host waits for, and added where they belong."""

    def __init__(self, up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: Tensor, *, experts: Tensor, probs: Tensor) -> Tensor:
        y = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for e in range(len(self.up)):
            tokens, which = (experts == e).nonzero(as_tuple=True)
            gate, up = F.linear(x[tokens], self.up[e]).chunk(2, -1)
            made = F.linear(F.silu(gate) * up, self.down[e])
            y = y.index_add(0, tokens, made * probs[tokens, which].unsqueeze(-1))
        return y.to(x.dtype)


class Theirs(nn.Module):
    """Hugging Face's experts of Mixtral, with one of its implementations."""

    def __init__(self, mixture: Mixture, implementation: str, up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        config = module("transformers").MixtralConfig(
            hidden_size=mixture.H, intermediate_size=mixture.F, num_local_experts=mixture.experts,
            num_experts_per_tok=mixture.top_k,
        )  # fmt: skip
        config._experts_implementation = implementation
        with torch.device("meta"):
            self.experts = module("transformers.models.mixtral.modeling_mixtral").MixtralExperts(config)
        self.experts.gate_up_proj, self.experts.down_proj = up, down

    def forward(self, x: Tensor, *, experts: Tensor, probs: Tensor) -> Tensor:
        return self.experts(x, experts, probs)


def fused(mixture: Mixture, **made: Any) -> sf.Sequential:
    """Ours."""
    count, H, F = mixture.experts, mixture.H, mixture.F
    up = ops.GroupedLinear(count, H, 2 * F, bias=False, **made)
    down = ops.GroupedLinear(count, F, H, bias=False, **made)
    return sf.Sequential(ops.Permute(count, mixture.top_k), up, ops.SwiGLU(), down, ops.Unpermute())


def of_one_expert(outputs: Outputs) -> Outputs:
    """Results with the gradients of the first expert's weights: of all they are billions of numbers in float64."""
    return [*outputs[:3], *(None if t is None else t[:1] for t in outputs[3:])]


def cases(sizes: Sizes) -> Iterator[Case]:
    """Every mixture."""
    return (_case(sizes, mixture) for mixture in sizes.mixtures)


def _case(sizes: Sizes, mixture: Mixture) -> Case:
    of, rows = Models(sizes, functools.partial(fused, mixture)), sizes.tokens[0]

    def make(tokens: int, seed: int) -> Inputs:
        draw = generator(sizes.device, seed)
        scores = torch.randn(tokens, mixture.experts, generator=draw, device=sizes.device)
        scores = scores + 0.5 * torch.randn(mixture.experts, generator=draw, device=sizes.device)  # of unequal load
        probs, experts = scores.softmax(-1).topk(mixture.top_k, -1)
        drawn = normal(dict.fromkeys(("x", "dy"), (tokens, mixture.H)), seed, sizes.device, sizes.dtype)
        return {**drawn, "experts": experts, "probs": probs / probs.sum(-1, keepdim=True)}

    def loop() -> Loop:
        return Loop(*of.ours.parameters())

    without_torchs = functools.partial(mock.patch.object, _grouped, "_takes", return_value=False)
    models: dict[str, Any] = dict.fromkeys(("seqfuse", "seqfuse, our GEMM"), lambda: of.ours)
    models["seqfuse lean"] = functools.partial(of.choosing, "lean")
    if module("transformers.integrations.moe") is None:
        models["eager"] = loop
    else:
        theirs = ("eager", "grouped_mm")
        models |= {"loop": loop} | {n: lambda n=n: Theirs(mixture, n, *of.ours.parameters()) for n in theirs}
    return passes(
        GROUP, f"{mixture.name} {rows}", sizes, mixture, rows, models, lambda: copy.deepcopy(loop()).double(),
        how=functools.partial(trained, leaves=("x", "probs")), within={"seqfuse, our GEMM": without_torchs}, make=make,
        judged=of_one_expert, priority=1, flops=3 * 2.0 * rows * mixture.top_k * 3 * mixture.H * mixture.F,
        shape={"experts": mixture.experts},
    )  # fmt: skip

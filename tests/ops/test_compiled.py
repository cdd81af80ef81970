"""Models that a compiler captures whole compute the same as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import seeded_randn

X, TOKENS = seeded_randn((5, 6), 0), torch.tensor([[1, 3, 10], [0, 1, 1]])
ENDS = torch.tensor([2, 4], dtype=torch.int32)
KV = {name: seeded_randn((2, 7, 16), i) for i, name in enumerate("kv")}
MODELS: dict[str, tuple[sf.Sequential, Tensor, dict[str, Tensor]]] = {
    "channels": (sf.Sequential(ops.Fork("r"), ops.GeLU(), ops.Take("r"), ops.Tanh(), ops.Add()), X, {}),
    "merged linear": (sf.Sequential(ops.RMSNorm(6), ops.MergedLinear(6, (9, 2, 4)), ops.GeLU()), X, {}),
    "merged linear apart": (
        sf.Sequential(ops.RMSNorm(6), ops.MergedLinear.of(*(ops.Linear(6, n) for n in (9, 2, 4))), ops.GeLU()), X, {},
    ),
    "cross attention": (sf.Sequential(ops.RMSNorm(32), ops.CrossAttention(4, 2)), seeded_randn((2, 5, 32), 2), KV),
    "embedding": (sf.Sequential(ops.Embedding(11, 6, padding_idx=3)), TOKENS, {}),
    "grouped linear": (
        sf.Sequential(ops.GroupedLinear(2, 6, 8), ops.SwiGLU(), ops.GroupedLinear(2, 4, 6)), X, {"offsets": ENDS},
    ),
    "experts": (
        sf.Sequential(
            ops.Route(6, 3, 2), ops.Permute(3, 2), ops.GroupedLinear(3, 6, 8), ops.SwiGLU(),
            ops.GroupedLinear(3, 4, 6), ops.Unpermute(),
        ), X, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_compiles_whole(name: str):
    model, x, named = MODELS[name]
    x, *rest = inputs = [t.detach().requires_grad_(t.is_floating_point()) for t in (x, *named.values())]
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    found, expected = (run(x, **dict(zip(named, rest, strict=True))) for run in (compiled, model))
    torch.testing.assert_close(found, expected)
    leaves = [t for t in (*inputs, *model.parameters()) if t.requires_grad]
    found, expected = (torch.autograd.grad(y.square().sum(), leaves) for y in (found, expected))
    torch.testing.assert_close(found, expected)

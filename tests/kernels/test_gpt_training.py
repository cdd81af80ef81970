"""Some steps of training a small GPT with its loss, fused and unfused, from one seed on the same tokens."""

from __future__ import annotations

import copy
import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import fusions, ops
from seqfuse.losses import LinearCrossEntropy, _chunks
from seqfuse.nn import TransformerStack
from seqfuse.ops import _attention

from .conftest import DEVICE

STEPS, BATCH, LENGTH, DIM, VOCABULARY = 12, 6, 7, 16, 29
TOKENS = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(DEVICE)


class GPT(nn.Module):
    """Tokens to the loss of the next ones; the loss's weight is the table of tokens."""

    def __init__(self, **attention: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        rotary = functools.partial(ops.RotaryEmbedding, style="half")
        shared: dict[str, Any] = {"kv_heads": 1, "qk_norm": True, "rotary": rotary, "causal": True, **attention}
        table = ops.Embedding(VOCABULARY, DIM)
        self.model = sf.Sequential(table, TransformerStack(1, DIM, 2, hidden_dim=24, **shared))
        self.loss = LinearCrossEntropy(DIM, VOCABULARY, bias=True, weight=table.weight, label_smoothing=0.1, chunk=16)
        self.to(DEVICE)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss(self.model(tokens[:, :-1]), tokens[:, 1:])


def trained(model: GPT, dtype: torch.dtype, *, fused: bool, order: Tensor | None = None) -> Tensor:
    """All parameters after the last step, in float64; `order` is that of the sequences, which sums do not depend on."""
    model = copy.deepcopy(model).to(dtype)
    tokens = TOKENS if order is None else TOKENS[order]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with (
            sf.fusing(fused, on_error="raise"),
            mock.patch.object(_attention, "interpreting", fused and DEVICE.type == "cpu"),
        ):
            model(tokens).backward()
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def spread(dtype: torch.dtype) -> tuple[Tensor, float]:
    """The unfused run in float64, and how far from it the farthest of unfused ones ends, each in another order."""
    model = GPT()
    exact = trained(model, torch.float64, fused=False)
    orders = [None, *(torch.randperm(BATCH, generator=torch.Generator().manual_seed(i)) for i in range(4))]
    return exact, max((trained(model, dtype, fused=False, order=o) - exact).norm().item() for o in orders)


def test_kernels_run_from_the_first_operation_to_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT()
    plan = model.model.plan(TOKENS[:, :-1])
    used = {fusion.__name__ for fusion in fusions.triton}
    for cover, heads in ((plan.forward, "BiasQKNormRotary"), (plan.backward, "BiasQKNormRotaryBackward")):
        assert heads in {step.name for step in cover}
        assert sum(step.name in used for step in cover) >= 4, plan
    chunks: list[int] = []
    in_kernel = _chunks._in_kernel

    def noted(how: Any, logits: Tensor, *rest: Any) -> Any:
        chunks.append(len(logits))
        return in_kernel(how, logits, *rest)

    monkeypatch.setattr(_chunks, "_in_kernel", noted)
    before = model(TOKENS)
    assert chunks == [16, 16, 10]
    after = copy.deepcopy(model)
    nn.utils.vector_to_parameters(trained(model, torch.float32, fused=False).float(), after.parameters())
    assert after(TOKENS) < 0.8 * before


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=str)
def test_training_ends_where_the_unfused_operations_do(dtype: torch.dtype) -> None:
    exact, farthest = spread(dtype)
    assert 0 < (trained(GPT(), dtype, fused=True) - exact).norm().item() <= 1.5 * farthest


def test_scores_of_a_wrong_scale_would_end_elsewhere() -> None:
    exact, farthest = spread(torch.float32)
    wrong = trained(GPT(scale=1.0001 * 8**-0.5), torch.float32, fused=False)
    assert (wrong - exact).norm().item() > 1.5 * farthest

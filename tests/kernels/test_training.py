"""Small models train with kernels as they do in torch."""

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
from seqfuse.kernels import attention, crossentropy, rope
from seqfuse.losses import LinearCrossEntropy, _chunks
from seqfuse.nn import TransformerStack
from seqfuse.ops import _attention
from seqfuse.testing import seeded_randn

from .conftest import DEVICE

STEPS, ROWS, H, F = 15, 24, 16, 32


def _model(eps: float = 1e-2) -> sf.Sequential:
    torch.manual_seed(0)
    first = ops.Residual(ops.LayerNorm(H, eps=eps), ops.Linear(H, F), ops.GeLU(), ops.Linear(F, H))
    second = ops.Residual(ops.RMSNorm(H, eps=eps), ops.Linear(H, 2 * F), ops.SwiGLU(), ops.Linear(F, H))
    return sf.Sequential(first, second, fusions=fusions.default).to(DEVICE)


class _Likelihood(nn.Module):
    """Of classes under a block of attention: the kernels of heads and of the loss."""

    def __init__(self, base: float = 1e4) -> None:
        super().__init__()
        torch.manual_seed(0)
        heads = (
            ops.QKNorm(8, 2, 1),
            ops.RotaryEmbedding(2, 1, style="half", base=base),
            ops.Attention(2, 1, causal=True),
        )
        block = ops.Residual(ops.RMSNorm(H), ops.Linear(H, 32), *heads, ops.Linear(16, H))
        self.body = sf.Sequential(block, fusions=fusions.default)
        self.head = LinearCrossEntropy(H, 24, chunk=8)
        self.to(DEVICE)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        classes = (8 * target[..., 0].float()).long() % 24
        return self.head(self.body(x.unflatten(0, (-1, 4))).flatten(0, 1), classes)


def _squares(model: sf.Sequential, x: Tensor, target: Tensor) -> Tensor:
    return (model(x) - target).double().square().mean()


def _trained(model: nn.Module, dtype: torch.dtype, *, fused: bool, order: Tensor | None = None) -> Tensor:
    """All parameters after the last step, in float64; `order` is that of the rows, which the sums do not depend on."""
    model = copy.deepcopy(model).to(dtype)
    x, target = (seeded_randn((ROWS, H), seed).to(DEVICE, dtype) for seed in (1, 2))
    if order is not None:
        x, target = (t[order.to(DEVICE)] for t in (x, target))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with sf.fusing(fused, on_error="raise"):
            loss = _squares(model, x, target) if isinstance(model, sf.Sequential) else model(x, target)
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def _distances(
    dtype: torch.dtype, fused_model: nn.Module | None = None, model: nn.Module | None = None
) -> tuple[float, float]:
    """From the unfused run in float64: of the fused run, and of the farthest of unfused ones, each in another order."""
    model = model or _model()
    exact = _trained(model, torch.float64, fused=False)
    # Sequences of four rows change places, their rows do not.
    drawn = [torch.randperm(ROWS // 4, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    orders = [None, *((4 * order.unsqueeze(1) + torch.arange(4)).flatten() for order in drawn)]
    unfused = max((_trained(model, dtype, fused=False, order=o) - exact).norm().item() for o in orders)
    return (_trained(fused_model or model, dtype, fused=True) - exact).norm().item(), unfused


def test_the_model_is_covered_by_kernels() -> None:
    plan = _model().plan(seeded_randn((ROWS, H), 1).to(DEVICE))
    used = {fusion.__name__ for fusion in fusions.triton}
    for cover in (plan.forward, plan.backward):
        assert sum(step.name in used for step in cover) >= 3, plan


def test_what_a_plan_saves_is_that_of_its_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    x = seeded_randn((ROWS, H), 1).to(DEVICE)
    model = sf.Sequential(ops.Linear(H, F), ops.GeLU(), ops.Linear(F, H), fusions=fusions.default).to(DEVICE)
    with sf.fusing(on_error="raise"):
        memory = model.plan(x).memory
    assert memory is not None
    assert memory.saved <= memory.saved_unfused
    assert "FakeTensor" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_ends_where_the_unfused_operations_do(dtype: torch.dtype) -> None:
    fused, unfused = _distances(dtype)
    assert 0 < fused <= 1.5 * unfused


def test_a_wrong_eps_is_found() -> None:
    fused, unfused = _distances(torch.float32, _model(eps=1.001e-2))
    assert fused > 1.5 * unfused


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels of heads and of the loss that are launched."""
    found: set[str] = set()
    for module in (attention, rope, crossentropy):
        plain = module.launch

        def launch(kernel: Any, *args: Any, plain: Any = plain, **more: Any) -> None:
            found.add(kernel.__name__)
            plain(kernel, *args, **more)

        monkeypatch.setattr(module, "launch", launch)
    return found


@pytest.mark.parametrize(
    ("dtype", "ours"),
    [
        pytest.param(torch.float32, False, id="fp32"),
        pytest.param(torch.bfloat16, False, id="bf16"),
        pytest.param(torch.float32, True, id="fp32, attention of ours", marks=pytest.mark.full),
        pytest.param(torch.bfloat16, True, id="bf16, attention of ours", marks=pytest.mark.full),
    ],
)
def test_training_with_heads_and_a_loss_ends_where_the_unfused_operations_do(
    dtype: torch.dtype, ours: bool, launched: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_attention, "interpreting", ours)
    fused, unfused = _distances(dtype, model=_Likelihood())
    assert 0 < fused <= 1.5 * unfused
    wanted = {"_rope_fwd_kernel", "_rope_bwd_kernel", "_cross_entropy_kernel"}
    wanted |= {"_attention_fwd_kernel", "_attention_dq_kernel", "_attention_dkv_kernel"} if ours else set()
    assert launched >= wanted, launched


def test_another_rotation_is_found() -> None:
    fused, unfused = _distances(torch.float32, _Likelihood(base=1.001e4), _Likelihood())
    assert fused > 1.5 * unfused


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
def test_training_of_a_gpt_ends_where_the_unfused_operations_do(dtype: torch.dtype) -> None:
    exact, farthest = spread(dtype)
    assert 0 < (trained(GPT(), dtype, fused=True) - exact).norm().item() <= 1.5 * farthest


def test_scores_of_a_wrong_scale_would_end_elsewhere() -> None:
    exact, farthest = spread(torch.float32)
    wrong = trained(GPT(scale=1.0001 * 8**-0.5), torch.float32, fused=False)
    assert (wrong - exact).norm().item() > 1.5 * farthest

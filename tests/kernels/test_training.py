"""Small models train the same with kernels and with torch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
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
BATCH, LENGTH, VOCABULARY = 6, 7, 29
TOKENS = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)).to(DEVICE)


class MLP(nn.Module):
    """Two blocks of a norm and a unit, and the distance from random targets."""

    count = ROWS

    def __init__(self, eps: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = ops.Residual(ops.LayerNorm(H, eps=eps), ops.Linear(H, F), ops.GeLU(), ops.Linear(F, H))
        second = ops.Residual(ops.RMSNorm(H, eps=eps), ops.Linear(H, 2 * F), ops.SwiGLU(), ops.Linear(F, H))
        self.model = sf.Sequential(first, second, fusions=fusions.default)
        self.to(DEVICE)

    def forward(self, order: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        x, target = (seeded_randn((ROWS, H), seed).to(DEVICE, dtype)[order] for seed in (1, 2))
        return (self.model(x) - target).double().square().mean()


class GPT(nn.Module):
    """Tokens to the loss of the next tokens; the loss's weight is the embedding weight."""

    count = BATCH

    def __init__(self, base: float = 1e4, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        rotary = functools.partial(ops.RotaryEmbedding, style="half", base=base)
        shared: dict[str, Any] = {"kv_heads": 1, "qk_norm": True, "rotary": rotary, "causal": True, **how}
        table = ops.Embedding(VOCABULARY, H)
        self.model = sf.Sequential(table, TransformerStack(1, H, 2, hidden_dim=24, **shared))
        self.loss = LinearCrossEntropy(H, VOCABULARY, bias=True, weight=table.weight, label_smoothing=0.1, chunk=16)
        self.to(DEVICE)

    def forward(self, order: Tensor) -> Tensor:
        return self.loss(self.model(TOKENS[order, :-1]), TOKENS[order, 1:])


def trained(model: nn.Module, dtype: torch.dtype, *, fused: bool, order: Tensor | None = None) -> Tensor:
    """All parameters after the last step, in float64; `order` permutes rows or sequences, which sums ignore."""
    model = copy.deepcopy(model).to(dtype)
    order = torch.arange(int(model.count)) if order is None else order  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with (
            sf.fusing(fused, on_error="raise"),
            mock.patch.object(_attention, "interpreting", fused and DEVICE.type == "cpu"),
        ):
            model(order.to(DEVICE)).backward()
        optimizer.step()
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


@functools.cache
def spread(kind: type[MLP | GPT], dtype: torch.dtype, seed: int) -> tuple[Tensor, float]:
    """The unfused run in float64, and its largest distance from unfused runs, each in another order."""
    model = kind()
    exact = trained(model, torch.float64, fused=False)
    orders = [None, *(torch.randperm(kind.count, generator=torch.Generator().manual_seed(i)) for i in range(4))]
    return exact, max((trained(model, dtype, fused=False, order=o) - exact).norm().item() for o in orders)


@pytest.mark.parametrize("kind", [MLP, GPT])
def test_models_are_covered_by_kernels(kind: type[MLP | GPT]) -> None:
    plan = kind().model.plan(TOKENS[:, :-1] if kind is GPT else seeded_randn((ROWS, H), 1).to(DEVICE))
    used = {fusion.__name__ for fusion in fusions.triton}
    for cover, heads in ((plan.forward, "BiasQKNormRotary"), (plan.backward, "BiasQKNormRotaryBackward")):
        assert sum(step.name in used for step in cover) >= 3, plan
        assert kind is MLP or heads in {step.name for step in cover}


def test_what_a_plan_saves_is_that_of_its_kernels(capfd: pytest.CaptureFixture[str]) -> None:
    x = seeded_randn((ROWS, H), 1).to(DEVICE)
    model = sf.Sequential(ops.Linear(H, F), ops.GeLU(), ops.Linear(F, H), fusions=fusions.default).to(DEVICE)
    with sf.fusing(on_error="raise"):
        memory = model.plan(x).memory
    assert memory is not None
    assert memory.saved <= memory.saved_unfused
    assert "FakeTensor" not in "".join(capfd.readouterr())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Launches of the kernels of heads and of the loss."""
    found: set[str] = set()
    for module in (attention, rope, crossentropy):
        plain = module.launch

        def launch(kernel: Any, *args: Any, plain: Any = plain, **more: Any) -> None:
            found.add(kernel.__name__)
            plain(kernel, *args, **more)

        monkeypatch.setattr(module, "launch", launch)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [MLP, GPT])
def test_training_ends_where_the_unfused_operations_do(
    kind: type[MLP | GPT], dtype: torch.dtype, launched: set[str]
) -> None:
    exact, farthest = spread(kind, dtype, torch.initial_seed())
    assert 0 < (trained(kind(), dtype, fused=True) - exact).norm().item() <= 1.5 * farthest
    wanted = {"_rope_fwd_kernel", "_rope_bwd_kernel", "_cross_entropy_kernel", "_attention_fwd_kernel"}
    wanted |= {"_attention_dq_kernel", "_attention_dkv_kernel"}
    assert kind is MLP or launched >= wanted, launched


WRONG: list[Callable[[], MLP | GPT]] = [
    lambda: MLP(eps=1.001e-2), lambda: GPT(base=1.001e4), lambda: GPT(scale=1.0001 * 8**-0.5),
]  # fmt: skip


@pytest.mark.parametrize("make", WRONG, ids=["eps", "rotation", "scale"])
def test_a_number_that_is_a_little_off_is_found(make: Callable[[], MLP | GPT]) -> None:
    wrong = make()
    exact, farthest = spread(type(wrong), torch.float32, torch.initial_seed())
    assert (trained(wrong, torch.float32, fused=False) - exact).norm().item() > 1.5 * farthest


def test_the_loss_is_made_by_its_kernel_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, chunks, in_kernel = GPT(), list[int](), _chunks._in_kernel

    def noted(how: Any, logits: Tensor, *rest: Any) -> Any:
        chunks.append(len(logits))
        return in_kernel(how, logits, *rest)

    monkeypatch.setattr(_chunks, "_in_kernel", noted)
    before = model(torch.arange(BATCH))
    assert chunks == [16, 16, 10]
    after = copy.deepcopy(model)
    nn.utils.vector_to_parameters(trained(model, torch.float32, fused=False).float(), after.parameters())
    assert after(torch.arange(BATCH)) < 0.8 * before

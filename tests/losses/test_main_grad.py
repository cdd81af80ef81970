"""Gradients of the loss's parameters, added to their `main_grad` buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import StateError
from seqfuse.losses import LinearCrossEntropy
from seqfuse.testing import assert_bitwise_equal, seeded_randn

ROWS, FEATURES, CLASSES = 37, 19, 53
TARGETS = torch.randint(CLASSES, (ROWS,), generator=torch.Generator().manual_seed(4))
REDUCTIONS = pytest.mark.parametrize("reduction", ["mean", "none"])


def drawn(reduction: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple[LinearCrossEntropy, Tensor]:
    module = LinearCrossEntropy(FEATURES, CLASSES, bias, reduction=reduction, chunk=5, dtype=dtype)
    return module, seeded_randn((ROWS, FEATURES), 1, dtype=dtype).requires_grad_()


def incoming(reduction: str) -> Tensor:
    return 1.7 * (seeded_randn((ROWS,), 5) if reduction == "none" else torch.ones(()))


@REDUCTIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_backwards_are_added_unrounded(dtype: torch.dtype, reduction: str) -> None:
    module, x = drawn(reduction, dtype)
    exact, dy = copy.deepcopy(module).double(), incoming(reduction)
    wanted = torch.autograd.grad(exact(x.double(), TARGETS), list(exact.parameters()), dy.double())
    dx, *rounded = torch.autograd.grad(module(x, TARGETS), [x, *module.parameters()], dy)
    for p in module.parameters():
        p.main_grad = torch.full(p.shape, 2.0)
    for _ in range(2):
        module(x, TARGETS).backward(dy)
    assert_bitwise_equal(x.grad, 2 * dx)
    for p, own, r in zip(module.parameters(), rounded, wanted, strict=True):
        assert p.grad is None
        assert p.main_grad.dtype is torch.float32
        error = (p.main_grad.double() - 2 - 2 * r).norm()
        if dtype is torch.float32:
            assert error <= 1e-6 * (2 + 2 * r).norm()
        else:
            assert error < (2 * own.double() - 2 * r).norm()


@REDUCTIONS
def test_what_is_added_is_not_rounded_to_the_dtype_of_the_weight(reduction: str) -> None:
    module, x = drawn(reduction, torch.bfloat16)
    weight = module.weight
    (rounded,) = torch.autograd.grad(module(x, TARGETS), weight, incoming(reduction))
    weight.main_grad = torch.zeros(weight.shape)
    module(x, TARGETS).backward(incoming(reduction))
    assert_bitwise_equal(weight.main_grad.bfloat16(), rounded)
    assert not torch.equal(weight.main_grad, rounded.float())


@REDUCTIONS
def test_a_buffer_is_let_be_where_the_gradient_goes_elsewhere(reduction: str) -> None:
    module, x = drawn(reduction, bias=False)
    weight, dy = module.weight, incoming(reduction)
    weight.main_grad = buffer = torch.zeros_like(weight)
    (returned,) = torch.autograd.grad(module(x, TARGETS), weight, dy)
    module(x, TARGETS).backward(dy, inputs=[x])
    seen: list[Tensor] = []
    handle = weight.register_hook(seen.append)
    module(x, TARGETS).backward(dy)
    handle.remove()
    assert_bitwise_equal(seen, [returned])
    assert_bitwise_equal(weight.grad, returned)
    assert not buffer.any()
    module.requires_grad_(False)
    module(x, TARGETS).backward(dy)
    assert not buffer.any()
    module.requires_grad_(True)
    module(x.detach(), TARGETS).backward(dy)
    assert_bitwise_equal(weight.grad, returned)
    assert_bitwise_equal(buffer, returned)


def test_a_buffer_that_cannot_be_added_to_is_one_clear_error() -> None:
    module, x = drawn("mean")
    module.weight.main_grad = torch.zeros(CLASSES, FEATURES, dtype=torch.bfloat16)
    with pytest.raises(
        StateError, match=r"^SF507 LinearCrossEntropy: main_grad of weight must be float32\[53, 19\] on"
    ):
        module(x, TARGETS).backward()


def test_a_tied_weight_adds_both_uses() -> None:
    embedding = ops.Embedding(11, 8)
    model, loss = sf.Sequential(embedding, ops.Linear(8, 8)), LinearCrossEntropy(8, 11, weight=embedding.weight)
    tokens, targets = torch.tensor([1, 4, 4, 0]), torch.tensor([4, 4, 0, -100])
    (expected,) = torch.autograd.grad(loss(model(tokens), targets), embedding.weight)
    embedding.weight.main_grad = torch.zeros_like(embedding.weight)
    loss(model(tokens), targets).backward()
    torch.testing.assert_close(embedding.weight.main_grad, expected)
    assert embedding.weight.grad is None

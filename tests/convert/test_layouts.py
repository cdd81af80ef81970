"""Results of chains whose strides differ from eager's, in graphs that change tensors in place."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import seqfuse as sf
from seqfuse.convert.effects import LIKE_ITS_INPUT
from seqfuse.testing import seeded_randn

from .comparing import assert_same, assert_same_recorded
from .spellings import Layers, S, heads, joined, operations

X = seeded_randn((2, 4, 8), 2).double()


def turned(m: Layers, x: Tensor) -> Tensor:
    """A sum with the strides of its first operand in eager torch, sequence first."""
    t = x.sin().transpose(0, 1)
    return t + m.b(F.gelu(m.a(t)))


def counts(m: Layers, x: Tensor) -> Tensor:
    count = torch.zeros(1, dtype=x.dtype)
    y = turned(m, x)
    count += 1
    return m.c(y) * count


def changes_a_product_of_it(m: Layers, x: Tensor) -> Tensor:
    z = turned(m, x).transpose(0, 1).reshape(-1, 8) * m.w
    z.add_(1)
    return m.c(z)


def adds_it_in_place(m: Layers, x: Tensor) -> Tensor:
    z = m.c(x.transpose(0, 1)) * 1
    z += turned(m, x)
    return z.sin()


def changes_what_may_be_a_view(m: Layers, x: Tensor) -> Tensor:
    y = turned(m, x)
    y.transpose(0, 1).reshape(-1, 8).mul_(2)
    return m.c(y)


def changes_what_may_be_a_copy(m: Layers, x: Tensor) -> Tensor:
    y = turned(m, x)
    y.reshape(-1, 8).mul_(2)
    return m.c(y)


def changes_a_part(m: Layers, x: Tensor) -> Tensor:
    y = turned(m, x)
    y.contiguous()[..., :4].zero_()
    return m.c(y)


CASES: dict[str, tuple[Callable[[Layers, Tensor], Any], bool]] = {
    "another tensor is changed": (counts, True),
    "a product of it is changed": (changes_a_product_of_it, True),
    "it is added in place": (adds_it_in_place, True),
    "a view of it is changed": (changes_what_may_be_a_view, False),
    "a copy of it is changed": (changes_what_may_be_a_copy, False),
    "a part of a copy is changed": (changes_a_part, False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_chain_may_lie_otherwise_unless_what_may_be_a_view_of_it_is_changed(name: str):
    spelling, whole = CASES[name]
    replayed = assert_same_recorded(Layers(spelling).double(), X)
    assert ("GeLU" in operations(replayed)) is whole
    otherwise = [left for g in replayed.graphs for left in g.left if "other strides" in left.reason]
    assert bool(otherwise) is not whole


@pytest.mark.parametrize("made", [lambda z: z, lambda z: z.clone(), lambda z: z * 2, lambda z: torch.zeros_like(z) + z])
@pytest.mark.parametrize("seen", [Tensor.contiguous, Tensor.flatten])
def test_multi_head_attention_lies_as_in_eager_torch_where_that_decides_what_is_changed(
    made: Callable[[Tensor], Tensor], seen: Callable[[Tensor], Tensor]
):
    """Its result has the sequence first in memory, so both calls copy it; a chain's result would be changed."""

    def spelling(m: Layers, x: Tensor) -> Tensor:
        z = made(m.mha(x, x, x, need_weights=False)[0])
        seen(z).mul_(2)
        return m.c(z)

    layers = Layers(spelling)
    layers.mha = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    assert_same_recorded(layers.double(), X)


@pytest.mark.parametrize("made", [lambda z: z, lambda z: z.abs(), lambda z: F.normalize(z, dim=-1)])
def test_as_strided_reads_the_memory_of_eager_torch(made: Callable[[Tensor], Tensor]):
    def spelling(m: Layers, x: Tensor) -> Tensor:
        z = made(m.mha(x, x, x, need_weights=False)[0])
        return m.c(z.as_strided((2, 4, 8), (8, 16, 1)))

    layers = Layers(spelling)
    layers.mha = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    assert_same_recorded(layers.double(), X)


# Behind a cast, where a chain ends, if a chain could contain the call.
ALIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda z: z + 1, "sub": lambda z: z - 1, "mul": lambda z: z.float() * 2, "truediv": lambda z: z.float() / 2,
    "neg": torch.neg, "pow": lambda z: z**2, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "exp": torch.exp,
    "log": torch.log, "where": lambda z: torch.where(z > 0, z, 0.5), "masked_fill": lambda z: z.masked_fill(z > 0, 0.5),
    "clamp": lambda z: z.clamp(max=0.5), "tanh": lambda z: z.float().tanh(), "sigmoid": lambda z: z.float().sigmoid(),
    "relu": lambda z: F.relu(z.float()), "gelu": lambda z: F.gelu(z.float()), "silu": lambda z: F.silu(z.float()),
    "softmax": lambda z: z.softmax(-1), "dropout": lambda z: F.dropout(z.float(), 1.0), "clone": torch.clone,
    "to": lambda z: z.to(torch.float32), "float": Tensor.float, "type_as": lambda z: z.type_as(z.float()),
    "normalize": lambda z: F.normalize(z.float(), dim=-1),
    "scaled_dot_product_attention": lambda z: F.scaled_dot_product_attention(z, z, z),
    "empty_like": lambda z: torch.empty_like(z).fill_(2) * z[:1], "zeros_like": lambda z: z[:1] + torch.zeros_like(z),
    "ones_like": lambda z: torch.ones_like(z) * z[:1],
}  # fmt: skip
CHANGED: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda z: z, "a sum": lambda z: z.add_(1), "+=": lambda z: operator.iadd(z, 1),
    "a number": lambda z: z.masked_fill_(z > 0, 0.5), "a copy": lambda z: torch.empty_like(z).copy_(z),
}  # fmt: skip


@pytest.mark.parametrize("made", [*CHANGED.values(), *ALIKE.values()], ids=[*CHANGED, *ALIKE])
def test_a_caller_can_view_what_it_can_view_of_eager_torch(made: Callable[[Tensor], Tensor]):
    """A sum has the strides of its first operand, which a chain exchanges with the second."""

    def spelling(m: Layers, x: Tensor) -> Tensor:
        return made(x + m.a(x.transpose(0, 1)).transpose(0, 1))

    replayed = assert_same_recorded(Layers(spelling).double(), X)
    assert "Add" in operations(replayed)
    replayed(X).view(-1)


def test_all_calls_that_give_what_lies_like_their_input_are_tested():
    assert ALIKE.keys() == LIKE_ITS_INPUT


@pytest.mark.parametrize("seen", [lambda y: y, lambda y: y.view(-1, 8)])
@pytest.mark.parametrize("back", [lambda y: y.transpose(0, 1), lambda y: y.movedim(1, 0)])
def test_a_result_that_is_turned_back_can_be_viewed_as_in_eager_torch(
    back: Callable[[Tensor], Tensor], seen: Callable[[Tensor], Tensor]
):
    replayed = assert_same_recorded(Layers(lambda m, x: seen(back(turned(m, x)))).double(), X)
    assert "Add" in operations(replayed)
    replayed(X).view(-1)


@pytest.mark.parametrize("seen", [lambda h: h.view(-1), lambda h: h[0].view(-1), lambda h: h.chunk(2)[0].view(-1)])
def test_queries_keys_and_values_can_be_viewed_as_in_eager_torch(seen: Callable[[Tensor], Tensor]):
    """A chain makes them side by side, and the memory of each one is not contiguous."""

    def spelling(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (layer(x).unflatten(-1, (2, 4)) for layer in (m.a, m.b, m.c))
        return joined(S(*(t.transpose(1, 2) for t in (q, k, v)))), seen(k)

    assert "MergedLinear" in operations(assert_same_recorded(Layers(spelling).double(), X))


def test_a_changed_view_is_captured():
    assert_same(Layers(changes_what_may_be_a_view).double(), X)


def test_a_clone_that_changes_through_data_changes_what_was_saved():
    """Torch does not notice this change, so the gradient is of the changed numbers."""

    def spelling(m: Layers, x: Tensor) -> Tensor:
        z = (m.a(x) * torch.tanh(m.c(x))).clone()
        y = m.b(z)
        z.data.mul_(1.5)
        return y + z

    assert_same_recorded(Layers(spelling).double(), X)


def test_keys_and_values_of_another_sequence_may_leave_in_a_cache():
    def spelling(m: Layers, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x.flip(1) * 2
        empty = torch.empty(0, dtype=x.dtype)
        k, v = (torch.cat([empty, heads(layer(y))], -2) for layer in (m.b, m.c))
        return joined(S(heads(m.a(x)), k, v)), k, v

    assert "CrossAttention" in operations(assert_same_recorded(Layers(spelling).double(), X))


@pytest.mark.parametrize("again", [lambda x: x.transpose(0, 1).transpose(0, 1), lambda x: x.view(-1, 8).view(x.shape)])
def test_a_view_of_a_view_that_is_returned_is_no_input(again: Callable[[Tensor], Tensor]):
    def spelling(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
        y = again(x)
        return y, m.b(F.gelu(m.a(y)))

    replayed = assert_same_recorded(Layers(spelling).double(), X)
    assert replayed(X)[0] is not X


@pytest.mark.parametrize(
    "again",
    [
        lambda h: h.view(h.shape), lambda h: h.reshape(h.shape), lambda h: h.expand(h.shape), lambda h: h[:],
        lambda h: h.clone(),
    ],
)  # fmt: skip
def test_a_view_or_copy_that_is_returned_and_read_has_a_gradient(again: Callable[[Tensor], Tensor]):
    def spelling(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
        r = again(m.a(x) + x)
        return r, m.b(F.gelu(m.c(r))) + r

    def gradient(model: Any) -> Tensor:
        r, y = model(X)
        return torch.autograd.grad(y.square().sum(), r)[0]

    model = Layers(spelling).double()
    torch.testing.assert_close(gradient(assert_same_recorded(model, X)), gradient(model))


def test_a_wider_copy_that_is_returned_and_read_has_a_gradient():
    def spelling(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
        r = m.a(x).double()
        root = torch.rsqrt(r.square().mean(-1, keepdim=True) + 1e-6)
        return r, m.b((r * root).to(x.dtype) * m.w)

    def gradient(model: Any) -> Tensor:
        r, y = model(X.float())
        return torch.autograd.grad(y.square().sum(), r)[0]

    model = Layers(spelling)
    torch.testing.assert_close(gradient(assert_same_recorded(model, X.float(), 1e-5)), gradient(model))


@pytest.mark.parametrize("again", [Tensor.contiguous, lambda h: F.dropout(h, 0.5, False), Tensor.float])
def test_a_result_that_is_returned_under_another_name_has_a_whole_gradient(again: Callable[[Tensor], Tensor]):
    def spelling(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.a(x) + x
        return again(h), m.b(F.layer_norm(h, (8,))) + h

    def gradient(model: Any) -> Tensor:
        r, y = model(X.float())
        return torch.autograd.grad(y.square().sum(), r)[0]

    model = Layers(spelling)
    wanted = gradient(model)
    with sf.fusing(unmeasured=True):
        sf.convert(model)
        torch.testing.assert_close(gradient(model), wanted)

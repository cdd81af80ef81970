"""Models that read a tensor, or a view of it, which they change in place, for `test_altered`."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .spellings import Layers, joined, qkv, rms, short, spelling


@spelling
def changes_what_was_turned(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    turned = (y := m.a(x) * 1.5).transpose(1, 2)
    z = m.b(y * 2)
    y.add_(z)
    return m.c(z), turned * 2


@spelling
def changes_the_result_of_attention_by_hand(m: Layers, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    y = joined((q @ k.mT).softmax(-1) @ v)
    y.add_(m.b(x))
    return m.c(y)


@spelling
def changes_heads_of_attention_by_hand(m: Layers, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    y = (q @ k.mT).softmax(-1) @ v
    y.mul_(m.w[0])
    return m.c(joined(y))


@spelling
def changes_an_activation_and_zero(m: Layers, x: Tensor) -> Tensor:
    y = torch.sigmoid(m.a(x)) + 0
    y.mul_(2)
    return m.b(y)


@spelling
def averages_again_after_a_change(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    y.sub_(y.mean(-1, keepdim=True) * 0.5)
    return m.b(y - y.mean(-1, keepdim=True))


@spelling
def views_scores_of_keys_and_queries(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, _ = qkv(m, x)
    made = torch.einsum("bhke,bhqe->bhqk", k, q)
    turned = torch.einsum("bhqe,bhke->bhqk", q, k.mT.contiguous().mT) * 2
    return made.view(-1), turned.view(4, 16)


@spelling
def views_heads_of_attention_by_hand(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = qkv(m, x)
    y = (q @ k.mT).softmax(-1) @ v
    return m.b((y * 2).view(2, -1, 8)), y.view(-1, 4)


@spelling
def views_what_was_turned_and_copied(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.gelu(m.a(x).transpose(1, 2).contiguous())
    return m.b(y.mT), y.view(2, -1)


@spelling
def reads_scores_that_a_mask_was_added_to(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = qkv(m, x)
    before = (s := q @ k.mT).flatten(2)
    s += m.w[:4]
    return m.b(joined(s.softmax(-1) @ v)), before * 2


def change_after_a_sum(name: str, change: Callable[[Tensor], object]) -> None:
    def spelled(m: Layers, x: Tensor) -> Tensor:
        total = (y := m.a(x)) + m.c(x)
        change(y)
        return m.b(F.layer_norm(total, (8,))) + F.gelu(m.c(y))

    short(name, spelled)


change_after_a_sum("leaky relu in place, by position", lambda y: F.leaky_relu(y, 0.1, True))
change_after_a_sum("relu in place, by position", lambda y: F.relu(y, True))
change_after_a_sum("a product in place, by its method", lambda y: y.__imul__(3))


@spelling
def detaches_in_place_what_was_read(m: Layers, x: Tensor) -> Tensor:
    y = F.layer_norm(m.a(x), (8,))
    z = m.b(y)
    y.detach_()
    return m.c(y) + z


short("reads bits as the same dtype", lambda m, x: m.b((y := F.relu(m.a(x))).view(y.dtype)) + m.c(x))


def change_without_gradients(name: str, change: Callable[[Layers, Tensor, Tensor], Tensor]) -> None:
    def spelled(m: Layers, x: Tensor) -> Tensor:
        y = m.a(x)
        with torch.no_grad():
            y = change(m, y, x)
        return m.c(F.gelu(y))

    short(f"{name} without gradients", spelled)


change_without_gradients("a sum in place", lambda m, y, x: operator.iadd(y, F.gelu(m.b(x))))
change_without_gradients("a sum by its method", lambda m, y, x: y.add_(m.b(x)))
change_without_gradients("an activation in place", lambda m, y, x: F.silu(y, inplace=True))


@spelling
def turns_there_and_back_without_gradients(m: Layers, x: Tensor) -> Tensor:
    y = F.gelu(m.a(x))
    with torch.no_grad():
        z = y.transpose(1, 2).transpose(1, 2)
        weight = m.b.weight.t()
    return m.c(z * 0.5) + x @ weight


@spelling
def detaches_in_place_what_was_made_without_gradients(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = F.gelu(m.b(x))
        z = rms(y, m.w)
    y.detach_()
    return m.c(x) + m.a(z) * y

"""Models that nearly match an operation, and some that match, by what is special about each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seqfuse.ops.mergedlinear import MAX_PARTS

from .comparing import Replayed

S = F.scaled_dot_product_attention
Spelling = Callable[["Layers", Tensor], Any]


class Layers(nn.Module):
    """Some layers, called in the form under test."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c, self.up, self.qkv = (nn.Linear(8, n) for n in (8, 8, 8, 16, 24))
        self.w = nn.Parameter(torch.rand(8) + 0.5)
        self.spelling = spelling

    def forward(self, x: Tensor) -> Any:
        return self.spelling(self, x)


def heads(t: Tensor, count: int = 2) -> Tensor:
    return t.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(t: Tensor) -> Tensor:
    return t.transpose(1, 2).reshape(t.shape[0], t.shape[2], -1)


def qkv(m: Layers, x: Tensor, count: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return heads(m.a(x), count), heads(m.b(x), count), heads(m.c(x), count)


def few(layer: nn.Linear, x: Tensor) -> Tensor:
    """Two heads of two elements."""
    return F.linear(x, layer.weight[:4]).view(*x.shape[:2], 2, 2).transpose(1, 2)


def angles(x: Tensor, size: int, times: float = 1.0) -> tuple[Tensor, Tensor]:
    a = times * torch.arange(4, dtype=x.dtype)[:, None] / 10 ** torch.arange(size // 2, dtype=x.dtype)
    a = torch.cat((a, a), -1)
    return a.cos(), a.sin()


def half(t: Tensor) -> Tensor:
    h = t.shape[-1] // 2
    return torch.cat((-t[..., h:], t[..., :h]), -1)


def tanh_gelu(half: Tensor, y: Tensor) -> Tensor:
    return half * (1.0 + tanh_of(y + 0.044715 * torch.pow(y, 3.0)))


def tanh_of(y: Tensor) -> Tensor:
    return torch.tanh(math.sqrt(2.0 / math.pi) * y)


def rms(y: Tensor, weight: Tensor | float = 1.0, eps: float = 1e-6, dim: Any = -1) -> Tensor:
    return weight * (y * torch.rsqrt(y.pow(2).mean(dim, keepdim=True) + eps))


def root(y: Tensor) -> Tensor:
    return torch.sqrt(y.pow(2).mean(-1, keepdim=True) + 0.1)


def deviation(y: Tensor) -> Tensor:
    return y - y.mean(-1, keepdim=True)


def operations(replayed: Replayed) -> list[str]:
    """The names of the operations of all chains."""
    regions = [region for graph in replayed.graphs for region in graph.regions]
    return [type(operation).__name__ for region in regions for operation in region.order.operations]


CASES: dict[str, Spelling] = {}


def spelling(function: Spelling) -> Spelling:
    CASES[function.__name__] = function
    return function


def short(name: str, function: Spelling) -> None:
    CASES[name] = function


# Tensors that are changed in place, and copies of them.
@spelling
def changes_a_clone(m: Layers, x: Tensor) -> Tensor:
    z = (y := m.a(x)).clone()
    z[:, 0] = 1
    return m.b(z) + m.c(y)


@spelling
def changes_what_was_cloned(m: Layers, x: Tensor) -> Tensor:
    z = (y := m.a(x) * 1).clone()
    y.add_(1)
    return m.b(z) + m.c(y)


@spelling
def changes_what_was_made_contiguous(m: Layers, x: Tensor) -> Tensor:
    z = (y := (m.a(x) * 1).transpose(0, 1)).contiguous()
    y.add_(1)
    return m.b(z) + m.c(y)


@spelling
def changes_a_cat_of_one(m: Layers, x: Tensor) -> Tensor:
    z = torch.cat([torch.empty(0, dtype=x.dtype), y := m.a(x)])
    z.add_(1)
    return m.b(y) + m.c(z)


@spelling
def changes_a_copy_of_the_same_dtype(m: Layers, x: Tensor) -> Tensor:
    z = (y := m.a(x)).to(x.dtype, copy=True)
    z.add_(1)
    return m.b(y) + m.c(z)


@spelling
def changes_through_a_dropout_that_is_off(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    z = F.dropout(y, 0.5, training=False)
    z += m.b(x)
    return m.c(y) + z


@spelling
def changes_between_products(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x * 1
        p = m.a(y)
        y.movedim(0, 1).add_(1)
        q = m.b(y)
    return m.c(x) * p * q


@spelling
def changes_what_a_chain_has_read(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.sin()
        h = F.gelu(m.a(y))
        y.add_(1)
        z = m.b(h)
    return m.c(x) * z


@spelling
def changes_inside_a_gelu(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.a(x)
        h = y * 0.5
        y.add_(1)
        z = tanh_gelu(h, y)
    return m.b(x + z)


@spelling
def changes_a_flattened_copy(m: Layers, x: Tensor) -> Tensor:
    z = F.gelu(m.b(F.gelu(m.a(x.transpose(0, 1)))).transpose(0, 1))
    y = F.gelu(z) + z
    y.flatten().mul_(2)
    return m.c(y) + z


@spelling
def changes_a_result(m: Layers, x: Tensor) -> Tensor:
    z = m.a(x)
    h = m.b(z * 2) + x
    z.add_(1)
    return h + z


@spelling
def changes_one_of_two_products(m: Layers, x: Tensor) -> Tensor:
    h = F.layer_norm(x, (8,))
    y, z = m.a(h), m.b(h)
    square = y.square()
    z[..., 0] += 1
    return square + z


@spelling
def writes_into_a_buffer(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        scaled, summed, bent = (torch.zeros_like(x) for _ in range(3))
        torch.mul(m.a(x), 2, out=scaled)
        torch.add(m.a(x), x, out=summed)
        torch.tanh(m.a(x), out=bent)
    return m.b(x + scaled) + m.c(x + summed) * bent


@spelling
def changes_activations(m: Layers, x: Tensor) -> Tensor:
    y = F.relu_(m.a(x))
    z = F.silu(m.b(y), inplace=True)
    z *= 2
    return m.c(z)


@spelling
def changes_what_another_call_reads_before(m: Layers, x: Tensor) -> Tensor:
    other = torch.ones_like(x)
    y = m.a(x)
    z = y.sin() - other
    other.add_(1)
    return m.b(F.gelu(y)) + z


@spelling
def computes_for_nobody(m: Layers, x: Tensor) -> Tensor:
    z = m.a(x) + x
    F.gelu(m.b(z))
    joined(S(*qkv(m, z)))
    z.add_(1)
    return m.c(z)


# Modes.
@spelling
def makes_keys_without_gradients(m: Layers, x: Tensor) -> Tensor:
    q = m.a(x)
    with torch.no_grad():
        k = m.b(x)
    return joined(S(heads(q), heads(k), heads(m.c(x))))


@spelling
def makes_gates_without_gradients(m: Layers, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = m.a(x)
    return m.c(F.silu(gate) * m.b(x))


@spelling
def makes_parts_without_gradients(m: Layers, x: Tensor) -> Tensor:
    y = m.a(x)
    with torch.no_grad():
        h, square = y * 0.5, y.pow(2).mean(-1, keepdim=True)
    return m.b(tanh_gelu(h, y)) + m.c(y * torch.rsqrt(square + 1e-6) * m.w)


@spelling
def makes_parts_in_inference_mode(m: Layers, x: Tensor) -> Tensor:
    with torch.inference_mode():
        s = F.gelu(m.b(x))
    return m.c(x) + s.clone()


@spelling
def detaches(m: Layers, x: Tensor) -> Tensor:
    y = F.gelu(m.a(x))
    return m.c(y + (y.round() - y).detach()) + m.b(y.detach())


@spelling
def reads_a_product_through_detach_alone(m: Layers, x: Tensor) -> Tensor:
    y = F.layer_norm(x, (8,), m.w)
    return m.c(F.silu(m.a(y).detach()) * m.b(y))


@spelling
def compares_a_product(m: Layers, x: Tensor) -> Tensor:
    y = F.gelu(m.a(x))
    return m.c(y).masked_fill(F.layer_norm(m.b(y), (8,)) > 0, 0.5)


@spelling
def lays_products_out_flat(m: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    y = F.layer_norm(x, (8,), m.w)
    return m.a(y).view(-1) * m.b(y).view(-1, 8).sum(), m.c(y).view(2, 4, 2, 4)


@spelling
def calls_vmap(m: Layers, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda t: m.b(F.gelu(m.a(t))))(x)


@spelling
def calls_grad(m: Layers, x: Tensor) -> Tensor:
    return m.c(torch.func.grad(lambda t: m.b(F.gelu(m.a(t))).sum())(x))


class Seven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, weight)), weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return F.gelu(dy * 7), torch.ones(8, 8, dtype=dy.dtype)


short("has a gradient of its own", lambda m, x: m.b(Seven.apply(m.a(x), m.c.weight)))


# Numbers that calls carry.
short("rounds a quotient", lambda m, x: m.b(torch.div(m.a(x), 0.1, rounding_mode="floor")))
short("adds a multiple", lambda m, x: m.b(torch.add(m.a(x), x, alpha=0.5) + m.c(x).sub(x, alpha=2)))
short("cubes", lambda m, x: m.b(F.relu(m.a(x)).pow(3)))
short("quick gelu", lambda m, x: m.b((y := m.a(x)) * torch.sigmoid(1.702 * y)))
short("quick gelu of another factor", lambda m, x: m.b((y := m.a(x)) * torch.sigmoid(1.7 * y)))
short("quick gelu of another tensor", lambda m, x: m.b(x * torch.sigmoid(1.702 * m.a(x))))
short("gelu of another factor", lambda m, x: m.b(0.5 * (y := m.a(x)) * (1 + torch.tanh(0.9 * (y + 0.044715 * y**3.0)))))
short("gelu of another tensor", lambda m, x: m.b(tanh_gelu(0.5 * m.c(x), m.a(x))))
short("silu by hand", lambda m, x: m.b((y := m.a(x)) * torch.sigmoid(y)))
short("tanh gelu of products", lambda m, x: m.b((y := m.a(x)) / 2 * (tanh_of(y + 0.044715 * y * y * y) + 1)))
short("relu times itself", lambda m, x: m.b((y := F.relu(m.a(x))) * y))
short("gelu and more", lambda m, x: m.b((torch.erf((y := m.a(x)) * 0.5**0.5) + 1.0) * (y * 0.5) * 3.0 + 1.0))
short("halves swapped", lambda m, x: m.b((h := m.up(x).chunk(2, -1))[0] * F.silu(h[1])))
short("gates interleaved", lambda m, x: m.b(F.silu((h := m.up(x))[..., ::2]) * h[..., 1::2]))
short("glu of torch", lambda m, x: m.b(F.glu(m.up(x))))


@spelling
def names_its_arguments(m: Layers, x: Tensor) -> Tensor:
    gate, up = torch.split(m.up(x), split_size_or_sections=8, dim=-1)
    y = m.b(torch.mul(input=F.silu(input=gate), other=up))
    y = F.linear(input=torch.tanh(input=y), weight=m.a.weight, bias=m.a.bias)
    y = torch.relu(input=y) ** 2 + torch.sigmoid(input=torch.dropout(input=y, p=0.5, train=False))
    y = F.layer_norm(input=torch.add(input=F.dropout(input=y, p=0.0), other=x), normalized_shape=[8], weight=m.w)
    gate, up = torch.chunk(input=m.up(y), chunks=2, dim=-1)
    return m.c(y * torch.rsqrt(input=y.pow(2).mean(-1, keepdim=True) + 1e-6)) + gate * torch.softmax(input=up, dim=-1)


short("halves that overlap", lambda m, x: m.b(F.silu((h := m.up(x))[..., :8]) * h[..., 4:12]))
short("more products than are merged", lambda m, x: sum((m.a(x) for _ in range(MAX_PARTS + 1)), m.b(x)) * m.w)


# Norms.
short("a mean that is no column", lambda m, x: m.b((y := m.a(x.view(8, 8))) * torch.rsqrt(y.pow(2).mean(-1) + 1e-6)))
short("a gain of one element", lambda m, x: m.b(rms(m.a(x), m.w[:1])))
short("a norm of what was rounded", lambda m, x: m.b(rms(m.a(x).float().double(), m.w)))
short("mean over rows", lambda m, x: m.b(rms(m.a(x), m.w, dim=1)))
short("mean over two dimensions", lambda m, x: m.b(rms(m.a(x), m.w, dim=(-1, -2))))
short("a norm of another tensor", lambda m, x: m.b(x * torch.rsqrt(m.a(x).pow(2).mean(-1, keepdim=True) + 1e-6)))
short("a norm of integers", lambda m, x: m.b(rms((m.a(x) * 5).to(torch.int32).to(x.dtype), m.w)))
short("a gain of two more", lambda m, x: m.b(rms(m.a(x), 2 + m.w)))
short("a gain made of data", lambda m, x: m.b(rms(m.a(x), m.c(x).mean((0, 1)))))
short("a floor of a norm", lambda m, x: m.b(torch.div(y := m.a(x), root(y), rounding_mode="floor")))
short("twice a norm", lambda m, x: m.b((y := m.a(x)) * (2 / root(y))))
short(
    "a norm of an eps times two",
    lambda m, x: m.b((y := m.a(x)) / torch.add(y.pow(2).mean(-1, True), 1, alpha=2).sqrt()),
)
short("a length times a number", lambda m, x: m.b(F.normalize(m.a(x), dim=-1) * 2 * m.w))
short("a bias without a weight", lambda m, x: m.b((y := deviation(m.a(x))) / root(y) + m.a.bias))
short("a norm of two dimensions", lambda m, x: m.b(F.layer_norm(m.a(x), (4, 8))))
short("another eps", lambda m, x: m.b(F.layer_norm(m.a(x), (8,), m.w, None, 0.3)) + m.c(rms(x, m.w, 0.5)))
short("a bias and no weight", lambda m, x: m.b(F.layer_norm(m.a(x), (8,), None, m.w)))

# Weights and biases.
short("a weight that is a view", lambda m, x: F.gelu(x @ m.a.weight.mT) @ m.b.weight + F.linear(x, m.c.weight.t()))
short("a weight made of others", lambda m, x: F.linear(F.gelu(m.a(x)), m.b.weight * 2 + m.c.weight.t(), m.b.bias * m.w))
short("a weight made of data", lambda m, x: F.linear(F.gelu(m.a(x)), m.c(x).mean((0, 1)).outer(m.w)))
short("a weight turned twice", lambda m, x: torch.addmm(m.w, torch.addmm(m.w, x[0], m.a.weight), m.a.weight))
short("an expanded weight", lambda m, x: F.linear(F.gelu(m.a(x)), m.w.expand(8, 8), m.w[:1].expand(8)))
short("a part of a bias", lambda m, x: m.b(F.gelu(torch.addmm(m.w, x[0], m.a.weight, beta=0.5))))
short("a bias for each element", lambda m, x: m.b(F.gelu(F.linear(x.view(8, 8), m.a.weight, m.c.weight))))
short("an added bias for each element", lambda m, x: m.b(F.gelu(torch.addmm(m.c.weight, x.view(8, 8), m.a.weight))))
short("a vector of one bias", lambda m, x: m.c(F.silu(F.linear(x, m.a.weight, m.w[:1])) * m.b(x)))
short("a bias of one number", lambda m, x: m.b(F.gelu(F.linear(x.view(8, 8), m.a.weight, m.w[0]))))
short("a weight of three dimensions", lambda m, x: m.b(F.gelu(x @ m.a.weight.expand(2, 8, 8).mT)))
short("a product of one row", lambda m, x: m.b(F.gelu(m.w @ m.a.weight.t())) * x)
short("a weight of one dimension", lambda m, x: m.b(F.gelu(m.a(x))) * (x @ m.w)[..., None])
short("a multiple of a product", lambda m, x: m.b(F.gelu(torch.addmm(m.w, x[0], m.a.weight, alpha=2))))
short("no view", lambda m, x: F.gelu(torch.addmm(m.w, m.a(x).amax(1), m.b.weight).view(2, 4, 2)))
short("a view of halves", lambda m, x: m.b(F.gelu(torch.addmm(m.w, m.up(x).view(-1, 8), m.a.weight).view(2, 8, 8))))
short("halves side by side", lambda m, x: F.gelu(torch.addmm(m.w, m.up(x).view(-1, 8), m.a.weight).view(2, 4, 16)))
short("other rows", lambda m, x: m.b(F.gelu(torch.addmm(m.w, m.a(x).view(-1, 8), m.c.weight).view(4, 2, 8))))
short("a bias for each row", lambda m, x: m.b(F.gelu(F.linear(x, m.a.weight) + m.w[:4, None])))
short("an expanded input", lambda m, x: m.b(F.gelu(m.a(x[:, :1].expand(2, 4, 8)))))
short("one layer three times", lambda m, x: m.a(F.gelu(m.a(F.gelu(m.a(x))))))
short("a tensor added to itself", lambda m, x: m.b((y := m.a(x)) + y))


# Attention.
@spelling
def reads_queries_of_attention_without_gradients(m: Layers, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return joined(S(q, k, v).detach() + q)


@spelling
def takes_scores_from_a_number(m: Layers, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return m.c(joined((5 - q @ k.mT).softmax(-1) @ v))


short("heads not put side by side", lambda m, x: S(*qkv(m, x)).reshape(2, 4, 8))
short("as many heads as rows, not put side by side", lambda m, x: S(*qkv(m, x, 4)).reshape(2, 4, 8))
short("elements outside of heads", lambda m, x: S(*qkv(m, x)).permute(0, 2, 3, 1).reshape(2, 4, 8))
short("heads cut from rows", lambda m, x: joined(S(*(layer(x).view(2, 2, 4, 4) for layer in (m.a, m.b, m.c)))))
short("attention between rows of heads", lambda m, x: S(*(t.transpose(1, 2) for t in qkv(m, x))).reshape(2, 4, 8))
short("values first", lambda m, x: joined(S(*[heads(t) for t in m.qkv(x).chunk(3, -1)[::-1]])))
short("one tensor for all", lambda m, x: joined(S(k := heads(m.b(x)), k, k)))
short("heads by heads", lambda m, x: joined(S(*heads(m.qkv(x)).chunk(3, -1))))
short("heads by heads, of four", lambda m, x: joined(S(*heads(m.qkv(x)).chunk(4, -1)[:3])))
short("heads by heads, askew", lambda m, x: joined(S(*(heads(m.qkv(x))[..., i : i + 4] for i in (0, 2, 8)))))
short("heads by heads, values first", lambda m, x: joined(S(*heads(m.qkv(x)).chunk(3, -1)[::-1])))
short("heads by heads, keys again", lambda m, x: joined(S(*[heads(m.qkv(x)).chunk(3, -1)[i] for i in (0, 1, 1)])))


def cut(name: str, *parts: Any, count: int = 6, **how: Any) -> None:
    """Heads of one GEMM: some are queries, some keys, some values."""

    def call(m: Layers, x: Tensor) -> Tensor:
        h = m.qkv(x).view(2, 4, count, -1)
        return joined(S(*(h[..., part, :].transpose(1, 2) for part in parts), **how))

    short(name, call)


cut("heads cut", slice(0, 2), slice(2, 4), slice(4, None))
cut("heads cut for one of keys", slice(None, -2), [-2], [-1], enable_gqa=True)
cut("heads cut in another order", slice(2, 4), slice(0, 2), slice(4, 6))
cut("heads cut twice", slice(0, 2), slice(1, 3), slice(4, 6))
cut("heads cut with a step", slice(0, 6, 3), slice(1, 6, 3), slice(2, 6, 3))
cut("heads cut by a list", [0, 1], [3, 2], [4, 5])
cut("heads cut twice by a list", [0, 0], [1, 1], [2, 2], count=3)
short("a row less", lambda m, x: joined(S(heads(m.a(x)), heads(m.b(x)[:, :3]), heads(m.c(x)[:, :3]))))
short("part of a product", lambda m, x: joined(S(heads(m.qkv(x)[..., :8]), heads(m.b(x)), heads(m.c(x)))))
short("queries with a bias", lambda m, x: joined(S((t := qkv(m, x))[0] + m.w[:4], *t[1:])))
short(
    "keys that are queries", lambda m, x: joined(S(*(heads(y[..., i : i + 8]) for y in [m.qkv(x)] for i in (0, 0, 16))))
)
short("queries times a number", lambda m, x: joined(S(heads(m.a(x) * 2), *qkv(m, x)[1:])))
short("keys times a number", lambda m, x: joined(S(heads(m.a(x)), heads(m.b(x) * 2), heads(m.c(x)))))
short("values times a number", lambda m, x: joined(S(*qkv(m, x)[:2], heads(m.c(x) * 2))))
short("heads that were rounded", lambda m, x: joined(S(*(t.float().double() for t in qkv(m, x)))))
short("a learned mask", lambda m, x: joined(S(*qkv(m, x), attn_mask=m.w[:4].outer(m.w[4:]))))
short(
    "a mask made by a factor",
    lambda m, x: m.b(joined(S(*qkv(m, x + m.a(x)), attn_mask=ONES.to(x.dtype).cumsum(-1) / 5))),
)
short("another scale", lambda m, x: joined(S(*qkv(m, x), scale=0.3)))
short("rows that see nothing", lambda m, x: joined(S(*qkv(m, x), attn_mask=torch.ones(4, 4).tril(-1).bool())))


def grouped(name: str, repeat: Callable[[Tensor], Tensor]) -> None:
    short(name, lambda m, x: joined(S(heads(m.a(x), 4), repeat(few(m.b, x)), repeat(few(m.c, x)))))


grouped("groups in turn", lambda t: t.repeat(1, 2, 1, 1))
grouped("groups in turn, expanded", lambda t: t[:, None].expand(2, 2, 2, 4, 2).reshape(2, 4, 4, 2))
grouped("uneven groups", lambda t: t.repeat_interleave(torch.tensor([1, 3]), 1))
grouped("groups side by side", lambda t: t[:, :, None].expand(2, 2, 2, 4, 2).reshape(2, 4, 4, 2))
grouped("groups in another order", lambda t: t[:, [1, 0], None].expand(2, 2, 2, 4, 2).reshape(2, 4, 4, 2))
short("rows repeated", lambda m, x: joined(S(heads(m.a(x)), *(t.repeat_interleave(2, 2) for t in qkv(m, x)[1:]))))


def by_hand(name: str, weights: Callable[[Tensor], Tensor]) -> None:
    short(name, lambda m, x: joined(weights((t := qkv(m, x))[0] @ t[1].transpose(-1, -2) / 2) @ t[2]))


ONES = torch.ones(4, 4).tril()
UNSEEN = torch.ones(4, 4).triu(0).bool()  # the first query sees no key: torch's softmax of it is NaN
LOWEST = torch.finfo(torch.float64).min
by_hand("a mask filled in", lambda s: torch.softmax(s.masked_fill(ONES == 0, -torch.inf), -1))
by_hand("rows of which nothing is left", lambda s: torch.softmax(s.masked_fill(UNSEEN, -torch.inf), -1))
by_hand("rows from which all is taken", lambda s: torch.softmax(s + UNSEEN.to(s).masked_fill(UNSEEN, -torch.inf), -1))
by_hand("rows from which the most is taken", lambda s: torch.softmax(s + UNSEEN.to(s).masked_fill(UNSEEN, LOWEST), -1))
by_hand("softmax over queries", lambda s: torch.softmax(s, -2))
by_hand("softmax over queries, from the front", lambda s: torch.softmax(s, 2))
by_hand("a mask of booleans added", lambda s: torch.softmax(s + ONES.bool(), -1))
by_hand("a mask of integers added", lambda s: torch.softmax(s + ONES.long(), -1))
by_hand("a number added to scores", lambda s: torch.softmax(s + 1.0, -1))
by_hand("a mask within the scale", lambda s: torch.softmax((s + ONES.to(s.dtype)) / 2, -1))
by_hand("a cap that is no cap", lambda s: torch.softmax(torch.tanh(s / 3) * 2, -1))
by_hand("a cap and a scale", lambda s: torch.softmax(torch.tanh(s / 3) * 3 * 0.7, -1))
by_hand("weights turned", lambda s: torch.softmax(s, -1).transpose(-1, -2))
by_hand("weights scaled", lambda s: torch.softmax(s, -1) * 0.9)


def turned(
    name: str,
    shape: Callable[[Tensor], Tensor] = lambda t: t[None, None],
    size: int = 4,
    rotate: Callable[[Tensor], Tensor] = half,
    keys: Callable[[Tensor], Tensor] = lambda t: t,
) -> None:
    def call(m: Layers, x: Tensor) -> Tensor:
        cos, sin = map(shape, angles(x, size))
        q, k, v = qkv(m, x, 8 // size)
        return joined(S(q * cos + rotate(q) * sin, k * keys(cos) + rotate(k) * keys(sin), v))

    short(name, call)


turned("RoPE with angles for heads", lambda t: t.unsqueeze(1), size=2)
turned("RoPE with angles", lambda t: t[None].unsqueeze(1))
turned("RoPE in pairs", rotate=lambda t: torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2))
turned("RoPE the other way", lambda t: t[None].unsqueeze(1), rotate=lambda t: -half(t))
turned(
    "RoPE of uneven halves", lambda t: t[None].unsqueeze(1), rotate=lambda t: torch.cat((-t[..., 1:], t[..., :1]), -1)
)
turned("RoPE with other angles for keys", lambda t: t[None].unsqueeze(1), keys=lambda t: t.flip(2))


@spelling
def turns_rows_before_heads(m: Layers, x: Tensor) -> Tensor:
    cos, sin = (t[None].unsqueeze(1) for t in angles(x, 2))  # [1, 1, S, 2], against [B, S, H, 2]
    q, k, v = (layer(x).view(2, 4, 4, 2) for layer in (m.a, m.b, m.c))
    q, k = (t * cos + half(t) * sin for t in (q, k))
    return joined(S(*(t.transpose(1, 2) for t in (q, k, v))))


@spelling
def turns_the_part_that_passes(m: Layers, x: Tensor) -> Tensor:
    cos, sin = (t[None].unsqueeze(1) for t in angles(x, 2))
    q, k, v = qkv(m, x)
    q, k = (torch.cat(((p := t[..., 2:]) * cos + half(p) * sin, t[..., 2:]), -1) for t in (q, k))
    return joined(S(q, k, v))


@spelling
def turns_the_part_before_what_passes(m: Layers, x: Tensor) -> Tensor:
    cos, sin = (t[None].unsqueeze(1) for t in angles(x, 2))
    q, k, v = qkv(m, x)
    q, k = (torch.cat(((p := t[..., :2]) * cos + half(p) * sin, t[..., 2:]), -1) for t in (q, k))
    return joined(S(q, k, v))


@spelling
def turns_keys_by_twice_the_angles(m: Layers, x: Tensor) -> Tensor:
    (cos, sin), (keys_cos, keys_sin) = ([t[None].unsqueeze(1) for t in angles(x, 4, n)] for n in (1.0, 2.0))
    q, k, v = qkv(m, x)
    return joined(S(q * cos + half(q) * sin, k * keys_cos + half(k) * keys_sin, v))


@spelling
def learns_its_angles(m: Layers, x: Tensor) -> Tensor:
    cos, sin = (layer.weight[None, :4, :4].unsqueeze(1) for layer in (m.a, m.b))  # whose halves differ
    q, k, v = qkv(m, x)
    return joined(S(q * cos + half(q) * sin, k * cos + half(k) * sin, v))


def normed(name: str, call: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
    short(name, lambda m, x: joined(S(*call(*qkv(m, x), m.w))))


normed("norms of several eps", lambda q, k, v, w: (rms(q, w[:4]), rms(k, w[4:], 0.5), v))
normed("a norm of values", lambda q, k, v, w: (rms(q, w[:4]), rms(k, w[4:]), rms(v, w[:4])))
normed("a norm of queries", lambda q, k, v, w: (rms(q, w[:4]), k, v))

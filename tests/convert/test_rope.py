"""RoPE as models write it: halves and pairs, before or after heads are transposed, and in complex numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.testing import seeded_randn

from .comparing import Replayed, assert_same, assert_same_recorded
from .spellings import half, operations

ROWS, HEADS, SIZE = 5, 3, 4
X = seeded_randn((2, ROWS, 12), 0).double()
Turn = Callable[["Roped", Tensor], Tensor]


def pairs(t: Tensor) -> Tensor:
    return torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2)


class Roped(nn.Module):
    """Attention whose queries and keys have RoPE.

    Args:
        turn: gives RoPE to queries or keys [B, S, H, D] or, if `after`, [B, H, S, D].
        after: whether heads were transposed before.
        style: of the cosines and sines of all elements.
        size: how many elements of a head have RoPE.
    """

    def __init__(self, turn: Turn, after: bool = True, style: str = "half", size: int = SIZE) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v = (nn.Linear(12, HEADS * SIZE) for _ in range(3))
        self.turn, self.after = turn, after
        angles = torch.arange(ROWS)[:, None] / 10 ** torch.arange(size // 2).double()
        full = torch.cat((angles, angles), -1) if style == "half" else angles.repeat_interleave(2, -1)
        self.register_buffer("cos", full.cos().double())
        self.register_buffer("sin", full.sin().double())
        self.register_buffer("c", angles.cos().double())
        self.register_buffer("s", angles.sin().double())
        self.register_buffer("angles", torch.polar(torch.ones_like(angles), angles).to(torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], HEADS, SIZE) for layer in (self.q, self.k, self.v))
        if self.after:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        q, k = self.turn(self, q), self.turn(self, k)
        if not self.after:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def over(t: Tensor) -> Tensor:
    """Angles for [B, S, H, D]."""
    return t[None, :, None, :]


def parts(m: Roped, t: Tensor) -> Tensor:
    one, two = t.chunk(2, -1)
    return torch.cat((one * m.c - two * m.s, two * m.c + one * m.s), -1)


def parts_of_pairs(m: Roped, t: Tensor) -> Tensor:
    one, two = t[..., ::2], t[..., 1::2]
    return torch.stack((m.c * one - two * m.s, m.s * one + m.c * two), dim=-1).reshape(t.shape)


def torchtune(m: Roped, t: Tensor) -> Tensor:
    y, c, s = t.reshape(*t.shape[:-1], -1, 2), over(m.c), over(m.s)
    return torch.stack([y[..., 0] * c - y[..., 1] * s, y[..., 1] * c + y[..., 0] * s], -1).flatten(3).type_as(t)


def twice_in_float32(m: Roped, t: Tensor) -> Tensor:
    """Two equal casts, of which one is left."""
    return t.float() * over(m.cos) + half(t.float()) * over(m.sin)


def of_complex(m: Roped, t: Tensor) -> Tensor:
    """As in Meta's Llama."""
    y = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2))
    return torch.view_as_real(y * m.angles.view(1, ROWS, 1, -1)).flatten(3).type_as(t)


def of_complex_after(m: Roped, t: Tensor) -> Tensor:
    y = torch.view_as_complex(t.contiguous().view(*t.shape[:-1], -1, 2))
    return torch.view_as_real(m.angles * y).reshape(t.shape)


def partly(m: Roped, t: Tensor) -> Tensor:
    turned, rest = t[..., :2], t[..., 2:]
    return torch.cat((turned * m.cos + half(turned) * m.sin, rest), dim=-1)


def partly_in_parts(m: Roped, t: Tensor) -> Tensor:
    turned, rest = t.split((2, 2), -1)
    return torch.cat((parts(m, turned), rest), dim=-1)


def partly_in_pairs(m: Roped, t: Tensor) -> Tensor:
    turned, rest = t.split((2, 2), -1)
    return torch.cat((turned * over(m.cos) + pairs(turned) * over(m.sin), rest), dim=-1)


SPELLINGS: dict[str, tuple[Roped, str]] = {
    "halves": (Roped(lambda m, t: t * m.cos + half(t) * m.sin), "half"),
    "halves, in another order": (Roped(lambda m, t: m.sin * half(t) + m.cos * t), "half"),
    "halves, of four dimensions": (Roped(lambda m, t: t * m.cos[None, None] + half(t) * m.sin[None, None]), "half"),
    "halves, before the transpose": (Roped(lambda m, t: t * over(m.cos) + half(t) * over(m.sin), after=False), "half"),
    "halves, of three dimensions": (
        Roped(lambda m, t: t * m.cos[:, None] + half(t) * m.sin[:, None], after=False), "half"
    ),
    "pairs": (Roped(lambda m, t: t * m.cos + pairs(t) * m.sin, style="interleaved"), "interleaved"),
    "pairs, before the transpose": (
        Roped(lambda m, t: t * over(m.cos) + pairs(t) * over(m.sin), after=False, style="interleaved"), "interleaved"
    ),
    "parts": (Roped(parts), "half"),
    "parts of pairs": (Roped(parts_of_pairs), "interleaved"),
    "torchtune": (Roped(torchtune, after=False), "interleaved"),
    "complex numbers": (Roped(of_complex, after=False), "interleaved"),
    "complex numbers, after the transpose": (Roped(of_complex_after), "interleaved"),
    "a part of each head": (Roped(partly, size=2), "half"),
    "a part of each head, in parts": (Roped(partly_in_parts, size=2), "half"),
    "a part of each head, in pairs": (Roped(partly_in_pairs, after=False, size=2), "interleaved"),
}  # fmt: skip


def ropes(replayed: Replayed) -> list[ops.RotaryEmbedding]:
    regions = [region for graph in replayed.graphs for region in graph.regions]
    return [op for region in regions for op in region.model if isinstance(op, ops.RotaryEmbedding)]


@pytest.mark.parametrize("name", SPELLINGS)
def test_rope_is_an_operation_and_keeps_its_numbers(name: str):
    model, style = SPELLINGS[name]
    replayed = assert_same_recorded(model.double(), X)
    (found,) = ropes(replayed)
    assert (found.style, found.rotary_dim) == (style, 2 if name.startswith("a part") else SIZE)
    assert operations(replayed) == ["MergedLinear", "RotaryEmbedding", "Attention"]
    assert not replayed.graphs[0].left


@pytest.mark.parametrize("name", ["halves, before the transpose", "pairs", "parts", "torchtune", "complex numbers"])
def test_rope_is_an_operation_as_dynamo_captures_it(name: str):
    conversion = assert_same(SPELLINGS[name][0].double(), X)
    found = [type(op).__name__ for region in conversion.graphs[0].regions for op in region.model]
    assert found == ["MergedLinear", "RotaryEmbedding", "Attention"]
    assert not conversion.graphs[0].beside


@pytest.mark.parametrize("turn", [of_complex, torchtune], ids=["complex numbers", "torchtune"])
def test_rope_in_float32_within_a_model_in_bfloat16_is_an_operation(turn: Turn):
    model = Roped(lambda m, t: turn(m, t.float()).to(t.dtype), after=False).bfloat16()
    for name in ("cos", "sin", "c", "s"):
        setattr(model, name, getattr(model, name).float())
    model.angles = model.angles.to(torch.complex64)
    replayed = assert_same_recorded(model, X.bfloat16(), bound=3e-2)
    assert len(ropes(replayed)) == 1


def test_what_is_cast_twice_is_viewed_as_what_is_cast_once():
    model = Roped(lambda m, t: twice_in_float32(m, t).type_as(t), after=False).bfloat16()
    model.cos, model.sin = model.cos.float(), model.sin.float()
    conversion = assert_same(model, X.bfloat16(), bound=3e-2)
    found = [type(op).__name__ for region in conversion.graphs[0].regions for op in region.model]
    assert found == ["MergedLinear", "RotaryEmbedding", "Attention"]


@pytest.mark.parametrize("after", [False, True])
def test_angles_that_are_learned_have_gradients(after: bool):
    def turn(m: Roped, t: Tensor) -> Tensor:
        cos, sin = (t if after else over(t) for t in (m.k.weight[:ROWS, :SIZE], m.v.weight[:ROWS, :SIZE]))
        return t * cos + pairs(t) * sin

    assert len(ropes(assert_same_recorded(Roped(turn, after).double(), X))) == 1


def pairs_to_halves(m: Roped, t: Tensor) -> Tensor:
    one, two = t[..., ::2], t[..., 1::2]
    return torch.cat((one * m.c - two * m.s, two * m.c + one * m.s), -1)


def halves_to_pairs(m: Roped, t: Tensor) -> Tensor:
    one, two = t.chunk(2, -1)
    return torch.stack((one * m.c - two * m.s, two * m.c + one * m.s), -1).flatten(-2)


def cosines_for_sines(m: Roped, t: Tensor) -> Tensor:
    one, two = t.chunk(2, -1)
    return torch.cat((one * m.c - two * m.s, two * m.s + one * m.c), -1)


def no_difference(m: Roped, t: Tensor) -> Tensor:
    one, two = t.chunk(2, -1)
    return torch.cat((one * m.c + two * m.s, two * m.c + one * m.s), -1)


def the_rest(m: Roped, t: Tensor) -> Tensor:
    turned = t[..., 2:]
    return torch.cat((turned * m.cos + half(turned) * m.sin, turned), -1)


def the_rest_first(m: Roped, t: Tensor) -> Tensor:
    turned = t[..., :2]
    return torch.cat((t[..., 2:], turned * m.cos + half(turned) * m.sin), -1)


def in_two(t: Tensor) -> Tensor:
    return t.reshape(*t.shape[:-1], 2, 2)


def complex_halves(m: Roped, t: Tensor) -> Tensor:
    y = torch.view_as_complex(in_two(t).transpose(-1, -2).contiguous())
    return torch.view_as_real(y * m.angles).flatten(3)


real = torch.view_as_real


def conjugates(m: Roped, t: Tensor) -> Tensor:
    return real(torch.view_as_complex(in_two(t)) * m.angles.conj()).flatten(3)


NEARLY: dict[str, Roped] = {
    "the other way": Roped(lambda m, t: t * m.cos - half(t) * m.sin),
    "pairs the other way": Roped(
        lambda m, t: t * m.cos + torch.stack((t[..., 1::2], -t[..., ::2]), -1).flatten(-2) * m.sin
    ),
    "pairs that become halves": Roped(pairs_to_halves),
    "halves that become pairs": Roped(halves_to_pairs),
    "cosines for sines": Roped(cosines_for_sines),
    "no difference": Roped(no_difference),
    "angles of heads": Roped(lambda m, t: t * m.cos[:HEADS, None] + half(t) * m.sin[:HEADS, None]),
    "angles of heads, before": Roped(lambda m, t: t * m.cos[:HEADS] + half(t) * m.sin[:HEADS], after=False),
    "a stretch for every other element": Roped(
        lambda m, t: t * m.cos + torch.stack((-t[..., 1:3], t[..., ::2]), -1).flatten(-2) * m.sin
    ),
    "another part": Roped(the_rest, size=2),
    "the first part behind": Roped(the_rest_first, size=2),
    "complex numbers of halves": Roped(complex_halves),
    "a factor of complex numbers": Roped(lambda m, t: real(torch.view_as_complex(in_two(t)) * m.c).flatten(3)),
    "another tensor": Roped(lambda m, t: t * m.cos + half(t * 2) * m.sin),
    "rows in turn": Roped(lambda m, t: t * m.cos.roll(1, 0) + half(t) * m.sin.roll(1, 0)),
}


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_rope_keeps_its_numbers(name: str):
    replayed = assert_same_recorded(NEARLY[name].double(), X)
    assert not ropes(replayed)


def test_conjugate_angles_turn_the_other_way():
    assert len(ropes(assert_same_recorded(Roped(conjugates).double(), X))) == 1


def test_angles_that_change_between_queries_and_keys_are_not_the_same():
    def turn(m: Roped, t: Tensor) -> Tensor:
        y = t * m.cos[None, None] + half(t) * m.sin[None, None]
        m.cos.mul_(2)
        return y

    model = Roped(turn).double()
    plain = copy.deepcopy(model)
    conversion = sf.convert(model)
    for _ in range(2):
        torch.testing.assert_close(model(X), plain(X), rtol=1e-9, atol=1e-9)
    assert "RotaryEmbedding" not in str(conversion)

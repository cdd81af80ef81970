"""Conversions between layouts of the weights of queries, keys and values."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqfuse.nn import pack_qkv, unpack_qkv
from seqfuse.testing import seeded_randn

LAYOUTS = ("packed", "separate", "3hde", "e3hd", "eh3d")
H, D, E = 3, 4, 5


def same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, a, b)) if isinstance(a, tuple) else torch.equal(a, b)


@pytest.mark.parametrize("bias", [False, True], ids=["weight", "bias"])
@pytest.mark.parametrize(("first", "second"), list(itertools.product(LAYOUTS, repeat=2)))
def test_every_pair_of_layouts_goes_round_bit_for_bit(first: Any, second: Any, bias: bool):
    packed = seeded_randn((3 * H * D,) if bias else (3 * H * D, E), 0)
    one = unpack_qkv(packed, first, H)
    other = unpack_qkv(pack_qkv(one, first, H), second, H)
    assert same(unpack_qkv(pack_qkv(other, second, H), first, H), one)


def test_each_layout_holds_each_number_where_it_says():
    packed = torch.arange(3.0 * H * D * E).view(3 * H * D, E)
    three: Any = unpack_qkv(packed, "3hde", H)
    eh3d: Any = unpack_qkv(packed, "eh3d", H)
    e3hd: Any = unpack_qkv(packed, "e3hd", H)
    separate: Any = unpack_qkv(packed, "separate", H)
    assert (three.shape, eh3d.shape, e3hd.shape) == ((3, H, D, E), (E, H, 3, D), (E, 3 * H * D))
    for part, head, element, column in itertools.product(range(3), range(H), range(D), range(E)):
        value = packed[(part * H + head) * D + element, column]
        assert three[part, head, element, column] == value
        assert eh3d[column, head, part, element] == value
        assert e3hd[column, (part * H + head) * D + element] == value
        assert separate[part][head * D + element, column] == value


def test_the_weight_of_torchs_attention_is_packed():
    module = nn.MultiheadAttention(H * D, H)
    assert pack_qkv(module.in_proj_weight, "packed", H) is module.in_proj_weight


@pytest.mark.parametrize("layout", ["packed", "separate", "e3hd"])
def test_key_heads_may_be_fewer(layout: Any):
    packed = seeded_randn(((6 + 2 * 2) * D, E), 0)
    one = unpack_qkv(packed, layout, 6, 2)
    assert torch.equal(pack_qkv(one, layout, 6, 2), packed)
    if layout == "separate":
        assert [part.shape[0] for part in one] == [24, 8, 8]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda w: pack_qkv(w, "h3de", H), "layout must be one of packed"),
        (lambda w: pack_qkv(w, "3hde", H), "layout '3hde' has 4 dimensions, 3 for a bias, got 2"),
        (lambda w: pack_qkv(w, "3hde", H, 1), "as many key heads as query heads, got 1 and 3"),
        (lambda w: pack_qkv(w, "packed", 7), r"layout 'packed' does not fit shape \(36, 5\)"),
        (lambda w: pack_qkv(w.view(3, H, D, E)[:, 1:], "3hde", H), r"layout '3hde' does not fit shape \(3, 2, 4, 5\)"),
        (lambda w: pack_qkv(w.view(E, D, 3, H), "eh3d", H), r"layout 'eh3d' does not fit shape \(5, 4, 3, 3\)"),
        (lambda w: pack_qkv((w[1:],) * 3, "separate", H), "expects weights of queries, keys and values for 3 heads"),
        (lambda w: pack_qkv((w, w, w[1:]), "separate", H), "expects keys and values of 36 rows"),
        (lambda w: pack_qkv((w, w[1:], w), "separate", H), r"36 rows, got \(36, 5\), \(35, 5\), \(36, 5\)"),
        (lambda w: unpack_qkv(w, "packed", 7), r"expects \[21 D, E\], or \[21 D\], got \(36, 5\)"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str):
    weight: Tensor = seeded_randn((3 * H * D, E), 0)
    with pytest.raises(ValueError, match=message):
        call(weight)

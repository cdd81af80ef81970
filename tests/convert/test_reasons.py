"""What the report says of calls that stay: what they are, why, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse.convert.launches import Before
from seqfuse.convert.region import Region
from seqfuse.testing import seeded_randn

from .comparing import assert_same_recorded
from .recording import Replayed
from .test_altered import Layers, Spelling, joined, qkv
from .test_composition import Net
from .test_composition import X as ROWS

X = seeded_randn((2, 4, 8), 2).double()
Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v)


def bmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    return (torch.bmm(q, k.transpose(1, 2)).softmax(-1) @ v).unflatten(0, (2, 2))


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / 2


CALL = "call F.scaled_dot_product_attention"
PAST = X[:, None, None, :, 0] > 9
ATTENTION: dict[str, tuple[Weigh, str]] = {
    "einsum": (einsum, f"its scores are made by einsum, not by q @ k.transpose(-2, -1): {CALL}"),
    "bmm": (bmm, f"its scores are made by bmm, not by q @ k.transpose(-2, -1): {CALL}"),
    "a mask of data": (
        lambda q, k, v: scores(q, k).masked_fill(PAST, -1e9).softmax(-1) @ v,
        f"its scores are masked by masked_fill with a mask that is data: {CALL}, with attn_mask=",
    ),
    "softmax over queries": (
        lambda q, k, v: scores(q, k).softmax(-2) @ v,
        "its softmax is not over the last dimension of scores [B, H, S, S]",
    ),
    "bent by tanh": (
        lambda q, k, v: (torch.tanh(scores(q, k)) * 3).softmax(-1) @ v,
        "its scores are bent by tanh, which is no soft cap: that is cap * tanh(scores / cap)",
    ),
    "heads not put side by side": (
        lambda q, k, v: (scores(q, k).softmax(-1) @ v).transpose(2, 3), "its heads are not laid side by side"
    ),
}  # fmt: skip


def attending(weigh: Weigh) -> Spelling:
    return lambda m, x: joined(weigh(*qkv(m, x)))


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_by_hand_that_is_left_says_why_and_its_gemms_point_to_that(name: str):
    weigh, reason = ATTENTION[name]
    (graph,) = assert_same_recorded(Layers(attending(weigh)).double(), X).graphs
    found = [(left.kind, left.reason) for left in graph.left if left.call not in ("linear", "tanh")]
    gemms = [("GEMM", "it is part of the attention around softmax, which is left")] * 2
    assert sorted(found) == sorted([*gemms, ("attention", reason)])


def test_a_softmax_that_weighs_nothing_is_no_attention():
    (graph,) = assert_same_recorded(Layers(lambda m, x: m.b(F.gelu(m.a(x))).softmax(-1)).double(), X).graphs
    assert not graph.left


STAYS: dict[str, tuple[Spelling, str, str]] = {
    "batch_norm": (
        lambda m, x: F.batch_norm(m.a(x[0]), None, None, training=True), "norm", "no operation stands for batch_norm"
    ),
    "softplus": (lambda m, x: F.softplus(m.a(x)), "activation", "no operation stands for softplus"),
    "layer_norm": (lambda m, x: F.layer_norm(m.a(x), (4, 8)), "norm", "it normalizes more than the last dimension"),
    "matmul": (lambda m, x: m.a(x) @ m.b(x).mT, "GEMM", "neither is a parameter of two dimensions on the right"),
}  # fmt: skip


@pytest.mark.parametrize("name", STAYS)
def test_a_call_that_no_operation_stands_for_says_so(name: str):
    spelling, kind, reason = STAYS[name]
    (graph,) = Replayed(Layers(spelling).double(), X).graphs
    (said,) = [left.reason for left in graph.left if (left.kind, left.call) == (kind, name)]
    assert said.startswith(reason)


def test_a_conversion_says_of_how_many_graphs_it_is():
    model = Net()
    conversion = sf.convert(model)
    assert repr(conversion) == "<Conversion of Net, 0 graphs>"
    model(ROWS)
    assert repr(conversion) == "<Conversion of Net, 1 graph>"


def test_what_a_report_counts_is_counted_once_for_each_plan():
    model: nn.Module = Net(p=0.1)
    conversion = sf.convert(model)
    model(ROWS)
    with (
        patch.object(Region, "_count_launched", autospec=True, side_effect=Region._count_launched) as launched,
        patch.object(Before, "eager", autospec=True, side_effect=Before.eager) as eager,
    ):
        first = str(conversion)
        assert str(conversion) == first
        assert (launched.call_count, eager.call_count) == (1, 1)
        model.eval()
        with torch.no_grad():
            model(ROWS)
        assert str(conversion) != first
        assert (launched.call_count, eager.call_count) == (2, 2)


@pytest.mark.parametrize("fast", [True, False], ids=["on", "off"])
def test_an_encoder_of_torch_in_its_fast_path_says_how_to_leave_that_off(fast: bool):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    conversion, before = sf.convert(model), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with torch.no_grad():
            model(X.float())
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    (graph,) = conversion.graphs
    assert bool(graph.regions) is not fast
    assert ["set_fastpath_enabled(False)" in left.reason for left in graph.left] == [True] * fast


def test_padded_tokens_of_an_encoder_are_those_without_a_nested_tensor():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    plain = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    model = nn.TransformerEncoder(layer, 1).eval()
    model.load_state_dict(plain.state_dict())
    padded = torch.tensor([[False] * 4, [False, False, True, True]])
    sf.convert(model)
    with torch.no_grad():
        found, wanted = (one(X.float(), src_key_padding_mask=padded) for one in (model, plain))
    torch.testing.assert_close(found, wanted)

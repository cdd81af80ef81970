"""The report's entries for calls left eager: the call, the reason, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

import seqfuse as sf
from seqfuse.convert.launches import Before, Launches
from seqfuse.convert.reasons import kind_of_module
from seqfuse.convert.region import CapturedRegion
from seqfuse.testing import seeded_randn

from .comparing import Replayed, assert_same_recorded
from .residual import Net
from .residual import X as ROWS
from .spellings import Layers, Spelling, joined, qkv

X = seeded_randn((2, 4, 8), 2).double()
Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / 2


CALL = "call F.scaled_dot_product_attention"
PAST = X[:, None, None, :, 0] > 9
ATTENTION: dict[str, tuple[Weigh, str]] = {
    "a mask of data": (
        lambda q, k, v: scores(q, k).masked_fill(PAST, -1e3).softmax(-1) @ v,
        f"its scores are masked by masked_fill with a mask that is data: {CALL}, with attn_mask=",
    ),
    "softmax over queries": (
        lambda q, k, v: scores(q, k).softmax(-2) @ v,
        "its softmax is not over the last dimension of scores [B, H, S, S]",
    ),
    "weights behind the values": (  # as `torch.einsum("bts,bcs->bct", weights, v)`
        lambda q, k, v: (v.transpose(2, 3) @ scores(q, k).softmax(-1).transpose(2, 3)).transpose(2, 3),
        f"its weights are read by more, or by something else, than weights @ v: {CALL}",
    ),
    "bent by tanh": (
        lambda q, k, v: (torch.tanh(scores(q, k)) * 3).softmax(-1) @ v,
        "its scores go through tanh, but not as a soft cap, cap * tanh(scores / cap)",
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


def test_scores_are_named_as_the_model_spells_them():
    """Not by the view with which an einsum is written as a GEMM."""

    def talking(m: Any, x: Tensor) -> Tensor:
        q, k, v = qkv(m, x)
        return joined(torch.einsum("bhij,hg->bgij", scores(q, k), m.mix).softmax(-1) @ v)

    model = Layers(talking)
    model.mix = nn.Parameter(torch.rand(2, 2))
    (graph,) = assert_same_recorded(model.double(), X).graphs
    (reason,) = [left.reason for left in graph.left if left.call == "softmax"]
    assert reason == f"its scores are made by einsum, not by q @ k.transpose(-2, -1): {CALL}"


def test_a_softmax_that_weighs_nothing_is_no_attention():
    (graph,) = assert_same_recorded(Layers(lambda m, x: m.b(F.gelu(m.a(x))).softmax(-1)).double(), X).graphs
    assert not graph.left


STAYS: dict[str, tuple[Spelling, str, str]] = {
    "batch_norm": (
        lambda m, x: F.batch_norm(m.a(x[0]), None, None, training=True), "norm", "no operation matches batch_norm"
    ),
    "softplus": (lambda m, x: F.softplus(m.a(x)), "activation", "no operation matches softplus"),
    "layer_norm": (lambda m, x: F.layer_norm(m.a(x), (4, 8)), "norm", "it normalizes more than the last dimension"),
    "matmul": (lambda m, x: m.a(x) @ m.b(x).mT, "GEMM", "its right operand is not a 2-D parameter"),
    "einsum": (
        lambda m, x: torch.einsum("bsh,h,oh->bso", x, m.w, m.a.weight), "GEMM", "no operation matches einsum"
    ),
    "lerp": (lambda m, x: torch.lerp(m.a(x), x, 0.5), "interpolation", "no operation matches lerp"),
    "fft_rfft": (lambda m, x: torch.fft.rfft(m.a(x)).abs(), "FFT", "no operation matches fft_rfft"),
    "lstm": (lambda m, x: m.lstm(x)[0], "recurrent layer", "no operation matches lstm"),
    "grouped_mm_fallback": (
        lambda m, x: torch.ops.seqfuse_tests.grouped_mm_fallback(x, m.a.weight), "GEMM",
        "no operation matches grouped_mm_fallback",
    ),
}  # fmt: skip


def test_a_gemm_is_named_as_the_model_spells_it():
    def spelling(m: Layers, x: Tensor) -> Tensor:
        return torch.bmm(torch.einsum("bsh,bth->bst", m.a(x), x).tanh(), x)

    (graph,) = Replayed(More(spelling).double(), X).graphs
    assert {(left.call, left.reason.partition(",")[0]) for left in graph.left if left.kind == "GEMM"} >= {
        (call, "its right operand is not a 2-D parameter") for call in ("einsum", "bmm")
    }
    assert "matmul" not in graph.beside


@torch.library.custom_op("seqfuse_tests::grouped_mm_fallback", mutates_args=())
def grouped_mm_fallback(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


class More(Layers):
    def __init__(self, spelling: Spelling) -> None:
        super().__init__(spelling)
        self.lstm = nn.LSTM(8, 8)


@pytest.mark.parametrize("name", STAYS)
def test_a_call_that_no_operation_stands_for_says_so(name: str):
    spelling, kind, reason = STAYS[name]
    (graph,) = Replayed(More(spelling).double(), X).graphs
    (said,) = [left.reason for left in graph.left if (left.kind, left.call) == (kind, name)]
    assert said.startswith(reason)


@pytest.mark.parametrize(
    "spelling",
    [
        pytest.param(lambda m, x: torch.einsum("bsh->shb", m.a(x)), id="a permutation"),
        pytest.param(lambda m, x: torch.einsum("ij,h->ijh", m.a(x)[0], m.w), id="an outer product"),
        pytest.param(lambda m, x: torch.einsum("bsh,h->bsh", m.a(x), m.w), id="a product of elements"),
        pytest.param(lambda m, x: torch.einsum("bsh->bs", m.a(x)), id="a sum"),
    ],
)
def test_an_einsum_that_contracts_nothing_is_no_gemm(spelling: Spelling):
    (graph,) = Replayed(Layers(spelling).double(), X).graphs
    assert {left.call for left in graph.left} == {"linear"}


ALONE: dict[str, tuple[Spelling, str]] = {
    "beside calls": (
        lambda m, x: m.a(torch.einsum("bsh,h->bsh", x, m.w)).cumsum(1),
        "its input is made by einsum (not recognized); its result is read by cumsum (not recognized)",
    ),
    "behind views": (
        lambda m, x: torch.chunk(m.up(x.cumsum(1).transpose(0, 1)), 2, -1)[0].cumsum(-1),
        "its input is made by cumsum (not recognized); its result is read by cumsum (not recognized)",
    ),
    "between a call that is left and the end": (
        lambda m, x: m.a(F.softplus(x)), "its input is made by softplus (left); its result is returned"
    ),
    "behind a view of a chain": (
        lambda m, x: m.c(m.b(F.gelu(m.a(x))).transpose(1, 2).reshape(2, -1, 8)),
        "its input is made by Linear (in another chain, by way of transpose and reshape); its result is returned",
    ),
    "behind a sum that is fused with nothing either": (
        lambda m, x: m.a((x.cumsum(0) + x.cumprod(0)).cummax(1).values + x.cumsum(1)),
        (
            "its input is made by add (no operation beside it to fuse it with); its result is returned"
        ),
    ),
    "several readers": (
        lambda m, x: (lambda y: y.cumsum(0) + y.cumprod(0) + y.sort().values + y.flip(0))(m.a(x)),
        (
            "its input is given to the graph; its result is read by cumsum (not recognized) and cumprod "
            "(not recognized) and 2 more"
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_a_gemm_that_is_fused_with_nothing_names_what_is_beside_it(name: str):
    spelling, said = ALONE[name]
    (graph,) = Replayed(Layers(spelling).double(), X).graphs
    (reason,) = [left.reason for left in graph.left if left.call == "linear"]
    assert reason == f"no operation beside it to fuse it with: {said}"


def test_an_activation_beside_a_sum_without_parameters_says_so():
    (graph,) = Replayed(Layers(lambda m, x: F.gelu(x.cumsum(1) + x.cumprod(1)).cumsum(1)).double(), X).graphs
    (reason,) = [left.reason for left in graph.left]
    sides = "its input is made by cumsum (not recognized) and cumprod (not recognized); its result is read by cumsum"
    assert reason == f"no operation has a parameter in its chain of Add and GeLU: {sides} (not recognized)"


def test_a_neighbour_that_filter_fn_left_out_is_named_with_that():
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).double()
    conversion = sf.convert(model, filter_fn=lambda module, path: path != "0")
    model(ROWS)
    reasons = {left.call: left.reason for left in conversion.graphs[0].left}
    said = "its input is made by layer_norm in 0 (left out by filter_fn); its result is returned"
    assert reasons["linear"] == f"no operation beside it to fuse it with: {said}"


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cummax(0).values


def test_a_neighbour_in_another_module_is_named_with_its_path_and_those_of_layers_are_one_line():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), Pool()) for _ in range(3))).double()
    conversion = sf.convert(model)
    model(ROWS)
    alone, between = "no operation beside it to fuse it with", "cummax in {}.1 (not recognized)"
    reasons = {left.module: left.reason for left in conversion.graphs[0].left}
    for i, entered in enumerate(("given to the graph", f"made by {between}", f"made by {between}")):
        sides = f"its input is {entered.format(i - 1)}; its result is read by {between.format(i)}"
        assert reasons[f"{i}.0"] == f"{alone}: {sides}"
    said = f"its input is made by {between}; its result is read by {between}".replace("{}.1", "*.*")
    assert f"  left: GEMM linear in 1.0, 2.0: {alone}: {said}" in str(conversion).splitlines()


def test_calls_within_a_transform_of_torch_func_say_so():
    class Each(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return torch.func.vmap(lambda t: self.inner(t))(x)

    model = Each()
    conversion = sf.convert(model)
    model(ROWS.float())
    (graph,) = conversion.graphs
    reasons = {left.call: left.reason for left in graph.left}
    assert reasons == dict.fromkeys(("layer_norm", "linear", "gelu"), "it runs within a transform of torch.func")


def test_a_hook_that_is_set_after_the_capture_is_the_reason_why_modules_are_in_no_graph():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)).double()
    conversion = sf.convert(model)
    model(ROWS)
    assert not conversion.left
    model[0].register_full_backward_hook(lambda module, dx, dy: None)
    model(ROWS)
    assert {left.module for left in conversion.left} == {"0", "1", "2"}
    assert all("Module-level backwards hooks" in left.reason for left in conversion.left)


def test_a_recurrent_layer_that_dynamo_leaves_is_named():
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.fc = nn.LSTM(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.lstm(x)[0])

    model = Tagger()
    conversion = sf.convert(model)
    model(X.float())
    left = {(one.kind, one.module) for one in (*conversion.left, *(one for g in conversion.graphs for one in g.left))}
    assert ("recurrent layer", "lstm") in left


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(2, 2), "GEMM"), (nn.Bilinear(2, 2, 2), "GEMM"), (Conv1D(2, 2), "GEMM"),
        (nn.ConvTranspose2d(2, 2, 1), "convolution"), (nn.GRU(2, 2), "recurrent layer"),
        (nn.GRUCell(2, 2), "recurrent layer"), (nn.BatchNorm1d(2), "norm"), (nn.GELU(), "activation"),
        (NewGELUActivation(), "activation"), (nn.Embedding(2, 2), None), (nn.Dropout(), None),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, nn.Module) else str(given),
)  # fmt: skip
def test_a_module_that_no_graph_contains_has_a_kind(module: nn.Module, kind: str | None):
    assert kind_of_module(module) == kind


@pytest.mark.parametrize("rows", [7, 12, 32])
def test_causal_attention_launches_what_eager_torch_launches(rows: int):
    """With few keys it was a loop in plain torch."""
    model = Layers(lambda m, x: m.a(joined(F.scaled_dot_product_attention(*qkv(m, x), is_causal=True))))
    x = torch.randn(2, rows, 8, requires_grad=True)
    with Launches() as forward:
        model(x)
    conversion = sf.convert(model)
    model(x)
    (region,) = conversion.graphs[0].regions
    assert region.eager is not None
    assert region.eager[0] == forward.count
    assert region.launched[0] <= forward.count
    assert region.launched[1] <= region.eager[1]


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
        patch.object(
            CapturedRegion, "_count_launched", autospec=True, side_effect=CapturedRegion._count_launched
        ) as launched,
        patch.object(Before, "eager", autospec=True, side_effect=Before.eager) as eager,
    ):
        first = str(conversion)
        assert str(conversion) == first
        assert (launched.call_count, eager.call_count) == (0, 1), "launches are not printed"
        assert conversion.report(launches=True) == conversion.report(launches=True) != first
        assert (launched.call_count, eager.call_count) == (1, 2)
        model.eval()
        with torch.no_grad():
            model(ROWS)
        assert str(conversion) != first
        assert (launched.call_count, eager.call_count) == (1, 2), "nothing is saved without gradients"


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

"""Models that nearly match an operation: converted, they keep their own results."""

from __future__ import annotations

import copy
import operator
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph

import seqfuse as sf
from seqfuse import ops
from seqfuse.convert import GraphReport
from seqfuse.convert.effects import in_place
from seqfuse.convert.rewrite import RewriteOptions, rewrite

from . import spellings_in_place as spellings_in_place  # adds to CASES
from .comparing import Replayed, assert_equal, assert_same, assert_same_recorded, passes, recorded
from .spellings import CASES, Layers, S, Spelling, joined, operations, qkv, rms

# What cannot be recorded, what is recorded in another form than Dynamo captures, and one model of each kind.
NOT_RECORDED = ("calls_vmap", "calls_grad", "has a gradient of its own")
CAPTURED = (
    *NOT_RECORDED, "makes_parts_in_inference_mode", "changes_a_cat_of_one", "changes_a_copy_of_the_same_dtype",
    "quick gelu of another factor", "quick gelu of another tensor", "gelu of another factor",
    "changes_between_products", "writes_into_a_buffer", "makes_gates_without_gradients", "detaches",
    "names_its_arguments", "a gain made of data", "a weight made of others", "a learned mask", "groups side by side",
    "RoPE with angles", "norms of several eps", "reads_scores_that_a_mask_was_added_to",
    "leaky relu in place, by position", "relu in place, by position", "a product in place, by its method",
    "averages_again_after_a_change", "a sum in place without gradients",
)  # fmt: skip


def altered(name: str) -> tuple[Layers, Tensor]:
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return Layers(CASES[name]).double(), x


def assert_no_reason_is_an_error(graphs: Sequence[GraphReport]) -> None:
    reasons = [left.reason for graph in graphs for left in graph.left]
    assert not [reason for reason in reasons if "Error" in reason or " would be " in reason]


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_RECORDED])
def test_a_graph_that_is_nearly_a_known_one_keeps_its_numbers(name: str):
    assert_no_reason_is_an_error(assert_same_recorded(*altered(name)).graphs)


@pytest.mark.parametrize("name", [n if n in CAPTURED else pytest.param(n, marks=pytest.mark.full) for n in CASES])
def test_a_converted_model_that_is_nearly_a_known_one_keeps_its_numbers(name: str):
    assert_no_reason_is_an_error(assert_same(*altered(name)).graphs)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("heads by heads, of four", "its queries: queries, keys and values lie within each head of one GEMM's result"),
        ("heads by heads, askew", "its keys: queries, keys and values lie within each head of one GEMM's result"),
        ("heads by heads, values first", "queries, keys and values do not lie side by side"),
        ("heads by heads, keys again", "queries, keys and values do not lie side by side"),
        ("heads cut from rows", "not by a GEMM whose last dimension is split into heads"),
    ],
)
def test_the_report_says_why_attention_is_left(name: str, reason: str):
    model, x = altered(name)
    graphs = Replayed(model, x).graphs
    (said,) = [left.reason for graph in graphs for left in graph.left if left.kind == "attention"]
    assert reason in said


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("quick gelu", "QuickGeLU"),
        ("silu by hand", "SiLU"),
        ("tanh gelu of products", "GeLU"),
        ("relu times itself", "SquaredReLU"),
        ("gelu and more", "GeLU"),
        ("RoPE with angles", "RotaryEmbedding"),
        ("turns_the_part_before_what_passes", "RotaryEmbedding"),
        ("heads cut for one of keys", "Attention"),
    ],
)
def test_a_spelling_of_an_operation_is_taken_for_it(name: str, operation: str):
    assert operation in operations(Replayed(*altered(name)))


@pytest.mark.parametrize("option", [None, "add_zero_attn", "add_bias_kv"])
def test_multi_head_attention_of_torch_is_attention_unless_it_has_a_rare_option(option: str | None):
    given = {} if option is None else {option: True}
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **given)
    model, x = Layers(lambda m, x: m.b(m.attention(*[m.a(x)] * 3, need_weights=False)[0])), altered("quick gelu")[1]
    model.attention = layer
    model.double()
    assert ("Attention" in operations(assert_same_recorded(model, x))) == (option is None)


def test_what_is_captured_is_among_the_cases():
    assert set(CAPTURED) <= CASES.keys()


def test_a_dropout_changes_its_input_whether_that_is_said_by_place_or_by_name():
    graph = Graph()
    x = graph.placeholder("x")
    said: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((0.5, True, True), {}), ((), {"inplace": True})]
    unsaid: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((0.5, True, False), {}), ((0.5, True), {})]
    for calls, expected in ((said, True), (unsaid, False)):
        for rest, named in calls:
            assert in_place(graph.call_function(F.dropout, (x, *rest), named)) == expected


IN_PLACE = {name for name in dir(operator) if name[0] == "i" and hasattr(operator, f"__{name[1:]}__")} - {"iconcat"}


@pytest.mark.parametrize("name", sorted({*IN_PLACE, "setitem"}))
def test_an_operator_in_place_changes_its_first_operand(name: str):
    graph = Graph()
    x = graph.placeholder("x")
    assert in_place(graph.call_function(getattr(operator, name), (x, 1)))
    assert in_place(graph.call_method(f"__{name}__", (x, 1)))
    assert not in_place(graph.call_function(getattr(operator, f"__{name[1:]}__", operator.getitem), (x, 1)))


def drops_weights(m: Layers, x: Tensor) -> Tensor:
    q, k, v = qkv(m, x)
    return joined(F.dropout(torch.softmax(q @ k.transpose(-1, -2), -1)) @ v)


@pytest.mark.parametrize(
    ("spelling", "call", "number"),
    [
        (drops_weights, F.dropout, ("dropout", 0.5)),
        (lambda m, x: m.b(F.layer_norm(m.a(x), (8,), m.w)), F.layer_norm, ("eps", 1e-5)),
    ],
    ids=["dropout", "layer_norm"],
)
def test_a_call_without_a_number_has_that_of_torch(spelling: Spelling, call: Any, number: tuple[str, float]):
    graph, _ = recorded(Layers(spelling).double(), altered("quick gelu")[1], renames=True, tensors=lambda y: [y])
    for node in graph.graph.find_nodes(op="call_function", target=call):
        kept = ("normalized_shape", "weight", "bias")
        node.kwargs = {name: value for name, value in node.kwargs.items() if name in kept}  # as Dynamo captures it
    (name, value), kinds = number, (ops.Attention, ops.LayerNorm)
    regions = [region for report in rewrite(graph, RewriteOptions()) for region in report.regions]
    found = [getattr(op, name) for r in regions for op in r.order.operations if isinstance(op, kinds)]
    assert found == [value]


def test_parameters_are_lent_for_a_call():
    replayed = assert_same_recorded(*altered("another eps"))
    regions = [region for graph in replayed.graphs for region in graph.regions]
    assert regions
    assert all(p.is_meta for region in regions for p in region.model.parameters())


def test_what_is_of_one_dimension_keeps_its_numbers():
    model = Layers(lambda m, x: m.b((y := rms(x)) * y) + m.c(F.gelu(m.a(x)))).double()
    assert_same(model, torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))


def test_a_model_of_convolutions_runs_as_before_and_says_why():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).double()
    x = torch.randn(1, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    conversion = assert_same(model, x)
    assert not [region for graph in conversion.graphs for region in graph.regions]
    assert "no operation matches conv2d" in str(conversion)


class Statistics(nn.Module):
    """Reads a state before and after a call that updates it."""

    def __init__(self, update: Any) -> None:
        super().__init__()
        self.a, self.b, self.update = nn.Linear(8, 8), nn.Linear(8, 8), update
        self.state = nn.BatchNorm1d(8)
        self.rows = nn.Embedding(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mean, row = self.state.running_mean, self.rows.weight[0].detach()
        h = self.a(x) + mean + row
        z = self.update(self, x)
        return self.b(F.gelu(h)) + z + mean


UPDATES: dict[str, Any] = {
    "batch norm": lambda m, x: m.state(x[0]),
    "batch norm, by position": lambda m, x: F.batch_norm(
        x[0], m.state.running_mean, m.state.running_var, None, None, True
    ),
    "instance norm": lambda m, x: F.instance_norm(x.mT, m.state.running_mean, m.state.running_var).mT,
    "embedding with max_norm": lambda m, x: F.embedding(torch.arange(4), m.rows.weight.detach(), max_norm=0.5),
}


@pytest.mark.parametrize("update", UPDATES.values(), ids=UPDATES)
def test_a_state_that_a_call_updates_is_read_as_it_was(update: Any):
    torch.manual_seed(0)
    plain = Statistics(update).double()
    model = copy.deepcopy(plain)
    conversion = sf.convert(model)
    x = torch.randn(2, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for factor in (1, 2, 3):
        assert_equal(passes(model, factor * x), passes(plain, factor * x))
    assert [region for graph in conversion.graphs for region in graph.regions]
    for mine, its in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, its)


def test_a_flag_of_torchs_embedding_is_no_limit():
    graph = Graph()
    weight, ids = graph.placeholder("weight"), graph.placeholder("ids")
    assert not in_place(graph.call_function(torch.embedding, (weight, ids, -1, True, False)))
    assert in_place(graph.call_function(F.embedding, (ids, weight, None, 0.5)))


class MaskMadeInPlace(nn.Module):
    """Attention by hand whose mask is changed in place between its calls; its queries are read before that."""

    def __init__(self, unbound: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.qkv, self.out = (
            nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 24), nn.Linear(8, 8),
        )  # fmt: skip
        self.unbound = unbound

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        qkv = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0) if self.unbound else (qkv[0], qkv[1], qkv[2])
        scores, read = q @ k.transpose(-2, -1) * 0.5, x.mean(-1) if self.unbound else q.mean(-1)
        mask = x.new_zeros(x.shape[1], x.shape[1])
        mask[:, 3:] = -1
        weights = (scores + mask.masked_fill(mask != 0, -100.0)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(x.shape)), read


def test_a_change_within_attention_leaves_the_other_chains():
    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    split, whole = (assert_same(MaskMadeInPlace(unbound).double(), x) for unbound in (False, True))
    assert [len(made.graphs[0].regions) for made in (split, whole)] == [1, 2]
    assert "between its calls, and a value of these is read before that" in str(split)
    assert "between its calls" not in str(whole)


def test_running_statistics_bring_no_gradient_to_what_they_measure():
    def spelling(m: Layers, x: Tensor) -> Tensor:
        q, k, v = qkv(m, x)
        m.bn(joined(S(q, k, v)).flatten(0, 1))
        return m.c(x * q.mean())

    model = Layers(spelling)
    model.bn = nn.BatchNorm1d(8)
    assert_same_recorded(model.double(), torch.randn(2, 4, 8, dtype=torch.float64))

"""Masks that a graph computes from positions: causal ones and sliding windows become options, near misses do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from seqfuse import ops
from seqfuse.convert import GraphReport
from seqfuse.convert.masks import Limits, limits_of
from seqfuse.convert.rewrite import RewriteOptions, rewrite

from .comparing import assert_same, assert_same_recorded, recorded
from .masks import NEARLY, SPELLINGS, Mask, between, changed, of_huggingface, ones, seen
from .spellings import Layers, heads, joined, operations

S = F.scaled_dot_product_attention


class Masked(nn.Module):
    """Attention of two heads with a mask, between GEMMs."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(4))
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return self.attended(x, self.mask(x))

    def attended(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(self.weighted(q, k, v, mask).transpose(1, 2).reshape(x.shape))

    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return S(q, k, v, attn_mask=mask)


class ByHand(Masked):
    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) * 0.5 + mask, -1) @ v


class Filled(Masked):
    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax((q @ k.transpose(-1, -2) * 0.5).masked_fill(mask, -torch.inf), -1) @ v


class Chosen(Masked):
    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        s = q @ k.transpose(-1, -2) * 0.5
        return torch.softmax(torch.where(mask, s, torch.finfo(s.dtype).min), -1) @ v


class Capped(Masked):
    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(q @ k.transpose(-1, -2) * 0.5 / 3) * 3 + mask, -1) @ v


X = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def found_in(graph: GraphModule) -> list[tuple[Node, Limits | None]]:
    """What is proved about the mask of each attention."""
    nodes = [n for n in graph.graph.nodes if n.target is S]
    lengths = [n.args[0].meta["example_value"].shape[-2] for n in nodes]
    return [(m, limits_of(m, s, s)) for n, s in zip(nodes, lengths, strict=True) for m in [n.kwargs["attn_mask"]]]


def converted(model: nn.Module, x: Tensor = X) -> tuple[GraphReport, list[ops.Attention]]:
    """The graph of a converted model with equal results, and its attention."""
    (graph,) = assert_same_recorded(model, x).graphs
    return graph, [op for region in graph.regions for op in region.model if isinstance(op, ops.Attention)]


@pytest.fixture(scope="module")
def symbolic() -> dict[str, Limits | None]:
    """What is proved about masks with symbolic sizes, in one graph."""
    masks = {name: mask for name, (mask, _) in SPELLINGS.items()} | NEARLY
    found: dict[str, Limits | None] = {}

    def backend(gm: GraphModule, inputs: Any) -> Any:
        found.update(zip(masks, (limits for _, limits in found_in(gm)), strict=True))
        return gm.forward

    def every(x: Tensor) -> list[Tensor]:
        heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
        return [S(heads, heads, heads, attn_mask=mask(x)) for mask in masks.values()]

    torch._dynamo.reset()
    torch.compile(every, backend=backend, dynamic=True, fullgraph=True)(X)
    return found


@pytest.mark.parametrize("name", SPELLINGS)
def test_what_masks_of_positions_let_through_is_known_for_all_sizes(name: str, symbolic: dict[str, Limits | None]):
    assert symbolic[name] == SPELLINGS[name][1]


@pytest.mark.parametrize("name", SPELLINGS)
def test_what_is_known_of_a_mask_is_what_the_mask_is(name: str):
    gm, _ = recorded(Masked(SPELLINGS[name][0]), X, renames=True, tensors=lambda y: (y,))
    ((mask, limits),) = found_in(gm)
    assert limits == SPELLINGS[name][1]
    visible = value if (value := mask.meta["example_value"]).dtype is torch.bool else value == 0
    i, j = torch.arange(5)[:, None], torch.arange(5)
    wanted = (j <= i) | torch.tensor(not limits.causal)
    wanted = wanted & ((i - j).abs() < (limits.window or 9))
    assert torch.equal(visible & wanted, visible)
    assert not limits.exact or torch.equal(visible.expand(2, 2, 5, 5), wanted.expand(2, 2, 5, 5))


@pytest.mark.parametrize("name", NEARLY)
def test_nothing_is_known_of_masks_that_are_nearly_causal(name: str, symbolic: dict[str, Limits | None]):
    gm, _ = recorded(Masked(NEARLY[name]), X, renames=True, tensors=lambda y: (y,))
    assert [limits for _, limits in found_in(gm)] == [None]
    assert symbolic[name] is None


@pytest.mark.parametrize("name", ["of Hugging Face", "a lower triangle", "added", "all"])
def test_attention_with_a_causal_mask_is_causal_and_reads_none(name: str):
    graph, (found,) = converted(Masked(SPELLINGS[name][0]))
    assert (found.causal, found.window, found.mask) == (name != "all", None, None)
    assert not graph.beside  # the calls that computed the mask are gone


def test_attentions_side_by_side_share_a_mask_that_is_made_like_what_they_read():
    class Both(Masked):
        def forward(self, x: Tensor) -> Tensor:
            mask = self.mask(x)
            return self.attended(x, mask) * self.attended(x, mask)

    graph, found = converted(Both(SPELLINGS["filled"][0]))
    assert [(op.causal, op.mask) for op in found] == [(True, None)] * 2
    assert not graph.left


def test_eager_torch_is_counted_without_a_mask_that_a_capture_alone_makes():
    class Flagged(Masked):
        def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return S(q, k, v, is_causal=True)

    graphs = [converted(model)[0] for model in (Masked(of_huggingface), Flagged(seen))]
    with_mask, with_flag = (region.eager for graph in graphs for region in graph.regions)
    assert with_flag is not None
    assert with_mask == with_flag


@pytest.mark.parametrize("name", ["added", "chosen", "nothing added"])
def test_attention_by_hand_with_a_causal_mask_is_causal_and_reads_none(name: str):
    graph, (found,) = converted(ByHand(SPELLINGS[name][0]))
    assert (found.causal, found.mask) == (name != "nothing added", None)
    assert not graph.beside


def test_a_flag_that_is_given_by_place_is_read():
    class Placed(Masked):
        def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            return S(q, k, v, None, 0.0, True)

    _, (found,) = converted(Placed(seen))
    assert (found.causal, found.mask) == (True, None)


def test_attention_by_hand_gives_nan_in_rows_that_see_nothing():
    x = X.clone()
    x[:, 2, 0] = 9
    model = ByHand(lambda x: torch.where(x[:, None, :, :1] > 8, -torch.inf, 0.0).to(x.dtype))
    assert model(x)[:, 2].isnan().all()
    _, (found,) = converted(model, x)
    assert found.mask is not None


@pytest.mark.parametrize("model", [Filled(lambda x: ones(x).triu(1) == 1), Chosen(seen)], ids=["filled", "chosen"])
def test_attention_by_hand_whose_scores_are_filled_behind_each_row_is_causal(model: nn.Module):
    graph, (found,) = converted(model)
    assert (found.causal, found.mask) == (True, None)
    assert not graph.beside


@pytest.mark.parametrize(
    "model",
    [Filled(lambda x: ones(x).triu(2) == 1), Filled(lambda x: ~seen(x) | (x[:, None, None, :, 0] > 9)), Filled(seen)],
    ids=["a row more", "with padding", "the other way round"],
)
def test_attention_by_hand_whose_scores_are_filled_in_another_way_gives_what_it_gave(model: nn.Module):
    _, found = converted(model)
    assert not found


def test_a_window_is_an_option_where_no_kernel_of_torch_would_run_with_the_mask():
    _, (found,) = converted(Capped(lambda x: torch.where(between(x, 3, 1), x.new_zeros(()), -torch.inf)))
    assert (found.causal, found.window, found.mask) == (True, 3, None)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_window_stays_a_mask_on_a_cpu_where_a_kernel_of_torch_runs_with_it(device: str):
    with torch.device(device):
        gm, _ = recorded(Masked(lambda x: between(x, 3, 1)), X.to(device), renames=True, tensors=lambda y: (y,))
        (graph,) = rewrite(gm, RewriteOptions())
    (found,) = [op for op in graph.regions[0].model if isinstance(op, ops.Attention)]
    assert found.causal
    assert (found.window, found.mask is None) == ((None, False) if device == "cpu" else (3, True))


def test_a_triangle_of_more_keys_than_rows_stays_a_mask():
    def spelling(m: Layers, x: Tensor) -> Tensor:
        q, k, v = heads(m.a(x[:, :3])), heads(m.b(x)), heads(m.c(x))
        return joined(S(q, k, v, attn_mask=torch.ones(3, x.shape[1]).tril().bool()))

    assert "CrossAttention" in operations(assert_same_recorded(Layers(spelling).double(), X))


def test_a_window_as_wide_as_the_sequence_is_none():
    _, (found,) = converted(Masked(lambda x: between(x, 5, 1)))
    assert (found.causal, found.window, found.mask) == (True, None, None)


def test_a_causal_mask_with_padding_is_causal_and_stays():
    _, (found,) = converted(Masked(lambda x: seen(x) & (x[:, None, None, :, 0] < 0.5)))
    assert (found.causal, found.mask is None) == (True, False)


@pytest.mark.parametrize("name", NEARLY)
def test_attention_with_a_nearly_causal_mask_gives_what_it_gave(name: str):
    _, found = converted(Masked(NEARLY[name]))
    assert not any(op.causal or op.mask is None for op in found)


@pytest.mark.parametrize("changes", [False, True], ids=["as it was made", "changed"])
def test_the_body_of_a_checkpoint_knows_the_mask_that_it_is_called_with(changes: bool):
    class Checkpointed(Masked):
        def forward(self, x: Tensor) -> Tensor:
            mask = changed(seen(x), lambda m: m[1:, :1].fill_(False) if changes else m)
            return checkpoint(self.attended, x, mask, use_reentrant=False)  # pyright: ignore[reportReturnType]

    graphs = assert_same(Checkpointed(seen), X).graphs
    found = [op for g in graphs for region in g.regions for op in region.model if isinstance(op, ops.Attention)]
    assert {(op.causal, op.mask is None) for op in found} == {(not changes, not changes)}


class Windows(ByHand):
    """Attention within windows with a bias of positions, and a mask of each window, as Swin Transformers have it."""

    def __init__(self, spelling: str) -> None:
        super().__init__(lambda x: torch.zeros(()))
        self.spelling, self.bias = spelling, nn.Parameter(torch.randn(2, 5, 5, dtype=torch.float64))
        self.register_buffer("hidden", torch.randn(3, 5, 5, dtype=torch.float64))
        self.factor = nn.Parameter(torch.randn(2, 1, 1, dtype=torch.float64))

    def weighted(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        hidden = self.hidden[:, None]
        if self.spelling == "made in place":  # as torchvision does; with a factor of each head, as in version 2
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        scores = q @ k.transpose(-1, -2) * (self.factor if self.spelling == "made in place" else 0.5) + self.bias
        if self.spelling == "made in place":
            hidden = hidden.clone()
            hidden[:, :, :2, 3:] = -7
            hidden = hidden.masked_fill(hidden < -5, -2.0)
        if self.spelling == "in heads by themselves":
            scores = scores.flatten(0, 1)
        if self.spelling == "of another axis":
            return torch.softmax((scores.view(6, 2, 5, 5, 1) + hidden[0, 0, ..., None]).view(6, 2, 5, 5), -1) @ v
        scores = scores.view(-1, 3, 2, 5, 5) + (hidden if self.spelling == "of one axis less" else hidden[None])
        if self.spelling == "twice":
            scores = scores + hidden[None]
        return torch.softmax(scores.view(-1, 2, 5, 5), -1) @ v


@pytest.mark.parametrize("spelling", ["once", "of one axis less", "twice", "made in place"])
def test_a_mask_of_each_window_is_one_of_attention(spelling: str):
    x = torch.randn(6, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (attention,) = converted(Windows(spelling), x)[1]
    assert attention.mask is not None


@pytest.mark.parametrize("spelling", ["in heads by themselves", "of another axis"])
def test_scores_that_are_nearly_those_of_windows_are_left(spelling: str):
    x = torch.randn(6, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert not converted(Windows(spelling), x)[1]


def test_a_mask_without_tokens_has_no_gradient():
    class Learned(Masked):
        def __init__(self) -> None:
            super().__init__(lambda x: self.bias)
            self.bias = nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))

    assert_same_recorded(Learned(), torch.zeros(0, 4, 8, dtype=torch.float64))

"""Causal masks in buffers: attention runs without a mask while their values are those of the capture."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

import seqfuse as sf
from seqfuse import ops
from seqfuse.convert import Conversion
from seqfuse.convert.buffers import CHANGED, Triangle, triangle_of
from seqfuse.testing import seeded_randn

from .comparing import assert_equal, assert_same, passes

BLOCK = 7
ONES = torch.ones(BLOCK, BLOCK)
LOWER = ONES.tril().view(1, 1, BLOCK, BLOCK)
X = seeded_randn((2, 5, 8), 0).double()


class Causal(nn.Module):
    """The attention of nanoGPT and minGPT."""

    def __init__(self, mask: Tensor = LOWER) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.register_buffer("bias", mask.clone())
        self.drop = nn.Dropout(0.0)

    def masked(self, att: Tensor, x: Tensor) -> Tensor:
        return att.masked_fill(self.bias[:, :, : x.shape[1], : x.shape[1]] == 0, float("-inf"))

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (t.view(B, T, 2, C // 2).transpose(1, 2) for t in self.c_attn(x).split(C, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        y = self.drop(F.softmax(self.masked(att, x), dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Flagged(Causal):
    """A 2D boolean mask, True at keys that are hidden."""

    def __init__(self) -> None:
        super().__init__(ONES.triu(1).bool())

    def masked(self, att: Tensor, x: Tensor) -> Tensor:
        return att.masked_fill(self.bias[: x.shape[1], : x.shape[1]], torch.finfo(att.dtype).min)


class Added(Causal):
    """A float mask that is added to the scores."""

    def __init__(self) -> None:
        super().__init__(torch.full((BLOCK, BLOCK), -torch.inf).triu(1))

    def masked(self, att: Tensor, x: Tensor) -> Tensor:
        return att + self.bias[: x.shape[1], : x.shape[1]]


class Plain(Causal):
    """A tensor attribute that is not a buffer."""

    def __init__(self) -> None:
        super().__init__()
        bias = self.bias
        del self.bias
        self.bias = bias


class Chosen(Causal):
    def masked(self, att: Tensor, x: Tensor) -> Tensor:
        return torch.where(self.bias[..., : x.shape[1], : x.shape[1]].bool(), att, -torch.inf)


class Blocks(nn.Module):
    """Residual attention layers, each with its own mask."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), Causal()) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def attention(conversion: Conversion) -> list[tuple[bool, bool]]:
    """For each attention of the first graph, whether it is causal, and whether it reads a mask."""
    found = [op for region in conversion.graphs[0].regions for op in region.model if isinstance(op, ops.Attention)]
    return [(op.causal, op.mask is not None) for op in found]


@pytest.mark.parametrize("build", [Causal, Flagged, Added, Plain, Chosen])
def test_attention_by_hand_with_a_causal_buffer_is_causal_and_keeps_its_numbers(build: Callable[[], nn.Module]):
    torch.manual_seed(1)
    conversion = assert_same(build().double(), X)
    assert attention(conversion) == [(True, False)]
    assert not conversion.graphs[0].left
    assert not conversion.graphs[0].beside


def test_lengths_that_differ_from_call_to_call_share_a_causal_graph():
    model = Blocks(1).double()
    plain = copy.deepcopy(model)
    conversion = sf.convert(model)
    for length in (5, 4, 6, 7, 1):
        x = seeded_randn((2, length, 8), length).double()
        assert_equal(passes(model, x), passes(plain, x))
    assert all(region.plan is not None for graph in conversion.graphs for region in graph.regions)
    assert attention(conversion) == [(True, False)]
    assert "ran as before" not in str(conversion)


def open_all(model: Any) -> None:
    model.layers[1][1].bias.fill_(1)


def open_one(model: Any) -> None:
    model.layers[1][1].bias[0, 0, 0, 1] = 1


def replace(model: Any) -> None:
    model.layers[1][1].bias = ONES.tril(1).view(1, 1, BLOCK, BLOCK).double()


def load(model: Any) -> None:
    state = model.state_dict()
    model.load_state_dict({**state, "layers.0.1.bias": ONES.tril(-1).view(1, 1, BLOCK, BLOCK) + torch.eye(BLOCK) * 2})


@pytest.mark.parametrize("regions", ["model", "layers"])
@pytest.mark.parametrize("change", [open_all, open_one, replace, load])
def test_a_buffer_that_changes_is_noticed(change: Callable[[nn.Module], None], regions: Any):
    model = Blocks().double()
    plain = copy.deepcopy(model)
    conversion = sf.convert(model, regions=regions)
    assert_equal(passes(model, X), passes(plain, X))
    assert attention(conversion)[0] == (True, False)
    change(model)
    change(plain)
    assert_equal(passes(model, X), passes(plain, X))
    if change is open_all:
        assert str(conversion).endswith(f"1 call ran as before the conversion: {CHANGED}")
        for one in (model, plain):
            one.layers[1][1].bias.tril_()
        assert_equal(passes(model, X), passes(plain, X))
        assert f"1 call ran as before the conversion: {CHANGED}" in str(conversion), "no more than before"


def test_loading_and_moving_a_model_leaves_it_converted():
    model = Blocks().double()
    plain = copy.deepcopy(model)
    conversion = sf.convert(model)
    model(X)
    model.load_state_dict(plain.state_dict())
    assert_equal(passes(model, X), passes(plain, X))
    model.float().double()
    assert_equal(passes(model, X), passes(plain, X))
    assert "ran as before" not in str(conversion)


def test_parameters_and_buffers_are_swapped_as_in_an_unconverted_model():
    """Torch swaps tensors for this flag and for parameters of other classes, but none with a weak reference."""
    model = Blocks().double()
    plain = copy.deepcopy(model)
    conversion = sf.convert(model)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for one in (model, plain):
            one(X)
            one.float().load_state_dict(Blocks().state_dict())
            one.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert_equal(passes(model, X), passes(plain, X))
    assert attention(conversion)[0] == (True, False)


def test_layers_with_buffers_of_their_own_share_a_graph():
    model = Blocks().double()
    conversion = sf.convert(model, regions="layers")
    model(X.clone().requires_grad_())
    assert [graph.captured.calls for graph in conversion.graphs if graph.captured] == [2]


NEARLY = {
    "a row more": ONES.tril(1),
    "a row less": ONES.tril(-1) + ONES.triu(BLOCK - 1),
    "one key more": ONES.tril().flatten().index_fill(0, torch.tensor(10), 1).view(BLOCK, BLOCK),
    "the other way round": ONES.triu(),
    "several numbers": (torch.arange(BLOCK) + 1.0) * ONES.tril(),
}


@pytest.mark.parametrize("name", NEARLY)
def test_a_buffer_that_is_nearly_causal_keeps_its_numbers(name: str):
    conversion = assert_same(Causal(NEARLY[name].view(1, 1, BLOCK, BLOCK)).double(), X)
    assert not attention(conversion)


class Opening(Causal):
    """Changes its mask in each call, before it is read."""

    def masked(self, att: Tensor, x: Tensor) -> Tensor:
        self.bias[..., 0, 1] += 1
        return super().masked(att, x)


def test_a_buffer_that_the_model_itself_changes_is_a_mask_as_before():
    conversion = assert_same(Opening().double(), X)
    assert not attention(conversion)


class Given(Causal):
    """The mask is an argument."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.given = mask
        return super().forward(x)

    def masked(self, att: Tensor, x: Tensor) -> Tensor:
        return att.masked_fill(self.given[..., :5, :5] == 0, -torch.inf)


def test_a_mask_that_is_an_argument_is_data():
    model = Given().double()
    plain = copy.deepcopy(model)
    conversion = sf.convert(model)
    for mask in (ONES.tril(), ONES):
        assert_equal([model(X, mask)], [plain(X, mask)])
    assert not attention(conversion)


class Checkpointed(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)  # pyright: ignore
        return x


def test_the_body_of_a_checkpoint_with_a_causal_buffer_is_causal_until_that_changes():
    model = Checkpointed().double()
    plain = copy.deepcopy(model)
    conversion = sf.convert(model)
    assert_equal(passes(model, X), passes(plain, X))
    found = [op for g in conversion.graphs for region in g.regions for op in region.model]
    assert [op.causal for op in found if isinstance(op, ops.Attention)] == [True] * 2
    for one in (model, plain):
        open_all(one)
    assert_equal(passes(model, X), passes(plain, X))
    assert CHANGED in str(conversion)


def test_what_a_triangle_is():
    assert triangle_of(ONES.tril()) == Triangle(1, 0)
    assert triangle_of(ONES.triu(1).bool()[None]) == Triangle(False, True)
    assert triangle_of(ONES) == Triangle(1, 1)
    assert triangle_of(torch.full((3, 3), -torch.inf).triu(1)) == Triangle(0, -torch.inf)
    trained = nn.Parameter(ONES.tril()), ONES.tril().requires_grad_()
    for other in (*NEARLY.values(), ONES.tril()[:3], ONES[0], ONES.tril().to("meta"), 3, *trained):
        assert triangle_of(other) is None
    with torch.inference_mode():
        assert triangle_of(ONES.tril()) is None, "its changes are not counted"


def test_a_triangle_is_read_again_after_a_change_in_place():
    mask = ONES.tril()
    assert triangle_of(mask) == Triangle(1, 0)
    mask[0, 1] = 1
    assert triangle_of(mask) is None
    mask.data = ONES.triu(1)  # its version is unchanged
    assert triangle_of(mask) == Triangle(0, 1)

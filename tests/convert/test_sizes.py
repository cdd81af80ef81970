"""Sizes that Dynamo traces as symbols, and that a later guard specializes to one number."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import seqfuse as sf
from seqfuse.testing import seeded_randn


def test_a_graph_whose_symbols_turned_out_to_be_numbers_is_converted_as_one_without() -> None:
    """Labels that are the input are one tensor to Dynamo; other labels make it specialize a size that it had marked
    dynamic."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=32, attn_pdrop=0, resid_pdrop=0, embd_pdrop=0,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model, plain = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    plain.load_state_dict(model.state_dict())
    conversion = sf.convert(model)

    def step(of: GPT2LMHeadModel, ids: Tensor, labels: Tensor) -> float:
        of.zero_grad()
        loss = of(input_ids=ids, labels=labels).loss
        loss.backward()
        return loss.item()

    first, second = torch.randint(32, (2, 12)), torch.randint(32, (2, 7))
    step(model, first, first)
    labels = second.clone()
    torch.testing.assert_close(step(model, second, labels), step(plain, second, labels))
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    assert len(conversion.graphs) == 2
    assert [[*graph.left] for graph in conversion.graphs] == [[], []]
    chains = [[type(op).__name__ for op in region.order.operations] for g in conversion.graphs for region in g.regions]
    assert chains[0] == chains[1]


class Modulated(nn.Module):
    """A norm with a scale and a shift for each sequence, repeated for its tokens, as in a DiT."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)) * (1 + scale[:, None]) + shift[:, None])


def test_what_is_repeated_for_any_number_of_tokens_is_added_in_the_chain() -> None:
    model = Modulated().double()
    plain = copy.deepcopy(model)
    conversion = sf.convert(model)
    for tokens in (5, 7, 3):
        given = [seeded_randn(shape, 1).double().requires_grad_() for shape in ((2, tokens, 8), (2, 8), (2, 8))]
        found, wanted = (
            torch.autograd.grad(m(*given).square().sum(), [*given, *m.parameters()]) for m in (model, plain)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    regions = [region for graph in conversion.graphs for region in graph.regions]
    assert len(regions) == 2
    for region in regions:
        assert [type(r.operation).__name__ for r in region.order.members] == [
            "Linear", "LayerNorm", "Multiply", "Add", "Linear",
        ]  # fmt: skip

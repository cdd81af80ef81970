"""Sizes that Dynamo traces as symbols, and that a later guard makes one number."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import seqfuse as sf


def test_a_graph_whose_symbols_turned_out_to_be_numbers_is_converted_as_one_without() -> None:
    """Labels that are the input are one tensor to Dynamo; those that are not make it specialize what it had marked."""
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
    # A sum with what is repeated, as embeddings of positions are, needs sizes that are numbers.
    assert chains[0] == ["Add", *chains[1]]

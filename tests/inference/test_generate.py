"""Tokens generated one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from seqfuse import ops
from seqfuse.inference import KVCache, generate, stream
from seqfuse.inference.generate import GraphedStep
from seqfuse.integrations.huggingface import from_huggingface

from .test_kvcache import model_of, tokens


@pytest.mark.parametrize("form", ["GPT", "Llama", "window"])
def test_greedy_tokens_are_those_of_reading_everything_again(form: str):
    model, x = model_of(form), tokens(3, 7)
    cached, plain = (generate(model, x, 30, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)
    assert torch.equal(cached[:, :7], x)
    assert cached.shape == (3, 37)
    for n in range(7, 37):
        with torch.no_grad():
            assert torch.equal(model(cached[:, :n])[:, -1].argmax(-1), cached[:, n])


@pytest.mark.parametrize("use_cache", [True, False])
def test_prompts_may_differ_in_length(use_cache: bool):
    model, x, lengths = model_of("Llama"), tokens(3, 9), torch.tensor([4, 9, 1])
    found = generate(model, x, 12, lengths=lengths, use_cache=use_cache)
    for b, n in enumerate(lengths.tolist()):
        assert torch.equal(found[b, : n + 12], generate(model, x[b : b + 1, :n], 12)[0])
    for kind in (torch.uint8, torch.int8, torch.int16, torch.int32):
        assert torch.equal(generate(model, x, 12, lengths=lengths.to(kind), use_cache=use_cache), found)


def test_a_seed_repeats_a_draw_and_the_cache_changes_none():
    model, x = model_of("GPT"), tokens(2, 5)

    def drawn(seed: int, **how: Any) -> Tensor:
        return generate(model, x, 20, temperature=1.3, generator=torch.Generator().manual_seed(seed), **how)

    assert torch.equal(drawn(1), drawn(1))
    assert torch.equal(drawn(1), drawn(1, use_cache=False))
    assert not torch.equal(drawn(1), drawn(2))
    assert torch.equal(drawn(3, top_k=1), generate(model, x, 20))
    assert torch.equal(drawn(3, top_p=1e-6), generate(model, x, 20))


class Fixed(nn.Module):
    """The same logits after every token."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(*x.shape, -1)


def are_draws_of(weights: Tensor, found: Tensor) -> None:
    """Each frequency is at most five standard deviations from its probability."""
    p = (weights / weights.sum()).double()
    shares = torch.bincount(found, minlength=len(p)) / found.numel()
    assert ((shares - p).abs() <= 5 * (p * (1 - p) / found.numel()).sqrt()).all()


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({}, [0, 1, 2, 3]), ({"top_k": 2}, [1, 3]), ({"top_p": 0.75}, [1, 3]), ({"top_p": 0.55}, [1, 3]),
        ({"top_k": 3, "top_p": 0.95}, [1, 2, 3]), ({"top_p": 0.7, "temperature": 0.5}, [1]),
    ],
    ids=str,
)  # fmt: skip
def test_draws_follow_the_probabilities_that_are_left(how: dict[str, Any], kept: list[int]):
    probabilities = torch.tensor([0.1, 0.5, 0.15, 0.25])
    model, generator = Fixed(probabilities.log()), torch.Generator().manual_seed(0)
    x = torch.zeros(2000, 1, dtype=torch.long)
    how = {"temperature": 1.0, **how}
    found = generate(model, x, 5, generator=generator, use_cache=False, **how)[:, 1:].flatten()
    are_draws_of(torch.zeros(4).index_fill_(0, torch.tensor(kept), 1) * probabilities, found)


def test_temperature_sharpens():
    model = Fixed(torch.tensor([0.1, 0.5, 0.15, 0.25]).log())
    x, generator = torch.zeros(4000, 1, dtype=torch.long), torch.Generator().manual_seed(0)
    found = generate(model, x, 1, temperature=0.5, generator=generator, use_cache=False)[:, 1]
    are_draws_of(torch.tensor([0.1, 0.5, 0.15, 0.25]).square(), found)


def test_a_sequence_ends_at_a_stop_token_and_all_end_together():
    model, x = model_of("GPT"), tokens(3, 5)
    free = generate(model, x, 30)
    stops = {int(free[0, 8]), int(free[1, 12]), int(free[2, 10])}
    found = generate(model, x, 30, stop=stops)
    ends = [next(i for i in range(5, 35) if int(free[b, i]) in stops) for b in range(3)]
    assert found.shape[1] == max(ends) + 1
    for b, end in enumerate(ends):
        assert torch.equal(found[b, : end + 1], free[b, : end + 1])
        assert found[b, end:].eq(free[b, end]).all()


def test_tokens_arrive_as_they_are_made():
    model, x = model_of("GPT"), tokens(2, 5)
    made = stream(model, x, 4)
    first = next(made)
    assert first.shape == (2,)
    assert torch.equal(torch.stack([first, *made], 1), generate(model, x, 4)[:, 5:])
    assert list(stream(model, x, 0)) == []


def test_a_conversation_goes_on_with_its_cache():
    model, x = model_of("Llama"), tokens(1, 6)
    cache = KVCache(1, 64)
    first = generate(model, x, 5, cache=cache)
    # The last token was generated but not read.
    more = torch.cat((first[:, -1:], tokens(1, 3, seed=8)), 1)
    found = generate(model, more, 6, cache=cache)
    assert torch.equal(found[:, 4:], generate(model, torch.cat((first[:, :-1], more), 1), 6)[:, 14:])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_greedy_generations_are_those_of_hugging_face(kind: str):
    pytest.importorskip("transformers")
    from tests.integrations.test_huggingface import MODELS

    its: Any = MODELS[kind]().eval()
    x = torch.randint(3, 61, (2, 6), generator=torch.Generator().manual_seed(2))
    want = its.generate(
        x, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(x), pad_token_id=0, eos_token_id=None
    )
    assert torch.equal(generate(from_huggingface(its), x, 20), want)


PADDED = torch.tensor([[5, 6, 7, 8], [0, 0, 6, 7], [6, 7, 0, 0]])


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        ([1], None, "prompt 0 begins with the padding token 0: pad on the right, and give the lengths"),
        ([0, 1], [4, 2], "prompt 1 begins with the padding token 0"),
        ([0, 2], None, "prompt 1 ends with the padding token 0"),
        ([0, 2], [4, 2], None),
        ([0, 1, 2], [4, 4, 4], None),  # the test means these
        ([0], None, None),
    ],
)
def test_prompts_that_are_padded_on_the_left_are_refused(
    rows: list[int], lengths: list[int] | None, message: str | None
) -> None:
    model: Any = model_of("Llama")
    model.pad_token_id, counts = 0, None if lengths is None else torch.tensor(lengths)
    if message is None:
        assert generate(model, PADDED[rows], 2, lengths=counts).shape == (len(rows), 6)
    else:
        with pytest.raises(ValueError, match=message):
            generate(model, PADDED[rows], 2, lengths=counts)


def test_the_token_that_pads_is_what_the_model_says() -> None:
    model: Any = model_of("GPT")
    generate(model, PADDED, 1)
    next(m for m in model.modules() if isinstance(m, ops.Embedding)).padding_idx = 0
    with pytest.raises(ValueError, match="prompt 1 begins with the padding token 0"):
        generate(model, PADDED, 1)
    model.pad_token_id = None
    generate(model, PADDED, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1.0}, "temperature must not be negative"),
        ({"temperature": float("nan")}, "temperature must not be negative, got nan"),
        ({"max_new_tokens": -1}, "max_new_tokens must not be negative, got -1"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"lengths": torch.tensor([0, 5])}, r"expects lengths \[2\] of 1 to 5"),
        ({"lengths": torch.tensor([1.0, 5.0])}, r"expects lengths \[2\] of 1 to 5"),
        ({"tokens": torch.zeros(2, 0, dtype=torch.long)}, "at least one token"),
        ({"cuda_graph": True}, "cuda_graph needs tokens on a GPU and a cache, got cpu$"),
        ({"cuda_graph": True, "use_cache": False}, "got cpu, without a cache"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str):
    given = {"tokens": tokens(2, 5), "max_new_tokens": 3, **arguments}
    with pytest.raises(ValueError, match=message):
        generate(model_of("GPT"), **given)


def test_a_graph_is_refused_where_there_is_no_gpu():
    with pytest.raises(ValueError, match="a CUDA graph needs a cache on a GPU, got one on cpu"):
        GraphedStep(model_of("GPT"), KVCache(2, 9))

"""Generates tokens one at a time, optionally with a CUDA graph that is replayed for each."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..ops import Embedding
from .kvcache import KVCache


def stream(
    model: nn.Module,
    tokens: Tensor,
    max_new_tokens: int,
    *,
    lengths: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: Collection[int] = (),
    generator: torch.Generator | None = None,
    cache: KVCache | None = None,
    use_cache: bool = True,
    cuda_graph: bool = False,
) -> Iterator[Tensor]:
    """Generate tokens; yields the next token of each sequence, int64 [B], as soon as it is computed.

    With logits z of the last token: the argmax at `temperature=0`, otherwise a sample from softmax(z / temperature),
    limited to the `top_k` largest and the fewest whose probabilities sum to `top_p`. After a token in `stop` a sequence
    repeats that token; generation ends when all sequences have stopped.

    Padding must be on the right, after `lengths`, since positions count from the first token and attention reads every
    token. If the model has a padding token (`padding_idx` of its embedding, `pad_token_id` of `from_huggingface`), a
    prompt that begins with it, or ends with it without `lengths`, is an error; pass `lengths` of S if it is intended.

    Args:
        model: tokens [B, S] to logits [B, S, V]; runs in its current mode, without gradients.
        tokens: the prompts, int64 [B, S], padded on the right.
        max_new_tokens: maximum number of new tokens.
        lengths: lengths of the prompts, int [B]; default S.
        temperature: 0 is greedy.
        top_k: sample from this many tokens; default all.
        top_p: sample from the fewest tokens with this total probability, 0 < p <= 1; default all.
        stop: tokens after which a sequence ends.
        generator: random generator for sampling.
        cache: a cache of all preceding tokens, to continue from; default a new cache.
        use_cache: whether to cache keys and values; otherwise every step recomputes all tokens.
        cuda_graph: whether a step is captured as a CUDA graph and replayed; on a GPU, with a cache.

    Raises:
        ValueError: for inconsistent arguments, or prompts with other padding.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must not be negative, got {max_new_tokens}")
    _check(tokens, temperature, top_k, top_p, lengths)
    _check_padding(tokens, lengths, _padding(model))
    if cuda_graph and not (use_cache and tokens.device.type == "cuda"):
        where = f"{tokens.device}{'' if use_cache else ', without a cache'}"
        raise ValueError(f"cuda_graph needs tokens on a GPU and a cache, got {where}")
    batch, width = tokens.shape
    if use_cache and cache is None:
        cache = KVCache(batch, width + max_new_tokens, device=tokens.device)
    ends = torch.tensor(sorted(stop), dtype=tokens.dtype, device=tokens.device)
    last = torch.full((batch,), width, device=tokens.device) if lengths is None else lengths.to(tokens.device).long()
    everything = tokens
    logits = _read(model, cache if use_cache else None, tokens, lengths)
    logits = logits[torch.arange(batch, device=tokens.device), last - 1]
    done: Tensor | None = None
    new: Tensor | None = None
    graph: GraphedStep | None = None
    for step in range(max_new_tokens):
        drawn = _draw(logits, temperature, top_k, top_p, generator)
        new = drawn if new is None or done is None else torch.where(done, new, drawn)
        yield new
        if len(ends):
            ended = torch.isin(new, ends)
            done = ended if done is None else done | ended
            if bool(done.all()):
                return
        if step + 1 == max_new_tokens:
            return
        if cuda_graph and cache is not None:
            graph = graph or GraphedStep(model, cache)
            logits = graph(new)
        elif use_cache:
            logits = _read(model, cache, new.unsqueeze(1), None)[:, -1]
        else:
            everything = _appended(everything, last, new)
            last = last + 1
            logits = _read(model, None, everything, None)[torch.arange(batch, device=tokens.device), last - 1]


def generate(
    model: nn.Module, tokens: Tensor, max_new_tokens: int, *, lengths: Tensor | None = None, **how: object
) -> Tensor:
    """Generate tokens with `stream`; returns prompts and new tokens, int64 `[B, S + n]`, padded on the right.

    Arguments and errors are those of `stream`.
    """
    last = None if lengths is None else lengths.to(tokens.device).long()
    everything = tokens
    for new in stream(model, tokens, max_new_tokens, lengths=lengths, **how):  # pyright: ignore[reportArgumentType]
        if last is None:
            everything = torch.cat((everything, new.unsqueeze(1)), 1)
        else:
            everything = _appended(everything, last, new)
            last = last + 1
    return everything


def _read(model: nn.Module, cache: KVCache | None, tokens: Tensor, counts: Tensor | None) -> Tensor:
    if cache is not None:
        return cache.feed(model, tokens, counts)
    with torch.no_grad():
        return model(tokens)


def _appended(tokens: Tensor, lengths: Tensor, new: Tensor) -> Tensor:
    """Tokens with a new one after the last of each sequence, overwriting padding."""
    wide = torch.cat((tokens, new.unsqueeze(1)), 1)
    return wide.scatter(1, lengths.unsqueeze(1), new.unsqueeze(1))


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ranked, order = probabilities.sort(-1, descending=True)
        beyond = ranked.cumsum(-1) - ranked >= top_p  # the most likely token always stays
        probabilities = probabilities.masked_fill(beyond.gather(-1, order.argsort(-1)), 0)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)


def _check(tokens: Tensor, temperature: float, top_k: int | None, top_p: float | None, lengths: Tensor | None) -> None:
    if tokens.ndim != 2 or tokens.is_floating_point() or not tokens.shape[1]:
        raise ValueError(
            f"expects prompts of at least one token, int64 [B, S], got {tokens.dtype} {tuple(tokens.shape)}"
        )
    if not temperature >= 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if lengths is not None and (
        lengths.is_floating_point()
        or lengths.shape != tokens.shape[:1]
        or bool(((lengths < 1) | (lengths > tokens.shape[1])).any())
    ):
        raise ValueError(f"expects lengths [{tokens.shape[0]}] of 1 to {tokens.shape[1]}, got {lengths}")


def _padding(model: nn.Module) -> int | None:
    """The model's padding token, if known."""
    if hasattr(model, "pad_token_id"):
        return cast(Any, model).pad_token_id
    known = {part.padding_idx for part in model.modules() if isinstance(part, Embedding)}
    return known.pop() if len(known) == 1 else None


def _check_padding(tokens: Tensor, lengths: Tensor | None, padding: int | None) -> None:
    if padding is None:
        return
    begins, ends = tokens[:, 0] == padding, tokens[:, -1] == padding
    wrong = begins | ends if lengths is None else begins & (lengths.to(tokens.device) < tokens.shape[1])
    if wrong.any():
        first = int(wrong.nonzero()[0])
        where = "begins" if begins[first] else "ends"
        message = f"prompt {first} {where} with the padding token {padding}"
        raise ValueError(f"{message}: pad on the right, and give the lengths of the prompts")


# Calls before a capture, in which everything is compiled, planned and allocated.
_WARM = 3


class GraphedStep:
    """The logits of each sequence's next token, [B, V], computed by a graph that is captured once and replayed.

    Args:
        model: tokens [B, 1] to logits [B, 1, V].
        cache: the cache of preceding tokens; capturing does not change it.

    Raises:
        ValueError: for a cache that is not on a GPU.
    """

    def __init__(self, model: nn.Module, cache: KVCache) -> None:
        if not _on_gpu(cache.lengths):
            raise ValueError(f"a CUDA graph needs a cache on a GPU, got one on {cache.lengths.device}")
        self._cache = cache
        with torch.cuda.device(cache.lengths.device):  # streams and captures use the current device
            self._tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=cache.lengths.device)
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            for _ in range(_WARM):
                with torch.cuda.stream(aside), cache.rehearsal():  # the lengths are restored on this stream, too
                    cache.feed(model, self._tokens)
            torch.cuda.current_stream().wait_stream(aside)
            self._graph = torch.cuda.CUDAGraph()
            with cache.rehearsal(), torch.cuda.graph(self._graph):
                self._logits: Tensor = cache.feed(model, self._tokens)[:, -1]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Feed one token of each sequence, int64 [B]; the result is overwritten by the next call."""
        self._cache.reserve(1)
        self._tokens.copy_(tokens.unsqueeze(1))
        self._graph.replay()
        self._cache.advance(1)
        return self._logits


def _on_gpu(lengths: Tensor) -> bool:
    return lengths.is_cuda

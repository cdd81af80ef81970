"""A step of decoding as a CUDA graph: the host launches all of its kernels at once."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .kvcache import KVCache

# Before a capture all is compiled, planned and allocated that is made once.
_WARM = 3


class GraphedStep:
    """Logits of each sequence's next row, [B, V], by a graph that is captured once and replayed.

    Args:
        model: tokens [B, 1] to logits [B, 1, V].
        cache: what it has read; it is left as it is.

    Raises:
        ValueError: for a cache that is not on a GPU.
    """

    def __init__(self, model: nn.Module, cache: KVCache) -> None:
        if not _on_gpu(cache.lengths):
            raise ValueError(f"a CUDA graph needs a cache on a GPU, got one on {cache.lengths.device}")
        self._cache = cache
        with torch.cuda.device(cache.lengths.device):  # of streams and of a capture the current device is meant
            self._capture(model, cache)

    def _capture(self, model: nn.Module, cache: KVCache) -> None:
        self._tokens = torch.zeros(cache.batch, 1, dtype=torch.int64, device=cache.lengths.device)
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        for _ in range(_WARM):
            with torch.cuda.stream(aside), cache.rehearsal():  # on which the lengths are put back, too
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

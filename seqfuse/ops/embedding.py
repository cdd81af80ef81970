"""Embedding: a row of a table for each index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import operation as sf
from ._norm import stats_dtype
from ._read import parameter

_backward: Callable[..., Tensor] = torch.ops.aten.embedding_dense_backward.default  # pyright: ignore


class Embedding(sf.UnfusedOperation):
    """y = weight[x].

    Backward: row v of dweight is the sum of dy over all x = v; that of `padding_idx` is zero. Summed in float32 or
    float64 and rounded once. x has no gradient.

    x: any shape [*] of int64 or int32, y: [*, embedding_dim], weight: [num_embeddings, embedding_dim].
    Saved: x.
    Keys, arguments and initial values are those of `torch.nn.Embedding`.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: its columns.
        padding_idx: a row that starts as zeros and gets no gradient.

    Raises:
        ValueError: for a `padding_idx` outside the table.
        IndexError: for an index outside the table (on a GPU an error of the device, as in torch).
    """

    class Saved(sf.Saved):
        x: Tensor  # [*]

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx must be within {num_embeddings} rows, got {padding_idx}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx % num_embeddings if padding_idx is not None else None
        self.weight = nn.Parameter(torch.empty((num_embeddings, embedding_dim), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start from N(0, 1), as `torch.nn.Embedding` does."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].fill_(0)

    @property
    def y_dtype(self) -> torch.dtype:
        return self.weight.dtype

    def reference(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.weight, self.padding_idx)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        weight = parameter(self, "weight")
        assert weight is not None
        return F.embedding(x, weight, self.padding_idx), self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[None, sf.Grads]:
        if "weight" not in needs:
            return None, {"weight": None}
        padding = -1 if self.padding_idx is None else self.padding_idx
        # The kernel for the CPU sums half gradients in half.
        fit = dy.to(stats_dtype(dy)) if dy.device.type == "cpu" else dy
        dweight = _backward(fit, saved.x, self.num_embeddings, padding, False)
        return None, {"weight": dweight.to(dy.dtype)}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape, self.embedding_dim)

    @classmethod
    def example(cls, x: Tensor) -> Embedding:
        if x.is_floating_point():
            raise ValueError(f"expects indices, got {x.dtype}; give an integer x")
        return cls(max(1, int(x.max()) + 1 if x.numel() else 1), 6, device=x.device)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"

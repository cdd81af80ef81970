"""PositionEmbedding: a learned row added at each position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import operation as sf
from ..casts import dtype_of
from ._cache import current
from ._norm import stats_dtype
from ._read import required
from ._takes import real, rows_of_table


class PositionEmbedding(sf.UnfusedOperation):
    """y = x + weight[t] for the row at position t.

    Backward: dx = dy;  row t of dweight is the sum of dy over all rows at position t, in float32 or float64, rounded
    once.

    x, y: [*, S, embedding_dim], weight: [max_positions, embedding_dim], positions: [S], or broadcast to [*, S].
    Saved: positions.
    Source: Gehring et al. 2017, arXiv:1705.03122.

    Args:
        max_positions: rows of the table.
        embedding_dim: its columns.
        positions: channel of the positions; 0..S-1 by default.

    Raises:
        InputError: (SF101) for complex x, and positions that are no integers or do not broadcast, (SF107) for positions
            outside the table (on a GPU an error of the device).
    """

    class Saved(sf.Saved):
        positions: Tensor | None  # [*, S]

    autocast = "promote"

    def __init__(
        self,
        max_positions: int,
        embedding_dim: int,
        *,
        positions: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.max_positions, self.embedding_dim, self.positions = max_positions, embedding_dim, positions
        self.weight = nn.Parameter(torch.empty((max_positions, embedding_dim), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start from N(0, 1), as `torch.nn.Embedding` does."""
        nn.init.normal_(self.weight)

    @property
    def channels(self) -> Mapping[str, str | None]:
        return {} if self.positions is None else {"position_ids": self.positions}

    def reference(self, x: Tensor, *, position_ids: Tensor | None = None) -> Tensor:
        return x + self._rows(self.weight, x, position_ids)

    def fwd(self, x: Tensor, *, position_ids: Tensor | None = None) -> tuple[Tensor, Saved]:
        weight = required(self, "weight")
        return x + self._rows(weight, x, position_ids), self.Saved(positions=position_ids)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        dx, dweight = dy if "x" in needs else None, None
        own = dtype_of(self, "weight") if "weight" in needs else None
        if own is not None:
            fit = dy.to(stats_dtype(dy))
            dweight = fit.new_zeros(self.max_positions, self.embedding_dim)
            if saved.positions is None:
                dweight[: dy.shape[-2]] = fit.flatten(0, -3).sum(0) if dy.ndim > 2 else fit
            else:
                positions = saved.positions.long().expand(dy.shape[:-1]).reshape(-1)
                dweight.index_add_(0, positions, fit.flatten(0, -2))
            dweight = dweight.to(own)
        return dx, {"weight": dweight}

    def _rows(self, weight: Tensor, x: Tensor, positions: Tensor | None) -> Tensor:
        real(x, "PositionEmbedding")
        if positions is None:
            cache = current()
            return weight[: x.shape[-2]] if cache is None else weight[cache.positions(x)]
        return F.embedding(rows_of_table(positions, x, self.max_positions, "PositionEmbedding"), weight)

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(shape) < 2 or shape[-1] != self.embedding_dim:
            raise ValueError(f"expects [*, S, {self.embedding_dim}], got shape {tuple(shape)}")
        if self.positions is None and shape[-2] > self.max_positions:
            raise ValueError(f"expects at most {self.max_positions} positions, got {shape[-2]}")
        return shape

    @classmethod
    def example(cls, x: Tensor) -> PositionEmbedding:
        return cls(x.shape[-2] + 2, x.shape[-1], device=x.device, dtype=x.dtype)

    def extra_repr(self) -> str:
        positions = "" if self.positions is None else f", positions={self.positions!r}"
        return f"{self.max_positions}, {self.embedding_dim}{positions}"

"""Embedding: a row of a table for each index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import operation as sf
from ..casts import dtype_of
from ..errors import InputError, RangeError
from ..group import Group, ParameterShard, vocabulary_shard
from ._norm import stats_dtype
from ._read import divide, initial, required
from ._takes import outside, token_ids
from .allreduce import AllReduce
from .reducescatter import ReduceScatter

_backward: Callable[..., Tensor] = torch.ops.aten.embedding_dense_backward.default  # pyright: ignore


class Embedding(sf.UnfusedOperation):
    """y = weight[x].

    Backward: row v of dweight is the sum of dy over all x = v; that of `padding_idx` is zero. Summed in float32 or
    float64 and rounded once. x has no gradient.

    x: any shape [*] of int64 or int32, y: [*, embedding_dim], weight: [num_embeddings, embedding_dim].
    Saved: x.
    Keys, arguments and initial values are those of `torch.nn.Embedding`.

    With `parallel="vocab"` each process of a group holds a shard of the vocabulary and gives zeros for those of others;
    `AllReduce` follows, or `ReduceScatter` with a `sequence_dim` of y.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: its columns.
        padding_idx: a row that starts as zeros and gets no gradient.
        parallel: `"vocab"`.
        group: a process group or a `DeviceMesh` of one dimension.
        sequence_dim: the dimension of y of which each process keeps its shard of the tokens.

    Raises:
        ValueError: for a `padding_idx` outside the table.
        RangeError: (SF107) for an index outside the table (on a GPU an error of the device, as in torch).
        InputError: (SF101) for an x that is not of integers, or rows that the processes do not divide, (SF106) for
            another `parallel`, or no group.
    """

    class Saved(sf.Saved):
        x: Tensor  # [*]

    autocast = "same"

    _meets: tuple[sf.UnfusedOperation, ...] = ()

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        parallel: Literal["vocab"] | None = None,
        group: Any = None,
        sequence_dim: int | None = None,
    ) -> None:
        super().__init__()
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx must be within {num_embeddings} rows, got {padding_idx}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = padding_idx % num_embeddings if padding_idx is not None else None
        self.weight = nn.Parameter(torch.empty((num_embeddings, embedding_dim), device=device, dtype=dtype))
        self.reset_parameters()
        if parallel is not None:
            if parallel != "vocab" or group is None:  # pyright: ignore[reportUnnecessaryComparison]
                message = f'parallel={parallel!r} must be "vocab" and needs a group'
                raise InputError(message, code="SF106", operation="Embedding")
            self.divide(group, sequence_dim=sequence_dim)

    def reset_parameters(self) -> None:
        """Start from N(0, 1), as `torch.nn.Embedding` does."""
        with initial(self, "weight") as weight:
            nn.init.normal_(weight)
            if self.padding_idx is not None:
                with torch.no_grad():
                    weight[self.padding_idx].fill_(0)

    def divided(self, group: Group) -> dict[str, ParameterShard]:
        """How the weight would be sharded over a group; raises where it cannot be."""
        return {"weight": vocabulary_shard("Embedding", self.shards, self.num_embeddings, group)}

    def divide(self, group: Any, *, sequence_dim: int | None = None) -> None:
        """Keep this process's shard; the arguments are those of the class."""
        group = Group(group)
        shards = self.divided(group)
        if group.size > 1:
            divide(self, shards)
            self._meets = (AllReduce(group) if sequence_dim is None else ReduceScatter(group, sequence_dim),)

    def expand(self) -> tuple[nn.Module, ...]:
        return (self, *self._meets)

    @property
    def y_dtype(self) -> torch.dtype:
        return dtype_of(self, "weight")

    @property
    def _rows(self) -> range:
        """The rows of this process."""
        group = self.shards["weight"].group
        count = self.num_embeddings // group.size
        return range(group.rank * count, (group.rank + 1) * count)

    def _error(self, x: Tensor, wrong: Tensor) -> RangeError:
        return outside(x, wrong, self.num_embeddings, "token ids", "Embedding")

    def _look_up(self, x: Tensor, weight: Tensor) -> Tensor:
        try:
            return F.embedding(x, weight, self.padding_idx)
        except IndexError as error:  # torch's says neither the index nor the table
            raise self._error(x, (x < 0) | (x >= self.num_embeddings)) from error

    def _own(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this process's shard, row 0 for an index outside of it, and a mask of these indices."""
        wrong = (x < 0) | (x >= self.num_embeddings)
        plain = type(x) is Tensor and not torch.compiler.is_compiling()  # else it has no numbers to look at
        if x.is_cuda and plain:
            torch._assert_async(~wrong.any())  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        elif plain and wrong.any():
            raise self._error(x, wrong)
        absent = (x < self._rows.start) | (x >= self._rows.stop)
        return (x - self._rows.start).masked_fill(absent, 0), absent

    def reference(self, x: Tensor) -> Tensor:
        token_ids(x, "Embedding")
        if len(self.shards):  # torch.compile takes an empty mapping proxy to be true
            own, absent = self._own(x)
            padding = self.padding_idx if self.padding_idx in self._rows else None
            padding = padding if padding is None else padding - self._rows.start
            return F.embedding(own, self.weight, padding).masked_fill(absent.unsqueeze(-1), 0)
        if type(x) is not Tensor or torch.compiler.is_compiling():  # there are no numbers to look at
            return F.embedding(x, self.weight, self.padding_idx)
        return self._look_up(x, self.weight)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        weight = required(self, "weight")
        token_ids(x, "Embedding")
        if self.shards:
            own, absent = self._own(x)
            return F.embedding(own, weight).masked_fill_(absent.unsqueeze(-1), 0), self.Saved(x=x)
        return self._look_up(x, weight), self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[None, sf.Grads]:
        if "weight" not in needs:
            return None, {"weight": None}
        # The kernel for the CPU sums half gradients in half.
        fit = dy.to(stats_dtype(dy)) if dy.device.type == "cpu" else dy
        if self.shards:
            own, absent = self._own(saved.x)
            absent = absent if self.padding_idx is None else absent | (saved.x == self.padding_idx)
            # The kernel leaves one row out: that is one more, where all goes that is not of this process.
            last = len(self._rows)
            dweight = _backward(fit, own.masked_fill(absent, last), last + 1, last, False)[:last].contiguous()
        else:
            padding = -1 if self.padding_idx is None else self.padding_idx
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
        across = ", parallel='vocab'" if self.shards else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}{across}"

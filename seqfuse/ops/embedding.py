"""Embeddings: a row of a weight per index, and a learned row added at each position."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import operation as sf
from ..casts import dtype_of
from ..errors import InputError, RangeError
from ..group import Group, ParameterShard, vocabulary_shard
from ._cache import current
from ._parameters import divide, initial, required
from ._tensors import check_positions, real, stats_dtype
from .collectives import AllReduce, ReduceScatter

_backward: Callable[..., Tensor] = torch.ops.aten.embedding_dense_backward.default  # pyright: ignore


class _EmbeddingOfTorch(nn.Embedding):
    """Lets `isinstance(operation, torch.nn.Embedding)` hold, without torch's parameters and initialization."""

    max_norm, norm_type, scale_grad_by_freq, sparse = None, 2.0, False, False

    def __init__(self) -> None:
        nn.Module.__init__(self)


class Embedding(sf.UnfusedOperation, _EmbeddingOfTorch):  # pyright: ignore[reportIncompatibleMethodOverride]
    """y = weight[x].

    Backward: row v of dweight is the sum of dy over all x = v; that of `padding_idx` is zero. Summed in float32 or
    float64 and rounded once. x has no gradient.

    x: any shape [*] of int64 or int32, y: [*, embedding_dim], weight: [num_embeddings, embedding_dim].
    Saved: x.
    State-dict keys, arguments and initial values are those of `torch.nn.Embedding`. It passes `isinstance` checks for
    it, so torch's `parallelize_module` styles accept it.

    With `parallel="vocab"` each process of a group holds a shard of the vocabulary and returns zeros for other tokens.
    It expands to the lookup and `AllReduce`, or `ReduceScatter` with a `sequence_dim` of y.

    Args:
        num_embeddings: size of the vocabulary.
        embedding_dim: last dimension of y.
        padding_idx: a token id whose embedding starts at zero and has no gradient.
        parallel: `"vocab"`.
        group: a process group or a `DeviceMesh` of one dimension.
        sequence_dim: the dimension of y that is sharded over the processes (sequence parallel).

    Raises:
        ValueError: for a `padding_idx` outside the vocabulary.
        RangeError: (SF107) for an index outside the vocabulary (on a GPU a device-side assert, as in torch).
        InputError: (SF101) for a non-integer x or a vocabulary that the number of processes does not divide, (SF106)
            for another `parallel` or a missing group.
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
        """Initialize from N(0, 1), as in `torch.nn.Embedding`."""
        with initial(self, "weight") as weight:
            nn.init.normal_(weight)
            if self.padding_idx is not None:
                with torch.no_grad():
                    weight[self.padding_idx].fill_(0)

    def divided(self, group: Group) -> dict[str, ParameterShard]:
        """How the weight would be sharded over a group; raises if it cannot be."""
        return {"weight": vocabulary_shard("Embedding", self.shards, self.num_embeddings, group)}

    def divide(self, group: Any, *, sequence_dim: int | None = None) -> None:
        """Shard the weight in place; the arguments are those of the class."""
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
        """The rows of the weight that this process holds."""
        group = self.shards["weight"].group
        count = self.num_embeddings // group.size
        return range(group.rank * count, (group.rank + 1) * count)

    def _look_up(self, x: Tensor, weight: Tensor) -> Tensor:
        try:
            return F.embedding(x, weight, self.padding_idx)
        except IndexError as error:  # torch's message has neither the index nor the size
            wrong = (x < 0) | (x >= self.num_embeddings)
            raise _outside(x, wrong, self.num_embeddings, "token ids", "Embedding") from error

    def _own(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of this process's shard, row 0 for an index outside of it, and a mask of these indices."""
        _check_range(x, self.num_embeddings, "token ids", "Embedding")
        absent = (x < self._rows.start) | (x >= self._rows.stop)
        return (x - self._rows.start).masked_fill(absent, 0), absent

    def reference(self, x: Tensor) -> Tensor:
        _check_ids(x)
        if len(self.shards):  # torch.compile evaluates an empty mapping proxy as true
            own, absent = self._own(x)
            padding = self.padding_idx if self.padding_idx in self._rows else None
            padding = padding if padding is None else padding - self._rows.start
            return F.embedding(own, self.weight, padding).masked_fill(absent.unsqueeze(-1), 0)
        if type(x) is not Tensor or torch.compiler.is_compiling():  # no values to check
            return F.embedding(x, self.weight, self.padding_idx)
        return self._look_up(x, self.weight)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        weight = required(self, "weight")
        _check_ids(x)
        if self.shards:
            own, absent = self._own(x)
            return F.embedding(own, weight).masked_fill_(absent.unsqueeze(-1), 0), self.Saved(x=x)
        return self._look_up(x, weight), self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[None, sf.Grads]:
        if "weight" not in needs:
            return None, {"weight": None}
        # The CPU kernel sums 16-bit gradients in 16 bits.
        fit = dy.to(stats_dtype(dy)) if dy.device.type == "cpu" else dy
        if self.shards:
            own, absent = self._own(saved.x)
            absent = absent if self.padding_idx is None else absent | (saved.x == self.padding_idx)
            # The kernel ignores one row: an additional last row, to which all tokens of other processes are mapped.
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


class PositionEmbedding(sf.UnfusedOperation):
    """y = x + weight[t] for the token at position t.

    Backward: dx = dy;  row t of dweight is the sum of dy over all tokens at position t, in float32 or float64, rounded
    once.

    x, y: [*, S, embedding_dim], weight: [max_positions, embedding_dim], positions: [S], or broadcast to [*, S].
    Saved: positions.
    Source: Gehring et al. 2017, arXiv:1705.03122.

    Args:
        max_positions: number of positions.
        embedding_dim: last dimension of x.
        positions: channel of the positions; default 0..S-1.

    Raises:
        InputError: (SF101) for complex x, and positions that are not integers or do not broadcast, (SF107) for
            positions out of range (on a GPU a device-side assert).
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
        """Initialize from N(0, 1), as in `torch.nn.Embedding`."""
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
            if (cache := current()) is None:
                return weight[: x.shape[-2]]
            positions = cache.positions(x)
            try:  # a check before would read them on the host
                return weight[positions]
            except IndexError:
                wrong = positions >= self.max_positions
                raise _outside(positions, wrong, self.max_positions, "positions", "PositionEmbedding") from None
        return F.embedding(self._checked(positions, x), weight)

    def _checked(self, positions: Tensor, x: Tensor) -> Tensor:
        """Positions as indices into the weight, checked."""
        if positions.is_floating_point():
            message = f"expects integer positions, got {positions.dtype}"
            raise InputError(message, code="SF101", operation="PositionEmbedding")
        check_positions(positions, x, "PositionEmbedding")
        positions = positions.long()  # uint8 would be a mask
        _check_range(positions, self.max_positions, "positions", "PositionEmbedding")
        return positions

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


def _check_ids(x: Tensor) -> None:
    """Raise InputError (SF101) unless x has an integer dtype that torch's embeddings support."""
    if x.dtype not in (torch.int32, torch.int64):
        hint = "token ids are torch.int64; x.long() makes them so"
        raise InputError(f"expects integer token ids, got {x.dtype}", code="SF101", operation="Embedding", hint=hint)


def _check_range(x: Tensor, rows: int, what: str, operation: str) -> None:
    """Raise the error of `_outside` for an index outside a weight of `rows` rows, on a GPU without synchronization."""
    if type(x) is not Tensor or torch.compiler.is_compiling() or x.is_meta:  # no values to check
        return
    wrong = (x < 0) | (x >= rows)
    if x.is_cuda:
        torch._assert_async(~wrong.any())  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    elif wrong.any():
        raise _outside(x, wrong, rows, what, operation)


def _outside(x: Tensor, wrong: Tensor, rows: int, what: str, operation: str) -> RangeError:
    """The error (SF107) for indices outside a weight of `rows` rows; `wrong` masks them."""
    message = f"expects {what} from 0 to {rows - 1}, got {int(x[wrong][0].item())}"
    return RangeError(message, code="SF107", operation=operation)

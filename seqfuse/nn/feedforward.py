"""FeedForward."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from .. import ops
from ..errors import InputError
from ..operation import UnfusedOperation
from ..pointwise import Gated
from ..run.sequential import Sequential
from ._across import across


class FeedForward(Sequential):
    """y = Linear(Dropout(activation(Linear(x)))).

    With a gated unit the first GEMM makes `[gate; up]`, twice as wide.  x, y: [*, dim].
    Keys: `up`, `activation`, `dropout` (if any), `down`.
    Source: Vaswani et al. 2017, arXiv:1706.03762; gated: Shazeer 2020, arXiv:2002.05202.

    Args:
        dim: last dimension of x and y.
        hidden_dim: what the activation gives; `4 dim` by default.
        activation: makes the activation, as `ops.GeLU` or `ops.SwiGLU` do.
        bias: whether the GEMMs have biases.
        merged: whether gate and up of a gated unit have a weight each, in an `ops.MergedLinear`, else one packed.
        dropout: probability of dropping what the activation gives, in training.
        group: processes that divide the hidden features, each half of a gated unit's; see `ops.Linear`.
        sequence_dim: the dimension of x and y of which each process has its shard, none by default.

    Raises:
        InputError: (SF101) for hidden features that the processes do not divide, (SF106) for merged weights that they
            would.
    """

    inlines: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        activation: Callable[[], UnfusedOperation] = ops.GeLU,
        *,
        bias: bool = True,
        merged: bool = False,
        dropout: float = 0.0,
        group: Any = None,
        sequence_dim: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        hidden = 4 * dim if hidden_dim is None else hidden_dim
        act = activation()
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        up, down = across(group, sequence_dim)
        sizes = (hidden, hidden) if isinstance(act, Gated) else (hidden,)
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if merged and group is not None:
            raise InputError("a MergedLinear is not divided among processes", code="SF106", operation="MergedLinear")
        packed: dict[str, Any] = {**made, **up, "parts": sizes if up else None}
        several = merged and len(sizes) > 1
        parts["up"] = (
            ops.MergedLinear(dim, sizes, bias, **made) if several else ops.Linear(dim, sum(sizes), bias, **packed)
        )
        parts["activation"] = act
        if dropout:
            parts["dropout"] = ops.Dropout(dropout)
        parts["down"] = ops.Linear(hidden, dim, bias, **made, **down)
        super().__init__(parts)

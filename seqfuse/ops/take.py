"""Take: the chain goes on from a channel, and what it had becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from .. import operation as sf
from ..errors import InputError


class Take(sf.UnfusedOperation):
    """y = other, the tensor of a channel, and out = x, a channel: the chain goes on from the one, the other waits.

    A block with branches side by side is `Fork("r"), LayerNorm(d), *attention, Take("r"), LayerNorm(d), *feedforward,
    Add(), Add("r")`: the first `Add` takes what attention gave, as if a `Fork` had let it out.

    Backward: dx = d_out, dother = dy.

    x, y, out: one shape, any, which is that of other.  Saved: nothing.
    Source: Wang & Komatsuzaki 2021, GPT-J-6B, whose parallel blocks it makes.

    Args:
        name: the channel that is taken. Without one, it takes what the nearest open `Fork` let out. One that nobody
            feeds is a public extra input of the `Sequential`, passed by that keyword.
        to: the channel that x becomes. Without one it is an open fork, which the next `Add` without a name closes. One
            that nobody takes is a public output of the `Sequential`, returned after y.

    Raises:
        InputError: (SF101) when the shapes differ.
    """

    outputs = ("out",)

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy and d_out alone."""

    NOTHING: ClassVar[Saved] = Saved()

    dy_may_be_none = True
    is_view = True
    autocast = "exchange"

    def __init__(self, name: str | None = None, to: str | None = None) -> None:
        super().__init__()
        self.name, self.to_channel = name, to

    @property
    def channels(self) -> Mapping[str, str | None]:
        return {"other": self.name, "out": self.to_channel}

    def reference(self, x: Tensor, *, other: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if x.shape != other.shape:
            sentence = f"takes a tensor of the shape of x, got {tuple(other.shape)} for {tuple(x.shape)}"
            raise InputError(sentence, code="SF101", operation="Take")
        return other, {"out": x}

    def fwd(self, x: Tensor, *, other: Tensor) -> tuple[Tensor, dict[str, Tensor], Saved]:
        return *self.reference(x, other=other), self.NOTHING

    def bwd(
        self, dy: Tensor | None, saved: Saved, *, d_out: Tensor | None, needs: frozenset[str]
    ) -> tuple[Tensor | None, sf.Grads]:
        given = dy if dy is not None else d_out
        assert given is not None
        dx = torch.zeros_like(given) if d_out is None and "x" in needs else d_out
        dother = torch.zeros_like(given) if dy is None and "other" in needs else dy
        return (dx if "x" in needs else None), {"other": dother if "other" in needs else None}

    @classmethod
    def example(cls, x: Tensor) -> Take:
        # Unnamed it cannot stand alone.
        return cls("other", "out")

    def extra_repr(self) -> str:
        text = "" if self.name is None else repr(self.name)
        return text if self.to_channel is None else f"{text}, to={self.to_channel!r}".lstrip(", ")

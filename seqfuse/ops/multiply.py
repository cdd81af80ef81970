"""Multiply: a channel that multiplies the chain."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .. import operation as sf
from ..errors import InputError
from ._attention import broadcasts


class Multiply(sf.UnfusedOperation):
    """y = x other, `other` the tensor of a channel, as a gate that is a tensor of its own.

    Backward: dx = dy other;  dother = dy x, summed over what other was broadcast to.

    x, y: one shape, any; other: broadcast to that, not x to other. Dtypes promote as in torch.
    Saved: x for dother, other for dx, and the shape of other.

    Args:
        name: the channel. Without one, it takes what the nearest open `Fork` let out. A named one that nobody feeds is
            a public extra input of the `Sequential`, passed by that keyword.

    Raises:
        InputError: (SF101) when other does not broadcast to x.
    """

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="other")
        other: Tensor = sf.field(for_="x")
        shape: tuple[int, ...]  # of other

    autocast = "promote"

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name

    @property
    def channels(self) -> Mapping[str, str | None]:
        return {"other": self.name}

    def reference(self, x: Tensor, *, other: Tensor) -> Tensor:
        if not broadcasts(other.shape, x.shape):
            sentence = f"multiplies by a tensor that broadcasts to {tuple(x.shape)}, got {tuple(other.shape)}"
            raise InputError(sentence, code="SF101", operation="Multiply")
        return x * other

    def fwd(self, x: Tensor, *, other: Tensor) -> tuple[Tensor, Saved]:
        return self.reference(x, other=other), self.Saved(x=x, other=other, shape=tuple(other.shape))

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        dx = dother = None
        if "x" in needs:
            dx = dy * saved.other.conj()
        if "other" in needs:
            dother = (dy * saved.x.conj()).sum_to_size(saved.shape)
        return dx, {"other": dother}

    @classmethod
    def example(cls, x: Tensor) -> Multiply:
        # Unnamed it cannot stand alone.
        return cls("other")

    def extra_repr(self) -> str:
        return "" if self.name is None else repr(self.name)

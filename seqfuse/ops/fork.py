"""Fork: where a channel leaves the chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from .. import operation as sf
from ..env import Env


class Fork(sf.UnfusedOperation):
    """y = x and out = x: the chain goes on, and the channel `out` leaves it until an `Add` of the same name.

    Backward: dx = dy + d_out.

    x, y, out: any shape.  Saved: nothing.
    Source: He et al. 2015, arXiv:1512.03385, whose shortcut it opens.

    Args:
        name: the channel. Without one, forks and adds pair like parentheses. A named fork nobody consumes is a public
            output of the `Sequential`, returned after y.
    """

    outputs = ("out",)

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy and d_out alone."""

    NOTHING: ClassVar[Saved] = Saved()

    dy_may_be_none = True
    is_view = True
    autocast = "same"

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name

    @property
    def channels(self) -> Mapping[str, str | None]:
        return {"out": self.name}

    def reference(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"out": x}

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Saved]:
        return x, {"out": x}, self.NOTHING

    def bwd(self, dy: Tensor | None, saved: Saved, *, d_out: Tensor | None) -> tuple[Tensor | None, sf.Grads]:
        if dy is None or d_out is None:
            return (d_out if dy is None else dy), {}
        return dy + d_out, {}

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        # Backward it reads dy and writes dx; d_out is read however it is run.
        return sf.Traffic() if backward else sf.Traffic(0, 0, 0)

    @classmethod
    def example(cls, x: Tensor) -> Fork:
        # Unnamed it cannot stand alone.
        return cls("out")

    def extra_repr(self) -> str:
        return "" if self.name is None else repr(self.name)

"""Add: where a channel returns to the chain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from .. import operation as sf
from ..env import Env
from ..errors import InputError


class Add(sf.UnfusedOperation):
    """y = x + other, `other` the tensor of a channel.

    Backward: dx = dy, dother = dy.

    x, other, y: one shape, any; nothing is broadcast, so a bias is never taken for a residual. Dtypes promote as in
    torch.  Saved: nothing.
    Source: He et al. 2015, arXiv:1512.03385, whose shortcut it closes.

    Args:
        name: the channel. Without one, it takes what the nearest open `Fork` let out. A named add nobody feeds is a
            public extra input of the `Sequential`, passed by that keyword.

    Raises:
        InputError: (SF101) when the shapes differ.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy alone."""

    autocast = "promote"

    NOTHING: ClassVar[Saved] = Saved()

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name

    @property
    def channels(self) -> Mapping[str, str | None]:
        return {"other": self.name}

    def reference(self, x: Tensor, *, other: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.shape != other.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _unequal(x, other)
        return x + other

    def fwd(self, x: Tensor, *, other: Tensor) -> tuple[Tensor, Saved]:
        if x.shape != other.shape:
            raise _unequal(x, other)
        return x + other, self.NOTHING

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        return (dy if "x" in needs else None), {"other": dy if "other" in needs else None}

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        return sf.Traffic(0, 0, 0) if backward else sf.Traffic()

    @classmethod
    def example(cls, x: Tensor) -> Add:
        # Unnamed it cannot stand alone.
        return cls("other")

    def extra_repr(self) -> str:
        return "" if self.name is None else repr(self.name)


def _unequal(x: Tensor, other: Tensor) -> InputError:
    sentence = f"adds tensors of one shape, got {tuple(x.shape)} and {tuple(other.shape)}"
    return InputError(sentence, code="SF101", operation="Add")

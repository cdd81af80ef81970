"""Channels: tensors that leave the chain and come back to it, and `Residual`, which is made of the two."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .. import operation as sf
from ..env import Env
from ..errors import InputError
from ..fusion import Fusions
from ..run import Sequential
from ._tensors import broadcasts, floating, stats_dtype


class OnChannel(sf.UnfusedOperation, open=True):
    """An operation with one extra input or output, which is called `end`, on the channel `name`."""

    end: ClassVar[str]

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name

    @property
    def channels(self) -> Mapping[str, str | None]:
        return {self.end: self.name}

    @classmethod
    def example(cls, x: Tensor) -> Any:
        # Unnamed it cannot stand alone.
        return cls(cls.end)

    def extra_repr(self) -> str:
        return "" if self.name is None else repr(self.name)


class Fork(OnChannel):
    """y = x and out = x: the chain goes on, and the channel `out` leaves it until an `Add` of the same name.

    Backward: dx = dy + d_out.

    x, y, out: any shape.  Saved: nothing.
    Source: He et al. 2015, arXiv:1512.03385, whose shortcut it opens.

    Args:
        name: the channel. Without one, forks and adds pair like parentheses. A named fork nobody consumes is a public
            output of the `Sequential`, returned after y.
    """

    outputs = ("out",)
    end = "out"

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy and d_out alone."""

    dy_may_be_none = True
    is_view = True
    native = True
    autocast = "same"

    def reference(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"out": x}

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Saved]:
        return x, {"out": x}, self._saved()

    def bwd(self, dy: Tensor | None, saved: Saved, *, d_out: Tensor | None) -> tuple[Tensor | None, sf.Grads]:
        if dy is None or d_out is None:
            return (d_out if dy is None else dy), {}
        return dy + d_out, {}

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        # Backward it reads dy and writes dx; d_out is read however it is run.
        return sf.Traffic() if backward else sf.Traffic(0, 0, 0)


class Add(OnChannel):
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

    end = "other"

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy alone."""

    autocast = "promote"
    native = True

    def reference(self, x: Tensor, *, other: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.shape != other.shape:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _unequal(x, other)
        return x + other

    def fwd(self, x: Tensor, *, other: Tensor) -> tuple[Tensor, Saved]:
        if x.shape != other.shape:
            raise _unequal(x, other)
        return x + other, self._saved()

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        return (dy if "x" in needs else None), {"other": dy if "other" in needs else None}

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        return sf.Traffic(0, 0, 0) if backward else sf.Traffic()


def _unequal(x: Tensor, other: Tensor) -> InputError:
    sentence = f"adds tensors of one shape, got {tuple(x.shape)} and {tuple(other.shape)}"
    return InputError(sentence, code="SF101", operation="Add")


class Multiply(OnChannel):
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

    end = "other"

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="other")
        other: Tensor = sf.field(for_="x")
        shape: tuple[int, ...]  # of other

    autocast = "promote"

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


class TokenScale(OnChannel):
    """y = scales x, one factor for each token, the tensor of a channel: as the probabilities of experts.

    Backward: dx = scales dy;  dscales = sum of dy x over the features of each token.

    x, y: [*, H], scales: [*] or [*, 1]. y has the dtype of x whatever that of scales is; it is computed in
    float32 (float64 for float64) and rounded once.  Saved: x for dscales, scales.

    Args:
        name: the channel. Without one, it takes what the nearest open `Fork` let out. A named one that nobody feeds is
            a public extra input of the `Sequential`, passed by that keyword.

    Raises:
        InputError: (SF101) for scales of another shape, or an x that is not of real numbers.
    """

    end = "scales"

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="scales")  # [*, H]
        scales: Tensor  # [*] or [*, 1]

    autocast = "same"

    def check(self, shape: Sequence[int], scales: Tensor) -> None:
        """Raise InputError unless there is one factor for each token of an x of this shape."""
        lead = tuple(shape[:-1])
        if tuple(scales.shape) not in (lead, (*lead, 1)):
            sentence = f"expects one factor for each token, {lead} or {(*lead, 1)}, got {tuple(scales.shape)}"
            raise InputError(sentence, code="SF101", operation="TokenScale")

    def reference(self, x: Tensor, *, scales: Tensor) -> Tensor:
        floating(x, "TokenScale")
        self.check(x.shape, scales)
        wide = stats_dtype(x)
        return (x.to(wide) * scales.to(wide).reshape(*x.shape[:-1], 1)).to(x.dtype)

    def fwd(self, x: Tensor, *, scales: Tensor) -> tuple[Tensor, Saved]:
        return self.reference(x, scales=scales), self.Saved(x=x, scales=scales)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        scales, dx, dscales = saved.scales, None, None
        wide = stats_dtype(dy)
        if "x" in needs:
            dx = (dy.to(wide) * scales.to(wide).reshape(*dy.shape[:-1], 1)).to(dy.dtype)
        if "scales" in needs:
            dscales = (dy.to(wide) * saved.x.to(wide)).sum(-1).view(scales.shape).to(scales.dtype)
        return dx, {"scales": dscales}


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
        return *self.reference(x, other=other), self._saved()

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


class Residual(Sequential):
    """y = x + (op_n(... op_1(x))), a container with the keys of its operations.

    dx = dy + (the branch's gradient).  x, y: [*, H]. It expands to `Fork, *operations, Add`, and fusions cross its
    border. Source: He et al. 2015, arXiv:1512.03385.

    Args:
        operations: modules in order, or one `OrderedDict` of them.
        fusions: the fusion set for when it runs on its own; the default one if left out.
    """

    inlines: ClassVar[bool] = True

    def __init__(self, *operations: nn.Module | OrderedDict[str, nn.Module], fusions: Fusions | None = None) -> None:
        super().__init__(*operations, fusions=fusions)
        self._ends = (Fork(), Add())

    def expand(self) -> tuple[nn.Module, ...]:
        fork, add = self._ends
        return (fork, *self._modules.values(), add)  # pyright: ignore[reportReturnType] # at once, as in Sequential

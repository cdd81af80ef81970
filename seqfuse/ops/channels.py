"""Channels: tensors that leave the sequence and return to it, and `Residual`, built from `Fork` and `Add`."""

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
    """An operation with one extra input or output, named `end`, on the channel `name`."""

    end: ClassVar[str]

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name

    @property
    def channels(self) -> Mapping[str, str | None]:
        return {self.end: self.name}

    @classmethod
    def example(cls, x: Tensor) -> Any:
        # Without a name it cannot run by itself.
        return cls(cls.end)

    def extra_repr(self) -> str:
        return "" if self.name is None else repr(self.name)


class Fork(OnChannel):
    """y = x and out = x: sends x into the channel `out`, up to the `Add` of the same name.

    Backward: dx = dy + d_out.

    x, y, out: any shape.  Saved: nothing.
    Source: He et al. 2015, arXiv:1512.03385, where the shortcut begins.

    Args:
        name: the channel. Without one, forks and adds pair like parentheses. A named channel that no operation reads is
            a public output of the `Sequential`, returned after y.
    """

    outputs = ("out",)
    end = "out"

    class Saved(sf.Saved):
        """Empty: the backward pass only reads dy and d_out."""

    dy_may_be_none = True
    is_view = True
    native = True
    autocast = "same"
    channels_like_x = True

    def reference(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x, {"out": x}

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], Saved]:
        return x, {"out": x}, self._saved()

    def bwd(self, dy: Tensor | None, saved: Saved, *, d_out: Tensor | None) -> tuple[Tensor | None, sf.Grads]:
        if dy is None or d_out is None:
            return (d_out if dy is None else dy), {}
        return dy + d_out, {}

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        # Backward reads dy and writes dx; d_out is read in any case.
        return sf.Traffic() if backward else sf.Traffic(0, 0, 0)


class Add(OnChannel):
    """y = x + other, `other` from a channel.

    Backward: dx = dy, dother = dy.

    x, other, y: the same shape, without broadcasting. Dtypes promote as in torch.  Saved: nothing.
    Source: He et al. 2015, arXiv:1512.03385, where the shortcut ends.

    Args:
        name: the channel. Without a name, that of the nearest open `Fork`. A named channel that no operation writes is
            a public extra input of the `Sequential`, passed by keyword.

    Raises:
        InputError: (SF101) if the shapes differ.
    """

    end = "other"

    class Saved(sf.Saved):
        """Empty: the backward pass only reads dy."""

    autocast = "promote"
    native = True
    channels_like_x = True

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
    """y = x other, `other` from a channel, such as a gate.

    Backward: dx = dy other;  dother = dy x, summed over broadcast dimensions.

    x, y: the same shape; other: broadcast to it, never x to other. Dtypes promote as in torch.
    Saved: x for dother, other for dx, and the shape of other.

    Args:
        name: the channel. Without a name, that of the nearest open `Fork`. A named channel that no operation writes is
            a public extra input of the `Sequential`, passed by keyword.

    Raises:
        InputError: (SF101) if other does not broadcast to x.
    """

    end = "other"

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="other")
        other: Tensor = sf.field(for_="x")
        shape: tuple[int, ...]  # shape of other

    native = True
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
    """y = scales x, with one factor per token from a channel, such as the router probabilities of experts.

    Backward: dx = scales dy;  dscales = sum of dy x over the features of each token.

    x, y: [*, H], scales: [*] or [*, 1]. Computed in float32 (float64 for float64) and rounded to the dtype of x once.
    Saved: x for dscales, scales.

    Args:
        name: the channel. Without a name, that of the nearest open `Fork`. A named channel that no operation writes is
            a public extra input of the `Sequential`, passed by keyword.

    Raises:
        InputError: (SF101) for scales of another shape or a complex x.
    """

    end = "scales"

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="scales")  # [*, H]
        scales: Tensor  # [*] or [*, 1]

    autocast = "same"

    def check(self, shape: Sequence[int], scales: Tensor) -> None:
        """Raise `InputError` unless x of this shape has one factor per token."""
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
    """y = other and out = x: reads one channel and sends x into another, for parallel branches.

    A block with parallel branches is `Fork("r"), LayerNorm(d), *attention, Take("r"), LayerNorm(d), *feedforward,
    Add(), Add("r")`: the first `Add` reads the output of attention, as if from a `Fork`.

    Backward: dx = d_out, dother = dy.

    x, y, out: the shape of other.  Saved: nothing.
    Source: Wang & Komatsuzaki 2021, GPT-J-6B, with parallel blocks.

    Args:
        name: the channel `other`. Without a name, that of the nearest open `Fork`. A named channel that no operation
            writes is a public extra input of the `Sequential`, passed by keyword.
        to: the channel `out`. Without a name it goes to the next unnamed `Add`. A named channel that no operation reads
            is a public output of the `Sequential`, returned after y.

    Raises:
        InputError: (SF101) if the shapes differ.
    """

    outputs = ("out",)

    class Saved(sf.Saved):
        """Empty: the backward pass only reads dy and d_out."""

    dy_may_be_none = True
    is_view = True
    autocast = "exchange"
    channels_like_x = True

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
        # Without names it cannot run by itself.
        return cls("other", "out")

    def extra_repr(self) -> str:
        text = "" if self.name is None else repr(self.name)
        return text if self.to_channel is None else f"{text}, to={self.to_channel!r}".lstrip(", ")


class Residual(Sequential):
    """y = x + (op_n(... op_1(x))), a container; state-dict keys are those of its operations.

    dx = dy + (gradient through the branch).  x, y: [*, H]. It expands to `Fork, *operations, Add`, so fusions cross its
    border. Source: He et al. 2015, arXiv:1512.03385.

    Args:
        operations: modules in order, or one `OrderedDict` of them.
        fusions: the fusion set when called by itself; by default `sf.fusions.default`.
    """

    inlines: ClassVar[bool] = True

    def __init__(self, *operations: nn.Module | OrderedDict[str, nn.Module], fusions: Fusions | None = None) -> None:
        super().__init__(*operations, fusions=fusions)
        self._ends = (Fork(), Add())

    def expand(self) -> tuple[nn.Module, ...]:
        fork, add = self._ends
        return (fork, *self._modules.values(), add)  # pyright: ignore[reportReturnType]

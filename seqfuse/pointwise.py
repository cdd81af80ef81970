"""Element-wise operations: `Pointwise`, whose device functions all kernels accept, and `Gated`, built from one."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from .env import Env, autocast_of
from .errors import InputError, definition_error
from .operation import Grads, Traffic, UnfusedOperation
from .saved import Saved
from .signature import check_device_functions

_NO_PARAMETERS = (
    "derive from sf.UnfusedOperation and state Saved, fwd and bwd, or state them here; a number that is not trained is "
    "an attribute or a buffer"
)


_16_BITS = (torch.float16, torch.bfloat16)


def widened(x: Tensor) -> Tensor:
    """Cast x to float32 if its numbers have 16 bits, so that a result of several steps is rounded once."""
    return x.float() if x.dtype in _16_BITS else x


class SavedInput(Saved):
    """Saved tensors of an activation whose derivative is a function of its input."""

    x: Tensor  # [*, H]


class SavedOutput(Saved):
    """Saved tensors of an activation whose derivative is a function of its output."""

    y: Tensor  # [*, H]


class Pointwise(UnfusedOperation, open=True):
    """An element-wise operation.

    A subclass defines `reference`. With `reads = "input"` it saves `x`. With `reads = "output"` it saves `y`, and
    `derivative_reference(y)` is dy/dx as a function of y. The default `fwd` and `bwd` use these; a subclass may
    override them. With device functions `value` and `derivative` it also fuses into kernels.

    Raises:
        PluginError: at class definition, if only one of `value` and `derivative` is defined, or one of them is not a
            `triton.jit` function with these arguments; if `derivative_reference` is missing with `reads = "output"`, or
            defined without it. At construction, if it has parameters and the default `bwd`, which only computes dx.
    """

    reads: ClassVar[Literal["input", "output"]] = "input"
    value: ClassVar[Any] = None
    """`value(x)`: `reference` as a `triton.jit` function in float32, for kernels."""
    derivative: ClassVar[Any] = None
    """`derivative(t)`: dy/dx, without the factor dy, as a `triton.jit` function of x or y (see `reads`).

    The derivative of a selection, as of ReLU, may be `derivative(dy, t)` and return dx. Where it returns 0 for dy = 1,
    dx is 0 for every dy.
    """

    @property
    def P(self) -> tuple[float, ...]:
        """Configuration numbers to compile with; a class that overrides it has `value(x, P)` and `derivative(t, P)`."""
        return ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if "Saved" not in vars(cls):
            cls.Saved = SavedInput if cls.reads == "input" else SavedOutput
        super().__init_subclass__(**kwargs)
        if cls.reads not in ("input", "output"):
            raise definition_error(cls, f'reads must be "input" or "output", not {cls.reads!r}', "reads")
        if cls.is_open:
            return
        stated = cls.derivative_reference is not Pointwise.derivative_reference
        if cls.reads == "output" and not stated and cls.bwd is Pointwise.bwd:
            raise definition_error(cls, 'reads = "output" needs derivative_reference(y)', "reads")
        if cls.reads == "input" and stated:
            message = 'derivative_reference(y) is a function of the output: it needs reads = "output"'
            raise definition_error(cls, message, "derivative_reference")
        check_device_functions(cls, takes_numbers=cls.P is not Pointwise.P)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and type(self).bwd is Pointwise.bwd:
            message = f"a Pointwise computes no gradient of its parameter {name!r}"
            raise definition_error(type(self), message, f"self.{name}", _NO_PARAMETERS)
        super().register_parameter(name, param)

    def derivative_reference(self, y: Tensor) -> Tensor:
        """dy/dx as a function of y; required with `reads = "output"`."""
        raise NotImplementedError

    def record(self, x: Tensor, y: Tensor) -> Saved:
        """The `Saved` of a forward pass from `x` to `y`: x or y, whichever the backward pass reads."""
        return self.Saved(x=x) if self.reads == "input" else self.Saved(y=y)  # pyright: ignore[reportCallIssue]

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        y = self.reference(x)
        return y, self.record(x, y)

    def bwd(self, dy: Tensor, saved: Any) -> tuple[Tensor | None, Grads]:
        if self.reads == "output":
            return dy * self.derivative_reference(saved.y), {}
        with torch.enable_grad():
            x: Tensor = saved.x.detach().requires_grad_()
            (dx,) = torch.autograd.grad(self.reference(x), x, dy)
        return dx, {}


class SavedPacked(Saved):
    """Saved tensors of a gated unit."""

    x: Tensor  # [*, 2 F], packed [gate; up]


Packing = Literal["gate_up", "up_gate", "interleaved"]


class Gated(UnfusedOperation, open=True):
    """y = activation(gate) * up, with the input packed [gate; up] along the last dimension.  x: [*, 2 F], y: [*, F].

    dup = dy * activation(gate);  dgate = dy * up * activation'(gate).  `activation` is any unary `Pointwise`; a
    subclass may set it as the class attribute `unit`.
    Source: Shazeer 2020, arXiv:2002.05202.

    Args:
        activation: a `Pointwise` instance; omitted if the class defines `unit`.
        up: a second `Pointwise`, applied to the up half: y = activation(gate) * up(up).
        packing: position of gate and up in x: `"gate_up"`, the gate in the first half; `"up_gate"`, the gate in the
            second half, as in `torch.nn.GLU`; `"interleaved"`, [gate_0, up_0, gate_1, up_1, ...].

    Raises:
        ValueError: for another packing.
    """

    Saved = SavedPacked
    narrows = 2
    unit: ClassVar[type[Pointwise] | None] = None

    def __init__(
        self, activation: Pointwise | None = None, *, up: Pointwise | None = None, packing: Packing = "gate_up"
    ) -> None:
        super().__init__()
        unit = type(self).unit
        chosen = activation if activation is not None else unit and unit()
        if not isinstance(chosen, Pointwise):
            raise TypeError(f"{type(self).__name__} needs a Pointwise activation, got {activation!r}")
        if up is not None and not isinstance(up, Pointwise):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{type(self).__name__} needs a Pointwise for up, got {up!r}")
        if packing not in get_args(Packing):
            raise ValueError(f"packing must be one of {', '.join(map(repr, get_args(Packing)))}, got {packing!r}")
        for of in filter(None, (chosen, up)):
            own = [name for name, _ in of.named_parameters()]
            if own and type(self).bwd is Gated.bwd:
                message = f"a Gated computes no gradient of the parameter {own[0]!r} of its activation"
                hint = "derive from sf.UnfusedOperation and state Saved, fwd and bwd of the gated unit"
                raise definition_error(type(of), message, f"self.{own[0]}", hint)
        self.activation, self.packing = chosen, packing
        self.up = up

    @property
    def packs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.packing != "interleaved"

    @property
    def autocast(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As for the activation, promoted with the dtype of x."""
        return self.activation.autocast if type(self).reference is Gated.reference else None

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the gate and up halves."""
        if self.packing == "interleaved":
            return x[..., ::2], x[..., 1::2]
        gate, up = x.chunk(2, -1)
        return (gate, up) if self.packing == "gate_up" else (up, gate)

    def reference(self, x: Tensor) -> Tensor:
        if x.is_complex():
            raise InputError(f"expects x of real numbers, got {x.dtype}", code="SF101", operation=type(self).__name__)
        wide = self._widened(x)
        gate, up = self.halves(wide)
        y = self.activation.reference(gate) * (up if self.up is None else self.up.reference(up))
        return y if wide is x else y.to(x.dtype)

    def record(self, x: Tensor, y: Tensor) -> Saved:
        """The `Saved` of a forward pass from `x` to `y`, as in `Pointwise`."""
        return self.Saved(x=x)  # pyright: ignore[reportCallIssue]

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        y = self.reference(x)
        return y, self.record(x, y)

    def bwd(self, dy: Tensor, saved: Any) -> tuple[Tensor | None, Grads]:
        wide = self._widened(saved.x)
        gate, up = self.halves(wide)
        activated, record = self.activation.fwd(gate)
        if self.up is None:
            dup = dy * activated
        else:
            up, of_up = self.up.fwd(up)
            dup, _ = self.up.bwd(dy * activated, of_up)
        dgate, _ = self.activation.bwd(dy * up, record)
        assert dgate is not None
        assert dup is not None
        # `out` avoids autocast, which cannot concatenate 16-bit tensors of another dtype than its own.
        dx = torch.empty_like(wide, memory_format=torch.contiguous_format)
        if self.packing == "interleaved":
            torch.stack((dgate, dup), -1, out=dx.view(*dgate.shape, 2))
        else:
            torch.cat((dgate, dup) if self.packing == "gate_up" else (dup, dgate), -1, out=dx)
        return dx if wide is saved.x else dx.to(saved.x.dtype), {}

    def _widened(self, x: Tensor) -> Tensor:
        """Cast x to float32 if it has 16 bits, unless autocast determines the dtype of the activation."""
        decided = self.activation.autocast != "same" and autocast_of(x.device.type) is not None
        return x if decided else widened(x)

    def extra_repr(self) -> str:
        return "" if self.packing == "gate_up" else f"packing={self.packing!r}"

    def traffic(self, env: Env, backward: bool) -> Traffic:
        # activation(gate) is a separate tensor; backward recomputes it, computes dy up, dgate and dup, and concatenates
        # the last two. In 16 bits x is cast to float32 and the result back, and intermediates are twice as large.
        if env.dtype in _16_BITS:
            return Traffic(7, 11, 18) if backward else Traffic(4, 5, 9)
        return Traffic(5, 6, 3) if backward else Traffic(2, 1, 3)

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape or shape[-1] % 2:
            raise ValueError(f"expects an even last dimension [gate; up], got shape {tuple(shape)}")
        return (*shape[:-1], shape[-1] // 2)

    @classmethod
    def example(cls, x: Tensor) -> UnfusedOperation:
        if cls is not Gated:
            return cls()
        raise NotImplementedError("Gated takes an activation; give the operation explicitly")


__all__ = ["Gated", "Grads", "Pointwise", "Saved", "UnfusedOperation"]

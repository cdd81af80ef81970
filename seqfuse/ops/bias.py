"""Bias: a vector added to every row, its own or that of the operation it was expanded from."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .. import operation as sf
from ..casts import dtype_of
from ..env import Env, autocast_of
from ._read import required


class Bias(sf.UnfusedOperation):
    """y = x + bias.

    Backward: dx = dy;  dbias = sum of dy over all rows, accumulated in fp32 for half dtypes.

    x, y: [*, size], bias: [size].  Saved: nothing.
    Dtypes promote as in torch. Under autocast the bias takes x's dtype, so that a GEMM in bf16 stays in bf16 as it
    does in `torch.nn.Linear`.

    Args:
        size: length of the last dimension.

    Attributes:
        bias: the parameter. `Bias.of(owner)` makes one that reads `owner.bias` and has no parameter of its own, or an
            equal part of it, where each of several processes adds one before their results are summed: the gradient
            is then still that of the whole.
    """

    class Saved(sf.Saved):
        """Empty: the backward pass reads dy alone."""

    autocast = "same"

    NOTHING: ClassVar[Saved] = Saved()

    # The owner holds its member, which therefore does not hold it; who runs a member holds the owner as well. A tuple,
    # because torch 2.11 traces no branch on a reference.
    _owner: tuple[weakref.ref[nn.Module], ...] = ()
    _parts = 1

    def __init__(self, size: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.size = size
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def of(cls, owner: nn.Module, size: int, parts: int = 1) -> Bias:
        """A `Bias` that stands for `owner.bias`, or one of its `parts`, in an expansion of `owner`."""
        self = cls.__new__(cls)
        super().__init__(self)
        self.size = size
        self._owner, self._parts = (weakref.ref(owner),), parts
        return self

    def reset_parameters(self) -> None:
        """Start from zeros."""
        nn.init.zeros_(self.bias)

    def __getattr__(self, name: str) -> Any:
        if name == "bias" and self._owner:
            return self.read()
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "bias" and self._owner:
            setattr(self._holder(), name, value)
        else:
            super().__setattr__(name, value)

    def belongs_to(self, owner: nn.Module) -> bool:
        """Whether it reads the bias of this very module."""
        return self._holder() is owner

    def _holder(self) -> Any:
        """The module whose bias this is."""
        return self._owner[0]() if self._owner else self

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return {**state, "_owner": self._holder()} if self._owner else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        owner = state.get("_owner")
        state = state if owner is None else {**state, "_owner": (weakref.ref(owner),)}
        super().__setstate__(state)  # pyright: ignore[reportUnknownMemberType]

    def parameter_slots(self) -> dict[str, tuple[nn.Module, str]]:
        return {"bias": (self._holder(), "bias")} if self._owner else super().parameter_slots()

    def read(self) -> Tensor:
        """`bias` as it is now, for a pass that reads it often: it costs a fraction of the attribute."""
        own: dict[str, Any] = self.__dict__
        owner = own.get("_owner")
        module: Any = owner[0]() if owner else self
        bias = module._parameters.get("bias")
        if bias is None:
            bias = required(module, "bias")
        if own.get("_parts", 1) > 1:
            bias = cast(Tensor, _Part.apply(bias, self._parts))  # pyright: ignore[reportUnknownMemberType]
        return bias

    def held(self) -> Mapping[str, Tensor | None]:
        """Where `bias` is kept as it is read, so long as the owner has it for a parameter."""
        return self._holder().__dict__["_parameters"] if self._parts == 1 else {}

    @property
    def dtype(self) -> torch.dtype:
        """That of `bias`, which is not read for it."""
        return dtype_of(self._holder(), "bias")

    def _addend(self, x: Tensor) -> Tensor:
        bias = self.read()
        if bias.dtype is not x.dtype and autocast_of(x.device.type) is not None:
            return bias.to(x.dtype)
        return bias

    def reference(self, x: Tensor) -> Tensor:
        return x + self._addend(x)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return x + self._addend(x), self.NOTHING

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        dbias = None
        if "bias" in needs:
            rank = dy.ndim
            dbias = dy.sum(0) if rank == 2 else dy.sum(tuple(range(rank - 1))) if rank > 1 else dy.clone()
            if dbias.is_complex() and not self.read().is_complex():
                dbias = dbias.real.contiguous()
        return (dy if "x" in needs else None), {"bias": dbias}

    @property
    def features(self) -> tuple[int, int]:
        return self.size, self.size

    def traffic(self, env: Env, backward: bool) -> sf.Traffic:
        return sf.Traffic(x=0 if backward else 1)  # dx is dy itself

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not shape or shape[-1] != self.size:
            raise ValueError(f"expects last dimension {self.size}, got {shape[-1] if shape else 'a 0-d tensor'}")
        return shape

    @classmethod
    def example(cls, x: Tensor) -> Bias:
        self = cls(x.shape[-1], x.device, x.dtype)
        nn.init.normal_(self.bias)
        return self

    def extra_repr(self) -> str:
        return f"{self.size}"


class _Part(torch.autograd.Function):
    """bias / parts, whose sum over the processes adds the bias once: its gradient is that of the sum."""

    @staticmethod
    def forward(bias: Tensor, parts: int) -> Tensor:
        return bias / parts

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        return douts[0], None

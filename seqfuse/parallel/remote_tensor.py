"""A tensor whose values are on another rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import StateError


class Elsewhere(Tensor):
    """A `meta` tensor that represents a tensor on another rank: it has its shape, dtype and `requires_grad`, no values.

    Results computed from it are also `Elsewhere`, even together with real tensors, so that every rank can run the same
    loss and `backward`.

    Attributes:
        place: the stage and rank of the values, for messages.

    Raises:
        StateError: (SF508) if its values are read.
    """

    place: str

    @staticmethod
    def of(tensor: Tensor, where: str) -> Elsewhere:
        """A tensor of this shape, dtype and `requires_grad`; a gradient through it to a real tensor is an error."""
        meta: Any = tensor if tensor.is_meta else _down(tensor, where)
        out: Any = meta.as_subclass(Elsewhere)
        out.place = where
        return out

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        where = _where([*args, *named.values()])
        name: str = getattr(func, "__name__", "")
        # Of a meta tensor torch refuses these by a TypeError, and other reads by the errors below.
        if name in ("numpy", "__array__") or (name == "__format__" and args[1]):
            raise _absent(where, name)
        # torch passes the arguments of both backward functions by name.
        if func is torch.autograd.grad or (func in _BACKWARD and named.get("inputs") is not None):
            message = "gradients of some tensors alone would not reach the stages before them"
            raise StateError(message, code="SF508", hint="call backward() on every rank, and read .grad")
        if name == "__repr__":
            tensor = args[0]
            return f"Elsewhere({tuple(tensor.shape)}, {tensor.dtype}, {where})"
        in_place = name == "__setitem__" or (name.endswith("_") and not name.startswith("__"))
        for tensor in (args[0] if in_place and args else None, named.get("out")):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                raise _absent(where, f"{name} into a tensor of this rank")

        def down(tensor: Tensor) -> Tensor:
            return tensor if tensor.is_meta else _down(tensor, where)

        try:
            with _plainly():
                given, named = tree_map_only(Tensor, down, (args, named))
                out = func(*given, **named)
        except NotImplementedError as error:
            raise _absent(where, name) from error
        except RuntimeError as error:
            if "meta tensor" not in str(error) and "data-dependent" not in str(error):
                raise
            raise _absent(where, name) from error

        def up(tensor: Tensor) -> Tensor:
            return Elsewhere.of(tensor, where) if tensor.is_meta and not isinstance(tensor, Elsewhere) else tensor

        return tree_map_only(Tensor, up, out)


def blank(tensor: Tensor, requires_grad: bool = False) -> Tensor:
    """A plain `meta` tensor of this shape and dtype, not in a graph."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=requires_grad)


def _where(values: Any) -> str:
    found: list[str] = []
    tree_map_only(Elsewhere, lambda t: found.append(t.place) if hasattr(t, "place") else None, values)
    return found[0] if found else "on another rank"


def _absent(where: str, name: str) -> StateError:
    hint = "ask tensor.is_meta first, or take everywhere(tensor, model), which every rank calls"
    return StateError(f"{name} needs numbers that are not here: they are {where}", code="SF508", hint=hint)


class _Down(torch.autograd.Function):
    """A real tensor of this rank as a `meta` tensor, in an expression with tensors of another rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, where: str) -> Tensor:
        ctx.where = where
        return torch.empty_like(tensor, device="meta")

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        raise _absent(ctx.where, "the gradient of a tensor of this rank")


_down: Callable[..., Any] = _Down.apply  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_BACKWARD: Any = (Tensor.backward, torch.autograd.backward)  # pyright: ignore[reportUnknownMemberType]
_plainly: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass  # pyright: ignore[reportPrivateUsage]

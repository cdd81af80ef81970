"""For all autograd functions of this library: the error of a second derivative, and whether a node will run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import StateError

executes: Callable[[Any], bool] = torch._C._will_engine_execute_node  # pyright: ignore[reportPrivateUsage]


class Once(torch.autograd.Function):
    """Passes first gradients through; differentiating them again is an error."""

    @staticmethod
    def guard(ctx: Any, grads: Sequence[Any], read: Sequence[Any]) -> tuple[Any, ...]:
        """Put every path from `grads` to what they depend on (tensors `read`, leaves of the node) behind the error.

        Where no tensor is left that leads to one of the node's inputs, the error is raised at once.
        """
        present = [g for g in grads if g is not None]
        links = [t for t in read if t is not None and t.requires_grad]
        nodes = [fn for fn, _ in ctx.next_functions if fn is not None]
        links += [fn.variable for fn in nodes if hasattr(fn, "variable")]
        led_to = [t.grad_fn for t in links]
        if present and not all(hasattr(fn, "variable") or any(fn is other for other in led_to) for fn in nodes):
            raise _twice()
        if not present:
            return tuple(grads)
        guarded: Iterator[Any] = iter(Once.apply(len(present), *present, *links))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        return tuple(None if g is None else next(guarded) for g in grads)

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Any:
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *douts: Any) -> Any:
        raise _twice()


def _twice() -> StateError:
    hint = "differentiate under torch.func, run the operations' reference, or undo() the conversion of the model"
    return StateError("double backward is not supported", code="SF501", hint=hint)

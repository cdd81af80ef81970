"""Gradients that are accumulated in a buffer `parameter.main_grad` instead of `parameter.grad`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .errors import StateError


class Accumulated:
    """The class of `sf.accumulated`."""

    def __repr__(self) -> str:
        return "sf.accumulated"


accumulated = Accumulated()
"""Returned by a `bwd` instead of a gradient that it has already added to the buffer from `main_grads`."""


class MainGrads:
    """The buffers of one backward, by parameter index; for the current step by name.

    A step takes a buffer with `pop`, which records that it may have written to it if it fails.
    """

    __slots__ = ("_latest", "by_index")

    def __init__(self, by_index: dict[int, Tensor]) -> None:
        self.by_index = by_index
        self._latest: tuple[frozenset[str], dict[str, Tensor]] = frozenset(), {}  # offered names, buffers not taken

    def offer(self, grads: Iterable[tuple[str, int]]) -> dict[str, Tensor]:
        """The buffers of a step whose gradients have these names and indices."""
        given = {name: self.by_index[i] for name, i in grads if i in self.by_index}
        self._latest = frozenset(given), given
        return given

    def taken(self) -> list[str]:
        """The names of the buffers that the latest step took."""
        offered, left = self._latest
        return sorted(offered - left.keys())

    def settle(self, sums: list[Tensor | None]) -> None:
        """Adds the remaining gradients to their buffers and removes them from those that autograd gets."""
        for i, buffer in self.by_index.items():
            if (g := sums[i]) is not None:
                buffer.add_(g)
                sums[i] = None


def main_grads(
    nodes: Iterable[Any], executes: Callable[[Any], bool], where: Callable[[int], tuple[str, str, int | None]]
) -> MainGrads | None:
    """The `main_grad` buffers of the leaves of these nodes, or `None`.

    A leaf whose gradient `torch.autograd.grad` returns, or that has hooks, gets its gradient from torch: for it
    `executes`, which tells whether a node will run, raises `RuntimeError`. `where` returns parameter, operation and
    position of an index.

    Raises:
        StateError: (SF507) for a `main_grad` that cannot hold the gradient.
    """
    found: dict[int, Tensor] = {}
    for i, node in enumerate(nodes):
        leaf = getattr(node, "variable", None)
        buffer = getattr(leaf, "main_grad", None)
        if leaf is None or buffer is None or leaf._backward_hooks or leaf._post_accumulate_grad_hooks:
            continue
        try:
            if not executes(node):
                continue
        except RuntimeError:
            continue
        wanted = torch.float64 if leaf.dtype == torch.float64 else torch.float32
        like = (tuple(leaf.shape), wanted, leaf.device)
        if not isinstance(buffer, Tensor) or (tuple(buffer.shape), buffer.dtype, buffer.device) != like:
            raise _unfit(where(i), like, buffer)
        found[i] = buffer
    return MainGrads(found) if found else None


def _unfit(where: tuple[str, str, int | None], like: tuple[Any, ...], buffer: Any) -> StateError:
    def described(shape: Any, dtype: torch.dtype, device: torch.device) -> str:
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"

    name, operation, position = where
    is_tensor = isinstance(buffer, Tensor)
    got = described(buffer.shape, buffer.dtype, buffer.device) if is_tensor else type(buffer).__name__
    message = f"main_grad of {name} must be {described(*like)}, got {got}"
    return StateError(message, code="SF507", operation=operation, position=position)

"""Residual: a branch that adds to what it branched from."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

from torch import nn

from ..run.sequential import Fusions, Sequential
from .add import Add
from .fork import Fork


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

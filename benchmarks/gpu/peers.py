"""Others' kernels, where they can be imported, and what plain torch does: all as contenders of one shape.

Some of them write a gradient over what was saved or over the incoming one; those are asked not to where there is a
choice.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from .case import Case, Contender, Inputs, Run
from .draw import normal
from .sizes import Sizes

DISTRIBUTIONS = {"liger": "liger-kernel", "quack": "quack-kernels"}


@functools.cache
def module(name: str) -> Any:
    """A module, or `None` where it cannot be imported for whatever reason, or its kernels would be interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    try:
        return importlib.import_module(name)
    except Exception:
        return None


@functools.cache
def liger() -> Any:
    """Liger's functions."""
    return module("liger_kernel.transformers.functional")


@functools.cache
def quack() -> Any:
    """quack's module of norms."""
    return module("quack.rmsnorm")


def versions() -> dict[str, str]:
    """Of the peers that can be used here, and why there are no others."""
    found: dict[str, str] = {}
    for peer, imported in (("liger", liger()), ("quack", quack())):
        try:
            number = version(DISTRIBUTIONS[peer])
        except PackageNotFoundError:
            number = "not installed"
        found[peer] = number if imported is not None else f"{number}, cannot be imported"
    return found


Function = Callable[..., Any]


def forward_of(function: Function) -> Contender:
    """`function(**inputs)` without gradients."""

    def prepare(inputs: Inputs) -> Run:
        def call() -> Sequence[Tensor]:
            with torch.no_grad():
                return several(function(**inputs))

        return call

    return Contender(prepare)


def backward_of(function: Function, wanted: Sequence[str], douts: Sequence[str] = ("dy",)) -> Contender:
    """Gradients of `wanted` by autograd through `function(**inputs)`, whose forward pass is not timed."""

    def prepare(inputs: Inputs) -> Run:
        leaves, rest = _leaves(inputs, wanted, douts)
        with torch._functorch.config.patch(donated_buffer=False):  # the graph is used again
            outputs = several(function(**leaves, **rest))

        def call() -> Sequence[Tensor]:
            return torch.autograd.grad(outputs, list(leaves.values()), [inputs[d] for d in douts], retain_graph=True)

        return call

    return Contender(prepare)


def _leaves(inputs: Inputs, wanted: Sequence[str], douts: Sequence[str]) -> tuple[Inputs, Inputs]:
    leaves = {name: inputs[name].detach().requires_grad_() for name in wanted}
    return leaves, {name: t for name, t in inputs.items() if name not in leaves and name not in douts}


def several(outputs: Any) -> tuple[Tensor, ...]:
    """One result or several, as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def compiled(function: Any, mode: str = "default") -> Any:
    """By `torch.compile`, for the shapes it is called with."""
    return torch.compile(function, dynamic=False, mode=None if mode == "default" else mode)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What rows of one kernel and shape share.

    Args:
        sizes: of all rows.
        rows: of the timed inputs.
        shape: numbers for tables.
        modes: of `torch.compile`, as a peer; those of `sizes` if left out.
        checked_rows: on which the numeric rule is asked; those of `sizes` if left out.
    """

    sizes: Sizes
    rows: int
    shape: dict[str, Any]
    modes: Sequence[str] | None = None
    checked_rows: int | None = None

    def case(
        self, group: str, name: str, priority: int, shapes: Callable[[int], dict[str, tuple[int, ...]]],
        ours: Callable[[Inputs], Run], eager: Function, *, wanted: Sequence[str] = (), douts: Sequence[str] = ("dy",),
        checked: bool = True, others: Mapping[str, Function | None] | None = None, **rest: Any,
    ) -> Case:  # fmt: skip
        """A row: ours beside eager, `torch.compile` in its first mode, and the others that are there.

        Args:
            group: rows of one kind.
            name: of the row.
            priority: of the row.
            shapes: by names, of the inputs of so many rows.
            ours: for one set of inputs, what is timed.
            eager: the same function of the inputs in torch; of a row with gradients, its forward pass.
            wanted: inputs whose gradients the row is of; without any it is a forward pass.
            douts: incoming gradients.
            checked: whether peers are compared.
            others: functions of peers, `None` where a peer is not there.
            rest: of the `Case`.
        """
        sizes = self.sizes
        modes = sizes.compile_modes if self.modes is None else self.modes
        functions = {"eager": eager, **({"compile": compiled(eager, modes[0])} if modes else {}), **(others or {})}
        peers = {
            name: backward_of(function, wanted, douts) if wanted else forward_of(function)
            for name, function in functions.items()
            if function is not None
        }

        def make(rows: int, seed: int) -> Inputs:
            return normal(shapes(rows), seed, sizes.device, sizes.dtype)

        contenders = {n: dataclasses.replace(c, checked=checked) for n, c in peers.items()}
        known = {"make": make, "checked_rows": self.checked_rows or sizes.checked_rows, "shape": self.shape, **rest}
        return Case(
            group, name, sizes.dtype, rows=self.rows, contenders={"seqfuse": Contender(ours), **contenders},
            priority=priority, **known,
        )  # fmt: skip

"""Others' kernels, where they can be imported, and what plain torch does: all as contenders of one shape.

Some of them write a gradient over what was saved or over the incoming one; those are asked not to where there is a
choice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._functorch.config
from record import version_of
from torch import Tensor

from .case import Case, Contender, Inputs, Run, normal
from .sizes import Sizes

Function = Callable[..., Any]
Shapes = Mapping[str, tuple[int, ...]]
Within = Callable[[], contextlib.AbstractContextManager[Any]]


@functools.cache
def module(name: str) -> Any:
    """A module, or `None` where it cannot be imported for whatever reason, or its kernels would be interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    try:
        return importlib.import_module(name)
    except Exception:
        return None


liger = functools.partial(module, "liger_kernel.transformers.functional")
quack = functools.partial(module, "quack.rmsnorm")
PEERS = {"liger": liger, "quack": quack}


def versions() -> dict[str, str]:
    """Of the peers that can be used here, and why there are no others."""
    known = {peer: version_of(f"{peer}-kernel{'s' * (peer == 'quack')}") or "not installed" for peer in PEERS}
    return {peer: said if PEERS[peer]() else f"{said}, cannot be imported" for peer, said in known.items()}


def forward_of(function: Function, within: Within = contextlib.nullcontext) -> Contender:
    """`function(**inputs)` without gradients."""

    def prepare(inputs: Inputs) -> Run:
        def call() -> Sequence[Tensor]:
            with torch.no_grad(), within():
                return several(function(**inputs))

        return call

    return Contender(prepare)


def backward_of(function: Function, wanted: Sequence[str], douts: Sequence[str] = ("dy",)) -> Contender:
    """Gradients of `wanted` by autograd through `function(**inputs)`, whose forward pass is not timed."""

    def prepare(inputs: Inputs) -> Run:
        leaves = {name: inputs[name].detach().requires_grad_() for name in wanted}
        rest = {name: t for name, t in inputs.items() if name not in leaves and name not in douts}
        with torch._functorch.config.patch(donated_buffer=False):  # the graph is used again
            outputs = several(function(**leaves, **rest))
        given = list(leaves.values()), [inputs[d] for d in douts]
        return lambda: torch.autograd.grad(outputs, *given, retain_graph=True)

    return Contender(prepare)


def several(outputs: Any) -> tuple[Tensor, ...]:
    """One result or several, as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def compiled(function: Any, mode: str = "default") -> Any:
    """By `torch.compile`, for the shapes it is called with."""
    return torch.compile(function, dynamic=False, mode=None if mode == "default" else mode)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Rows of one kernel and shape: ours beside eager, `torch.compile` in its first mode, and others that are there."""

    sizes: Sizes
    label: str
    rows: int  # of the timed inputs
    shape: dict[str, Any]  # numbers for tables
    compiles: bool = True  # whether `torch.compile` is a peer, if it is one in `sizes`
    checked_rows: int | None = None  # on which the numeric rule is asked; those of `sizes` if left out
    per: int = 1  # how many rows one index of an input's first dimension has

    def inputs(self, shapes: Shapes, rows: int, seed: int) -> Inputs:
        """Tensors of these shapes, in which -1 stands for the rows."""
        sized = {n: tuple(rows // self.per if d < 0 else d for d in shape) for n, shape in shapes.items()}
        return normal(sized, seed, self.sizes.device, self.sizes.dtype)

    def case(
        self, group: str, priority: int, shapes: Shapes, ours: Callable[[Inputs], Run], eager: Function, *,
        wanted: Sequence[str] = (), douts: Sequence[str] = ("dy",), how: Callable[[Function], Contender] = forward_of,
        checked: bool = True, others: Mapping[str, Function] | None = None, **rest: Any,
    ) -> Case:  # fmt: skip
        """A row: for one set of inputs of these shapes, `ours` is timed, and functions of the inputs beside it.

        Of a row of gradients, those of the `wanted` inputs by `douts`, the functions are its forward pass; else `how`
        calls them. Peers are compared if they are to be `checked`. `rest` is of the `Case`.
        """
        how = functools.partial(backward_of, wanted=wanted, douts=douts) if wanted else how
        functions = {"eager": eager}
        if self.compiles and self.sizes.compile_modes:
            functions["compile"] = compiled(eager, self.sizes.compile_modes[0])
        functions |= {name: function for name, function in (others or {}).items() if PEERS[name]()}
        contenders = {n: dataclasses.replace(how(f), checked=checked) for n, f in functions.items()}
        known = {"make": functools.partial(self.inputs, shapes), "shape": self.shape, **rest}
        known = {"checked_rows": self.checked_rows or self.sizes.checked_rows, **known}
        return Case(
            group, self.label, self.sizes.dtype, rows=self.rows, contenders={"seqfuse": Contender(ours), **contenders},
            priority=priority, **known,
        )  # fmt: skip

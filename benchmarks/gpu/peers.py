"""Contenders of one form: kernels of other libraries, if they can be imported, and plain torch.

Some of them overwrite saved tensors or the incoming gradient; if there is an option against it, it is used.
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
    """A module, or `None` if it cannot be imported, or its kernels would be interpreted."""
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
    """The versions of the peers, or why a peer cannot be used."""
    known = {peer: version_of(f"{peer}-kernel{'s' * (peer == 'quack')}") or "not installed" for peer in PEERS}
    return {peer: said if PEERS[peer]() else f"{said}, cannot be imported" for peer, said in known.items()}


def forward_of(function: Function, within: Within = contextlib.nullcontext) -> Contender:
    """Runs `function(**inputs)` without gradients."""

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
        with torch._functorch.config.patch(donated_buffer=False):  # the graph is used repeatedly
            outputs = several(function(**leaves, **rest))
        given = list(leaves.values()), [inputs[d] for d in douts]
        return lambda: torch.autograd.grad(outputs, *given, retain_graph=True)

    return Contender(prepare)


def several(outputs: Any) -> tuple[Tensor, ...]:
    """One or several results as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def compiled(function: Any, mode: str = "default") -> Any:
    """A function compiled by `torch.compile`, for the shapes of its first call."""
    return torch.compile(function, dynamic=False, mode=None if mode == "default" else mode)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Rows of one kernel and shape: seqfuse against eager, `torch.compile` in its first mode, and other peers."""

    sizes: Sizes
    label: str
    rows: int  # number of rows of the timed inputs
    shape: dict[str, Any]  # numbers for tables
    compiles: bool = True  # whether `torch.compile` is a peer, if it is one in `sizes`
    checked_rows: int | None = None  # rows for the error bound; by default those of `sizes`
    per: int = 1  # rows per index of an input's first dimension

    def inputs(self, shapes: Shapes, rows: int, seed: int) -> Inputs:
        """Tensors of these shapes, with the number of rows instead of -1."""
        sized = {n: tuple(rows // self.per if d < 0 else d for d in shape) for n, shape in shapes.items()}
        return normal(sized, seed, self.sizes.device, self.sizes.dtype)

    def case(
        self, group: str, priority: int, shapes: Shapes, ours: Callable[[Inputs], Run], eager: Function, *,
        wanted: Sequence[str] = (), douts: Sequence[str] = ("dy",), how: Callable[[Function], Contender] = forward_of,
        checked: bool = True, others: Mapping[str, Function] | None = None, **rest: Any,
    ) -> Case:  # fmt: skip
        """A row that times `ours` on a set of inputs of these shapes, against functions of the inputs.

        With `wanted`, gradients of these inputs by `douts` are timed, and the functions are the forward pass; else
        `how` calls them. Peers are compared if `checked`. `rest`: as in `Case`.
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

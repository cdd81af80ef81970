"""Others' kernels, where they can be imported, and what plain torch does: all as contenders of one shape.

Some of them write a gradient over what was saved or over the incoming one; those are asked not to where there is a
choice.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from .case import Contender, Inputs, Run

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


def both_of(function: Function, wanted: Sequence[str], douts: Sequence[str] = ("dy",)) -> Contender:
    """Results of `function(**inputs)` and gradients of `wanted`."""

    def prepare(inputs: Inputs) -> Run:
        leaves, rest = _leaves(inputs, wanted, douts)

        def call() -> Sequence[Tensor]:
            outputs = several(function(**leaves, **rest))
            return *outputs, *torch.autograd.grad(outputs, list(leaves.values()), [inputs[d] for d in douts])

        return call

    def forward(inputs: Inputs) -> Any:
        leaves, rest = _leaves(inputs, wanted, douts)
        return function(**leaves, **rest)

    return Contender(prepare, forward)


def _leaves(inputs: Inputs, wanted: Sequence[str], douts: Sequence[str]) -> tuple[Inputs, Inputs]:
    leaves = {name: inputs[name].detach().requires_grad_() for name in wanted}
    return leaves, {name: t for name, t in inputs.items() if name not in leaves and name not in douts}


def several(outputs: Any) -> tuple[Tensor, ...]:
    """One result or several, as a tuple."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def compiled(function: Any, mode: str = "default") -> Any:
    """By `torch.compile`, for the shapes it is called with."""
    return torch.compile(function, dynamic=False, mode=None if mode == "default" else mode)


def peers_of(
    make: Callable[[Function], Contender], eager: Function, modes: Sequence[str], **others: Function | None
) -> dict[str, Contender]:
    """Eager, `torch.compile` in its first mode, and the other peers that are there."""
    found = {"eager": make(eager)}
    if modes:
        found["compile"] = make(compiled(eager, modes[0]))
    return found | {name: make(function) for name, function in others.items() if function is not None}

"""Runs a sequence on fake tensors, part by part, including the modules that run eagerly."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from ..casts import autocasting
from ..env import Env
from ..fake import faking, laid_like
from ..operation import FusableOperation, UnfusedOperation
from .flatten import HOOKS, Node, global_hooks
from .reference import run_eagerly, walk_reference

_FILLED = (list, dict, set)


class Unknown(Exception):
    """The result of a module is unknown, and so are the results of all operations behind it."""


def aside(module: nn.Module, mode: Any, made: dict[int, nn.Module] | None = None) -> nn.Module:
    """Copies a module and its submodules with fake tensors, so that running the copy changes nothing in the module.

    The copy is not compiled and has no hooks: hooks see the tensors of real calls only.
    """
    made = {} if made is None else made
    module = module._modules.get("_orig_mod") or module  # pyright: ignore[reportPrivateUsage] # of torch.compile
    if id(module) not in made:
        kept = made[id(module)] = object.__new__(type(module))
        own: dict[str, Any] = kept.__dict__
        own.update(_copied(module.__dict__, mode), _compiled_call_impl=None)
        own.update((name, _copied(module.__dict__[name], mode)) for name in ("_parameters", "_buffers"))
        own.update((name, OrderedDict[int, Any]()) for name in HOOKS)
        inside: Mapping[str, nn.Module | None] = module.__dict__["_modules"]
        own["_modules"] = {name: child if child is None else aside(child, mode, made) for name, child in inside.items()}
        if isinstance(module, FusableOperation):
            own["_engine"] = []
    return made[id(module)]


def _copied(held: Mapping[str, Any], mode: Any) -> dict[str, Any]:
    """Replaces tensors by fake tensors and copies lists, dicts and sets; other values are shared."""
    return {
        name: mode.from_tensor(value) if isinstance(value, Tensor) else copy(value) if type(value) in _FILLED else value
        for name, value in held.items()
    }


def run_aside(nodes: Sequence[Node], position: int, x: Tensor, channels: dict[str, Tensor], mode: Any) -> Tensor:
    """Runs an eager module on fake tensors and returns its output. The module does not change; its hooks do not run.

    Raises:
        Unknown: where it does not run on fake tensors.
    """
    node = nodes[position]
    operation = node.operation
    try:
        if global_hooks():
            raise Unknown("global module hooks are registered")
        stand_in = dataclasses.replace(node, operation=aside(operation, mode))
        return run_eagerly([*nodes[:position], stand_in], position, x, channels)
    except Exception as error:
        if isinstance(operation, UnfusedOperation):  # its parameters may live on other ranks, as under FSDP
            channels.update((channel, x) for _, channel in node.outputs)
            return x.new_empty(operation.infer(tuple(x.shape)), dtype=operation.y_dtype)
        raise _unknown(node, position, error) from None


def _unknown(node: Node, position: int, error: Exception) -> Unknown:
    said = str(error).strip().partition("\n")[0]
    said = said if isinstance(error, Unknown) else f"{type(error).__name__}: {said}"
    return Unknown(f"unknown behind {node.name} at {position}, which does not run on fake tensors ({said})")


class Arriving:
    """Runs a sequence part by part; the fake tensors `x` and `channels` are the inputs of the next part.

    Once they are unknown, `unknown` is the reason.
    """

    def __init__(self, x: Tensor, channels: Mapping[str, Tensor], env: Env, place: torch.device) -> None:
        self.unknown: str | None = None
        self._env, self._place = env, place
        try:
            with self._running() as mode:
                self._mode = mode
                self.x: Tensor = self._like(x)
                self.channels = {name: self._like(t) for name, t in channels.items()}
        except Exception as error:
            self.unknown = f"the input cannot be made without data ({type(error).__name__}: {error})"

    def _like(self, t: Tensor) -> Tensor:
        fake = self._mode.from_tensor(t).detach()
        fake = fake if fake.device == self._place else laid_like(fake, fake.dtype, self._place)
        return fake.requires_grad_(t.requires_grad)

    @contextlib.contextmanager
    def _running(self) -> Generator[Any]:
        autocast = self._env.autocast if self._env.device == self._place.type else None
        casting, mode = autocasting(self._place.type, autocast), getattr(self, "_mode", None)
        with torch.set_grad_enabled(self._env.grad), casting, faking(mode) as mode:
            yield mode

    def apart(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The inputs of the next part, x and channels, as tensors on meta, which outlive the fake mode."""
        x, *given = (
            laid_like(t, t.dtype, "meta").requires_grad_(t.requires_grad) for t in (self.x, *self.channels.values())
        )
        return x, dict(zip(self.channels, given, strict=True))

    def run(self, nodes: Sequence[Node], positions: range) -> None:
        if self.unknown is not None:
            return
        with self._running() as mode:
            seeds = torch.empty(len(nodes), dtype=torch.int64, device=self._place)
            for at in positions:
                try:
                    if nodes[at].fusable:
                        self.x = walk_reference(nodes, range(at, at + 1), self.x, self.channels, seeds)
                    else:
                        self.x = run_aside(nodes, at, self.x, self.channels, mode)
                except Exception as error:
                    self.unknown = str(error if isinstance(error, Unknown) else _unknown(nodes[at], at, error))
                    return

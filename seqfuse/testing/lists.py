"""Random `Sequential`s as data: what one is made of, how it is built, and what it computes by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import ops
from ..fuser import Sequential
from ..fuser.reference import random_seeds
from ..fuser.sequential import Fusions
from ..operation import UnfusedOperation
from ..ops.residual import Residual
from .cases import seeded
from .tensors import seeded_randn

HEADED = ("QKNorm", "RotaryEmbedding", "Attention")
CONTAINERS: dict[str, type[Sequential]] = {"Sequential": Sequential, "Residual": Residual}


def _halve_output(module: nn.Module, args: Any, out: Any) -> Any:
    return 0.5 * out if isinstance(out, Tensor) else (0.5 * out[0], *out[1:])


def _halve_input(module: nn.Module, args: Any) -> Any:
    return (0.5 * args[0], *args[1:])


def _look_on(module: nn.Module, *given: Any) -> None:
    return None


HOOKS = ("forward", "forward pre", "full backward")


@dataclass(frozen=True, slots=True)
class Node:
    """A module of a random list: an operation, a container, or a plain `torch.nn` module, which is a barrier.

    Args:
        kind: a name in `seqfuse.ops`, `"Sequential"`, `"Residual"`, or one of `torch.nn` behind `"nn."`.
        arguments: of its constructor.
        members: of a container.
        hook: one of `HOOKS`, or none; the first two halve what passes.
        frozen: whether its own parameters want no gradient.
        named: the remaining arguments of its constructor.
    """

    kind: str
    arguments: tuple[Any, ...] = ()
    members: tuple[Node, ...] = ()
    hook: str = ""
    frozen: bool = False
    named: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        given = [*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in self.named)]
        inside = ", ".join(map(str, self.members) if self.members else given)
        marks = [f"{self.hook} hook"] * bool(self.hook) + ["frozen"] * self.frozen
        return f"{self.kind}({inside})" + (f" <{', '.join(marks)}>" if marks else "")

    @property
    def attends(self) -> bool:
        """Whether attention is in it, so that it takes x of at least two dimensions."""
        return self.kind in HEADED or any(member.attends for member in self.members)

    def build(self) -> nn.Module:
        """The module, with fresh parameters."""
        if self.kind in CONTAINERS:
            module: nn.Module = CONTAINERS[self.kind](*(member.build() for member in self.members))
        elif self.kind.startswith("nn."):
            module = getattr(nn, self.kind.removeprefix("nn."))(*self.arguments)
        else:
            module = getattr(ops, self.kind)(*self.arguments, **dict(self.named))
        for p in module.parameters(recurse=False):
            p.requires_grad_(not self.frozen)
        if self.hook == "forward":
            module.register_forward_hook(_halve_output)
        elif self.hook == "forward pre":
            module.register_forward_pre_hook(_halve_input)
        elif self.hook:
            module.register_full_backward_hook(_look_on)
        return module


@dataclass(frozen=True, slots=True)
class ListSpec:
    """A random list; `str` shows it in one line, `build` makes it, `reference` says what it computes.

    Args:
        width: last dimension of x.
        members: of the `Sequential`.
        inputs: public extra inputs by name, with the width of each.
        outputs: public extra outputs by name, in order.
        training: its mode.
    """

    width: int
    members: tuple[Node, ...]
    inputs: tuple[tuple[str, int], ...] = ()
    outputs: tuple[str, ...] = ()
    training: bool = True

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluation"
        return f"{Node('Sequential', members=self.members)} on width {self.width}, in {mode}"

    @property
    def attends(self) -> bool:
        """Whether attention is in it, so that it takes x of at least two dimensions."""
        return any(member.attends for member in self.members)

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float32, fusions: Fusions | None = None) -> Sequential:
        """The list, with random numbers also where fresh parameters are constant."""
        with seeded(seed, torch.device("cpu")):
            model = Sequential(*(member.build() for member in self.members), fusions=fusions)
            for i, p in enumerate(model.parameters()):
                if p.numel() and bool((p == p.flatten()[0]).all()):
                    p.data.add_(0.5 * seeded_randn(tuple(p.shape), seed + i))
        return model.to(dtype).train(self.training)

    def reference(self, model: nn.Module, x: Tensor, **channels: Tensor) -> dict[str, Tensor]:
        """`y` and the public outputs, by references and plain torch alone, with the seeds the engine would draw."""
        made = dict(channels)
        y = _call(Node("Sequential", members=self.members), model, x, made)
        return {"y": y, **{name: made[name] for name in self.outputs}}


def _call(node: Node, module: nn.Module, x: Tensor, channels: dict[str, Tensor]) -> Tensor:
    """A module that is called by itself: it draws seeds of its own, and its hooks run."""
    if node.hook == "forward pre":
        x = 0.5 * x
    count = _active(node, module)
    y = _walk(node, module, x, channels, iter(random_seeds(count, x) if count else ()))
    return 0.5 * y if node.hook == "forward" else y


def _pairs(node: Node, module: nn.Module) -> Iterator[tuple[Node, nn.Module]]:
    return zip(node.members, module.children(), strict=True)


def _active(node: Node, module: nn.Module) -> int:
    """Random operations that share the seeds of a call."""
    if node.kind in CONTAINERS:
        return sum(_active(*pair) for pair in _pairs(node, module) if not pair[0].hook)
    return int(isinstance(module, UnfusedOperation) and module.random)


def _walk(node: Node, module: Any, x: Tensor, channels: dict[str, Tensor], seeds: Iterator[Tensor]) -> Tensor:
    if node.kind in CONTAINERS:
        shortcut = x
        for member, child in _pairs(node, module):
            x = _call(member, child, x, channels) if member.hook else _walk(member, child, x, channels, seeds)
        return x + shortcut if node.kind == "Residual" else x
    if node.kind == "Linear":
        return F.linear(x, module.weight, module.bias)
    if node.kind == "Fork":
        channels[module.name] = x
        return x
    if node.kind == "Add":
        return x + channels[module.name]
    if node.kind in ("Dropout", "Attention"):
        return module.reference(x, seed=next(seeds) if module.random else None)
    return module.reference(x) if isinstance(module, UnfusedOperation) else module.forward(x)  # without its hooks


class Routing:
    """Channels while a list is drawn: which may be read where.

    A channel that is read inside a container that made it is private to that container, so all its readers have to
    share with it as many containers as the first one does.
    """

    def __init__(self) -> None:
        self.widths: dict[str, int] = {}
        self.public: list[str] = []
        self._homes: dict[str, tuple[int, ...]] = {}
        self._shared: dict[str, int] = {}

    def fork(self, width: int, home: tuple[int, ...]) -> str:
        """A new channel made inside the containers `home`."""
        name = f"c{len(self.widths)}"
        self.widths[name], self._homes[name] = width, home
        return name

    def take(self, width: int) -> str:
        """A new public input."""
        name = f"c{len(self.widths)}"
        self.widths[name] = width
        self.public.append(name)
        return name

    def readable(self, width: int, here: tuple[int, ...]) -> list[str]:
        """Channels of this width that may be read inside the containers `here`."""
        found = [name for name, w in self.widths.items() if w == width]
        return [
            n for n in found if n in self.public or self._shared.get(n, self._common(n, here)) == self._common(n, here)
        ]

    def read(self, name: str, here: tuple[int, ...]) -> None:
        """Note a reader."""
        if name not in self.public:
            self._shared[name] = self._common(name, here)

    def _common(self, name: str, here: Sequence[int]) -> int:
        home = self._homes[name]
        return next(
            (i for i, pair in enumerate(zip(home, here, strict=False)) if pair[0] != pair[1]), min(len(home), len(here))
        )

    @property
    def inputs(self) -> tuple[tuple[str, int], ...]:
        return tuple((name, self.widths[name]) for name in self.public)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for name in self._homes if name not in self._shared)

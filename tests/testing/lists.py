"""Random `Sequential`s as data: their members, how they are built, results in plain torch, and results of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from seqfuse import ops
from seqfuse.fusion import FusedOperation
from seqfuse.operation import UnfusedOperation
from seqfuse.ops import Residual
from seqfuse.plan import random_seeds
from seqfuse.run import Sequential
from seqfuse.testing.cases import seeded
from seqfuse.testing.tensors import LAYOUTS, generator, in_regime, laid_out, seeded_randn

HEADED = ("QKNorm", "RotaryEmbedding", "Attention")
CONTAINERS: dict[str, type[Sequential]] = {"Sequential": Sequential, "Residual": Residual}


def _halve_output(module: nn.Module, args: Any, out: Any) -> Any:
    return 0.5 * out if isinstance(out, Tensor) else (0.5 * out[0], *out[1:])


def _halve_input(module: nn.Module, args: Any) -> Any:
    return (0.5 * args[0], *args[1:])


def _look_on(module: nn.Module, *given: Any) -> None:
    return None


class Checkpointed(nn.Module):
    """A `Sequential` under non-reentrant activation checkpointing."""

    def __init__(self, *members: nn.Module) -> None:
        super().__init__()
        self.inner = Sequential(*members)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # pyright: ignore[reportUnknownVariableType]


MASKS = ("min", "-1e9", "-1e4", "-inf", "bool")
"""The value of masked keys: a large finite number added to the score (`"min"`: least of the dtype), -inf or False."""
HOOKS = ("forward", "forward pre", "full backward")


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """A module of a random list: an operation, a container, or a plain `torch.nn` module, which is a barrier.

    Args:
        kind: a name in `seqfuse.ops`, `"Sequential"`, `"Residual"`, `"Checkpointed"`, or one of `torch.nn` behind
            `"nn."`; `"Checkpointed"` is a barrier as well.
        arguments: of its constructor.
        members: of a container.
        hook: one of `HOOKS`, or none; the first two halve what passes.
        frozen: whether its own parameters need no gradient.
        named: the remaining arguments of its constructor.
        other: names of its own parameters that have the second dtype, where the sequence has two.
        layout: memory layout of its own parameters, as in `laid_out`.
    """

    kind: str
    arguments: tuple[Any, ...] = ()
    members: tuple[MemberSpec, ...] = ()
    hook: str = ""
    frozen: bool = False
    named: tuple[tuple[str, Any], ...] = ()
    other: tuple[str, ...] = ()
    layout: str = "contiguous"

    def __str__(self) -> str:
        given = [*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in self.named)]
        inside = ", ".join(map(str, self.members) if self.members else given)
        marks = [f"{self.hook} hook"] * bool(self.hook) + ["frozen"] * self.frozen
        marks += [f"{' and '.join(self.other)} of the other dtype"] if self.other else []
        marks += [self.layout] if self.layout != "contiguous" else []
        return f"{self.kind}({inside})" + (f" <{', '.join(marks)}>" if marks else "")

    @property
    def attends(self) -> bool:
        """Whether it contains attention, so that x needs at least two dimensions."""
        return self.kind in HEADED or any(member.attends for member in self.members)

    def build(self) -> nn.Module:
        """The module, with fresh parameters."""
        if self.kind == "Checkpointed":
            module: nn.Module = Checkpointed(*(member.build() for member in self.members))
        elif self.kind in CONTAINERS:
            module = CONTAINERS[self.kind](*(member.build() for member in self.members))
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


Computed = Callable[[Any, Tensor, Tensor | None, Tensor | None], Tensor]


def _referred(operation: Any, x: Tensor, seed: Tensor | None, mask: Tensor | None) -> Tensor:
    given = {name: t for name, t in (("seed", seed), ("attn_mask", mask)) if t is not None}
    for member in operation.expand():  # a Linear, and its Bias
        x = member.reference(x, **given)
    return x


@dataclass(frozen=True, slots=True)
class ListSpec:
    """A random op sequence; `str` shows it in one line, `build` builds it, `reference` computes it in plain torch.

    Args:
        width: last dimension of x.
        members: operations of the `Sequential`.
        inputs: public extra inputs by name, with the width of each.
        outputs: public extra outputs by name, in order.
        training: whether it is in training mode.
        masks: attention masks among the public extra inputs, by name, with one of `MASKS`.
    """

    width: int
    members: tuple[MemberSpec, ...]
    inputs: tuple[tuple[str, int], ...] = ()
    outputs: tuple[str, ...] = ()
    training: bool = True
    masks: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        mode = "training" if self.training else "evaluation"
        return f"{MemberSpec('Sequential', members=self.members)} on width {self.width}, in {mode}"

    @property
    def attends(self) -> bool:
        """Whether it contains attention, so that x needs at least two dimensions."""
        return any(member.attends for member in self.members)

    def build(
        self,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        other: torch.dtype | None = None,
        fusions: Sequence[type[FusedOperation]] | None = None,
    ) -> Sequential:
        """The sequence, with random values also for constant initial parameters; `other` is its second dtype."""
        with seeded(seed, torch.device("cpu")):
            model = Sequential(*(member.build() for member in self.members), fusions=fusions)
            for i, p in enumerate(model.parameters()):
                if p.numel() and bool((p == p.flatten()[0]).all()):
                    p.data.add_(0.5 * seeded_randn(tuple(p.shape), seed + i))
        model.to(dtype).train(self.training)
        for node, module in _nodes(MemberSpec("Sequential", members=self.members), model):
            for name, p in module.named_parameters(recurse=False):
                p.data = laid_out(p.data.to(other if other is not None and name in node.other else dtype), node.layout)
        return model

    def masked(self, length: int, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Attention masks [length, length]; the first row is fully masked."""
        draw = generator(seed)
        found: dict[str, Tensor] = {}
        for name, kind in self.masks:
            hidden = torch.rand((length, length), generator=draw) < 0.4
            hidden[:1] = True
            value = torch.finfo(dtype).min if kind == "min" else float("nan" if kind == "bool" else kind)
            found[name] = (
                ~hidden if kind == "bool" else torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, value)
            )
        return found

    def reference(
        self, model: nn.Module, x: Tensor, *, by: Computed | None = None, **channels: Tensor
    ) -> dict[str, Tensor]:
        """`y` and the public outputs in plain torch, with the dropout seeds of the engine.

        `by(operation, x, seed, mask)` computes an operation; by default its `reference`.
        """
        made = dict(channels)
        y = _call(MemberSpec("Sequential", members=self.members), model, x, made, by or _referred)
        return {"y": y, **{name: made[name] for name in self.outputs}}


def _nodes(node: MemberSpec, module: nn.Module) -> Iterator[tuple[MemberSpec, nn.Module]]:
    yield node, module
    for pair in _pairs(node, module) if node.members else ():
        yield from _nodes(*pair)


def _call(node: MemberSpec, module: nn.Module, x: Tensor, channels: dict[str, Tensor], by: Computed) -> Tensor:
    """A module that runs through its own `__call__`: it draws its own seeds, and its hooks run."""
    if node.hook == "forward pre":
        x = 0.5 * x
    if node.kind == "Checkpointed":
        y = _call(MemberSpec("Sequential", members=node.members), _inner(module), x, {}, by)
    else:
        count = _active(node, module)
        y = _walk(node, module, x, channels, iter(random_seeds(count, x) if count else ()), by)
    return 0.5 * y if node.hook == "forward" else y


def _inner(module: Any) -> nn.Module:
    return module.inner if isinstance(module, Checkpointed) else module


def _pairs(node: MemberSpec, module: nn.Module) -> Iterator[tuple[MemberSpec, nn.Module]]:
    return zip(node.members, _inner(module).children(), strict=True)


def _apart(node: MemberSpec) -> bool:
    """Whether a module runs through its own `__call__`."""
    return bool(node.hook) or node.kind == "Checkpointed"


def _active(node: MemberSpec, module: nn.Module) -> int:
    """Random operations that share the seeds of a call."""
    if node.kind in CONTAINERS:
        return sum(_active(*pair) for pair in _pairs(node, module) if not _apart(pair[0]))
    return int(isinstance(module, UnfusedOperation) and module.random)


def _walk(
    node: MemberSpec, module: Any, x: Tensor, channels: dict[str, Tensor], seeds: Iterator[Tensor], by: Computed
) -> Tensor:
    if node.kind in CONTAINERS:
        shortcut = x
        for member, child in _pairs(node, module):
            if _apart(member):
                x = _call(member, child, x, channels, by)
            else:
                x = _walk(member, child, x, channels, seeds, by)
        return x + shortcut if node.kind == "Residual" else x
    if node.kind == "Fork":
        channels[module.name] = x
        return x
    if node.kind == "Add":
        return x + channels[module.name]
    if not isinstance(module, UnfusedOperation):
        return module.forward(x)  # without its hooks
    mask = channels.get(dict(node.named).get("mask", ""))
    return by(module, x, next(seeds) if module.random else None, mask)


class Routing:
    """Channels while a sequence is drawn: which may be read where.

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


Results = dict[str, Tensor | None]
CPU = torch.device("cpu")
DISTINCT = tuple(layout for layout in LAYOUTS if layout not in ("expanded", "scalar"))
"""Layouts whose rows differ: attention over equal rows has gradients of queries and keys that are rounding errors
only."""


def results(
    call: Callable[..., Any],
    model: nn.Module,
    spec: ListSpec,
    seed: int,
    *,
    rows: tuple[int, ...] = (4,),
    x_wants: bool = True,
    dtype: torch.dtype = torch.float32,
    grad: bool = True,
    wide: bool = False,
    layout: str = "contiguous",
    dy_layout: str = "contiguous",
    checkpointed: str = "",
) -> Results:
    """Outputs and every gradient of a run on the numbers of a seed, rounded to `dtype`, then widened to float64.

    `layout` is that of the inputs, `dy_layout` that of the incoming gradients; `checkpointed` is `"reentrant"`,
    `"non-reentrant"`, or not at all.
    """
    own = torch.float64 if wide else dtype
    given = {
        name: laid_out(in_regime("normal", (*rows, width), seed + i, dtype=dtype), layout).to(own)
        for i, (name, width) in enumerate({"x": spec.width, **dict(spec.inputs)}.items())
    }
    for name, mask in spec.masked(rows[-1] if rows else 0, seed, dtype).items():
        given[name] = mask.to(own) if mask.is_floating_point() else mask
    for t in given.values():
        t.requires_grad_(x_wants and t.is_floating_point())
    reentrant = checkpointed == "reentrant"
    with seeded(seed, CPU), torch.set_grad_enabled(grad):
        if checkpointed:
            run = lambda *tensors: call(**dict(zip(given, tensors, strict=True)))  # noqa: E731
            out = checkpoint(run, *given.values(), use_reentrant=reentrant)
        else:
            out = call(**given)
    names = ("y", *spec.outputs)
    outputs = out if isinstance(out, dict) else dict(zip(names, out if spec.outputs else (out,), strict=True))
    wanted = {f"d_{name}": t for name, t in given.items() if t.requires_grad}
    wanted |= {f"{name}.grad": p for name, p in model.named_parameters() if p.requires_grad}
    pairs = [
        (y, laid_out(seeded_randn(tuple(y.shape), seed + 9 + i, dtype=dtype), dy_layout).to(y.dtype))
        for i, y in enumerate(outputs.values())
        if y.requires_grad
    ]
    if not pairs or not wanted:
        return {**outputs}
    ys, dys = zip(*pairs, strict=True)
    if reentrant:  # it requires inputs to differentiate
        torch.autograd.backward(ys, dys)
        found = tuple(t.grad for t in wanted.values())
        for t in wanted.values():
            t.grad = None
    else:
        found = torch.autograd.grad(ys, tuple(wanted.values()), dys, allow_unused=True)
    return {**outputs, **{n: _zeros_for_none(g, t) for (n, t), g in zip(wanted.items(), found, strict=True)}}


def _zeros_for_none(g: Tensor | None, like: Tensor) -> Tensor:
    # Autograd returns None where no path leads back, and zeros where a path adds nothing.
    return torch.zeros_like(like) if g is None else g

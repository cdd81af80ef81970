"""Runs of a sequence whose tensors are seen between its operations: by the engine, and by references in float64."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..fusion import FusedOperation
from ..operation import UnfusedOperation
from ..plan import flatten
from ..plan.fake import is_fake
from ..plan.match import Matcher, Refusal
from ..plan.plan import Step
from ..plan.reference import draw, number_seeds, run_eagerly, walk_reference
from ..plan.schedule import Candidate
from ..run import Fuser, Sequential
from ..run.regions import Region
from ..settings import fusing
from ..testing.cases import seeded
from .inputs import Spec, surroundings, vocabulary

Kind = Literal["engine", "reference", "rounded"]


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """A tensor between operations: `y` of a position, `dx` of a position, or the gradient of a parameter.

    They are ordered as they come to be.
    """

    order: tuple[int, int, int]
    at: int
    tensor: str

    @classmethod
    def y(cls, at: int) -> Place:
        """What leaves a position."""
        return cls((0, at, 0), at, "y")

    @classmethod
    def dx(cls, at: int) -> Place:
        """The gradient of what enters a position."""
        return cls((1, -at, 0), at, "dx")

    @classmethod
    def grad(cls, at: int, name: str) -> Place:
        """The gradient of a parameter that a position reads."""
        return cls((1, -at, 1), at, f"{name}.grad")


Values = dict[Place, Tensor]


@dataclasses.dataclass(frozen=True)
class Run:
    """How a sequence is run: by the engine, by references in float64, or by these rounded to `dtype` at each border.

    `rounds` is the dtype that parameters and inputs are rounded to before.
    """

    kind: Kind
    dtype: torch.dtype
    device: torch.device
    fused: bool = True
    rounds: torch.dtype | None = None
    autocast: str | None = None

    def __call__(
        self, root: Sequential, spec: Spec, channels: Mapping[str, Spec], seed: int, grad: bool
    ) -> tuple[Values, dict[int, str]]:
        """Run a copy of a sequence and its backward: the tensors by their places, and the fused steps by position."""
        model = copy.deepcopy(root).to(self.device, self.rounds or self.dtype)
        wide = self.kind != "engine"
        model = model.double() if wide else model

        def given(one: Spec, offset: int) -> Tensor:
            t = one.draw("cpu", seed + offset, vocabulary(model))
            if t.is_floating_point():
                t = t.to(self.rounds or self.dtype)
                t = t.double() if wide else t
            return t.to(self.device).requires_grad_(grad and t.is_floating_point())

        x, extra = given(spec, 0), {name: given(one, 1 + i) for i, (name, one) in enumerate(channels.items())}
        values: Values = {}
        names: dict[int, str] = {}
        with seeded(seed, self.device), surroundings(self.device.type, None if wide else self.autocast, grad):
            if wide:
                out = _walked(model, x, extra, values, self.dtype if self.kind == "rounded" else None)
            else:
                recorder = _Recorder(model, root.fusions)
                with fusing(None if self.fused else False):
                    out = recorder(x, **extra)
            outputs: tuple[Tensor, ...] = (out,) if isinstance(out, Tensor) else out
            if grad:
                _backward(outputs, seed)
            if not wide:
                names = recorder.collect(values)  # pyright: ignore[reportPossiblyUnboundVariable]
        values |= _gradients(model)
        low = self.dtype if self.kind == "rounded" else None
        return {place: t.detach().to("cpu", low or t.dtype, copy=True) for place, t in values.items()}, names


def _backward(outputs: Sequence[Tensor], seed: int) -> None:
    pairs: list[tuple[Tensor, Tensor]] = []
    for i, y in enumerate(outputs):
        if y.requires_grad:
            generator = torch.Generator().manual_seed(seed + 100 + i)
            # Every run gets the same numbers: those that bfloat16 has.
            dy = torch.randn(y.shape, generator=generator).bfloat16()
            pairs.append((y, dy.to(y.device, y.dtype)))
    if pairs:
        ys, dys = zip(*pairs, strict=True)
        torch.autograd.backward(ys, dys)


def _gradients(model: Sequential) -> Values:
    readers: dict[int, int] = {}
    for at, node in enumerate(flatten(model)):
        slots = [getattr(owner, name) for owner, name in node.slots.values()]
        for p in slots if node.fusable else node.operation.parameters():
            readers.setdefault(id(p), at)
    named = model.named_parameters()
    return {Place.grad(readers.get(id(p), 0), name): p.grad for name, p in named if p.grad is not None}


class _Noting(Matcher):
    """Shows each instance of a fusion before it is used."""

    def __init__(self, fusions: Sequence[type[FusedOperation]], attach: Callable[[Any], None]) -> None:
        super().__init__(fusions)
        self._attach = attach

    def find(self, *args: Any, **kwargs: Any) -> tuple[list[Candidate], list[Refusal]]:
        found, refused = super().find(*args, **kwargs)
        for candidate in found:
            self._attach(candidate.fusion)
        return found, refused


class _Recorder(Fuser):
    """A fuser that keeps what the passes of operations and fusions return."""

    plain_autograd = False

    def __init__(self, root: Sequential, fusions: Sequence[type[FusedOperation]]) -> None:
        self._seen: dict[tuple[int, str], list[Tensor | None]] = {}
        self._alone: Values = {}
        super().__init__(root, fusions)
        for at, node in enumerate(flatten(root)):
            if node.fusable and isinstance(node.operation, UnfusedOperation):
                self._attach(node.operation)
            else:
                _watch_alone(node.operation, at, self._alone)

    def _reset(self) -> None:
        super()._reset()
        self._matcher = _Noting(self.fusions, self._attach)

    def _attach(self, owner: Any) -> None:
        for name in ("fwd", "bwd"):
            fn = getattr(owner, name, None)
            if fn is not None and not isinstance(fn, functools.partial):
                setattr(owner, name, functools.partial(self._call, owner, name, fn))

    def _call(self, owner: Any, name: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        out = fn(*args, **kwargs)
        first: Any = out[0] if isinstance(out, tuple) else out  # pyright: ignore[reportUnknownVariableType]
        if not is_fake(first) and not any(map(is_fake, args[:1])):  # the engine checks a pass on tensors without data
            kept = first.detach().clone() if isinstance(first, Tensor) else None
            self._seen.setdefault((id(owner), name), []).append(kept)
        return out  # pyright: ignore[reportUnknownVariableType]

    def collect(self, values: Values) -> dict[int, str]:
        """Give what was kept its places in the plans that ran; returns the fusions at `at` ahead, and back at `~at`."""
        names: dict[int, str] = {}
        for part in self.op_list().parts:
            if isinstance(part, Region):
                assert part.program is not None  # it ran
                plan = part.program.plan
                for step in plan.forward:
                    self._take(step, "fwd", Place.y(step.covers.stop - 1), values)
                    names.update(dict.fromkeys(step.covers, step.name) if step.fused else {})
                for step in reversed(plan.backward):
                    self._take(step, "bwd", Place.dx(step.covers.start), values)
                    names.update({~at: step.name for at in step.covers} if step.fused else {})
        values |= self._alone
        return names

    def _take(self, step: Step, name: str, place: Place, values: Values) -> None:
        kept = self._seen.get((id(step.operation), name))
        if kept and (value := kept.pop(0)) is not None:
            values[place] = value


def _watch_alone(module: nn.Module, at: int, values: Values) -> None:
    def before(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].requires_grad:
            _keep_gradient(args[0], Place.dx(at), values)

    def after(_: nn.Module, args: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple) else out  # pyright: ignore[reportUnknownVariableType]
        if isinstance(first, Tensor):
            values[Place.y(at)] = first.detach().clone()

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


class _Round(torch.autograd.Function):
    """Numbers, and gradients, as a dtype has them, in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: torch.dtype) -> Tensor:
        ctx.low = low
        return x.to(low).double()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.low).double(), None


def _walked(
    model: Sequential, x: Tensor, channels: dict[str, Tensor], values: Values, low: torch.dtype | None
) -> tuple[Tensor, ...]:
    """Run the references, each on a view of its own, so that the gradient of what enters it is its own."""
    nodes = flatten(model)
    number_seeds(nodes)
    seeds = draw(nodes, x)

    def border(t: Tensor) -> Tensor:
        if low is None or not t.is_floating_point():
            return t.view_as(t)
        return _Round.apply(t, low)  # pyright: ignore[reportReturnType, reportUnknownMemberType, reportUnknownVariableType]

    made = dict(channels)
    for at, node in enumerate(nodes):
        x = border(x)
        if x.requires_grad:
            _keep_gradient(x, Place.dx(at), values)
        if node.eager is not None:
            x = run_eagerly(nodes, at, x, made)
        else:
            x = walk_reference(nodes, range(at, at + 1), x, made, seeds)
        made.update({channel: border(made[channel]) for _, channel in node.outputs})
        values[Place.y(at)] = x.detach()
    read = {channel for node in nodes for _, channel in node.inputs}
    outputs = dict.fromkeys(channel for node in nodes for _, channel in node.outputs if channel not in read)
    return x, *(made[channel] for channel in outputs)


def _keep_gradient(x: Tensor, place: Place, values: Values) -> None:
    def keep(g: Tensor) -> None:
        values[place] = g.clone()

    x.register_hook(keep)  # pyright: ignore[reportUnknownMemberType]

"""The fuser of a pipelined sequence."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..autograd import transformed
from ..env import any_autocast
from ..errors import InputError, StateError
from ..group import mark_divided
from ..ops._cache import current
from ..plan import check_channels, draw, run_eagerly, validate, walk_reference
from ..run import KEPT_LOWERINGS, Fuser, OpList, Region, Sequential
from .remote_tensor import Elsewhere, blank
from .transfer import Boundary, Placement, sources, stand_in, through, together

# By inputs of a region; by channel, the main tensor's being "": an output on meta, whether it has a gradient, and the
# inputs that it depends on.
_Clipped = dict[Any, dict[str, tuple[Tensor, bool, list[int]]]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """The part of a sequence between two boundaries; it begins with its `boundary`, except for the first stage."""

    index: int
    parts: tuple[Region | int, ...]
    boundary: Boundary | None
    enters: tuple[str, ...]  # channels that enter it in addition to the main tensor
    leaves: tuple[str, ...]
    clipped: _Clipped = dataclasses.field(default_factory=_Clipped)

    @property
    def positions(self) -> list[int]:
        """Positions of its operations."""
        return [at for p in self.parts for at in (range(p.start, p.stop) if isinstance(p, Region) else (p,))]


class _CallState(NamedTuple):
    """State of one call for all stages: op sequence, public channels and seeds."""

    op_list: OpList
    channels: dict[str, Tensor]
    seeds: Tensor | None


class StagedFuser(Fuser):
    """Runs a sequence in stages: the stages of this rank as usual, those of other ranks only on shapes."""

    def __init__(self, root: Sequential, fusions: Any, placement: Placement) -> None:
        super().__init__(root, fusions, owned=True, memory=root.memory)
        mark_divided()  # dropout of ranks that run no stage draws no numbers
        self.placement = placement
        self.device: torch.device | None = None  # of the last input
        self._cuts: WeakKeyDictionary[OpList, tuple[Stage, ...]] = WeakKeyDictionary()
        self.forget_draws()

    def __getstate__(self) -> dict[str, Any]:
        kept = {"placement": self.placement, "device": self.device}
        return {**super().__getstate__(), **kept, "_cuts": WeakKeyDictionary(), "_drawn": {}, "_ran": {}}

    def __call__(self, x: Tensor, **channels: Tensor) -> Any:
        """Run the sequence; the input must be the same on every rank."""
        if torch.compiler.is_compiling() or transformed() or x.__class__ not in (Tensor, nn.Parameter) or x.is_meta:
            got = f"{type(x).__name__} on {x.device}" if isinstance(x, Tensor) else type(x).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
            message = f"a model in stages takes plain tensors, neither compiled nor transformed, got {got}"
            raise InputError(message, code="SF105", hint="the input of the first stage is the same on every rank")
        if current() is not None:  # raised before other ranks wait for this one
            message = "a model in stages cannot be fed by a cache of keys: attention of other ranks would not fill it"
            raise StateError(message, code="SF505", hint="feed a model that is whole on its rank")
        self.device = x.device
        return super().__call__(x, **channels)

    def stages(self, op_list: OpList) -> tuple[Stage, ...]:
        """The stages of an op sequence."""
        if op_list not in self._cuts:
            nodes = op_list.nodes
            begin = [p for p in op_list.parts if isinstance(p, int) and isinstance(nodes[p].operation, Boundary)]
            crossing: list[tuple[str, ...]] = [()]
            for at in begin:
                made = [c for node in nodes[:at] for _, c in node.outputs]
                crossing.append(tuple(c for c in made if max(nodes[0].readers[c], default=at) >= at))
            crossing.append(op_list.outputs)
            found: list[Stage] = []
            for index, (start, stop) in enumerate(zip([-1, *begin], [*begin, len(nodes)], strict=True)):
                parts = tuple(p for p in op_list.parts if start < (p.start if isinstance(p, Region) else p) < stop)
                boundary: Any = nodes[start].operation if index else None
                found.append(Stage(index, parts, boundary, crossing[index], crossing[index + 1]))
            self._cuts[op_list] = tuple(found)
        return self._cuts[op_list]

    def operations(self, index: int) -> list[nn.Module]:
        """The operations of a stage, without duplicates."""
        op_list = self.op_list()
        return [*dict.fromkeys(op_list.nodes[at].operation for at in self.stages(op_list)[index].positions)]

    def _run_parts(
        self, op_list: OpList, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None, first: int = 0
    ) -> Tensor:
        given, tensors = _CallState(op_list, channels.copy(), seeds), [x]  # the main tensor first, then channels
        tells = self.placement.tells or any_autocast()
        stages = self.stages(op_list)
        for stage in stages:
            own = self.placement.own(stage.index)
            if own:
                if stage.boundary is not None and not self.placement.own(stage.index - 1):
                    tensors = stage.boundary.enter(tensors, x.device)
                tensors = self._own(given, stage, tensors)
            told = None
            if tells:
                told = self.placement.tell(stage.index, tensors if own else None, 1 + len(stage.leaves), x.device)
            if not own:
                tensors = self._others(given, stage, tensors, told)
            elif stage is stages[-1]:
                tensors = together(tensors)
            elif not self.placement.own(stage.index + 1):
                following = stages[stage.index + 1].boundary
                assert following is not None
                tensors = following.leave(tensors)
        channels.update(zip(op_list.outputs, tensors[1:], strict=True))
        return tensors[0]

    def _own(self, given: _CallState, stage: Stage, tensors: list[Tensor]) -> list[Tensor]:
        x, *rest = tensors
        channels = {**given.channels, **dict(zip(stage.enters, rest, strict=True))}
        for part in stage.parts:
            if isinstance(part, Region):
                x = self.run_region(given.op_list, part, x, channels, given.seeds)
            else:
                x = run_eagerly(given.op_list.nodes, part, x, channels)
        return [x, *[channels[c] for c in stage.leaves]]

    def _others(self, given: _CallState, stage: Stage, tensors: list[Tensor], told: list[Any] | None) -> list[Tensor]:
        """The tensors that represent the outputs of a stage of another rank."""
        where = self.placement.where(stage.index)
        entries = [t if isinstance(t, Elsewhere) else _leaf(t, where) for t in tensors]
        if told is not None:
            outs = [torch.empty(s, dtype=d, device="meta", requires_grad=r) for s, d, r, _ in told]
            passes = any(p for *_, p in told)
        else:
            leaves = [_leaf(t, where) for t in entries]
            outs = self._inferred(given, stage, leaves)
            passes = any(t.requires_grad and sources(t, leaves) for t in outs)
        return through(entries, outs, passes, where)

    def _inferred(self, given: _CallState, stage: Stage, leaves: list[Tensor]) -> list[Tensor]:
        where = self.placement.where(stage.index)
        x, *rest = leaves
        channels: dict[str, Tensor] = {c: _leaf(t, where) for c, t in given.channels.items()}
        channels.update(zip(stage.enters, rest, strict=True))
        given = given._replace(channels=channels, seeds=None if given.seeds is None else given.seeds.to("meta"))
        for part in stage.parts:
            if isinstance(part, Region):
                x = self._clip(given, stage, part, x)
            else:
                x = _walk(given, range(part, part + 1), x)
        return [x, *[channels[c] for c in stage.leaves]]

    def _clip(self, given: _CallState, stage: Stage, region: Region, x: Tensor) -> Tensor:
        """The tensors that represent the outputs of a region; cached, since it runs only operations of this library."""
        nodes, got = given.op_list.nodes, [x, *[given.channels[c] for c in region.channels]]
        parameters: list[Tensor] = [getattr(owner, name) for owner, name in region.slots]
        state = [(tuple(t.shape), t.dtype, t.requires_grad) for t in (*got, *parameters)]
        key = region.start, torch.is_grad_enabled(), *state
        where = self.placement.where(stage.index)
        if key not in stage.clipped:
            validate(nodes, region.positions, x.shape)
            leaves = [_leaf(t, where) for t in got]
            made = dict(zip(("", *region.channels), leaves, strict=True))
            made[""] = _walk(given._replace(channels=made), region.positions, leaves[0])
            written = [c for node in nodes[region.start : region.stop] for _, c in node.outputs]
            leaving = [c for c in written if max(nodes[0].readers[c], default=region.stop) >= region.stop]
            if len(stage.clipped) == KEPT_LOWERINGS:
                stage.clipped.clear()
            stage.clipped[key] = {
                c: (blank(made[c]), made[c].requires_grad, sources(made[c], leaves)) for c in ("", *leaving)
            }
        for c, (t, wants, of) in stage.clipped[key].items():
            given.channels[c] = Elsewhere.of(stand_in(t, wants, [got[i] for i in of]), where)
        return given.channels.pop("")

    def infer(self, x: Tensor, channels: dict[str, Tensor]) -> list[list[Tensor]]:
        """Tensors that represent the input of the first stage, and the outputs of each stage."""
        op_list = self.op_list()
        check_channels(op_list.nodes, op_list.inputs, channels)
        given = _CallState(op_list, channels, torch.zeros(op_list.random, dtype=torch.int64, device="meta"))
        found = [[_leaf(x, "nowhere")]]
        for stage in self.stages(op_list):
            found.append(self._inferred(given, stage, [_leaf(t, "nowhere") for t in found[-1]]))
        return found

    def run_stage(self, index: int, tensors: list[Tensor], given: dict[str, Tensor]) -> list[Tensor]:
        """Run one of this rank's stages on one micro-batch."""
        op_list = self.op_list()
        seeds = self._draw(index, op_list, tensors[0])
        with parametrize.cached() if op_list.parametrized else contextlib.nullcontext():
            return self._own(_CallState(op_list, given, seeds), self.stages(op_list)[index], tensors)

    def forget_draws(self) -> None:
        """Restart the count of micro-batches: the n-th call of each stage uses the n-th draw of seeds."""
        self._drawn, self._ran = dict[int, Tensor | None](), dict[int, int]()

    def _draw(self, index: int, op_list: OpList, x: Tensor) -> Tensor | None:
        """The seeds of a stage's current micro-batch: one vector for all stages, as in one process."""
        batch = self._ran.get(index, 0)
        self._ran[index] = batch + 1
        if batch not in self._drawn:
            self._drawn[batch] = draw(op_list.nodes, x)
        own = [s for s in range(self.placement.stages) if self.placement.own(s)]
        done = all(self._ran.get(s, 0) > batch for s in own)
        return self._drawn.pop(batch) if done else self._drawn[batch]


def _leaf(tensor: Tensor, where: str) -> Tensor:
    """The tensor that represents an input of another rank's stage."""
    return Elsewhere.of(blank(tensor), where).requires_grad_(tensor.requires_grad)


def _walk(given: _CallState, positions: range, x: Tensor) -> Tensor:
    """Run references and modules on tensors that represent their inputs."""
    for at in positions:
        try:
            x = walk_reference(given.op_list.nodes, range(at, at + 1), x, given.channels, given.seeds)
        except StateError as error:
            if error.code == "SF508":
                node = given.op_list.nodes[at]
                error.operation, error.position, error.path = node.name, at, node.path
                error.hint = 'its output depends on numbers: pipeline(..., shapes="broadcast") has them told'
            raise
    return x

"""What steps would save for the backward pass: found by running them on fake tensors, where a plan has a choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..casts import cast_once
from ..env import Env
from ..fusion import FusedOperation
from ..saved import Recompute, Saved
from .budget import Kept
from .cost_lookup import describe
from .dtypes import Border
from .fake import autocasting, faking, placed
from .fallback import at as found_at
from .flatten import Node
from .interpret import call, returned
from .schedule import Candidate
from .step import Step
from .wants import Wants


class Footprint:
    """Finds what the operations of a region and candidate fusions would save.

    Args:
        nodes: the sequence.
        start: the first position of the region, `stop` the one after its last.
        wants: the needed gradients.
        env: the environment that is planned for, `place` the device on which it is tried.
        random: how many operations draw a seed.
        x: what enters the region, and `channels` the extra inputs.
        borders: the dtypes along it, where they differ.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        start: int,
        stop: int,
        wants: Wants,
        env: Env,
        place: torch.device,
        random: int,
        x: Tensor,
        channels: Mapping[str, Tensor],
        borders: tuple[Border, ...],
    ) -> None:
        self._nodes, self._span, self._wants, self._env = nodes, range(start, stop), wants, env
        self._place, self._random, self._x, self._channels = place, random, x, channels
        self._borders = borders
        self._found: Kept | str | None = None

    def __call__(self, candidates: Sequence[Candidate]) -> Kept | str:
        """What is saved with these candidates, or why it is not known; it is found once."""
        if self._found is None:
            try:
                with torch.no_grad(), autocasting(self._env, self._place), faking() as mode, cast_once():
                    self._found = self._look(candidates, mode)
            except Exception as error:
                self._found = f"{type(error).__name__}: {error}"
        return self._found

    @property
    def kept(self) -> Kept | None:
        """What was found."""
        return self._found if isinstance(self._found, Kept) else None

    def _look(self, candidates: Sequence[Candidate], mode: Any) -> Kept | str:
        def like(t: Tensor, dtype: torch.dtype) -> Tensor:
            return placed(mode.from_tensor(t.detach()), self._place, dtype)

        x = like(self._x, self._env.dtype if self._x.is_floating_point() else self._x.dtype)
        channels = {name: like(t, t.dtype) for name, t in self._channels.items()}
        own_channels = {c for at in self._span for _, c in self._nodes[at].outputs}
        for at in self._span:
            for name, channel in self._nodes[at].inputs:
                if channel not in own_channels and channel not in channels:
                    return f"{self._nodes[at].name} reads {name} from {channel!r}, which is not given to plan()"
        entering, given, own = [x], [dict(channels)], list[frozenset[int]]()
        tried = _Tried(torch.empty(self._random, dtype=torch.int64, device=self._place))
        for at in self._span:
            x, made, saved = tried(self._step(at, at + 1), x, channels, self._env)
            channels.update(made)
            own.append(saved)
            entering.append(x)
            given.append(dict(channels))
        fused: dict[tuple[int, FusedOperation], frozenset[int]] = {}
        first = self._span.start
        for c in candidates:
            if (c.fusion.saves_memory or c.fusion.has_record) and c.stop > self._wants.live_from:
                a, b = c.start - first, c.stop - first
                step = self._step(c.start, c.stop, c.fusion)
                _, _, saved = tried(step, entering[a], given[a], self._env, (entering[b], given[b]))
                fused[c.start, c.fusion] = saved
        return Kept(own, fused, tried.sizes)

    def _step(self, a: int, b: int, fusion: FusedOperation | None = None) -> Step:
        needs = tuple(self._wants.needs[at] for at in range(a, b))
        around = self._borders[a - self._span.start : b - self._span.start + 1]
        operation = self._nodes[a].operation if fusion is None else fusion
        return Step(operation, range(a, b), "", fusion is not None, tuple(self._nodes[a:b]), needs, around)


class _Tried:
    """Steps that were run on fake tensors; one that is like another, as those of equal layers are, is not run again.

    Attributes:
        sizes: bytes of each tensor that a step saves.
    """

    def __init__(self, seeds: Tensor) -> None:
        self._seeds, self.sizes = seeds, dict[int, int]()
        self._numbers: dict[int, int] = {}  # by storage
        self._held: list[Tensor] = []  # so that no storage takes the place of one that went
        # What y is like, unless it is x, and what is saved: "x", "y", "seeds", or a tensor of so many bytes.
        self._known: dict[Any, tuple[tuple[Any, ...] | None, tuple[str | int, ...]]] = {}
        self._described: dict[int, str] = {}

    def __call__(
        self,
        step: Step,
        x: Tensor,
        channels: Mapping[str, Tensor],
        env: Env,
        same: tuple[Tensor, Mapping[str, Tensor]] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], frozenset[int]]:
        """y, the channels it makes and the numbers of what it saves; `same` are y and channels of its operations."""
        alone = not any(node.inputs or node.outputs for node in step.nodes)
        about = (*map(self._about, step.nodes, step.covers), x.shape, x.dtype, x.stride(), step.needs, step.borders)
        key: Any = (type(step.operation), about) if alone else None
        if key in self._known:
            like, found = self._known[key]
            y = x if like is None else torch.empty_strided(*like[:2], dtype=like[2], device=x.device)
            places = {"x": x, "y": y if same is None else same[0], "seeds": self._seeds}
            return y, {}, frozenset(self._fresh(n) if isinstance(n, int) else self._number(places[n]) for n in found)
        y, made, saved = self._run(step, x, channels, env)
        if same is not None:
            # What it gives is what its operations give: another step that saves it saves the same tensor.
            for mine, theirs in ((y, same[0]), *((t, same[1][channel]) for channel, t in made.items())):
                self._numbers[_storage(mine)] = self._number(theirs)
                self._held.append(mine)
        records = ((record, found_at(saved, record.path)) for record in step.saves)
        tensors = [t for record, value in records for t in _tensors(value, record.kept)]
        if key is not None and (y is x or _storage(y) != _storage(x)):
            names: dict[int, str | int] = {_storage(self._seeds): "seeds", _storage(y): "y", _storage(x): "x"}
            several = {_storage(t): names.get(_storage(t), t.untyped_storage().nbytes()) for t in tensors}
            self._known[key] = None if y is x else (y.shape, y.stride(), y.dtype), tuple(several.values())
        return y, made, frozenset(map(self._number, tensors))

    def _about(self, node: Node, at: int) -> str:
        if at not in self._described:
            self._described[at] = describe(node)
        return self._described[at]

    def _number(self, t: Tensor) -> int:
        self._held.append(t)
        at = self._numbers.get(_storage(t))
        if at is None:
            at = self._numbers[_storage(t)] = self._fresh(t.untyped_storage().nbytes())
        return at

    def _fresh(self, size: int) -> int:
        self.sizes[len(self.sizes)] = size
        return len(self.sizes) - 1

    def _run(
        self, step: Step, x: Tensor, channels: Mapping[str, Tensor], env: Env
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        y, made, saved = returned(step, call(step, env, x, channels, self._seeds)[0])
        return y, {channel: made[name] for name, channel in step.writes}, saved


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _tensors(record: Saved, kept: Sequence[str]) -> Iterator[Tensor]:
    late: Mapping[str, Recompute] = vars(record).get("_late", {})
    for name in kept:
        value: Any = late[name].tensors if name in late else vars(record).get(name)
        several: tuple[Any, ...] = cast(Any, value) if isinstance(value, tuple) else (value,)
        yield from (t for t in several if isinstance(t, Tensor) and not isinstance(t, nn.Parameter))

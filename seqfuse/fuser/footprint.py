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
from .fake import autocasting, faking, placed
from .fallback import at as found_at
from .flatten import Node
from .interpret import call, returned
from .schedule import Candidate
from .step import Step
from .stretch import Stretch


class Footprint:
    """Finds what the operations of a stretch and candidate fusions would save."""

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._found: Kept | str | None = None

    def __call__(self, candidates: Sequence[Candidate]) -> Kept | str:
        """What is saved with these candidates, or why it is not known; it is found once."""
        if self._found is None:
            try:
                with (
                    torch.no_grad(),
                    autocasting(self._stretch.env, self._stretch.place),
                    faking() as mode,
                    cast_once(),
                ):
                    self._found = self._look(candidates, mode)
            except Exception as error:
                self._found = f"{type(error).__name__}: {error}"
        return self._found

    @property
    def kept(self) -> Kept | None:
        """What was found."""
        return self._found if isinstance(self._found, Kept) else None

    def _look(self, candidates: Sequence[Candidate], mode: Any) -> Kept | str:
        stretch, given_x = self._stretch, self._stretch.x
        if given_x is None:
            return "the shape of the input"

        def like(t: Tensor, dtype: torch.dtype) -> Tensor:
            return placed(mode.from_tensor(t.detach()), stretch.place, dtype)

        x = like(given_x, stretch.env.dtype if given_x.is_floating_point() else given_x.dtype)
        channels = {name: like(t, t.dtype) for name, t in stretch.channels.items()}
        own_channels = {c for node in stretch.inside for _, c in node.outputs}
        for node in stretch.inside:
            for name, channel in node.inputs:
                if channel not in own_channels and channel not in channels:
                    return f"{node.name} reads {name} from {channel!r}, which is not given to plan()"
        entering, given, own = [x], [dict(channels)], list[frozenset[int]]()
        tried = _Tried(torch.empty(len(stretch.nodes), dtype=torch.int64, device=stretch.place))
        for at in stretch.positions:
            x, made, saved = tried(stretch.step(at, at + 1), x, channels, stretch.env)
            channels.update(made)
            own.append(saved)
            entering.append(x)
            given.append(dict(channels))
        fused: dict[tuple[int, FusedOperation], frozenset[int]] = {}
        for c in candidates:
            if (c.fusion.saves_memory or c.fusion.has_record) and c.stop > stretch.wants.live_from:
                a, b = c.start - stretch.start, c.stop - stretch.start
                step = stretch.step(c.start, c.stop, c.fusion)
                _, _, saved = tried(step, entering[a], given[a], stretch.env, (entering[b], given[b]))
                fused[c.start, c.fusion] = saved
        return Kept(own, fused, tried.sizes)


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

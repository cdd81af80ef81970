"""What steps would save for the backward pass: found by running them on fake tensors, where a plan has a choice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..env import Env
from ..fusion import FusedOperation
from ..saved import Recompute, Saved
from .budget import Kept
from .dtypes import Border, recast
from .fake import faking
from .fallback import at as found_at
from .flatten import Node
from .interpret import drawn, fit
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
                with torch.no_grad(), self._cast(), faking() as mode:
                    self._found = self._look(candidates, mode)
            except Exception as error:
                self._found = f"{type(error).__name__}: {error}"
        return self._found

    @property
    def kept(self) -> Kept | None:
        """What was found."""
        return self._found if isinstance(self._found, Kept) else None

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        kind, dtype = self._place.type, self._env.autocast
        if not torch.amp.is_autocast_available(kind):  # as on meta
            return contextlib.nullcontext()
        return torch.autocast(kind, dtype, dtype is not None)

    def _look(self, candidates: Sequence[Candidate], mode: Any) -> Kept:
        numbers: dict[int, int] = {}
        sizes: dict[int, int] = {}
        held: list[Tensor] = []  # so that no storage takes the place of one that went

        def number(t: Tensor) -> int:
            storage = t.untyped_storage()
            at = numbers.setdefault(storage._cdata, len(numbers))  # pyright: ignore[reportPrivateUsage]
            sizes[at] = storage.nbytes()
            held.append(t)
            return at

        def saved_by(step: Step, saved: Any) -> frozenset[int]:
            records = ((record, found_at(saved, record.place)) for record in step.saves)
            return frozenset(number(t) for record, value in records for t in _tensors(value, record.kept))

        def like(t: Tensor, dtype: torch.dtype) -> Tensor:
            fake: Tensor = mode.from_tensor(t.detach())
            return fake if fake.device == self._place and fake.dtype is dtype else torch.empty_like(
                fake, device=self._place, dtype=dtype
            )  # fmt: skip

        x = like(self._x, self._env.dtype if self._x.is_floating_point() else self._x.dtype)
        channels = {name: like(t, t.dtype) for name, t in self._channels.items()}
        seeds = torch.empty(self._random, dtype=torch.int64, device=self._place)
        entering, given, own = [x], [dict(channels)], list[frozenset[int]]()
        for at in self._span:
            step = self._step(at, at + 1)
            x, made, saved = self._run(step, x, channels, seeds)
            channels.update(made)
            own.append(saved_by(step, saved))
            entering.append(x)
            given.append(dict(channels))
        fused: dict[tuple[int, FusedOperation], frozenset[int]] = {}
        first = self._span.start
        for c in candidates:
            if not (c.fusion.saves_memory or c.fusion.has_record) or c.stop <= self._wants.live_from:
                continue
            a, b = c.start - first, c.stop - first
            step = self._step(c.start, c.stop, c.fusion)
            y, made, saved = self._run(step, entering[a], given[a], seeds)
            for mine, theirs in ((y, entering[b]), *((t, given[b][channel]) for channel, t in made.items())):
                # What it gives is what its operations give: another step that saves it saves the same tensor.
                numbers[mine.untyped_storage()._cdata] = number(theirs)  # pyright: ignore[reportPrivateUsage]
                held.append(mine)
            fused[c.start, c.fusion] = saved_by(step, saved)
        return Kept(own, fused, sizes)

    def _step(self, a: int, b: int, fusion: FusedOperation | None = None) -> Step:
        needs = tuple(self._wants.needs[at] for at in range(a, b))
        around = self._borders[a - self._span.start : b - self._span.start + 1]
        operation = self._nodes[a].operation if fusion is None else fusion
        return Step(operation, range(a, b), "", fusion is not None, tuple(self._nodes[a:b]), needs, around)

    def _run(
        self, step: Step, x: Tensor, channels: Mapping[str, Tensor], seeds: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Any]:
        operation = step.operation
        given = step.constants(self._env)
        given |= {name: fit(channels[channel], operation.layout) for name, channel in step.reads}
        given |= {name: drawn(seeds, index) for name, index in step.seeds}
        y, *rest = operation.fwd(fit(recast(x, step.cast), operation.layout), **given)
        made: Mapping[str, Tensor] = rest.pop(0) if operation.outputs else {}
        return y, {channel: made[name] for name, channel in step.writes}, rest[0]


def _tensors(record: Saved, kept: Sequence[str]) -> Iterator[Tensor]:
    late: Mapping[str, Recompute] = vars(record).get("_late", {})
    for name in kept:
        value: Any = late[name].tensors if name in late else vars(record).get(name)
        several: tuple[Any, ...] = cast(Any, value) if isinstance(value, tuple) else (value,)
        yield from (t for t in several if isinstance(t, Tensor) and not isinstance(t, nn.Parameter))

"""A fuser that takes every fusion that matches, and random numbers from a seed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..fusion import FusedOperation
from ..plan.match import Matcher, Refusal
from ..plan.reference import by_reference
from ..plan.schedule import Candidate
from ..plan.step import Stretch
from ..run import Fuser, Sequential

Prepare = Callable[[FusedOperation], None]


class _Eager(Matcher):
    """Takes every match that is not refused: the longest first, whatever it saves."""

    only_memory = False  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, fusions: Sequence[type[FusedOperation]], prepare: Prepare | None) -> None:
        super().__init__(fusions)
        self._prepare = prepare

    def find(self, stretch: Stretch, *_: Any, **__: Any) -> tuple[list[Candidate], list[Refusal]]:
        found, refused = super().find(stretch, lean=True)
        for candidate in found:
            if self._prepare is not None:
                self._prepare(candidate.fusion)
        return [dataclasses.replace(c, cost=-1000 * (c.stop - c.start) ** 2) for c in found], refused


class Bench(Fuser):
    """A fuser that uses fusions wherever they match and are not refused, so that cost does not decide what is tested.

    `prepare` sees each instance of a fusion before it is used.
    """

    plain_autograd = False  # a stretch of views is tested behind a node as all others are

    def __init__(
        self, root: Sequential, fusions: Sequence[type[FusedOperation]] = (), prepare: Prepare | None = None
    ) -> None:
        self._prepare = prepare
        super().__init__(root, fusions)

    def _reset(self) -> None:
        super()._reset()
        self._matcher = _Eager(self.fusions, self._prepare)

    def references(self, x: Tensor, **channels: Tensor) -> Any:
        """Run every operation's `reference` under plain autograd, with the seeds that a call would draw."""
        op_list = self.op_list()
        return by_reference(op_list.nodes, op_list.inputs, op_list.outputs, x, channels)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """A block in which torch's generators start from a seed, and after which they are as they were before it."""
    seed += 0x5EED_0000  # which no pass that seeds them itself takes: it would leave them as they were
    on_cuda = device.type == "cuda"
    with cast(Any, torch.random).fork_rng([device] if on_cuda else []):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a traceback, for devices not yet started
        if on_cuda:
            cast(Any, torch.cuda).manual_seed(seed)
        yield

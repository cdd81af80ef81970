"""Which gradients are needed in a region."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.utils import parametrize

from .flatten import Node


@dataclasses.dataclass(frozen=True, slots=True)
class Wants:
    """Which gradients are needed in a region: names per position, and the first position where there are any."""

    live_from: int
    needs: Mapping[int, frozenset[str]]

    @classmethod
    def of(
        cls, nodes: Sequence[Node], start: int, stop: int, x: bool, channels: Mapping[str, bool], grad: bool
    ) -> Wants:
        """Follow requires_grad through positions `start..stop`."""
        needs: dict[int, frozenset[str]] = {}
        carries = dict(channels)
        live_from = stop
        for position in range(start, stop):
            node = nodes[position]
            wanted = {"x"} if x else set[str]()
            wanted |= {name for name, channel in node.inputs if carries.get(channel)}
            for name, (owner, attribute) in node.slots.items():
                if _requires_grad(owner, attribute):
                    wanted.add(name)
            wanted = wanted if grad else set[str]()
            needs[position] = frozenset(wanted)
            x = bool(wanted)
            if wanted and live_from == stop:
                live_from = position
            carries.update((channel, x) for _, channel in node.outputs)
        return cls(live_from, needs)


def _requires_grad(owner: nn.Module, attribute: str) -> bool:
    known = owner._parameters.get(attribute)  # pyright: ignore[reportPrivateUsage]
    if known is not None:
        return known.requires_grad
    if parametrize.is_parametrized(owner, attribute):
        # Reading the attribute would evaluate it, and some parametrizations step when they are.
        originals = getattr(owner.parametrizations, attribute).parameters()
        return any(p.requires_grad for p in originals)
    return bool(getattr(owner, attribute).requires_grad)

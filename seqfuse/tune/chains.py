"""The chains that calls of a converted model have captured, on fake tensors, ready to time."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Generator, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..casts import autocasting
from ..env import Env
from ..errors import one_line
from ..fake import faking
from ..plan import Plan
from .shadow import Shadow, Site
from .timing import scratch_like

if TYPE_CHECKING:
    from ..convert.region import CapturedRegion


class ChainShadow(Shadow):
    """A copy of a captured chain, as in its last call: its sizes at capture, and random numbers as parameters."""

    def __init__(self, region: CapturedRegion, plan: Plan) -> None:
        self.mode = "train" if plan.env.grad else "eval"
        self._region, self._autocast = region, plan.env.autocast
        order = region.order
        with faking() as self._fakes:
            self._x, *given = region.stand_ins([order.x, *order.channels.values(), *region.given])
        channels, parameters = given[: len(order.channels)], given[len(order.channels) :]
        self._channels = dict(zip(order.channels, channels, strict=True))
        # The chain has its parameters only in a call, so nothing but their kind is known.
        self._originals = {id(fake): (fake, torch.empty(0, dtype=fake.dtype)) for fake in parameters}
        self._fuser = region.copied(parameters)
        self._generator = torch.Generator(self._x.device).manual_seed(0)

    def site(self) -> Site:
        """The call of the chain."""
        site = Site(self._region.ends, self.mode, self, self._fuser, self._fuser.op_list(), [])
        with self.tracing():
            site.run(self._x, **self._channels)
        return site

    @contextlib.contextmanager
    def tracing(self) -> Generator[None]:
        with self._autocasting(), super().tracing():
            yield

    @contextlib.contextmanager
    def real(self, owners: Iterable[nn.Module]) -> Generator[None]:
        with self._autocasting(), super().real(owners):
            yield

    def copy_of(self, fake: Tensor) -> Tensor:
        return scratch_like(fake, self._generator)

    def _autocasting(self) -> contextlib.AbstractContextManager[None]:
        return autocasting(self._region.device, self._autocast)


def captured_in(model: nn.Module) -> list[CapturedRegion] | None:
    """The chains that a model's conversions have captured so far; `None` if nothing in it is converted."""
    from ..convert.capture import conversions_in  # imported here, since its torch modules take long to import

    found = dict.fromkeys(conversion for _, conversion in conversions_in(model))
    return [region for one in found for graph in one.graphs for region in graph.regions] if found else None


def sites_of(chains: Iterable[CapturedRegion], modes: Container[str]) -> Iterator[Site | str]:
    """The last call of each chain, if it was in one of these modes, or the reason why it cannot be timed."""
    for region in chains:
        plan = region.plan
        if plan is None:
            yield f"{region.ends}: it ran unconverted"
        elif ("train" if plan.env.grad else "eval") in modes:
            try:
                site = ChainShadow(region, plan).site()
                yield site
                if (tokens := Env.like(site.entering[0][0]).rows) != plan.env.rows:
                    given = f"its last call, rounded up to {plan.env.rows} tokens"
                    yield f"{region.ends}: the size of {given}; the size at capture was measured, {tokens}"
            except Exception as error:
                yield f"{region.ends}: {one_line(error)}"

"""The candidates of a container: what each is known by, and its passes, fused and unfused, ready to be timed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..casts import cast_once
from ..env import Env
from ..fusion import BackwardFusion, JointFusion
from ..plan.cost_lookup import Known
from ..plan.flatten import has_own_graph
from ..plan.match import Matcher
from ..plan.plan import Plan
from ..plan.schedule import Candidate
from ..plan.step import Stretch
from ..run.lower import Context, Segment, lower
from ..run.node import Alone, back_alone, run_alone
from ..run.regions import Region
from ..settings import fusing_now
from .shadow import Site
from .timing import Passes, scratch_like


@dataclasses.dataclass(eq=False)
class CalledRegion:
    """A region of a container as it was called, and its candidates."""

    site: Site
    region: Region
    entered: Stretch
    context: Context
    found: list[Candidate]

    @property
    def known(self) -> Known:
        """What is known of candidates by measurement, now."""
        return Known(self.entered)


def called_regions(site: Site) -> Generator[CalledRegion | str]:
    """The regions of a container that ran, or why one cannot be measured."""
    op_list = site.op_list
    for part in op_list.parts:
        if not isinstance(part, Region) or len(site.entering) <= part.stop:
            continue
        x, channels = site.entering[part.start]
        where = f"{site.path or 'the model'} {part.start}-{part.stop - 1}"
        parameters = [owner._parameters.get(name) for owner, name in part.slots]  # pyright: ignore[reportPrivateUsage]
        present = [p for p in parameters if p is not None]
        if len(present) < len(parameters):
            yield f"{where}: a parametrization makes its parameters"
            continue
        plain = all(type(site.shadow.original(p)) in (Tensor, nn.Parameter) for p in present)
        if not plain or has_own_graph(site.fuser.root):
            yield f"{where}: its parameters are not plain tensors, so it runs unfused"
            continue
        with site.tracing():
            yield _stretch(site, part, x, channels, present)


def _stretch(
    site: Site, region: Region, x: Tensor, channels: dict[str, Tensor], parameters: Sequence[Tensor]
) -> CalledRegion:
    given = {c: channels[c] for c in region.channels}
    entered = Stretch.of(site.op_list.nodes, region.positions, x, given, parameters, Env.like(x))
    context = Context.of(entered, region.slots, parameters, "raise", lambda: None)
    fusing = dataclasses.replace(fusing_now(), unmeasured=True)
    unmeasured = dataclasses.replace(entered, fusing=fusing)
    found, _ = Matcher(site.fuser.fusions).find(unmeasured, lean=site.fuser.memory != "fast")
    return CalledRegion(site, region, entered, context, found)


def passes(stretch: CalledRegion, candidate: Candidate) -> Passes:
    """The pass or passes that a candidate replaces, by itself and by its operations, on scratch tensors."""
    site, (a, b) = stretch.site, (candidate.start, candidate.stop)
    live = stretch.entered.wants.live_from < b
    x, channels = site.entering[a]
    y, after = site.entering[b]
    generator = torch.Generator(x.device)
    generator.manual_seed(0)

    def scratch(like: Tensor) -> Tensor:
        return scratch_like(like, generator)

    fusion = candidate.fusion
    fused = _segment(stretch, a, b, candidate, fusion.replaces_forward, fusion.replaces_backward and live)
    unfused = _segment(stretch, a, b, candidate, False, False)
    entering, dy = scratch(x), scratch(y)
    sides = [scratch(channels[c]) for c in fused.inputs]
    d_sides = [scratch(after[c]) for c in fused.outputs]
    count = site.op_list.random
    seeds = torch.randint(2**63 - 1, (count,), device=x.device, generator=generator) if count else None

    def forward(segment: Segment) -> Alone:
        with cast_once() if live else contextlib.nullcontext():
            return run_alone(segment, seeds, entering, *sides)[0]

    def backward(run: Alone) -> Any:
        return back_alone(run, dy, *d_sides)

    if isinstance(fusion, BackwardFusion):
        own, theirs = forward(fused), forward(unfused)
        return lambda: backward(own), lambda: backward(theirs)
    if isinstance(fusion, JointFusion) and live:
        return lambda: backward(forward(fused)), lambda: backward(forward(unfused))
    return lambda: forward(fused), lambda: forward(unfused)


def _segment(stretch: CalledRegion, a: int, b: int, candidate: Candidate, ahead: bool, back: bool) -> Segment:
    """A segment of a candidate's positions alone, covered by it in the passes that are asked for."""
    own = stretch.entered.step(a, b, candidate.fusion)
    forward = (own,) if ahead else own.unfused()
    backward = (own,) if back else own.unfused(backward=True)[::-1]
    plan = Plan(stretch.entered.env, forward, backward, (range(a, b),))
    (segment,) = lower(plan, stretch.context, stretch.site.op_list.configured)
    return segment


@contextlib.contextmanager
def real_parameters(stretch: CalledRegion, candidate: Candidate) -> Generator[None]:
    """Within the block, the parameters that a candidate reads are copies of the model's, rather than fake."""
    inside = stretch.site.op_list.nodes[candidate.start : candidate.stop]
    owners = [m for node in inside for m in node.operation.modules()]
    owners += [owner for node in inside for owner, _ in node.slots.values()]
    with stretch.site.shadow.real(owners):
        yield

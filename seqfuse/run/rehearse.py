"""Which C kernels a plan calls: its steps are run on fake tensors, so that all of them are compiled at once, before."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compiler
from ..casts import autocasting, cast_once
from ..env import Env
from ..plan.cost_lookup import describe, identity
from ..plan.fake import faking
from ..plan.plan import Plan
from .lower import Segment
from .node import back_alone, run_alone


def calls_c(plan: Plan) -> bool:
    """Whether a plan may call C kernels: fusions have them, and operations that draw random numbers.

    One that exchanges tensors with other processes or writes a cache of keys and values is not run on fake ones.
    """
    if plan.env.kernels != "c":
        return False
    steps = (*plan.forward, *plan.backward)
    nodes = [node for step in steps for node in step.nodes]
    if any(getattr(node.operation, "redistribution", None) is not None for node in nodes):
        return False
    if not all(step.repeatable for step in steps):
        return False
    return any(node.seed is not None for node in nodes) or any(step.fused and step.operation.kernels for step in steps)


def kernels_of(
    segments: Sequence[Segment], env: Env, x: Tensor, channels: Mapping[str, Tensor], random: int
) -> dict[str, None]:
    """The sources of the C kernels that segments call for tensors like these, with so many `random` operations.

    The segments are for this alone: a segment remembers what it ran with. One that is like another, as those of equal
    layers are, is not run again. One that does not run on fake tensors has its kernels compiled when they are called.
    """
    found: dict[str, None] = {}
    autocast = autocasting(x.device.type, env.autocast)
    with contextlib.suppress(Exception), torch.no_grad(), autocast, faking() as mode, cast_once():
        here = {name: mode.from_tensor(t).detach() for name, t in channels.items()}
        y = mode.from_tensor(x).detach()
        seeds = torch.empty(random, dtype=torch.int64, device=x.device)
        for segment in segments:
            given = [here[c] for c in segment.inputs]
            key = described(segment, (y, *given))
            known = _known.get(key)
            if known is None:
                if len(_known) >= KEPT:
                    _known.clear()
                known = _known[key] = _rehearsed(segment, seeds, y, given)
            found |= known.kernels
            y, *outputs = [torch.empty_strided(size, stride, dtype=of) for size, stride, of in known.results]
            here.update(zip(segment.outputs, outputs, strict=True))
    return found  # the call itself will say what it was that failed


class _Rehearsed(NamedTuple):
    """The C kernels of a segment, and shape, strides and dtype of what it gives."""

    kernels: dict[str, None]
    results: list[tuple[torch.Size, tuple[int, ...], torch.dtype]]


KEPT = 256  # by names and sizes: no class or tensor of a model is held
_known: dict[Any, _Rehearsed] = {}


def described(segment: Segment, entering: Sequence[Tensor]) -> Any:
    """What the kernels of a segment depend on."""
    steps: list[Any] = [
        (
            identity(s.operation.__class__),
            s.start - segment.span.start,
            *map(describe, s.nodes),
            s.needs,
            s.borders,
            s.recipes,
        )
        for s in (*segment.forward, *segment.backward)
    ]
    env = dataclasses.replace(segment.context.env, rows=None)
    return env, *steps, *[(t.shape, t.stride(), t.dtype, t.device) for t in entering]


def _rehearsed(segment: Segment, seeds: Tensor, x: Tensor, given: Sequence[Tensor]) -> _Rehearsed:
    with compiler.collecting() as wanted:
        node, (y, *outputs) = run_alone(segment, seeds, x, *given)
        if segment.live:
            named = zip(segment.outputs, outputs, strict=True)
            douts = [None if c in segment.frozen else torch.empty_like(t) for c, t in named]
            back_alone(node, torch.empty_like(y), *douts)
    return _Rehearsed(wanted, [(t.shape, t.stride(), t.dtype) for t in (y, *outputs)])

"""Which C kernels a plan calls: its steps are run on fake tensors, so that all of them are compiled at once, before."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import compiler
from ..casts import autocasting, cast_once
from ..env import Env
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

    The segments are for this alone: a segment remembers what it ran with. One that does not run on fake tensors has its
    kernels compiled when they are called.
    """
    with compiler.collecting() as wanted, contextlib.suppress(Exception):  # the call itself will say what it was
        _run(segments, x, channels, random, autocasting(x.device.type, env.autocast))
    return wanted


def _run(segments: Sequence[Segment], x: Tensor, channels: Mapping[str, Tensor], random: int, autocast: Any) -> None:
    with torch.no_grad(), autocast, faking() as mode, cast_once():
        here = {name: mode.from_tensor(t).detach() for name, t in channels.items()}
        y = mode.from_tensor(x).detach()
        seeds = torch.empty(random, dtype=torch.int64, device=x.device)
        for segment in segments:
            node, (y, *outputs) = run_alone(segment, seeds, y, *[here[c] for c in segment.inputs])
            here.update(zip(segment.outputs, outputs, strict=True))
            if segment.live:
                pairs = zip(segment.outputs, outputs, strict=True)
                back_alone(
                    node, torch.empty_like(y), *[None if c in segment.frozen else torch.empty_like(t) for c, t in pairs]
                )

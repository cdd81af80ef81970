"""Which kernels quantize their results for the operation that reads them, so that no pass of its own does."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

import torch

from ..env import Env, Savings
from ..fusion import FusedOperation
from ..quantized import Quantize, is_local
from ..recipes import Recipe, Role
from .step import Step, Stretch

_HALVES = torch.bfloat16, torch.float16


def absorbed_by(stretch: Stretch, fusion: FusedOperation, a: int, b: int) -> Iterator[Quantize]:
    """How the kernels of a fusion at positions `a..b` can quantize their results for the operations around it."""
    around = stretch.around(a, b)
    if fusion.forward_signature.to and b < stretch.positions.stop:
        border = around[-1] if around else None
        if border is None or border.cast is None or fusion.forward_signature.dtype:
            yield from _asked(stretch, fusion, b, "x", stretch.env.dtype if border is None else border.taken)
    if fusion.backward_signature.to and a > stretch.start:
        border = around[0] if around else None
        if border is None or border.cast is None:
            yield from _asked(stretch, fusion, a - 1, "dy", stretch.env.dtype if border is None else border.taken)


def _asked(
    stretch: Stretch, fusion: FusedOperation, at: int, role: Role, dtype: torch.dtype | None
) -> Iterator[Quantize]:
    recipe, operation, env = stretch.recipes.get(at), stretch.nodes[at].operation, stretch.env
    wants = getattr(operation, "wants_quantized", None)
    arch = re.fullmatch(r"sm_(\d+)a?", env.arch)
    # Before sm_90 Triton goes from float32 to 8 bits by way of float16, which rounds twice.
    runs = env.triton and (env.device == "cpu" or (arch is not None and int(arch[1]) >= 90))
    if not isinstance(recipe, Recipe) or not runs or wants is None or not is_local(recipe) or dtype not in _HALVES:
        return
    needs = stretch.wants.needs[at]
    rows, columns = wants(role, recipe, needs)
    to = Quantize(at, operation, recipe, role, rows, columns, record=role == "dy" or bool(needs))
    if (rows or columns) and fusion.can_quantize(to, env):
        yield to


def savings(to: Quantize, env: Env) -> Savings:
    """What it saves: the launch that quantizes, and a tensor that is neither written nor read."""
    width = to.operation.features[0 if to.role == "x" else 1]
    return Savings(launches=1, bytes=2 * env.tokens * width * env.itemsize)


def absorbing(
    stretch: Stretch, forward: Sequence[Step], backward: Sequence[Step]
) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """The steps of both schedules, with what their kernels quantize where the operation that reads it is not fused."""

    def told(steps: Sequence[Step], role: Role) -> Iterator[Step]:
        unfused = {step.start for step in steps if not step.fused}
        for step in steps:
            found = absorbed_by(stretch, step.operation, step.start, step.stop) if step.fused else ()
            to = next((to for to in found if to.role == role and to.at in unfused), None)
            yield step if to is None else dataclasses.replace(step, to=to)

    if not any(isinstance(recipe, Recipe) for recipe in stretch.recipes.values()):
        return tuple(forward), tuple(backward)
    return tuple(told(forward, "x")), tuple(told(backward, "dy"))


def within(steps: Sequence[Step], segments: Sequence[range], saved: Sequence[int] = ()) -> tuple[Step, ...]:
    """The steps; none quantizes for a step of another segment, or a result that is saved at one of these positions."""

    def stands(step: Step) -> bool:
        assert step.to is not None
        near = any(step.start in span and step.to.at in span for span in segments)
        return near and not (step.to.role == "x" and step.start in saved)

    return tuple(s if s.to is None or stands(s) else dataclasses.replace(s, to=None) for s in steps)

"""The estimated gain of a fusion: the traffic that its operations declare, less that of the fusion."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .env import Env, Savings
from .hardware import STEP
from .operation import Traffic, UnfusedOperation

FLOPS: dict[Any, Callable[..., int]] = {}
"""FLOPs of operators of this library, of the shapes of their arguments; the modules that define them fill it."""

_Kinds = tuple[type[UnfusedOperation], ...]
_Features = tuple[tuple[int, int] | None, ...]


def gain(
    operations: Sequence[UnfusedOperation],
    env: Env,
    *,
    forward: bool,
    backward: bool,
    saved: tuple[int, ...],
) -> Savings:
    """The gain where one kernel, or one for each GEMM, runs these operations, in the passes that are given.

    A tensor between them is not read or written, but for those that are saved, enter a GEMM or leave as an extra
    output: these are written once, and read again where a GEMM or the backward pass takes them. Of a launch `STEP` is
    the engine's step, one for each operation, also where it launches several kernels or none. Tensors are `saved` where
    so many operations stand before them.
    """
    kinds, features = tuple(map(type, operations)), tuple([operation.features for operation in operations])
    fwd = _traffic(operations, env, False)
    bwd = _traffic(operations, env, True) if backward else ()
    return _gain(kinds, features, fwd, bwd, forward, saved, env.width, env.tokens * env.itemsize)


def unfused(operations: Sequence[UnfusedOperation], env: Env, positions: Iterable[int]) -> Savings:
    """The work of the forward pass of operations at these positions of a sequence."""
    widths = _widths(tuple(map(type, operations)), tuple([operation.features for operation in operations]), env.width)
    found = _traffic(operations, env, False)
    launches, moved, flops = 0.0, 0.0, 0.0
    for t, i in ((found[i], i) for i in positions):
        launches, moved, flops = launches + t.launches, moved + t.x * widths[i] + t.y * widths[i + 1], flops + t.flops
    return Savings(launches, moved * env.tokens * env.itemsize, flops)


def _traffic(operations: Sequence[UnfusedOperation], env: Env, backward: bool) -> tuple[Traffic, ...]:
    if not env.along:
        return tuple([operation.traffic(env, backward) for operation in operations])
    around = [env.between(env.along[i : i + 2]) for i in range(len(operations))]
    return tuple([operation.traffic(here, backward) for operation, here in zip(operations, around, strict=True)])


@functools.lru_cache(4096)  # sequences repeat themselves
def _gain(
    kinds: _Kinds,
    features: _Features,
    fwd: tuple[Traffic, ...],
    bwd: tuple[Traffic, ...],
    forward: bool,
    saved: tuple[int, ...],
    width: int,
    column: int,
) -> Savings:
    widths, last = _widths(kinds, features, width), len(kinds)
    gemms = [i for i in range(last) if fwd[i].flops]
    # A view is the tensor that it is made from.
    same = [0]
    for i in range(last):
        same.append(i + 1 if fwd[i].x or fwd[i].y else same[i])
    entering, kept = {same[i] for i in gemms}, {same[i] for i in saved}
    kernels = steps = moved = 0.0
    if forward and any(t.launches for t in fwd):  # fused, tensors that are handed on are handed on, too
        between = entering | kept | {same[i] for i in range(last) if kinds[i].outputs}
        own = [0, last, *(between - {0, same[-1]}), *(entering - {0})]
        kernels -= (len(gemms) or 1) + bool(gemms and same[gemms[0]])
        moved -= sum(widths[i] for i in own)
    if any(t.launches for t in bwd):
        # Where dx is dy, both are one tensor.
        d = [last] * (last + 1)
        for i in reversed(range(last)):
            d[i] = i if bwd[i].x else d[i + 1]
        taken = [d[i + 1] for i in gemms]  # twice, by the GEMM of dx and by that of the weight's gradient
        made = {d[0], *taken, *(d[i] for i in range(last) if kinds[i].forward_signature.extras and not bwd[i].x)}
        own = [last, *(made - {last}), *(entering | kept), *taken, *(i for i in taken if i != last)]
        kernels -= (2 * len(gemms) or 1) + bool(gemms and taken[-1] != last)
        moved -= sum(widths[i] for i in own)
    for replaced in (fwd if forward else (), bwd):
        kernels, steps = kernels + sum(t.launches for t in replaced), steps + max(0, len(replaced) - 1)
        moved += sum(t.x * widths[i] + t.y * widths[i + 1] for i, t in enumerate(replaced))
    return Savings((1 - STEP) * kernels + STEP * steps, moved * column)


def entering(operations: Sequence[UnfusedOperation]) -> list[int]:
    """The last dimension of what enters each operation, as those before or behind it state it; 0 where none does."""
    found: list[int] = []
    width = 0
    for operation in operations:
        stated = operation.features
        found.append(width if stated is None else stated[0])
        width = _leaving(operation, width) if stated is None else stated[1]
    for i in reversed(range(len(found) - 1)):
        if not found[i] and _keeps(operations[i]):
            found[i] = found[i + 1] * operations[i].narrows
    return found


def _leaving(operation: UnfusedOperation, width: int) -> int:
    if _keeps(operation) or not width:
        return width // operation.narrows
    try:
        return operation.infer((1, 1, width))[-1]
    except Exception:  # it asks more of a shape: then nothing is known
        return 0


def _keeps(operation: UnfusedOperation) -> bool:
    """Whether the last dimension of x is that of y, times what `narrows` says."""
    return type(operation).infer is UnfusedOperation.infer or operation.narrows > 1


def _widths(kinds: _Kinds, features: _Features, first: int) -> list[int]:
    """The last dimension of the tensors before, between and behind operations; 0 where none of them says it."""
    known: list[int | None] = [first or None, *[None] * len(kinds)]
    for i, stated in enumerate(features):
        if stated is not None:
            known[i : i + 2] = stated
    for i, kind in enumerate(kinds):
        before = known[i]
        if known[i + 1] is None and before is not None:
            known[i + 1] = before // kind.narrows
    for i in reversed(range(len(kinds))):
        known[i] = known[i] or (known[i + 1] or 0) * kinds[i].narrows
    return [width or 0 for width in known]

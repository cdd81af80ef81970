"""The estimated gain of a fusion: the declared traffic of its operations minus that of the fusion."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .env import Env, Savings
from .hardware import STEP
from .operation import Traffic, UnfusedOperation

FLOPS: dict[Any, Callable[..., int]] = {}
"""FLOPs of this library's custom ops as functions of argument shapes; filled by the modules that define them."""

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
    """The gain if one kernel, or one for each GEMM, runs these operations in the given passes.

    Tensors between the operations are not read or written, except those that are saved, read by a GEMM, or extra
    outputs: these are written once, and read again by a GEMM or the backward pass. `STEP` of a launch is the engine's
    step, one for each operation, even if it launches several kernels or none. A tensor is `saved` if the number of
    operations before it is listed.
    """
    kinds, features = tuple(map(type, operations)), tuple([operation.features for operation in operations])
    fwd = _traffic(operations, env, False)
    bwd = _traffic(operations, env, True) if backward else ()
    return _gain(kinds, features, fwd, bwd, forward, saved, env.width, env.tokens * env.itemsize)


def unfused(operations: Sequence[UnfusedOperation], env: Env, positions: Iterable[int]) -> Savings:
    """The work of the forward of operations at these positions of a sequence."""
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


@functools.lru_cache(4096)  # cached, since sequences repeat
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
    # A view counts as its base.
    same = [0]
    for i in range(last):
        same.append(i + 1 if fwd[i].x or fwd[i].y else same[i])
    entering, kept = {same[i] for i in gemms}, {same[i] for i in saved}
    kernels = steps = moved = 0.0
    if forward and any(t.launches for t in fwd):  # pass-through tensors also pass through the fusion
        between = entering | kept | {same[i] for i in range(last) if kinds[i].outputs}
        own = [0, last, *(between - {0, same[-1]}), *(entering - {0})]
        kernels -= (len(gemms) or 1) + bool(gemms and same[gemms[0]])
        moved -= sum(widths[i] for i in own)
    if any(t.launches for t in bwd):
        # If dx is dy, both count as one tensor.
        d = [last] * (last + 1)
        for i in reversed(range(last)):
            d[i] = i if bwd[i].x else d[i + 1]
        taken = [d[i + 1] for i in gemms]  # read twice, by the GEMMs of dx and of the weight's gradient
        made = {d[0], *taken, *(d[i] for i in range(last) if kinds[i].forward_signature.extras and not bwd[i].x)}
        own = [last, *(made - {last}), *(entering | kept), *taken, *(i for i in taken if i != last)]
        kernels -= (2 * len(gemms) or 1) + bool(gemms and taken[-1] != last)
        moved -= sum(widths[i] for i in own)
    for replaced in (fwd if forward else (), bwd):
        kernels, steps = kernels + sum(t.launches for t in replaced), steps + max(0, len(replaced) - 1)
        moved += sum(t.x * widths[i] + t.y * widths[i + 1] for i, t in enumerate(replaced))
    return Savings((1 - STEP) * kernels + STEP * steps, moved * column)


def entering(operations: Sequence[UnfusedOperation]) -> list[int]:
    """The last dimension of each operation's input, as declared by its neighbours; 0 if unknown."""
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
    except Exception:  # it needs more of the shape: unknown
        return 0


def _keeps(operation: UnfusedOperation) -> bool:
    """Whether the last dimension of x is that of y times `narrows`."""
    return type(operation).infer is UnfusedOperation.infer or operation.narrows > 1


def _widths(kinds: _Kinds, features: _Features, first: int) -> list[int]:
    """The last dimension of the tensors before, between and after operations; 0 if unknown."""
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

"""Segments: the positions of a plan that run behind one autograd node.

After each segment the backward pass hands on gradients and frees saved tensors. A further node costs tens of
microseconds of a CPU, so a segment can be asked to have some bytes at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from .step import Step
from .stretch import Stretch

SEGMENT = 8


def segments_of(
    stretch: Stretch, forward: Sequence[Step], backward: Sequence[Step], least: int = 0
) -> tuple[range, ...]:
    """Cut where both schedules have a border: near every eighth position, rather where a single tensor crosses.

    Segments before the last have parameters and activations of about `least` bytes, or more.
    """
    nodes, start, stop = stretch.nodes, stretch.start, stretch.positions.stop
    if start == stop:
        return ()
    first = backward[0].start if backward else stop
    borders = {s.start for s in forward} & {*(s.start for s in backward), *range(start, first)}
    cuts, before = [start], _bytes_before(stretch) if least else int
    while stop - cuts[-1] > SEGMENT + SEGMENT // 2:
        aims = range(cuts[-1] + SEGMENT, stop - SEGMENT // 2)
        aim = next((p for p in aims if before(p) - before(cuts[-1]) >= least), stop)
        if aim == stop:
            break
        reach = range(aim - SEGMENT // 2, min(aim + SEGMENT // 2, stop - 1) + 1)
        near = [b for b in reach if b in borders]
        near = near or [b for b in range(reach.stop, stop) if b in borders][:1]
        if not near:
            break
        cuts.append(min(near, key=lambda b: (nodes[b].crossing > 0, abs(b - aim))))
    return tuple(range(a, b) for a, b in zip(cuts, [*cuts[1:], stop], strict=True))


def _bytes_before(stretch: Stretch) -> Callable[[int], int]:
    """The bytes of parameters and inputs of all operations before a position, as a function of the position."""
    assert stretch.shapes is not None
    sums = [0]
    for node, shape in zip(stretch.inside, stretch.shapes, strict=False):
        own = [owner._parameters.get(name) for owner, name in node.slots.values()]  # pyright: ignore[reportPrivateUsage]
        size = sum(p.numel() * p.element_size() for p in own if p is not None)
        sums.append(sums[-1] + size + math.prod(shape) * stretch.env.dtype.itemsize)
    return lambda position: sums[position - stretch.start]

"""The dtype of the tensor at each border of a sequence: what an operation gives, and what the next one takes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..casts import dtype_of
from ..env import Env
from .flatten import Node
from .inputs import dtypes_of

_LIKE_FLOAT32 = (torch.float16, torch.bfloat16, torch.float32)


class Border(NamedTuple):
    """What arrives at a position, and what its operation takes; a cast stands between them where they differ.

    `None` where it is not known before a call.
    """

    given: torch.dtype | None
    taken: torch.dtype | None

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype that is cast to here, if any is."""
        return self.taken if self.taken is not self.given else None


def recast(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor in a dtype, if it is to have a certain one."""
    return t if dtype is None or t.dtype is dtype else t.to(dtype)


def along_of(borders: Sequence[Border], absorbs: bool) -> tuple[torch.dtype | None, ...]:
    """What each operation between borders takes, and their result: as it is taken if a fusion `absorbs` the cast."""
    taken = tuple([border.taken for border in borders])
    return taken if absorbs or not borders else (*taken[:-1], borders[-1].given)


def borders_of(
    nodes: Sequence[Node],
    positions: range,
    x: Tensor,
    channels: Mapping[str, Tensor],
    parameters: Sequence[Tensor],
    env: Env,
) -> tuple[Border, ...]:
    """The borders of a region for the tensors that enter it; none where all of them have one dtype."""
    run = functools.cache(lambda: dtypes_of(nodes, positions, x, channels)[positions.start :])
    if env.autocast is not None:
        return under_autocast(nodes, positions, env, {c: t.dtype for c, t in channels.items()}, run)
    if all(t.dtype is x.dtype for t in (*parameters, *channels.values())):
        return ()
    return tuple([Border(dtype, dtype) for dtype in run()])


def under_autocast(
    nodes: Sequence[Node],
    positions: range,
    env: Env,
    channels: Mapping[str, torch.dtype],
    run: Callable[[], Sequence[torch.dtype | None]] | None = None,
) -> tuple[Border, ...]:
    """The borders of a region under autocast, one before each position and one behind the last.

    They follow from the class of each operation, `UnfusedOperation.autocast`. What one that states none gives is seen
    in a `run` of the references, where there are tensors to run them on.
    """
    known: dict[str, torch.dtype | None] = dict(channels)
    given: torch.dtype | None = env.dtype
    found: list[Border] = []
    for i, position in enumerate(positions):
        node = nodes[position]
        operation: Any = node.operation
        taken = env.cast(given) if operation.autocast == "lower" and given is not None else given
        found.append(Border(given, taken))
        given = _given(node, taken, [known.get(c) for _, c in node.inputs], env)
        if given is None and run is not None:
            given = run()[i + 1]
        # An output of an operation that states nothing may be of any dtype.
        made = taken if operation.autocast == "exchange" else given if operation.autocast else None
        known.update((c, made) for _, c in node.outputs)
    return (*found, Border(given, given))


def _given(node: Node, x: torch.dtype | None, inputs: Sequence[torch.dtype | None], env: Env) -> torch.dtype | None:
    operation: Any = node.operation
    if operation.y_dtype is not None:
        return operation.y_dtype
    if x is None or operation.autocast is None:
        return None
    if operation.autocast == "float32" and env.device != "cpu" and x in _LIKE_FLOAT32:
        return torch.float32  # torch's list for the CPU has none of them
    if operation.autocast == "exchange":
        return inputs[0]
    if operation.autocast != "promote":
        return x
    dtypes = [dtype_of(owner, name) for owner, name in node.slots.values()]
    dtypes += [dtype for dtype in inputs if dtype is not None]
    return None if None in inputs else functools.reduce(torch.promote_types, dtypes, x)

"""Stretches that torch's own calls can run, by nodes of autograd, instead of a node of this library."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..casts import dtype_of
from ..fusion import FusedOperation
from ..hardware import C_BESIDE_TORCH, C_WORTHWHILE
from .step import Stretch


class TorchCall(NamedTuple):
    """The torch function of a native operation, or a GEMM with its bias, and its parameters after x.

    An operation that returns x unchanged has no function; a channel `keeps` x. Others `reads` channels as keywords.
    """

    run: Callable[..., Tensor] | None
    parameters: tuple[tuple[nn.Module, str], ...]
    position: int
    keeps: str | None = None
    reads: tuple[tuple[str, str], ...] = ()


class TorchCalls(NamedTuple):
    """The calls of a stretch, in order."""

    calls: tuple[TorchCall, ...]
    elements: int  # of the widest tensor
    below: float  # with fewer elements they take less time than a node with C kernels
    on_cpu: bool

    def faster_than(self, fusion: FusedOperation) -> bool:
        """Whether they take less time than a node with this fusion, or as much because it does no more."""
        below = fusion.native_below
        # On a GPU a launch takes as long as the rest of a node.
        return self.elements < (below if self.on_cpu or math.isinf(below) else min(below, C_WORTHWHILE))


def torch_calls(stretch: Stretch) -> TorchCalls | None:
    """The torch calls that equal the unfused operations of a stretch, if there are any.

    Requires that each operation is native and that all gradients are needed.
    """
    env, nodes, first = stretch.env, stretch.inside, stretch.start
    if env.autocast is not None or env.dtype not in (torch.float32, torch.float64):
        return None
    if stretch.borders or stretch.recipes:
        return None
    operations: list[Any] = [node.operation for node in nodes]
    calls: list[TorchCall] = []
    joined, below = False, float(C_BESIDE_TORCH)
    made = ends = False  # whether x is the result of a call that no channel keeps yet; whether a call follows each
    for i, (node, operation) in enumerate(zip(nodes, operations, strict=True)):
        own, needs = tuple(node.slots.values()), stretch.wants.needs[first + i]
        if (needs and not needs.issuperset(node.slots)) or any(dtype_of(*slot) is not env.dtype for slot in own):
            return None
        if joined:
            calls[-1] = calls[-1]._replace(parameters=(*calls[-1].parameters, *own))
            joined = False
            continue
        leaving = [channel for _, channel in node.outputs]
        run = None if leaving else operation.torch_call()
        if not operation.native or node.seed is not None or node.sum_over:
            return None
        if run is None and not (operation.is_view and len(leaving) == 1):
            return None
        if run is None:
            inside = node.readers[leaving[0]] and max(node.readers[leaving[0]]) < first + len(nodes)
            # The caller may change a tensor that leaves: it must not be x, y or another such tensor as well.
            if not (inside or made):
                return None
            made, ends = made and bool(inside), ends and bool(inside)
        elif not operation.is_view:
            made = ends = True
        calls.append(TorchCall(run, own, first + i, leaving[0] if leaving else None, node.inputs))
        below = min(below, operation.native_below)
        joined = i + 1 < len(nodes) and operation.joins(operations[i + 1])
    if not ends:
        return None
    rows, features = env.rows or 0, [operation.features or (1,) for operation in operations]
    if env.multiplies_by_onednn(rows * max(map(math.prod, features))):  # autograd's GEMMs would be slower
        return None
    widths = [max(each) for each in features] if stretch.shapes is None else [s[-1] for s in stretch.shapes if s]
    return TorchCalls((*calls,), rows * max(widths, default=1), below, env.device == "cpu")

"""Custom autograd functions in captured graphs, run as generated code instead of by torch's interpreter of graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .graph import name_of


def run_as_code(gm: GraphModule) -> None:
    """Replace calls of `autograd_function_apply` in a graph and its bodies.

    Torch interprets both bodies node by node in each call, which takes several times as long as small operations.
    """
    for module in gm.modules():
        if isinstance(module, GraphModule):
            calls = [n for n in module.graph.nodes if name_of(n) == "autograd_function_apply"]
            for node in calls:
                node.target = applied
            if calls:
                module.recompile()


def applied(fwd: GraphModule, bwd: GraphModule, *args: Any, **indices: Sequence[int]) -> Any:
    """The result of a custom autograd function, from the graphs of its passes; `fwd` also returns what is saved."""
    return _Applied.apply([], fwd, bwd, indices, *args)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(kept: list[Any], fwd: GraphModule, bwd: GraphModule, indices: Any, *args: Any) -> Any:
        output, saved = fwd(*args)
        kept.extend(saved)
        if indices.get("dirty_idx") or isinstance(output, torch.Tensor):
            return output
        # Torch saves no input that is also a result, as torch 2.11 captures one that is changed in place.
        return tuple([t.view_as(t) if any(t is arg for arg in args) else t for t in output])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        kept, _, ctx.bwd, indices = inputs[:4]
        # Outputs that `ctx` referenced itself would never be freed, and hooks for saved tensors would not see them.
        places = set(indices["saved_for_backward_idx"])
        ctx.save_for_backward(*(t for i, t in enumerate(kept) if i in places))
        ctx.others = [None if i in places else t for i, t in enumerate(kept)]
        ctx.places = [i for i in range(len(kept)) if i in places]

        def chosen(of: Iterable[int]) -> list[Any]:
            return [output if isinstance(output, torch.Tensor) else output[i] for i in of]

        if dirty := indices.get("dirty_idx"):
            ctx.mark_dirty(*chosen(dirty))
        if constant := indices["non_differentiable_idx"]:
            ctx.mark_non_differentiable(*chosen(constant))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        kept = [*ctx.others]
        for i, t in zip(ctx.places, ctx.saved_tensors, strict=True):
            kept[i] = t
        made = ctx.bwd(*grads, *kept)
        return None, None, None, None, *(made if isinstance(made, tuple | list) else (made,))

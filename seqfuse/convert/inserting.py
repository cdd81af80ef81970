"""Putting regions into a graph: whether one can stand for its chain, and the calls that take the chain's place."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, Node

from ..env import autocast_of
from ..errors import one_line
from .chains import Chain
from .effects import in_place
from .graph import example, numbers, same_shape
from .raising import Transposed
from .region import Region


def _itself(t: Tensor) -> Tensor:
    return t


def why_not(region: Region, chain: Chain) -> str | None:
    """Why a region cannot stand for its chain: what it returns has other shapes or dtypes.

    Under autocast a norm may give its result in the dtype that the next GEMM reads, where a model that writes it by
    hand gives float32: what is read outside is cast then. Hooks of the caller's for saved tensors see none of this.
    """
    modes = [node.args for node in chain.state.autocast]
    lowered = bool(modes) or autocast_of(region.device) is not None
    with FakeTensorMode(), saved_tensors_hooks(_itself, _itself), contextlib.ExitStack() as stack:
        for args in modes:
            stack.enter_context(torch.autocast(*args))  # pyright: ignore[reportArgumentType]
        order = region.order
        try:
            results = region(*region.stand_ins((order.x, *order.channels.values(), *region.given)))
        except Exception as error:
            return one_line(error)
        results = results if len(order.outputs) > 1 else [results]
        region.dtypes = [result.dtype for result in results]
        for node, result in zip(order.outputs, results, strict=True):
            e = example(node)
            if e is None:  # a value that no node holds
                continue
            cast = lowered and result.is_floating_point() and e.is_floating_point()
            if (result.dtype is not e.dtype and not cast) or not same_shape(result.shape, numbers(e.shape)):
                got = f"{result.dtype} {tuple(result.shape)}"
                return f"{node} would be {got} instead of {e.dtype} {tuple(e.shape)}"
            graph: Graph | None = getattr(node, "graph", None)  # an inner value has none
            if result.stride() != numbers(e.stride()) and graph is not None and any(in_place(n) for n in graph.nodes):
                return "it would lie otherwise in memory, where a tensor is changed in place"
    return None


def insert(graph: Graph, name: str, region: Region, after: Node) -> tuple[list[Node], dict[Node, Node]]:
    """Put a call of a region into a graph, behind a node: the nodes that were added, and which stand for which."""
    order = region.order
    with graph.inserting_after(after):
        call = graph.call_module(name, ())
    with graph.inserting_before(call):
        made = {g: graph.call_method("t", (g.node,)) for g in dict.fromkeys(region.given) if isinstance(g, Transposed)}
    given = [made[g] if isinstance(g, Transposed) else g for g in region.given]
    call.args = (order.x, *order.channels.values(), *given)
    added, holders = [*made.values(), call], dict[Node, Node]()
    needs = any(e.requires_grad for n in call.all_input_nodes if (e := example(n)) is not None)

    def then(what: str, target: Any, *args: Any) -> Node:
        with graph.inserting_after(added[-1]):
            added.append(graph.create_node(what, target, args))
        return added[-1]

    def stand_for(node: Node, holder: Node, dtype: torch.dtype) -> None:
        e = example(node)
        if e is not None and e.dtype is not dtype:
            holder = then("call_method", "to", holder, e.dtype)
        if e is not None and needs and not e.requires_grad:  # one of several results that needs no gradient
            holder = then("call_method", "detach", holder)
        holder.meta = dict(node.meta)
        holders[node] = holder

    for i, (output, dtype) in enumerate(zip(order.outputs, region.dtypes, strict=True)):
        holder = call if len(order.outputs) == 1 else then("call_function", operator.getitem, call, i)
        if isinstance(output, Node):
            stand_for(output, holder, dtype)
            continue
        for view in output.views:
            stop = view.start + (view.heads or 1) * view.size
            part = then("call_function", operator.getitem, holder, (..., slice(view.start, stop)))
            if view.heads is not None:
                part = then("call_method", "unflatten", part, -1, (view.heads, view.size))
                part = then("call_method", "transpose", part, 1, 2)
            stand_for(view.node, part, dtype)
    return added, holders

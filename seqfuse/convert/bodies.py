"""Bodies of checkpoints: graphs of their own, which the graph around them calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from .positions import OUTER


def hand_over(gm: GraphModule) -> None:
    """Let the bodies of a graph know the nodes of it that they are called with."""
    for body, call in _called_once(gm):
        for inner, outer in zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True):
            inner.meta[OUTER] = outer


def run_bodies(gm: GraphModule) -> None:
    """Leave out what bodies do not read any more, and let their calls run without a compiler."""
    for body, call in _called_once(gm):
        inside = body.graph.find_nodes(op="placeholder")
        call.args = (call.args[0], *(o for i, o in zip(inside, call.args[1:], strict=True) if i.users))
        for inner in inside:
            if not inner.users:
                body.graph.erase_node(inner)
        body.recompile()
    for call in _calls(gm):
        call.target = _checkpointed


def _calls(gm: GraphModule) -> list[Node]:
    return gm.graph.find_nodes(op="call_function", target=tag_activation_checkpoint)


def _called_once(gm: GraphModule) -> list[tuple[GraphModule, Node]]:
    names: dict[Node, str] = {call: str(call.args[0].target) for call in _calls(gm) if isinstance(call.args[0], Node)}
    count = Counter(names.values())
    bodies = [(gm.get_submodule(name), call) for call, name in names.items() if count[name] == 1]
    return [(body, call) for body, call in bodies if isinstance(body, GraphModule)]


def _checkpointed(body: GraphModule, *args: Any, **how: Any) -> Any:
    # What Dynamo puts into a graph leaves it to a compiler to draw dropout's numbers again in a second run.
    how |= {"use_reentrant": False}
    if "_checkpoint_context_fn" in body.meta:
        how["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **how)  # pyright: ignore[reportUnknownVariableType]

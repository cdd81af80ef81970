"""Inserts calls into a captured graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from .graph import NAMED, WRITTEN, example, spelled, value_of


def written_behind(node: Node, function: Callable[..., Any], *args: Any) -> Node:
    """A call of a function on a node, inserted directly after it; all its readers share one."""
    found = next((user for user in node.users if user.target is function and user.args == (node, *args)), None)
    if found is None:
        with node.graph.inserting_after(node):
            found = node.graph.call_function(function, (node, *args))
        found.meta = {**node.meta, WRITTEN: True, "example_value": function(example(node), *args)}
    return found


class Writer:
    """Inserts calls before a node, with its module and modes, and computes their example values."""

    def __init__(self, node: Node, modes: Sequence[Node] = ()) -> None:
        self.node, self.added = node, list[Node]()
        self._modes = [mode.args for mode in modes]

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> Node:
        """Insert a tensor method, or one of the functions below."""
        if name in _FUNCTIONS:
            return self._write("call_function", _FUNCTIONS[name], args, kwargs)
        return self._write("call_method", name, args, kwargs)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert a function call."""
        return self._write("call_function", function, args, kwargs)

    def like(self, call: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        """Insert the same function or method with other arguments."""
        return self._write(call.op, call.target, args, kwargs)

    def again(self, x: Node, call: Node | None = None) -> Node:
        """Insert the node's call, or another call with that call's module, on another tensor."""
        call = call or self.node
        named = {name: value for name, value in call.kwargs.items() if name != "input"}
        made = self._write(call.op, call.target, (x, *call.args[1:]), named)
        made.meta = {**call.meta, WRITTEN: True, "example_value": made.meta["example_value"]}
        return made

    def _write(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.create_node(kind, target, args, kwargs)
        self.added.append(made)
        made.meta = {key: value for key, value in self.node.meta.items() if key not in ("example_value", "val")}
        made.meta[WRITTEN] = True
        if spelled(self.node) in _GEMMS:
            made.meta[NAMED] = spelled(self.node)
        given: Any = map_arg((args, kwargs), value_of)
        run: Any = target if kind == "call_function" else getattr(cast("Any", type(given[0][0])), target)
        with contextlib.ExitStack() as stack:
            mode = next((m for t in made.all_input_nodes if (m := getattr(example(t), "fake_mode", None))), None)
            stack.enter_context(mode or cast("Any", torch.random).fork_rng(devices=()))
            for modes in self._modes:
                stack.enter_context(torch.autocast(*modes))  # pyright: ignore[reportArgumentType]
            made.meta["example_value"] = run(*given[0], **given[1])
        return made

    def keep(self) -> None:
        """Keep the calls in the graph like the model's own."""
        for made in self.added:
            made.meta.pop(WRITTEN, None)

    def undo(self) -> None:
        """Remove the calls."""
        for made in reversed(self.added):
            self.node.graph.erase_node(made)


_GEMMS = ("einsum", "addmm", "matmul", "bmm", "baddbmm")
_FUNCTIONS: dict[str, Any] = {
    "add": operator.add,
    "mul": operator.mul,
    "getitem": operator.getitem,
    "F.linear": torch.nn.functional.linear,
    "F.relu": torch.nn.functional.relu,
    "F.silu": torch.nn.functional.silu,
    "F.softmax": torch.nn.functional.softmax,
    "F.dropout": torch.nn.functional.dropout,
    "F.attention": torch.nn.functional.scaled_dot_product_attention,
    "torch.zeros_like": torch.zeros_like,
}

"""What is left of a graph beside its regions, through Inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module

from .effects import is_state
from .region import Region


def compiled_rest(gm: GraphModule) -> Callable[..., Any]:
    """A graph whose stretches between regions are compiled by Inductor, each at its first call."""
    part, of = 0, dict[Node, int]()
    before: bool | None = None
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        here = node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), Region)
        apart = here or is_state(node)
        if before is not None and (apart or before):
            part += 1
        of[node], before = part, apart
    split = split_module(gm, gm, lambda node: of[node])
    for name, child in list(split.named_children()):
        assert isinstance(child, GraphModule)
        calls = [n for n in child.graph.nodes if n.op in ("call_function", "call_method", "call_module")]
        alone = len(calls) == 1 and (calls[0].op == "call_module" or is_state(calls[0]))
        if not alone:
            setattr(split, name, _Compiled(child))
    return split.forward


class _Compiled(torch.nn.Module):
    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self._run = torch.compile(body)  # pyright: ignore[reportUnknownMemberType]

    def forward(self, *args: Any) -> Any:
        return self._run(*args)

"""Sorting the nodes of a graph again after chains became calls, with modes and changes in place where they were."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from torch.fx import Graph, Node

from .effects import State, in_place, is_state


class CannotOrder(Exception):
    """No order of the nodes keeps modes and changes in place where they were."""


def sort(graph: Graph, state: Mapping[Node, State], dead: Container[Node]) -> None:
    """Move every node behind those whose values it reads, otherwise keeping the order.

    Nodes that are `dead` will not run, and so change nothing in place.

    Nodes are moved, not copied, because Dynamo and Inductor keep notes on them.

    Raises:
        CannotOrder: if that is impossible; the graph is as it was.
    """
    nodes = list(graph.nodes)
    last = nodes[0].prev  # the root of the list
    for node in _sorted(nodes, state, dead):
        last.append(node)
        last = node


def _sorted(nodes: Sequence[Node], state: Mapping[Node, State], dead: Container[Node]) -> list[Node]:
    units = _units(nodes, state, dead)
    of = {node: i for i, unit in enumerate(units) for node in unit}
    before: list[set[int]] = []
    barrier, since = None, list[int]()
    for i, unit in enumerate(units):
        reads = {of[n] for node in unit for n in node.all_input_nodes if n in of} - {i}
        if barrier is not None:
            reads.add(barrier)
        since.append(i)
        if any(in_place(node) and node not in dead for node in unit) or unit[0].op == "output":
            reads |= set(since) - {i}
            barrier, since = i, []
        before.append(reads)
    done, order, waiting = set[int](), list[Node](), list(range(len(units)))
    while waiting:
        able = next((i for i in waiting if before[i] <= done), None)
        if able is None:
            raise CannotOrder
        waiting.remove(able)
        done.add(able)
        order += units[able]
    return order


def _units(nodes: Sequence[Node], state: Mapping[Node, State], dead: Container[Node]) -> list[list[Node]]:
    """Nodes one by one, those under another mode than the first as one unit, sorted in itself."""
    base = _mode(state[nodes[0]])
    units: list[list[Node]] = []
    block: list[Node] = []
    for node in nodes:
        if _mode(state[node]) != base:
            block.append(node)
        elif block:
            inner = _sorted(block[1:], state, dead) if len(block) > 1 else []
            units.append([block[0], *inner, node] if is_state(node) else [block[0], *inner])
            block = []
            if not is_state(node):
                units.append([node])
        else:
            units.append([node])
    if block:
        units.append([block[0], *(_sorted(block[1:], state, dead) if len(block) > 1 else [])])
    return units


def _mode(state: State) -> tuple[object, object]:
    return state.autocast, state.grad

"""Chains: selects the raised operations that run as one `Sequential`, and their order."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence

from torch.fx import Graph, Node

from .. import ops
from ..operation import FusableOperation
from .effects import State, returned, states
from .graph import WRITTEN, alike, channel, example, same_shape
from .raising import Inner, Raised, Value


@dataclasses.dataclass(eq=False)
class RaisedChain:
    """Raised operations that run as one `Sequential`, in the order of the graph."""

    members: list[Raised]
    state: State
    begun: bool = False
    """Whether it must begin with its first operation, since all others depend on it."""

    @property
    def inputs(self) -> list[Node]:
        """The nodes outside the chain that it reads."""
        made = {r.out for r in self.members}
        return list(dict.fromkeys(n for r in self.members for n in r.inputs if n not in made))


def chains_of(
    graph: Graph, operations: Sequence[Raised], apart: Container[Raised] = (), strict: bool = False
) -> list[RaisedChain]:
    """Partition the operations of a graph into chains, as large as possible while each can run as one call.

    A chain is convex: it reads no value that is computed outside of it from its own results. Its operations run under
    one autocast and gradient mode, and between two in-place changes. A gradient reaches either all of them or none:
    where none reaches a parameter, its gradient is None, not zeros. A result of the graph is not read by the chain that
    computes it: its gradient would lack the part that comes back through that chain.

    Args:
        graph: the captured graph.
        operations: the raised operations.
        apart: operations that begin a chain.
        strict: whether in-place changes of all tensors count, not only of those that operations read or compute.
    """
    touched = None if strict else {n for r in operations for n in (*r.inputs, *r.ends)}
    state = states(graph.nodes, {r.out for r in operations}, touched)
    place = {node: i for i, node in enumerate(graph.nodes)}
    leaving = returned(graph)
    made: dict[Value, RaisedChain] = {}
    viewed: dict[Value, RaisedChain] = {}
    for together in _in_order(operations, place):
        chain = RaisedChain(list(together), state[together[-1].node], together[0] in apart)
        own = {p for r in together for p in r.parameters.values()}
        for node in () if chain.begun else chain.inputs:
            producer = made.get(node)
            if producer is None or producer is chain or producer.state != chain.state or node in own:
                continue
            if any(made.get(n) is producer for n in leaving.intersection(chain.inputs)):
                continue
            if producer.members[0].reached is not chain.members[0].reached:
                continue
            if len(chain.members) > len(together) and (chain.begun or producer.begun):
                continue
            if _depends(chain, producer, made | viewed, place) or _depends(producer, chain, made | viewed, place):
                continue
            producer.members += chain.members
            chain = producer
            made.update((r.out, chain) for r in chain.members)  # before the next input, which may be of a merged chain
        for r in chain.members:
            made[r.out] = chain
            if isinstance(r.out, Inner):
                viewed |= {view.node: chain for view in r.out.views}
    found = list(dict.fromkeys(made.values()))
    for chain in found:
        chain.members.sort(key=lambda r: place[r.node])
    return found


def _in_order(operations: Sequence[Raised], place: Mapping[Node, int]) -> Iterable[list[Raised]]:
    """Operations in the order of the graph, in lists of those that were raised together."""
    groups: list[list[Raised]] = []
    for r in operations:
        if groups and isinstance(r.x, Inner):
            groups[-1].append(r)
        else:
            groups.append([r])
    return sorted(groups, key=lambda group: place[group[-1].node])


def _depends(chain: RaisedChain, on: RaisedChain, made: Mapping[Value, RaisedChain], place: Mapping[Node, int]) -> bool:
    """Whether a chain depends on another's results through a node or a third chain."""
    views = [view.node for r in on.members if isinstance(r.out, Inner) for view in r.out.views]
    first = min(place[node] for node in (*(r.node for r in on.members), *views))
    seen: set[Node | RaisedChain] = set()
    inside = {r.out for r in on.members}
    stack = [n for n in chain.inputs if n not in inside]
    while stack:
        node = stack.pop()
        maker = made.get(node)
        if maker is on:
            return True
        unit = node if maker is None else maker
        if unit in seen or maker is chain or (maker is None and place[node] < first):
            continue
        seen.add(unit)
        stack += node.all_input_nodes if maker is None else maker.inputs
    return False


def needed(graph: Graph, chains: Sequence[RaisedChain]) -> tuple[set[Value], set[Node]]:
    """The values that are read outside of their chain, and the nodes that nothing reads: replaced or written ones."""
    made: dict[Value, Value] = {r.out: r.out for chain in chains for r in chain.members}
    made |= {view.node: inner for inner in list(made) if isinstance(inner, Inner) for view in inner.views}
    absorbed = {t for chain in chains for r in chain.members for t in r.took}
    for node in reversed(graph.nodes):
        if WRITTEN in node.meta and absorbed.issuperset(node.users):
            absorbed.add(node)
    outside, alive = set[Value](), set[Node]()
    stack = [i for n in graph.nodes if n not in absorbed for i in n.all_input_nodes]
    stack += [i for chain in chains for i in chain.inputs]
    while stack:
        node = stack.pop()
        if node in made:
            outside.add(made[node])
        elif node in absorbed and node not in alive:
            alive.add(node)
            stack += node.all_input_nodes
    return outside, absorbed - alive


@dataclasses.dataclass(eq=False)
class Order:
    """A chain as a sequence of operations."""

    operations: list[FusableOperation]  # with the `Fork`s and `Take`s that route values to their readers
    x: Node  # the node of the sequence's input
    channels: dict[str, Node]  # the nodes of its channels, by name
    outputs: list[Value]  # the returned values, y first
    members: list[Raised]  # the raised operations, in execution order
    # Operations that must begin chains, since their input has another shape than the last result.
    apart: list[Raised]


def order_of(chain: RaisedChain, outside: set[Value]) -> Order:
    """Order a chain's operations so that most of them read the result of the previous one."""
    left, members = list(chain.members), list[Raised]()
    inside, current = {r.out for r in left}, None
    ready: set[Value] = set()
    while left:
        able = [r for r in left if all(n in ready or n not in inside for n in (r.x, *r.channels.values()))]
        chosen = next((r for r in able if r.x is current), None)
        if chosen is None:
            chosen = next((r for r in able if current in r.channels.values() and _commuted(r)), able[0])
        left.remove(chosen)
        if chosen.x is not current and current in chosen.channels.values():
            chosen = _commuted(chosen) or chosen
        members.append(chosen)
        current = chosen.out
        ready.add(current)
    return _routed(members, inside, outside)


def _commuted(r: Raised) -> Raised | None:
    """A sum or product with its operands exchanged, if that is possible."""
    if not isinstance(r.operation, ops.Add | ops.Multiply) or not isinstance(r.x, Node):
        return None
    (other,), x = r.channels.values(), r.x
    if isinstance(r.operation, ops.Multiply) and not alike(x, other):
        return None
    return dataclasses.replace(r, operation=type(r.operation)(channel(x)), x=other, channels={channel(x): x})


def _routed(members: list[Raised], inside: set[Value], outside: set[Value]) -> Order:
    start = members[0].x
    assert isinstance(start, Node)
    order = Order([], start, {}, [], members, [])
    extra: list[Value] = []
    current: Value = start
    branch = members[0]
    for i, r in enumerate(members):
        order.channels.update({c: n for c, n in r.channels.items() if n not in inside and n is not start})
        later = members[i:]
        if r.x is current:
            if isinstance(current, Node) and _is_read_later(current, later):
                order.operations.append(ops.Fork(channel(current)))
        else:
            assert isinstance(r.x, Node)
            a, b = example(current), example(r.x)
            if not isinstance(current, Node) or a is None or b is None or not same_shape(a.shape, b.shape):
                joins = branch is not members[0] and current in r.channels.values()  # such as a gate for each token
                order.apart.append(branch if joins else r)
                return order
            unread = not _is_read_later(current, later)  # not read here: its channel is an output
            if unread and current not in outside:
                order.apart.append(r)
                return order
            order.operations.append(ops.Take(channel(r.x), to=channel(current)))
            branch = r
            if unread:
                extra.append(current)
            if r.x not in inside and r.x is not start:
                order.channels[channel(r.x)] = r.x
        order.operations.append(r.operation)
        current = r.out
        if current in outside and r is not members[-1]:
            after = members[i + 1].x is current or _is_read_later(current, members[i + 1 :])
            if after:
                order.operations.append(ops.Fork(f"out_{len(extra)}"))
                extra.append(current)
    order.outputs = [current, *extra]
    return order


def _is_read_later(value: Value, later: Sequence[Raised]) -> bool:
    """Whether an operation reads a value, except the next one as its x."""
    return any(value in r.channels.values() for r in later) or any(r.x is value for r in later[1:])

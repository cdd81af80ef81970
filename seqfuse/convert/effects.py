"""Side effects in a captured graph: mode switches, in-place changes, and an order of nodes that respects both."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import operator
import re
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node

from .graph import HIDDEN, VIEWS, argument, example, is_plain, is_same, name_of, spelled, unchanged, value_of

_IN_PLACE = {
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor", "ilshift",
    "irshift", "setitem",
}  # fmt: skip
# Python operators without side effects, although their names look like in-place methods.
_OPERATORS: tuple[Any, ...] = (operator.and_, operator.or_, operator.not_, operator.is_)  # pyright: ignore
_MODES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")
# Modes of functorch and inference, hooks of saved tensors, attention kernels, random generators.
_SWITCH = re.compile(r"_?(enter|exit|set|push|pop|manual_seed)(_|$)|.*(_nesting|_hooks_(en|dis)able|sdpa_kernel)")


def _name(node: Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else str(node.target)


def is_state(node: Node) -> bool:
    """Whether a node switches autocast or gradient mode, so that other nodes must not be moved across it."""
    return node.op == "call_function" and _name(node) in _MODES


def in_place(node: Node) -> bool:
    """Whether a node may modify an existing tensor, or a mode other than autocast and gradient mode."""
    if node.op not in ("call_function", "call_method"):
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):  # pyright: ignore[reportPrivateUsage]
        return target._schema.is_mutable  # pyright: ignore[reportPrivateUsage]
    if isinstance(target, torch._ops.HigherOrderOperator):  # pyright: ignore[reportPrivateUsage]
        return False
    if node.kwargs.get("out") is not None or argument(node, _place_of_inplace(target), "inplace") or _updated(node):
        return True
    name = _name(node)
    if target in _OPERATORS:
        return False
    if name.strip("_") in _IN_PLACE:  # `__iadd__`, too
        return True
    if node.op == "call_function" and name not in _MODES and _SWITCH.match(name) is not None:
        return True
    return name.endswith("_") and not name.endswith("__")


def _updated(node: Node) -> list[Node]:
    """The running statistics that a norm may update, or the weight of an embedding that renormalizes it."""
    name = _name(node)
    if name in ("embedding", "embedding_bag"):
        weight, limit = argument(node, 1, "weight"), argument(node, 3, "max_norm")  # `torch.embedding` has a bool there
        return [weight] if type(limit) in (int, float) else []
    if (name == "batch_norm" and argument(node, 5, "training")) or (
        name == "instance_norm" and argument(node, 5, "use_input_stats") is not False
    ):
        return [n for n in node.all_input_nodes[1:] if (e := example(n)) is None or not e.requires_grad]
    return []


def _place_of_inplace(target: Any) -> int:
    """The position of the argument `inplace` of a function of torch; behind all others if it has none."""
    return _by_place(target) if getattr(target, "__module__", None) == "torch.nn.functional" else _NO_PLACE


@functools.lru_cache(1024)
def _by_place(function: Callable[..., Any]) -> int:
    try:
        return [*inspect.signature(function).parameters].index("inplace")
    except (TypeError, ValueError):  # without a signature, or without this argument
        return _NO_PLACE


_NO_PLACE = sys.maxsize


def _picks_kernels(node: Node) -> bool:
    """Whether a call selects torch's attention kernels, which does not concern this library's kernels."""
    return _name(node).endswith("sdpa_kernel")


def _memory(node: Any) -> object:
    """The identity of the storage of a tensor, or of several in one; `None` if unknown."""
    memory = _storage(node)
    while isinstance(node, Node) and node.args and isinstance(source := node.args[0], Node):
        # Without dropout the result is the input, which neither its fake tensor nor those of its views show.
        is_input = spelled(node) == "dropout" and is_same(node) is not None
        if not is_input and (memory is None or _storage(source) != memory):
            break
        node, memory = source, _storage(source)
    return memory


def _storage(node: Any) -> object:
    value, found = value_of(node), set[object]()
    several = cast("Sequence[Any]", value) if isinstance(value, tuple | list) else (value,)
    for t in several:
        found.add(t.untyped_storage()._cdata if is_plain(t) else None)  # pyright: ignore[reportPrivateUsage]
    return found.pop() if len(found) == 1 else None


def _targets(node: Node) -> Sequence[Any]:
    """The tensors that an in-place call may modify: its first argument, `out` or statistics; for an ATen overload, all
    inputs.
    """
    if isinstance(node.target, torch._ops.OpOverload):  # pyright: ignore[reportPrivateUsage]
        return node.all_input_nodes
    if updated := _updated(node):
        return updated
    given: Any = node.kwargs.get("out") or (node.args[0] if node.args else None)
    return cast("Sequence[Any]", given) if isinstance(given, list | tuple) else [given]


def _changed(node: Node) -> set[object]:
    """The storages that a node modifies; `None` for an unknown one."""
    return set(map(_memory, _targets(node)))


def _meet(memory: set[object], changed: set[object]) -> bool:
    return None in memory or None in changed or not memory.isdisjoint(changed)


def are_changed(nodes: Sequence[Node]) -> bool:
    """Whether the nodes' graphs, or graphs that these call, modify any of the nodes' results in place."""
    memory = set(map(_memory, nodes))
    modules = {part for node in nodes if (gm := node.graph.owning_module) is not None for part in gm.modules()}
    graphs = {node.graph for node in nodes} | {part.graph for part in modules if isinstance(part, GraphModule)}
    return any(_meet(memory, _changed(node)) for graph in graphs for node in graph.nodes if in_place(node))


# Calls that always return new tensors, whatever the layout of their inputs.
_FRESH = {
    "linear", "matmul", "bmm", "baddbmm", "addmm", "einsum", "scaled_dot_product_attention", "conv1d", "conv2d", "add",
    "sub", "mul", "truediv", "neg", "pow", "sqrt", "rsqrt", "exp", "log", "where", "masked_fill", "gelu", "relu",
    "silu", "tanh", "sigmoid", "softmax", "log_softmax", "layer_norm", "rms_norm", "group_norm", "batch_norm",
    "normalize", "mean", "sum", "any", "embedding", "cat", "stack", "clone", "cross_entropy", "empty_like",
    "zeros_like", "ones_like",
}  # fmt: skip


LIKE_ITS_INPUT = {
    "add", "sub", "mul", "truediv", "neg", "pow", "sqrt", "rsqrt", "exp", "log", "where", "masked_fill",
    "clamp", "tanh", "sigmoid", "relu", "gelu", "silu", "softmax", "dropout", "clone", "to", "float",
    "type_as", "normalize", "scaled_dot_product_attention", "empty_like", "zeros_like", "ones_like",
}  # fmt: skip
"""Calls whose result may be a new tensor with the strides of their input."""


def is_fresh(changed: Node, node: Node) -> bool:
    """Whether a tensor that is changed in place was made by a call and is read by nobody else."""
    fresh = {"linear", "dropout", "layer_norm", "addmm", "matmul", "gelu", "add", "mul"}
    while list(changed.users) == [node]:
        source = is_same(changed)
        if source is None:
            return spelled(changed) in fresh and not in_place(changed) and example(changed) is not None
        changed, node = source, changed
    return False


def views_are_changed(node: Node) -> bool:
    """Whether a node's result, or a possible view of it, is modified in place.

    Whether a call returns a view or a copy depends on the layout of its input.
    """
    stack, seen = [node], {node}
    while stack:
        alias = stack.pop()
        for user in alias.users:
            if in_place(user):
                if not {alias, None}.isdisjoint(_targets(user)):
                    return True
            elif user not in seen and user.op != "output" and spelled(user) not in _FRESH:
                seen.add(user)
                stack.append(user)
    return False


def strides_matter(node: Node) -> bool:
    """Whether numbers depend on the strides of a node's result, or of what is made of it element by element.

    `as_strided` reads memory, and calls such as `flatten` return a view or a copy, of which the former changes in place
    with its source.
    """
    stack = [(node, False)]
    seen = {*stack}
    while stack:
        alias, may_copy = stack.pop()
        for user in alias.users:
            name = spelled(user)
            if name_of(user) == "as_strided":
                return True
            if in_place(user):
                if may_copy and not {alias, None}.isdisjoint(_targets(user)):
                    return True
            elif user.op == "output" or (name in _FRESH and name not in LIKE_ITS_INPUT):
                continue
            keeps = in_place(user) or name in LIKE_ITS_INPUT or (name in VIEWS and name not in ("reshape", "flatten"))
            if (found := (user, (may_copy or not keeps) and name not in _FRESH)) not in seen:
                seen.add(found)
                stack.append(found)
    return False


def is_detached(node: Node) -> bool:
    """Whether a call detaches a result in place: its example then needs no gradient, but earlier calls had it."""
    detaching = node.graph.find_nodes(op="call_method", target="detach_")
    return any(_memory(change.args[0]) == _memory(node) for change in detaching)


def readers_after(change: Node, place: Mapping[Node, int]) -> set[Node]:
    """The calls that read a tensor, or a view of it, after a call that changes it, but not as that call's result."""
    changed, at = _changed(change), place[change]
    before = [node for node in place if place[node] < at and not changed.isdisjoint({None, _memory(node)})]
    return {user for node in before for user in node.users if place[user] > at}


def leave(nodes: Sequence[Node]) -> bool:
    """Whether a graph returns the result of any of the nodes, or a view of it."""
    memory = set(map(_memory, nodes))
    given = nodes[0].graph.find_nodes(op="output")[0].all_input_nodes
    return None in memory or not memory.isdisjoint(_memory(node) for node in given)


@dataclasses.dataclass(frozen=True)
class State:
    """The autocast and gradient mode of a node, and the number of in-place changes before it."""

    autocast: tuple[Node, ...] = ()
    grad: Any = None
    changes: int = 0


def states(nodes: Iterable[Node], functional: Any = (), touched: Iterable[Node] | None = None) -> dict[Node, State]:
    """The state of each node.

    Args:
        nodes: the nodes of a graph, in order.
        functional: calls that will no longer modify anything in place.
        touched: if given, in-place changes count only in storages of these nodes' results.
    """
    state = State(grad=torch.is_grad_enabled())
    memory = None if touched is None else set(map(_memory, touched))
    found: dict[Node, State] = {}
    for node in nodes:
        name = _name(node) if is_state(node) else ""
        if name == "_enter_autocast":
            state = dataclasses.replace(state, autocast=(*state.autocast, node))
        elif name == "_exit_autocast":
            state = dataclasses.replace(state, autocast=tuple(n for n in state.autocast if n is not node.args[0]))
        elif name == "_set_grad_enabled":
            state = dataclasses.replace(state, grad=node.args[0])
        elif in_place(node) and node not in functional:
            counts = memory is None or (not _picks_kernels(node) and _meet(memory, _changed(node)))
            state = dataclasses.replace(state, changes=state.changes + counts)
        found[node] = state
    return found


def returned(graph: Graph) -> set[Node]:
    """Results with a gradient that a graph returns, so that the gradient may be requested.

    Complete only if no call that computes such a result also reads it.
    """
    found: set[Node] = set()
    for node in graph.find_nodes(op="output")[0].all_input_nodes:
        if (e := example(node)) is not None and e.requires_grad:
            found.update(unchanged(node))
    return found


def keeps_gradient(node: Node, state: State) -> bool:
    """Whether a call changes a tensor in place without gradients, so that the tensor keeps its gradient as it was."""
    e = example(node)
    return in_place(node) and state.grad is False and e is not None and e.requires_grad


def hide_cuts(graph: Graph) -> None:
    """Mark views through which torch passes no gradient, so that no spelling contains them.

    These are views made without gradients and read with them, and bits that are read as a dtype, even as their own.
    """
    modes = states(graph.nodes)
    for node in graph.nodes:
        is_bits = spelled(node) == "view" and isinstance(argument(node, 1, "dtype"), torch.dtype)
        if is_bits or (modes[node].grad is False and not in_place(node) and _is_read_with_gradients(node, modes)):
            node.meta[HIDDEN] = True


def _is_read_with_gradients(node: Node, modes: Mapping[Node, State]) -> bool:
    """Whether a result seems to need a gradient, as views of tensors that need one do, where a call reads it."""
    e = example(node)
    return e is not None and e.requires_grad and any(modes[user].grad is not False for user in node.users)


class Effects:
    """Decides which nodes of a graph can run as one call, at the position of the last one."""

    def __init__(self, graph: Graph) -> None:
        self._place = {node: i for i, node in enumerate(graph.nodes)}
        self._states = states(graph.nodes)
        self.returned = returned(graph)  # results whose gradient may be requested
        self.unread: set[object] = set()  # calls whose results are unused: values that only they read have no gradient
        for node in reversed(graph.nodes):
            pure = node.op in ("call_function", "call_method") and not in_place(node) and not is_state(node)
            if pure and all(user in self.unread for user in node.users):
                self.unread.add(node)
        # Calls that a gradient may reach; other calls need none, or are read only through `detach`. Without gradient
        # mode the distinction does not matter: all calls count as reached.
        self.reached = {node for node, state in self._states.items() if state.grad is False} | self._leads_out(graph)
        changing = (node for node in graph.nodes if in_place(node) and not _picks_kernels(node))
        self._changes = [(self._place[node], node, _changed(node)) for node in changing]

    def _leads_out(self, graph: Graph) -> set[object]:
        """Nodes that need gradients and lead to a result of the graph, or to an in-place change of one."""
        found: set[object] = set()
        memory = {_memory(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
        for node in reversed(graph.nodes):
            changes = in_place(node) and not _updated(node) and _meet(memory - {None}, _changed(node))
            if node.op == "output" or node in found or changes:
                needing = [n for n in node.all_input_nodes if (e := example(n)) is None or e.requires_grad]
                found.update(needing)
                memory.update(map(_memory, needing))
        return found

    def stays(self, node: Node) -> bool:
        """Whether nothing modifies a node's result in place."""
        return not any(_meet({_memory(node)}, changed) for _, _, changed in self._changes)

    def allow(self, nodes: Iterable[Node]) -> bool:
        """Whether nodes run in one mode, and no in-place change between them touches their inputs or results."""
        taken = {node for node in nodes if node.op not in ("placeholder", "get_attr")}
        states = [self._states[node] for node in taken]
        computing = {self._states[node].autocast for node in taken if is_same(node) is None}
        if len({state.grad for state in states}) > 1 or len(computing) > 1:
            return False
        if any(in_place(node) and self._is_seen(node, taken) for node in taken):
            return False
        places = [self._place[node] for node in taken]
        for i, node, changed in self._changes:
            if min(places) < i < max(places) and node not in taken:
                before = [t for t in taken if self._place[t] < i]  # later nodes run after the change in any case
                if _meet({_memory(t) for node in before for t in (node, *node.all_input_nodes)}, changed):
                    return False
        return True

    def is_across(self, nodes: Iterable[Node]) -> bool:
        """Whether a call between these nodes, and none of them, changes a tensor in place."""
        taken = set(nodes)
        places = [self._place[node] for node in taken if node in self._place]
        return any(min(places) < i < max(places) and node not in taken for i, node, _ in self._changes)

    def _is_seen(self, change: Node, taken: set[Node]) -> bool:
        """Whether a change cannot be a sum: a call that is not taken would see that it is not made, since only taken
        ones read its result, or the tensor's gradient would.
        """
        if spelled(change) != "iadd" or keeps_gradient(change, self._states[change]):
            return True
        return taken.issuperset(change.users) and not taken.issuperset(readers_after(change, self._place))


class CannotOrder(Exception):
    """No order of the nodes respects modes and in-place changes."""


def sort(graph: Graph, state: Mapping[Node, State], dead: Container[Node]) -> None:
    """Move every node after the nodes that it reads, otherwise keeping the order.

    Nodes that are `dead` will not run, so their in-place changes do not count.

    Nodes are moved instead of copied because Dynamo and Inductor hold references to them.

    Raises:
        CannotOrder: if there is no such order; the graph is then unchanged.
    """
    nodes = list(graph.nodes)
    last = nodes[0].prev  # the root of the linked list
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
    """Units that move together: single nodes in the first node's mode; nodes in another mode, sorted, as one unit."""
    base = _mode(state[nodes[0]])
    units: list[list[Node]] = []
    for own, group in itertools.groupby(nodes, lambda node: _mode(state[node]) == base):
        first, *others = group
        if own:
            if units and is_state(first):  # it ends the other mode
                units[-1].append(first)
            else:
                units.append([first])
            units += [[node] for node in others]
        else:
            units.append([first, *(_sorted(others, state, dead) if others else [])])
    return units


def _mode(state: State) -> tuple[object, object]:
    return state.autocast, state.grad

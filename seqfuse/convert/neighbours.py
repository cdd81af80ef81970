"""Why an operation is fused with nothing: the calls before and behind it, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch.fx import Node

from .chains import Chain
from .graph import is_same, name_of, spelled
from .raising import CHEAP, Raised, Value

_MOST = 2
"""Neighbours on one side that are named, at most."""


def alone(chain: Chain, operations: Sequence[Raised], why_left: Callable[[Node], str]) -> str:
    """The reason why a chain is not worth a call.

    Args:
        chain: of one operation, or of operations without a parameter.
        operations: all operations of the graph.
        why_left: says of a call that was not raised why.
    """
    makers = {node: r for r in operations for node in (*r.took, r.out)}
    readers = {node: r for r in reversed(operations) for node in r.took}
    inside = set(chain.members)

    def described(known: Mapping[Value, Raised], node: Node, between: Sequence[str]) -> str | None:
        r = known.get(node)
        if r in inside:
            return None
        if r is None:
            return f"{name_of(node)} ({why_left(node)})"
        path = f", by way of {' and '.join(between)}" if between else ""
        return f"{type(r.operation).__name__} (in another chain{path})"

    given = [n for r in chain.members for n in (r.x, *r.channels.values()) if isinstance(n, Node)]
    outs = [r.out for r in chain.members if isinstance(r.out, Node)]
    before, behind = list(map(_maker, given)), [found for out in outs for found in _readers(out)]
    entered = any(node.op in ("placeholder", "get_attr") for node, _ in before)
    left = any(node.op == "output" for node, _ in behind)
    made = _listed("made by", (described(makers, *found) for found in before if found[0].op.startswith("call")))
    read = _listed("read by", (described(readers, *found) for found in behind if found[0].op.startswith("call")))
    into = " and ".join([*made, *["given to the graph"] * entered])
    out = " and ".join([*read, *["returned"] * left])
    sides = "; ".join([*[f"its input is {into}"] * bool(into), *[f"its result is {out}"] * bool(out)])
    return f"{ALONE}: {sides}" if sides else ALONE


ALONE = "no operation beside it to fuse it with"


def _listed(verb: str, said: Iterable[str | None]) -> list[str]:
    names = list(dict.fromkeys(filter(None, said)))
    more = [f"{len(names) - _MOST} more"] if len(names) > _MOST else []
    return [f"{verb} {' and '.join(names[:_MOST] + more)}"] if names else []


def _passes(node: Node) -> bool:
    return spelled(node) in CHEAP or is_same(node) is not None


def _view(node: Node) -> list[str]:
    """The name of a view or cast, but for those that change nothing and the places of the parts of a split."""
    part = spelled(node) == "getitem" and isinstance(node.args[1], int)
    return [] if part or is_same(node) is not None else [name_of(node)]


def _maker(node: Node) -> tuple[Node, list[str]]:
    """What made a value before views and casts, and the names of these."""
    between = list[str]()
    while _passes(node) and node.args and isinstance(node.args[0], Node):
        between[:0] = _view(node)
        node = node.args[0]
    return node, between


def _readers(node: Node, between: Sequence[str] = ()) -> Iterator[tuple[Node, Sequence[str]]]:
    """What reads a value behind views and casts, and the names of these."""
    for user in node.users:
        if _passes(user):
            yield from _readers(user, [*between, *_view(user)])
        else:
            yield user, between

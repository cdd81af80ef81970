"""Mixtures of experts: what stands for them in a graph, and the router before them, by what it makes of logits."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ... import ops
from ...operation import FusableOperation
from ..experts import operations
from ..graph import argument, back, channel, example, is_fixed, numbers, read_by, spelled
from ..raising import META, Found, Given, Inner, Raised, Value, matcher

_DIVIDE, _DIVIDE_IN_PLACE = (getattr(operator, name) for name in ("truediv", "itruediv"))
_ROWS = 256
"""Tokens of which a router is compared with `Route`."""


def raise_mixture(node: Node) -> Found:
    """`convert.experts.mixture`, with the router whose experts and factors it reads."""
    args: Any = node.args
    x, experts, probs, up, up_bias, down, down_bias, unit = args
    shapes = [e.shape for given in (up, down) if (e := example(given)) is not None]
    e, chosen = example(x), example(experts)
    if (
        len(shapes) != 2
        or e is None
        or chosen is None
        or not is_fixed(*(n for s in shapes for n in s), chosen.shape[-1])
    ):
        return "its sizes are not known"
    names = {"experts": channel(experts), "probs": channel(probs)}
    names |= {name: f"{name}_{node.name}" for name in ("offsets", "rows")}
    sequence = operations(shapes[0], shapes[1], chosen.shape[-1], up_bias is not None, unit, e.dtype, **names)
    permute, first, act, second, unpermute = cast("tuple[FusableOperation, ...]", tuple(sequence))
    given = [_given(up, up_bias), _given(down, down_bias)]
    found: list[Raised] = []
    route = _route(back(x), experts, probs)
    values: list[Value] = [x, *(Inner() for _ in range(4)), node]
    if route is not None:
        values.insert(1, Inner())
        found.append(Raised(route[0], x, values[1], node, route[1]))
        values = values[1:]
    outside = {} if route is not None else {channel(experts): experts}
    factors = {} if route is not None else {channel(probs): probs}
    about: list[tuple[Any, dict[str, Given], dict[str, Node]]] = [
        (permute, {}, outside), (first, given[0], {}), (act, {}, {}), (second, given[1], {}), (unpermute, {}, factors),
    ]  # fmt: skip
    for (operation, parameters, channels), before, after in zip(about, values[:-1], values[1:], strict=True):
        found.append(Raised(operation, before, after, node, parameters, channels))
    return found


def _given(weight: Any, bias: Any) -> dict[str, Given]:
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


def _route(x: Any, experts: Node, probs: Node) -> tuple[ops.Route, dict[str, Given]] | None:
    """The router that chose experts and factors of x, if it is one of this library's, and its parameters."""
    behind = _behind(experts) & _behind(probs)
    logits = next((n for n in reversed(list(experts.graph.nodes)) if n in behind and spelled(n) == "linear"), None)
    if logits is None:
        return None
    source, weight, bias = (argument(logits, i, name) for i, name in enumerate(("input", "weight", "bias")))
    e, w, chosen, given = example(x), example(weight), example(experts), example(logits)
    weight = back(weight)
    if _rows_of(source) is not _rows_of(x) or e is None or w is None or chosen is None or given is None:
        return None
    if not is_fixed(*w.shape, chosen.shape[-1]) or given.ndim != 2 or not e.dtype == w.dtype == given.dtype:
        return None
    count, width = w.shape
    found = _like(logits, experts, probs, count, chosen.shape[-1])
    if found is None:
        return None
    configuration, correction = found
    made = ops.Route(
        width, count, chosen.shape[-1], bias=bias is not None, correction=correction is not None, device=META,
        dtype=w.dtype, to=(channel(experts), channel(probs)), **configuration,
    )  # fmt: skip
    return made, _given(weight, bias) | ({} if correction is None else {"correction": correction})


def _rows_of(node: Any) -> Any:
    """What a matrix is rows of, by way of views and of casts that change nothing."""
    while isinstance(node := back(node), Node) and spelled(node) in ("view", "reshape", "flatten"):
        before, after = example(node.args[0]), example(node)
        if before is None or after is None or before.shape[-1] != after.shape[-1]:
            break
        node = node.args[0]
    return node


def _behind(node: Node) -> set[Node]:
    """The nodes that a node is made of."""
    found, stack = set[Node](), [node]
    while stack:
        at = stack.pop()
        if at not in found:
            found.add(at)
            stack += read_by(at)
    return found


def _like(
    logits: Node, experts: Node, probs: Node, count: int, top_k: int
) -> tuple[dict[str, Any], Node | None] | None:
    """The configuration of a `Route` that does of logits what the graph does, found by trying it; its correction."""
    (rows, _), generator = numbers(example(logits).shape), torch.Generator().manual_seed(0)  # pyright: ignore[reportOptionalMemberAccess]
    correction = 0.3 * torch.randn(count, generator=generator)
    # As many rows at a time as the graph has, which may say so; of a few, experts may be the same by chance.
    draws = [torch.randn(rows, count, generator=generator) for _ in range(-(-_ROWS // max(1, rows)))]
    made = [_computed(drawn, correction, logits, experts, probs) for drawn in draws]
    if not all(made):
        return None
    drawn, (chosen, factors, corrected) = torch.cat(draws), zip(*(one for one in made if one is not None), strict=True)
    chosen, factors, corrected = torch.cat(chosen), torch.cat(factors), corrected[0]
    narrow = factors.dtype.itemsize < 4
    order = chosen.argsort(-1)
    chosen, factors = chosen.gather(-1, order), factors.double().gather(-1, order)
    weight = torch.eye(count)
    for given in _configurations(count, top_k):
        try:
            route = ops.Route(count, count, top_k, correction=corrected is not None, **given)
        except ValueError:
            continue
        route.weight = torch.nn.Parameter(weight)
        if corrected is not None:
            route.correction = correction
        with torch.no_grad():
            _, found, _ = route.fwd(drawn)
        order = found["experts"].argsort(-1)
        mine = found["probs"].double().gather(-1, order)
        if not torch.equal(found["experts"].gather(-1, order), chosen):
            continue
        scale = float((factors / mine).median())
        if torch.allclose(mine * scale, factors, rtol=1e-2 if narrow else 1e-4, atol=1e-6):
            return {**given, "scale": round(scale, 6)}, corrected
    return None


def _configurations(count: int, top_k: int) -> Iterator[dict[str, Any]]:
    cuts: list[tuple[int, int] | None] = [None]
    cuts += [(n, m) for n in range(2, count + 1) if count % n == 0 for m in range(1, n) if m * (count // n) >= top_k]
    for groups, score, normalize in itertools.product(cuts, ("softmax", "sigmoid"), (True, False)):
        yield {"groups": groups, "score": score, "normalize": normalize}


def _computed(
    drawn: Tensor, correction: Tensor, logits: Node, experts: Node, probs: Node
) -> tuple[Tensor, Tensor, Node | None] | None:
    """What the calls behind logits make of numbers, and what else they read, a number for each expert.

    `None` where they read more.
    """
    corrected: Node | None = None
    between, behind = _behind(experts) | _behind(probs), _behind(logits)
    for node in reversed(list(logits.graph.nodes)):  # those that give a shape alone, too
        between.update(node.all_input_nodes if node in between and node not in behind else ())
    values: dict[Node, Any] = {logits: drawn}
    with torch.no_grad():
        for node in logits.graph.nodes:
            if node not in between or node in behind or not any(inner in values for inner in node.all_input_nodes):
                continue
            if node.op not in ("call_function", "call_method"):
                return None
            for inner in read_by(node):
                e = example(inner)
                if inner not in values and corrected is None and e is not None and e.shape == correction.shape:
                    values[corrected := inner] = correction.to(e.dtype)
            like = {inner: example(inner) for inner in node.all_input_nodes if inner not in values}
            if any(e is None or inner in read_by(node) for inner, e in like.items()):
                return None
            of = {**values, **{inner: torch.empty(0, dtype=e.dtype) for inner, e in like.items() if e is not None}}
            args: Any = map_arg(node.args, of.__getitem__)
            kwargs: Any = map_arg(node.kwargs, of.__getitem__)
            target: Any = node.target
            if node.op == "call_method":
                first, *rest = args
                values[node] = getattr(first, target)(*rest, **kwargs)
            else:
                values[node] = target(*args, **kwargs)
    return values[experts], values[probs], corrected


def functional(graph: Graph) -> None:
    """Let routers make tensors where they change one of their own in place: the factors that they divide, and masks.

    The tensor is one that the graph made, and that nobody has read before but for its numbers as they were.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        values = node.args[0] if node.args else None
        if not isinstance(values, Node):
            continue
        later = [user for user in values.users if place[user] > place[node]]
        of = spelled(values.args[0]) if spelled(values) == "getitem" else spelled(values)
        if node.target is _DIVIDE_IN_PLACE and of in ("topk", "gather"):
            if not later:
                node.target = _DIVIDE
        elif node.target == "scatter_" and spelled(values) == "zeros_like" and len(later) == len(values.users) - 1:
            node.target = "scatter"
            for user in later:
                user.replace_input_with(values, node)


MATCHERS = (matcher(raise_mixture, "mixture"),)

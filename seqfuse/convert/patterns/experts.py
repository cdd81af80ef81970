"""Mixtures of experts: their nodes in a graph, and the router before them, recognized by its function of the logits."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ... import ops
from ..dtensor import shards_of
from ..effects import keeps_gradient, readers_after, states
from ..experts import operations, unit_like
from ..graph import alike, argument, back, called, channel, example, is_fixed, numbers, read_by, spelled, unflattened
from ..raising import META, Found, behind, in_turn, matcher
from ..writer import Writer

_DIVIDE, _DIVIDE_IN_PLACE = (getattr(operator, name) for name in ("truediv", "itruediv"))
_PRODUCTS = ("bmm", "matmul")
_ROWS = 256
"""Tokens of which a router is compared with `Route`."""


def raise_mixture(node: Node, router: bool = True) -> Found:
    """`convert.experts.mixture`, with the `router` whose experts and factors it reads."""
    args: Any = node.args
    x, experts, probs, up, up_bias, down, down_bias, unit = args
    shapes = [e.shape for given in (up, down) if (e := example(given)) is not None and is_fixed(*e.shape)]
    e, chosen = example(x), example(experts)
    if len(shapes) != 2 or e is None or chosen is None or not is_fixed(chosen.shape[-1]):
        return "its sizes are not known"
    names = {"experts": channel(experts), "probs": channel(probs)}
    names |= {name: f"{name}_{node.name}" for name in ("offsets", "rows")}
    sequence = operations(shapes[0], shapes[1], chosen.shape[-1], up_bias is not None, unit, e.dtype, **names)
    sequence[1].shards, sequence[3].shards = shards_of([up]), shards_of([down])
    parameters: Any = [{}, _given(up, up_bias), {}, _given(down, down_bias), {}]
    channels: Any = [{channel(experts): experts}, {}, {}, {}, {channel(probs): probs}]
    steps: list[Any] = [*zip(sequence, parameters, channels, strict=True)]
    route, out = _route(back(x), experts, probs) if router else None, node
    if route is not None:
        x, out = unflattened(x, node)  # nothing else says how many dimensions it has
        steps = [route, *(step[:2] for step in steps)]
    return in_turn(steps, x, out, node)


def raise_batched(node: Node) -> Found:
    """Every expert for every token by `bmm`, of tokens times the factor of the one expert that each has, as Llama 4."""
    second = _rows_of(node.args[0]) if argument(node, 1, "dim") in (0, (0,), [0]) else None
    if not isinstance(second, Node) or spelled(second) not in _PRODUCTS or not isinstance(second.args[0], Node):
        return None
    inner, down = cast("tuple[Node, Node]", second.args)
    first = _last_of(_PRODUCTS, behind([inner]))
    product = None if first is None else _rows_of(first.args[0])
    if first is None or not isinstance(product, Node) or spelled(product) != "mul":
        return None
    up = cast(Node, first.args[1])
    shapes = [numbers(e.shape) for given in (up, down) if (e := example(given)) is not None and is_fixed(*e.shape)]
    repeated = next((n for n in product.all_input_nodes if spelled(n) == "repeat"), None)
    if len(shapes) != 2 or repeated is None or len(product.all_input_nodes) != 2:
        return None
    x, experts = back(repeated.args[0]), shapes[0][0]
    (factor,) = (n for n in product.all_input_nodes if n is not repeated)
    logits = _last_of(("linear",), behind([factor]))
    e, wanted = example(x), (experts, 1)
    if e is None or logits is None or e.ndim != 2 or repeated.args[1:] not in (wanted, (wanted,)):
        return None
    source, weight, bias = (argument(logits, i, name) for i, name in enumerate(("input", "weight", "bias")))
    w = example(weight)
    if _rows_of(source) is not _rows_of(x) or w is None or tuple(w.shape) != (experts, e.shape[-1]):
        return None
    (count, width, inside), hidden = shapes[0], shapes[1][1]
    unit = unit_like(lambda drawn: _value(inner, {first: drawn}), shape=(count, 5, inside))
    if unit is None or not _is_best_of(logits, factor, experts):
        return None
    names = {name: f"{name}_{node.name}" for name in ("experts", "probs", "offsets", "rows")}
    to, biased = (names["experts"], names.pop("probs")), bias is not None
    route = ops.Route(width, count, 1, "sigmoid", False, biased, to=to, device=META, dtype=e.dtype)
    ups, downs = ({"weight": Writer(node)("transpose", given, -2, -1)} for given in (up, down))
    sequence = operations((count, inside, width), (count, width, hidden), 1, False, unit, e.dtype, **names, probs=None)
    sequence[1].shards, sequence[3].shards = shards_of([*ups.values()]), shards_of([*downs.values()])
    given: Any = [{}, ups, {}, downs, {}]
    steps = [(route, _given(back(weight), bias)), (ops.TokenScale(to[1]),), *zip(sequence, given, strict=True)]
    return in_turn(steps, x, node, node)


def _is_best_of(logits: Node, factor: Node, count: int) -> bool:
    """Whether the factors are sigmoids of the greatest logit of each token, and zeros for the other experts."""
    (tokens, _) = numbers(example(logits).shape)  # pyright: ignore[reportOptionalMemberAccess]
    drawn = 4 * torch.randn(tokens, count, generator=torch.Generator().manual_seed(0))
    best = drawn.max(-1, keepdim=True)
    expected = torch.zeros_like(drawn).scatter(1, best.indices, best.values.sigmoid())
    with torch.no_grad():
        found: Tensor = _value(factor, {logits: drawn})
    tolerance = 1e-2 if example(factor).dtype.itemsize < 4 else 1e-5  # pyright: ignore[reportOptionalMemberAccess]
    return torch.allclose(found.float().reshape(count, tokens).t(), expected, rtol=tolerance, atol=1e-6)


def _value(node: Any, known: dict[Node, Any]) -> Any:
    """What the calls of a graph make of the values that are known; raises `KeyError` for others."""
    if node not in known:
        if node.op not in ("call_function", "call_method"):
            raise KeyError(node)
        known[node] = called(node, lambda n: _value(n, known))
    return known[node]


def _given(weight: Any, bias: Any) -> dict[str, Node]:
    return {"weight": weight} if bias is None else {"weight": weight, "bias": bias}


def _route(x: Any, experts: Node, probs: Node) -> tuple[ops.Route, dict[str, Node]] | None:
    """The router that chose experts and factors of x, if it is one of this library's, and its parameters."""
    logits = _last_of(("linear",), behind([experts]) & behind([probs]))
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


def _last_of(calls: Sequence[str], nodes: set[Node]) -> Node | None:
    """The last of these calls among nodes of a graph."""
    every = [n for node in itertools.islice(nodes, 1) for n in node.graph.nodes]
    return next((n for n in reversed(every) if n in nodes and spelled(n) in calls), None)


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
    between, before = behind([experts, probs]), behind([logits])
    for node in reversed(list(logits.graph.nodes)):  # those that give a shape alone, too
        between.update(node.all_input_nodes if node in between and node not in before else ())
    values: dict[Node, Any] = {logits: drawn}
    with torch.no_grad():
        for node in logits.graph.nodes:
            if node not in between or node in before or not any(inner in values for inner in node.all_input_nodes):
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
            values[node] = called(node, of.__getitem__)
    return values[experts], values[probs], corrected


_FRESH = {"scatter_": ("zeros_like", "full_like"), "add_": ("linear",)}
"""Changes in place, and the calls that make the tensors of which a changed copy is as good."""


def functional(graph: Graph) -> None:
    """Let blocks of experts make tensors where they change one of their own in place: the factors that a router
    divides, its masks, and the result of an expert of all tokens, to which that of the others is added.

    The tensor is one that the graph made, and that nobody has read before but for its numbers as they were.
    """
    place, modes = {node: i for i, node in enumerate(graph.nodes)}, states(graph.nodes)
    for node in graph.nodes:
        values = node.args[0] if node.args else None
        if not isinstance(values, Node):
            continue
        later = [user for user in values.users if place[user] > place[node]]
        of = spelled(values.args[0]) if spelled(values) == "getitem" else spelled(values)
        if node.target is _DIVIDE_IN_PLACE and of in ("topk", "gather"):
            if not readers_after(node, place):
                node.target = _DIVIDE
        elif (
            spelled(values) in _FRESH.get(node.target, ())
            and (node.target == "scatter_" or alike(values, node.args[1]))
            and len(later) == len(values.users) - 1
            and not keeps_gradient(node, modes[node])
        ):
            node.target = node.target[:-1]
            for user in later:
                user.replace_input_with(values, node)


MATCHERS = (
    matcher(raise_mixture, "mixture"),
    matcher(functools.partial(raise_mixture, router=False), "mixture"),  # where logits or factors leave the model
    matcher(raise_batched, "sum"),
)

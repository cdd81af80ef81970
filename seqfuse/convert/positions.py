"""What a graph makes of positions alone: each element as a function of its indices, exact for all sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from .effects import in_place
from .graph import argument, example, same_shape, same_size, spelled
from .indices import (
    Choice,
    Index,
    Known,
    chosen,
    constant,
    fixed,
    in_shape,
    looked_up,
    mapped,
    placed,
    sliced,
    where_natural,
)

OUTER = "outer"
"""What an input of a graph that another graph calls has as a name of the node that it is there."""

TRIANGLE = "seqfuse_triangle"
"""Where the node of a buffer notes the number on and below its diagonal, and the one above, if it is a triangle."""


class Values:
    """What is known of the values of nodes.

    Attributes:
        found: that of each node that was looked at.
    """

    def __init__(self) -> None:
        self.found: dict[Node, Known] = {}

    def of(self, given: Any) -> Known:
        """What is known of a node, or of a number that a call is given."""
        if isinstance(given, Node):
            given = given.meta.get(OUTER, given)
        number = _number(given)
        if number is not None:
            return constant(number, torch.float64) if isinstance(number, float) else Index(number, {})
        if isinstance(given, Node) and given not in self.found:
            e, self.found[given] = example(given), None
            if e is not None and TRIANGLE in given.meta:
                yes, no = (torch.tensor(number, dtype=e.dtype, device="cpu") for number in given.meta[TRIANGLE])
                self.found[given] = Choice((Index(0, {-2: 1, -1: -1}),), yes, no)
            elif e is not None and is_known(given):
                try:
                    found = _RULES[_name(given)](self, given, e)
                except Exception:  # a spelling that nobody thought of
                    found = None
                if isinstance(found, Choice):
                    yes, no = found.yes.to(e.dtype), found.no.to(e.dtype)
                    found = Choice((), yes, yes) if yes == no else found._replace(yes=yes, no=no)
                elif e.dtype is not torch.int64:
                    found = None
                self.found[given] = mapped(found, partial(in_shape, shape=e.shape))
        return self.found.get(given)

    def index(self, given: Any) -> Index | None:
        """A value that is an integer."""
        found = self.of(given)
        if isinstance(found, Choice):
            return Index(int(found.yes), {}) if found.is_fixed and not found.yes.is_floating_point() else None
        return found

    def choice(self, given: Any) -> Choice | None:
        """A value that is one of two numbers, or one number."""
        found = self.of(given)
        if isinstance(found, Index):
            start = None if found.steps else fixed(found.start)
            return None if start is None else constant(start, torch.int64)
        return found


def is_known(node: Node) -> bool:
    """Whether something may be known of what a node makes; such a call need not run if nobody reads it."""
    return _name(node) in _RULES and not in_place(node)


def _name(node: Node) -> str:
    return (spelled(node) or "").strip("_")


def _number(given: Any) -> Any:
    value = given.meta.get("example_value", given.meta.get("val")) if isinstance(given, Node) else given
    return value if isinstance(value, int | float | SymInt) else None


def _arange(values: Values, node: Node, e: Tensor) -> Known:
    place = 0 if len(node.args) > 1 else len(node.args)
    start, step = values.index(argument(node, place, "start", 0)), argument(node, 2, "step", 1)
    return Index(start.start, {-1: step}) if start is not None and isinstance(step, int) else None


def _filled(values: Values, node: Node, e: Tensor, place: int, name: str, number: Any = None) -> Known:
    number = fixed(_number(argument(node, place, name))) if number is None else number
    return None if number is None else constant(number, e.dtype)


def _sum(values: Values, node: Node, e: Tensor, factor: int) -> Known:
    a, b = map(values.index, node.args)
    if a is None or b is None or e.dtype is not torch.int64 or node.kwargs:
        return _pointwise(values, node, e)
    return a.plus(b, factor)


def _compared(values: Values, node: Node, e: Tensor) -> Known:
    a, b = map(values.index, node.args)
    if a is None or b is None:
        return _pointwise(values, node, e)
    name, one, above, below = _name(node), Index(1, {}), b.plus(a, -1), a.plus(b, -1)
    if name not in ("eq", "ne"):
        limit = above if name in ("le", "lt") else below
        return where_natural(limit.plus(one, -1) if name in ("lt", "gt") else limit)
    if not above.steps and fixed(above.start) == 0:
        return constant(name == "eq", torch.bool)
    differ = any(gap.plus(one, -1).is_natural(e.shape) for gap in (above, below))
    return constant(name == "ne", torch.bool) if differ else None


def _pointwise(values: Values, node: Node, e: Tensor) -> Known:
    """A function of numbers and of one choice: that of each number that it may be."""
    parts = [values.choice(a) if isinstance(a, Node) else a for a in node.args]
    choices = [p for p in parts if isinstance(p, Choice)]
    made = [p for p in choices if not p.is_fixed] or choices[:1]
    if node.kwargs or len(made) != 1 or any(p is None for p in parts):
        return None
    call: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    yes, no = (call(*(getattr(p, pick) if isinstance(p, Choice) else p for p in parts)) for pick in ("yes", "no"))
    return made[0]._replace(yes=yes, no=no)


def _both(values: Values, node: Node, e: Tensor) -> Known:
    """Both of two masks; of one that is not known, at most the other."""
    a, b = map(values.choice, node.args)
    no = constant(False, torch.bool)
    if e.dtype is not torch.bool:
        return None
    if a is None or b is None:
        return chosen(a or b, Choice((), ~no.yes, no.yes, exact=False), no)
    return chosen(a, b, no) or chosen(b, a, no)


def _either(values: Values, node: Node, e: Tensor) -> Known:
    a, b = map(values.choice, node.args)
    yes = constant(True, torch.bool)
    return (chosen(a, yes, b) or chosen(b, yes, a)) if e.dtype is torch.bool else None


def _where(values: Values, node: Node, e: Tensor, order: tuple[int, ...]) -> Known:
    given = [values.choice(node.args[i]) for i in order]
    if spelled(node) == "where" and node.op == "call_method":  # of x: x.where(c, y)
        given[:2] = given[1::-1]
    return chosen(*given)


def _triangle(values: Values, node: Node, e: Tensor, sign: int) -> Known:
    inside = Index(sign * argument(node, 1, "diagonal", 0), {-2: sign, -1: -sign})
    return chosen(where_natural(inside), values.choice(node.args[0]), constant(0, e.dtype))


def _cumsum(values: Values, node: Node, e: Tensor) -> Known:
    x, dim = values.index(node.args[0]), argument(node, 1, "dim")
    step = None if x is None or x.steps else fixed(x.start)
    return None if step is None else Index(step, {dim if dim < 0 else dim - e.ndim: step} if step else {})


def _diff(values: Values, node: Node, e: Tensor) -> Known:
    """Differences along a dimension that are one number, the first of them as well."""
    x, dim, first = values.index(node.args[0]), argument(node, 2, "dim", -1), argument(node, 3, "prepend")
    if x is None or argument(node, 1, "n", 1) != 1 or argument(node, 4, "append") is not None:
        return None
    dim = dim if dim < 0 else dim - e.ndim
    step = x.steps.get(dim, 0)
    if first is not None:
        before = Index(x.start - step, {d: s for d, s in x.steps.items() if d != dim})
        given, t = values.index(first), example(first)
        gap = None if given is None else given.plus(before, -1)
        if gap is None or t is None or gap.steps or fixed(gap.start) != 0 or fixed(t.shape[dim]) != 1:
            return None
    return Index(step, {})


def _cast(values: Values, node: Node, e: Tensor) -> Known:
    return values.of(node.args[0]) if e.dtype is torch.int64 else values.choice(node.args[0])


def _viewed(values: Values, node: Node, e: Tensor) -> Known:
    """A view that adds or takes away dimensions of size 1, and no others."""
    source = example(node.args[0])
    if source is None or source.dtype is not e.dtype:
        return None
    before, after = ([d for d in range(-t.ndim, 0) if fixed(t.shape[d]) != 1] for t in (source, e))
    same = same_shape([source.shape[d] for d in before], [e.shape[d] for d in after])
    place = dict(zip(before, after, strict=True)) if same else {}
    return mapped(values.of(node.args[0]), partial(placed, place=place))


def _expanded(values: Values, node: Node, e: Tensor) -> Known:
    source = example(node.args[0])
    kept = [] if source is None else [d for d in range(-source.ndim, 0) if same_size(source.shape[d], e.shape[d])]
    return mapped(values.of(node.args[0]), partial(placed, place=dict(zip(kept, kept, strict=True))))


def _getitem(values: Values, node: Node, e: Tensor) -> Known:
    source, x, given = example(node.args[0]), values.of(node.args[0]), cast("Any", node.args[1])
    index: list[Any] = [*given] if isinstance(given, tuple) else [given]
    if source is None:
        return None
    if len(index) == source.ndim and all(example(i) is not None for i in index):
        return mapped(x, partial(looked_up, places=[values.of(i) for i in index], shape=e.shape))
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
        return None
    at = next((d for d, i in enumerate(index) if i is Ellipsis), len(index))
    rest = source.ndim - sum(i is not None and i is not Ellipsis for i in index)
    index = [*index[:at], *[slice(None)] * rest, *index[at + 1 :]]
    return mapped(x, partial(sliced, index=index, dims=source.ndim))


_RULES: dict[str, Callable[[Values, Node, Tensor], Known]] = {
    "arange": _arange, "cumsum": _cumsum, "diff": _diff, "getitem": _getitem,
    "where": partial(_where, order=(0, 1, 2)), "masked_fill": partial(_where, order=(1, 2, 0)),
    "tril": partial(_triangle, sign=1), "triu": partial(_triangle, sign=-1),
    "add": partial(_sum, factor=1), "sub": partial(_sum, factor=-1),
    **dict.fromkeys(("full", "full_like"), partial(_filled, place=1, name="fill_value")),
    "new_full": partial(_filled, place=2, name="fill_value"), "tensor": partial(_filled, place=0, name="data"),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), partial(_filled, place=0, name="", number=1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), partial(_filled, place=0, name="", number=0)),
    **dict.fromkeys(("le", "lt", "ge", "gt", "eq", "ne"), _compared),
    **dict.fromkeys(("mul", "truediv", "neg", "invert", "bitwise_not", "logical_not"), _pointwise),
    **dict.fromkeys(("and", "bitwise_and", "logical_and"), _both),
    **dict.fromkeys(("or", "bitwise_or", "logical_or"), _either),
    **dict.fromkeys(("to", "bool", "int", "long", "float", "double", "half", "bfloat16", "type", "type_as"), _cast),
    **dict.fromkeys(("contiguous", "clone", "detach"), _cast),
    **dict.fromkeys(("unsqueeze", "squeeze", "view", "reshape", "flatten"), _viewed),
    **dict.fromkeys(("expand", "expand_as", "repeat"), _expanded),
}  # fmt: skip

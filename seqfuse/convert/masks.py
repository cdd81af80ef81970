"""Recognizes causal and sliding-window attention masks, for all sizes, if a graph computes them only from positions.

Each element of such a tensor is known as a function of its indices: an integer that grows in steps, or one of two
numbers, depending on the signs of such integers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .effects import are_changed, in_place
from .graph import alike, argument, back, example, fixed, numbers, same_shape, same_size, spelled, value_of
from .writer import written_behind

OUTER = "outer"
"""Key in a node's `meta`, for an input of a graph that another graph calls: the node that is passed there."""

TRIANGLE = "seqfuse_triangle"
"""Key in a buffer node's `meta`, if it is a triangle: the numbers on and below its diagonal, and above it."""


def limited(mask: Any, how: dict[str, Any], qkv: tuple[Any, Any, Any], by_hand: bool, window: bool) -> Any:
    """The mask that attention needs; `None` if options, which are added to `how`, have the same effect.

    Args:
        mask: the mask of the scores, or `None`.
        how: the options.
        qkv: queries, keys and values.
        by_hand: whether `softmax` computes the weights, which returns NaN for rows that are all -inf.
        window: whether attention has an option for a sliding window.
    """
    rows, keys = example(qkv[0]), example(qkv[1])
    if rows is None or keys is None or mask is None:
        return mask
    found = limits_of(mask, rows.shape[-2], keys.shape[-2])
    if found is not None:
        how["causal"] = found.causal or how.get("causal", False)
        # Torch's CPU kernel has no window, and its other implementations are slower than this kernel with a mask.
        slow = rows.device.type == "cpu" and not how["dropout"] and how.get("softcap") is None
        if found.window is not None and (not window or (slow and found.window < numbers(rows.shape)[-2])):
            found = found._replace(exact=False)
        if found.exact:
            how |= {} if found.window is None else {"window": found.window}
            return None
    mask = back(mask)
    return written_behind(mask, nan_in_rows_of_nothing) if by_hand else mask


def scores_of(filled: Any, how: dict[str, Any]) -> Node | None:
    """The scores in which a call fills hidden elements, if options, which are added to `how`, have the same effect."""
    e, name = example(filled), spelled(filled)
    scores = next((n for n in filled.all_input_nodes if alike(n, filled)), None) if name in FILLING else None
    if e is None or scores is None:
        return None
    found = limits_of(filled, e.shape[-2], e.shape[-1], scores)
    if found is None or not found.exact:
        return None
    how |= {"causal": found.causal, "window": found.window}
    return scores


FILLING = ("masked_fill", "where")


def nan_in_rows_of_nothing(mask: Tensor) -> Tensor:
    """A mask with NaN in rows that are all -inf, as softmax returns for them; attention would return zeros."""
    return mask.masked_fill((mask == -torch.inf).all(-1, keepdim=True), torch.nan)


class Limits(NamedTuple):
    """The keys that row i attends to: none after i if `causal`, fewer than `window` on each side; these if `exact`."""

    causal: bool
    window: int | None
    exact: bool


def limits_of(mask: Any, rows: Any, keys: Any, scores: Node | None = None) -> Limits | None:
    """The limits of a mask, or of masked scores, that are proved for these numbers of rows and keys, or `None`."""
    e, values = example(mask), KnownValues()
    if scores is not None:
        values.found[scores] = constant(0, torch.float64)  # stands in for the scores, to which the mask is added
    made = None if e is None or (e.requires_grad and scores is None) else values.choice(mask)
    if e is None or made is None:
        return None
    added, exact = e.is_floating_point(), made.exact
    seen, unseen = (0.0, torch.finfo(e.dtype).min) if added else (True, False)
    found = next((c for c in made.spellings if c.yes == seen and (c.no <= unseen or not c.where)), None)
    if found is None:
        return None
    reach: dict[int, int] = {}  # number of keys that a row sees before (1) and after it (-1)
    for limit in found.where:
        start = fixed(limit.start)
        if limit.is_natural(e.shape):
            continue
        if start is None or start < 0 or limit.steps not in ({-2: 1, -1: -1}, {-2: -1, -1: 1}):
            exact = False
        else:
            way = limit.steps[-1]
            reach[way] = min(start, reach.get(way, start))
    before, behind = reach.get(1), reach.get(-1)
    fits = (not reach or same_size(rows, keys)) and (exact or not added)
    if not fits or not (behind == 0 or (exact and before == behind)):
        return None
    if are_changed([node for node, value in values.found.items() if value is not None]):
        return None
    return Limits(behind == 0, None if before is None else before + 1, exact)


class KnownValues:
    """The known values of nodes."""

    def __init__(self) -> None:
        self.found: dict[Node, KnownValue] = {}  # by node, for each node that was analyzed

    def of(self, given: Any) -> KnownValue:
        """The known value of a node, or of a number in the arguments of a call."""
        if isinstance(given, Node):
            given = given.meta.get(OUTER, given)
        number = _number(given)
        if number is not None:
            return constant(number, torch.float64) if isinstance(number, float) else Index(number, {})
        if isinstance(given, Node) and given not in self.found:
            e, self.found[given] = example(given), None
            if e is not None and TRIANGLE in given.meta:
                yes, no = (torch.tensor(number, dtype=e.dtype, device="cpu") for number in given.meta[TRIANGLE])
                self.found[given] = Selection((Index(0, {-2: 1, -1: -1}),), yes, no)
            elif e is not None and is_known(given):
                try:
                    found = _RULES[_name(given)](self, given, e)
                except Exception:  # an unexpected form
                    found = None
                if isinstance(found, Selection):
                    yes, no = found.yes.to(e.dtype), found.no.to(e.dtype)
                    found = Selection((), yes, yes) if yes == no else found._replace(yes=yes, no=no)
                elif e.dtype is not torch.int64:
                    found = None
                self.found[given] = mapped(found, partial(in_shape, shape=e.shape))
        return self.found.get(given)

    def index(self, given: Any) -> Index | None:
        """A known value as an integer."""
        found = self.of(given)
        if isinstance(found, Selection):
            return Index(int(found.yes), {}) if found.is_fixed and not found.yes.is_floating_point() else None
        return found

    def choice(self, given: Any) -> Selection | None:
        """A known value as one of two numbers, or as one number."""
        found = self.of(given)
        if isinstance(found, Index):
            start = None if found.steps else fixed(found.start)
            return None if start is None else constant(start, torch.int64)
        return found


def is_known(node: Node) -> bool:
    """Whether the value of a node may be known; such a call is removed if nothing reads it."""
    return _name(node) in _RULES and not in_place(node)


def _name(node: Node) -> str:
    return (spelled(node) or "").strip("_")


def _number(given: Any) -> Any:
    value = value_of(given) if isinstance(given, Node) else given
    return value if isinstance(value, int | float | SymInt) else None


def _arange(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
    place = 0 if len(node.args) > 1 else len(node.args)
    start, step = values.index(argument(node, place, "start", 0)), argument(node, 2, "step", 1)
    return Index(start.start, {-1: step}) if start is not None and isinstance(step, int) else None


def _filled(values: KnownValues, node: Node, e: Tensor, place: int, name: str, number: Any = None) -> KnownValue:
    number = fixed(_number(argument(node, place, name))) if number is None else number
    return None if number is None else constant(number, e.dtype)


def _sum(values: KnownValues, node: Node, e: Tensor, factor: int) -> KnownValue:
    a, b = map(values.index, node.args)
    if a is None or b is None or e.dtype is not torch.int64 or node.kwargs:
        return _pointwise(values, node, e)
    return a.plus(b, factor)


def _compared(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
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


def _pointwise(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
    """A function of numbers and of one selection, applied to both of its numbers."""
    parts = [values.choice(a) if isinstance(a, Node) else a for a in node.args]
    choices = [p for p in parts if isinstance(p, Selection)]
    made = [p for p in choices if not p.is_fixed] or choices[:1]
    if node.kwargs or len(made) != 1 or any(p is None for p in parts):
        return None
    call: Any = getattr(Tensor, node.target) if isinstance(node.target, str) else node.target
    yes, no = (call(*(getattr(p, pick) if isinstance(p, Selection) else p for p in parts)) for pick in ("yes", "no"))
    return made[0]._replace(yes=yes, no=no)


def _both(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
    """The conjunction of two masks; if one is unknown, at most the other."""
    a, b = map(values.choice, node.args)
    no = constant(False, torch.bool)
    if e.dtype is not torch.bool:
        return None
    if a is None or b is None:
        return chosen(a or b, Selection((), ~no.yes, no.yes, exact=False), no)
    return chosen(a, b, no) or chosen(b, a, no)


def _either(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
    a, b = map(values.choice, node.args)
    yes = constant(True, torch.bool)
    return (chosen(a, yes, b) or chosen(b, yes, a)) if e.dtype is torch.bool else None


def _where(values: KnownValues, node: Node, e: Tensor, order: tuple[int, ...]) -> KnownValue:
    given = [values.choice(node.args[i]) for i in order]
    if spelled(node) == "where" and node.op == "call_method":  # x.where(c, y)
        given[:2] = given[1::-1]
    return chosen(*given)


def _triangle(values: KnownValues, node: Node, e: Tensor, sign: int) -> KnownValue:
    inside = Index(sign * argument(node, 1, "diagonal", 0), {-2: sign, -1: -sign})
    return chosen(where_natural(inside), values.choice(node.args[0]), constant(0, e.dtype))


def _cumsum(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
    x, dim = values.index(node.args[0]), argument(node, 1, "dim")
    step = None if x is None or x.steps else fixed(x.start)
    return None if step is None else Index(step, {dim if dim < 0 else dim - e.ndim: step} if step else {})


def _diff(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
    """Differences along a dimension that are all the same number, including the first."""
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


def _cast(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
    return values.of(node.args[0]) if e.dtype is torch.int64 else values.choice(node.args[0])


def _viewed(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
    """A view that only adds or removes dimensions of size 1."""
    source = example(node.args[0])
    if source is None or source.dtype is not e.dtype:
        return None
    before, after = ([d for d in range(-t.ndim, 0) if fixed(t.shape[d]) != 1] for t in (source, e))
    same = same_shape([source.shape[d] for d in before], [e.shape[d] for d in after])
    place = dict(zip(before, after, strict=True)) if same else {}
    return mapped(values.of(node.args[0]), partial(placed, place=place))


def _expanded(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
    source = example(node.args[0])
    kept = [] if source is None else [d for d in range(-source.ndim, 0) if same_size(source.shape[d], e.shape[d])]
    return mapped(values.of(node.args[0]), partial(placed, place=dict(zip(kept, kept, strict=True))))


def _getitem(values: KnownValues, node: Node, e: Tensor) -> KnownValue:
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


_RULES: dict[str, Callable[[KnownValues, Node, Tensor], KnownValue]] = {
    "arange": _arange, "cumsum": _cumsum, "diff": _diff, "getitem": _getitem,
    "where": partial(_where, order=(0, 1, 2)), "masked_fill": partial(_where, order=(1, 2, 0)),
    "tril": partial(_triangle, sign=1), "triu": partial(_triangle, sign=-1),
    "add": partial(_sum, factor=1), "sub": partial(_sum, factor=-1),
    **dict.fromkeys(("full", "full_like"), partial(_filled, place=1, name="fill_value")),
    "new_full": partial(_filled, place=2, name="fill_value"), "tensor": partial(_filled, place=0, name="data"),
    **dict.fromkeys(("ones", "new_ones", "ones_like"), partial(_filled, place=0, name="", number=1)),
    **dict.fromkeys(("zeros", "new_zeros", "zeros_like"), partial(_filled, place=0, name="", number=0)),
    **dict.fromkeys(("le", "lt", "ge", "gt", "eq", "ne"), _compared),
    **dict.fromkeys(("mul", "truediv", "neg", "sqrt", "invert", "bitwise_not", "logical_not"), _pointwise),
    **dict.fromkeys(("and", "bitwise_and", "logical_and"), _both),
    **dict.fromkeys(("or", "bitwise_or", "logical_or"), _either),
    **dict.fromkeys(("to", "bool", "int", "long", "float", "double", "half", "bfloat16", "type", "type_as"), _cast),
    **dict.fromkeys(("contiguous", "clone", "detach"), _cast),
    **dict.fromkeys(("unsqueeze", "squeeze", "view", "reshape", "flatten"), _viewed),
    **dict.fromkeys(("expand", "expand_as", "repeat"), _expanded),
}  # fmt: skip


class Index(NamedTuple):
    """Integers: `start`, plus `steps[d]` times the index in dimension d; dimensions count from the last, -1."""

    start: Any
    steps: dict[int, int]

    def plus(self, other: Index, factor: int = 1) -> Index:
        """The sum, with the other times a factor."""
        steps = {d: self.steps.get(d, 0) + factor * other.steps.get(d, 0) for d in {*self.steps, *other.steps}}
        return Index(self.start + factor * other.start, {d: step for d, step in steps.items() if step})

    def is_natural(self, shape: Any) -> bool:
        """Whether all elements are non-negative in a tensor of this shape."""
        least = self.start + sum(step * (shape[d] - 1) for d, step in self.steps.items() if step < 0)
        return statically_known_true(least >= 0)


class Selection(NamedTuple):
    """The number `no` where any of `where` is negative; elsewhere `yes` or, if not `exact`, either."""

    where: tuple[Index, ...]
    yes: Tensor
    no: Tensor
    exact: bool = True

    @property
    def is_fixed(self) -> bool:
        """Whether all elements are `yes`."""
        return not self.where and self.exact

    @property
    def spellings(self) -> list[Selection]:
        """Equivalent selections: with a single condition, also the one with the condition negated."""
        if len(self.where) != 1 or not self.exact:
            return [self]
        return [self, Selection((Index(-1, {}).plus(self.where[0], -1),), self.no, self.yes)]


KnownValue = Index | Selection | None


def constant(number: float, dtype: torch.dtype) -> Selection:
    """The same number everywhere."""
    value = torch.full((), number, dtype=dtype, device="cpu")
    return Selection((), value, value)


def where_natural(x: Index) -> Selection:
    """True where an index is non-negative."""
    return Selection((x,), constant(True, torch.bool).yes, constant(False, torch.bool).yes)


def mapped(found: KnownValue, way: Callable[[Index], Index | None]) -> KnownValue:
    """A value with transformed indices."""
    if not isinstance(found, Selection):
        return None if found is None else way(found)
    where = [way(limit) for limit in found.where]
    return None if None in where else found._replace(where=tuple(cast("list[Index]", where)))


def in_shape(x: Index, shape: Any) -> Index:
    """The index in a tensor of this shape: constant along dimensions of size 1."""
    return Index(x.start, {d: step for d, step in x.steps.items() if fixed(shape[d]) != 1})


def placed(x: Index, place: dict[int, int]) -> Index | None:
    """The index with its dimensions renumbered."""
    known = x.steps.keys() <= place.keys()
    return Index(x.start, {place[d]: step for d, step in x.steps.items()}) if known else None


def chosen(c: Selection | None, x: Selection | None, y: Selection | None) -> Selection | None:
    """`torch.where` if one side is a single number, or if the other side has that number where it is not selected."""
    for condition in () if c is None else c.spellings:
        inside, outside = (x, y) if condition.yes else (y, x)
        if condition.is_fixed or inside is None:
            return inside
        for part in inside.spellings:
            if outside is not None and outside.is_fixed and (part.is_fixed or part.no == outside.yes):
                where = (*part.where, *condition.where)
                return Selection(where, part.yes, outside.yes, part.exact and condition.exact)
    return None


def looked_up(x: Index, places: list[KnownValue], shape: Any) -> Index | None:
    """Advanced indexing: the index, looked up elementwise at other indices."""
    found = Index(x.start, {})
    for d, step in x.steps.items():
        place = places[d]
        if not isinstance(place, Index) or not place.is_natural(shape):
            return None
        found = found.plus(place, step)
    return found


def sliced(x: Index, index: list[Any], dims: int) -> Index | None:
    """Basic indexing: one index for each of `dims` dimensions, and `None` for each new one."""
    start, d = x.start, -dims
    steps: list[int] = []
    for i in index:
        step = 0 if i is None else x.steps.get(d, 0)
        begin: Any = getattr(i, "start", i) or 0  # the start of a slice, or the index itself
        if step and not (isinstance(begin, int) and begin >= 0 and getattr(i, "step", 1) in (None, 1)):
            return None
        start += step * begin if step else 0
        steps += [] if isinstance(i, int) else [step]
        d += i is not None
    return Index(start, {d - len(steps): step for d, step in enumerate(steps) if step})

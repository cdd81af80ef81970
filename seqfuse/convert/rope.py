"""RoPE of queries or keys, as models spell it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, cast

from torch.fx import Node

from .angles import cosines, is_same_value, row, sines
from .graph import argument, back, example, is_fixed, narrow_of, operands, same_shape, same_size, spelled
from .matmuls import part_of

Style = Literal["half", "interleaved"]
_CASTS = {"to", "type_as", "float", "double", "half", "bfloat16"}
_VIEWS = {"view", "reshape", "flatten", "unflatten"}


class Turned(NamedTuple):
    """Elements of heads that have RoPE.

    Attributes:
        x: all elements of the heads.
        cos: cosines, [B or 1, S, R] or [S, R], or half as many for pairs.
        sin: sines, the same.
        size: R, how many elements of a head have RoPE.
        style: which of them are a pair.
    """

    x: Any
    cos: Node
    sin: Node
    size: int
    style: Style

    def is_like(self, other: Turned) -> bool:
        """Whether the angles of another are the same; each call of a function may make them again."""
        same = all(is_same_value(*pair) for pair in ((self.cos, other.cos), (self.sin, other.sin)))
        return same and (self.size, self.style) == (other.size, other.style)


class _Angles(NamedTuple):
    """What has RoPE, as it is spelled: cosines and sines, or complex numbers of both, and for how many elements."""

    x: Any
    cos: Node
    sin: Node
    given: int
    style: Style


def rope_at(node: Any, before_transpose: bool, took: list[Node]) -> Turned | None:
    """RoPE whose result a node is, in the dtype of what has it.

    Args:
        node: heads [B, H, S, D].
        before_transpose: whether it is [B, S, H, D].
        took: the nodes that RoPE stands for are added to it.
    """
    own: list[Node] = [node]
    e, value = example(node), _wide(node, own)
    size: Any = None if e is None else e.shape[-1]
    found = _turned(value, own)
    whole: Any = None
    if found is None and _is_cat(value) and e is not None:
        turned, rest = argument(value, 0, "tensors")
        passed = part_of(rest, own)
        if passed is None or passed[1] + passed[2] != size:
            return None
        own.append(turned)
        whole, size = passed[0], passed[1]
        found = _turned(_wide(turned, own), own)
    if found is None or e is None or not is_fixed(size) or found.given not in (size, size // 2):
        return None
    x = found.x
    if whole is not None:
        part = part_of(x, own)
        if part is None or part != (whole, 0, size):
            return None
        x = whole
    given = example(x)
    cos, sin = (row(t, before_transpose, pick, own) for t, pick in ((found.cos, cosines), (found.sin, sines)))
    if given is None or not same_shape(given.shape, e.shape) or cos is None or sin is None:
        return None
    if given.dtype is not e.dtype and (whole is not None or value is not node):
        return None
    took += own
    return Turned(x, cos, sin, size, found.style)


def _is_cat(node: Any) -> bool:
    """Whether two tensors are put side by side along the last of four dimensions."""
    return spelled(node) == "cat" and argument(node, 1, "dim", 0) in (-1, 3) and len(argument(node, 0, "tensors")) == 2


def _wide(node: Any, took: list[Node]) -> Any:
    """What a node is cast from to a narrower dtype, if it is."""
    source = node.args[0] if spelled(node) in _CASTS and node.args else None
    before, after = example(source), example(node)
    if before is None or after is None or before.dtype is after.dtype or not before.is_floating_point():
        return node
    took.append(node)
    return back(source, took)


def _turned(node: Any, took: list[Node]) -> _Angles | None:
    for form in (_of_sum, _of_parts, _of_complex):
        own: list[Node] = [node]
        if (found := form(node, own)) is not None:
            took += own
            return found
    return None


def _either(pair: tuple[Any, Any] | None) -> Iterator[tuple[Any, Any]]:
    """Two operands, and the other way round."""
    return iter(()) if pair is None else iter((pair, pair[::-1]))


def _of_sum(node: Any, took: list[Node]) -> _Angles | None:
    """X cos + rotate(x) sin."""
    for first, second in _either(operands(node, "add")):
        for half, sin in _either(operands(second, "mul")):
            own: list[Node] = [first, second]
            rotated = _rotated(half, own)
            for x, cos in _either(operands(first, "mul")) if rotated is not None else ():
                t = example(cos)
                if rotated is not None and narrow_of(x, own) is rotated[0] and t is not None:
                    took += own
                    return _Angles(rotated[0], cos, sin, t.shape[-1], rotated[1])
    return None


def _rotated(node: Any, took: list[Node]) -> tuple[Any, Style] | None:
    """X of (-x2, x1), where x1 and x2 are the parts of x, and which elements they are."""
    joined = _joined(node, took)
    if joined is None or spelled(joined[0]) != "neg":
        return None
    second, first = _part(joined[0].args[0], took), _part(joined[1], took)
    if first is None or second is None or second != (first[0], 1, first[2]) or first[1:] != (0, joined[2]):
        return None
    took.append(joined[0])
    return first[0], joined[2]


def _of_parts(node: Any, took: list[Node]) -> _Angles | None:
    """The parts (x1 cos - x2 sin, x2 cos + x1 sin)."""
    joined = _joined(node, took)
    one, two = (operands(joined[0], "sub"), operands(joined[1], "add")) if joined is not None else (None, None)
    if joined is None or one is None or two is None:
        return None
    took += joined[:2]
    terms = [_term(product, took) for product in (*one, *two)]
    if any(term is None for term in terms):
        return None
    (x, cos), (x2, sin), *others = cast("list[tuple[Any, Any]]", terms)
    t, wanted = example(cos), [(x2, cos), (x, sin)]
    if x[1:] != (0, joined[2]) or x2 != (x[0], 1, x[2]) or others not in (wanted, wanted[::-1]) or t is None:
        return None
    return _Angles(x[0], cos, sin, t.shape[-1], joined[2])


def _term(product: Any, took: list[Node]) -> tuple[tuple[Any, int, Style], Any] | None:
    """A part of x, and what it is multiplied by."""
    for part, factor in _either(operands(product, "mul")):
        if (found := _part(part, took)) is not None:
            took.append(product)
            return found, factor
    return None


def _joined(node: Any, took: list[Node]) -> tuple[Any, Any, Style] | None:
    """First and second members of pairs that are put together, and which elements they become."""
    if _is_cat(node):
        took.append(node)
        return (*argument(node, 0, "tensors"), "half")
    stack: Any = node.args[0] if spelled(node) in _VIEWS and node.args else None
    e, laid = example(stack), example(node)
    if spelled(stack) != "stack" or e is None or laid is None or argument(stack, 1, "dim", 0) not in (-1, e.ndim - 1):
        return None
    if len(argument(stack, 0, "tensors")) != 2 or not same_shape(laid.shape[:-1], e.shape[:-2]):
        return None
    took += [node, stack]
    return (*argument(stack, 0, "tensors"), "interleaved")


def _part(node: Any, took: list[Node]) -> tuple[Any, int, Style] | None:
    """Of which x a node is the first (0) or second (1) members of pairs, and which elements these are."""
    own: list[Node] = []
    node = narrow_of(node, own)
    half = part_of(node, own)
    if half is not None:
        e = example(half[0])
        if e is None or not same_size(e.shape[-1], 2 * half[2]) or half[1] not in (0, half[2]):
            return None
        took += own
        return narrow_of(half[0], took), half[1] // half[2], "half"
    if spelled(node) != "getitem":
        return None
    own.append(node)
    source: Any = node.args[0]
    index: Any = node.args[1]
    if spelled(source) == "unbind" and argument(source, 1, "dim", 0) in (-1, 4):
        own.append(source)
        source, index = source.args[0], (Ellipsis, index)
    e = example(source)
    *every, last = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (None, None)
    if e is None or any(i is not Ellipsis and i != slice(None) for i in every):
        return None
    if Ellipsis not in every and len(every) + 1 != e.ndim:
        return None
    took += own
    if isinstance(last, slice):
        step = cast("slice[Any, Any, Any]", last)
        begin = {(None, None, 2): 0, (0, None, 2): 0, (1, None, 2): 1}.get((step.start, step.stop, step.step))
        return None if begin is None or e.shape[-1] % 2 else (narrow_of(source, took), begin, "interleaved")
    x = _of_pairs(source, took)
    return (x, last, "interleaved") if x is not None and type(last) is int and last in (0, 1) else None


def _of_pairs(node: Any, took: list[Node]) -> Any:
    """X of x.view(*, D / 2, 2)."""
    x = node.args[0] if spelled(node) in _VIEWS and node.args else None
    before, after = example(x), example(node)
    if before is None or after is None or after.ndim != before.ndim + 1 or after.shape[-1] != 2:
        return None
    if not same_shape(before.shape[:-1], after.shape[:-2]):
        return None
    took.append(node)
    return narrow_of(x, took)


def _of_complex(node: Any, took: list[Node]) -> _Angles | None:
    """view_as_real(view_as_complex(x in pairs) * (cos + i sin)), laid out flat."""
    real: Any = node.args[0] if spelled(node) in _VIEWS and node.args else None
    product: Any = real.args[0] if spelled(real) == "view_as_real" else None
    for pairs, angles in _either(operands(product, "mul")):
        t, own = example(angles), [real, product, pairs]
        x = _of_pairs(back(pairs.args[0], own), own) if spelled(pairs) == "view_as_complex" else None
        if x is not None and t is not None and t.is_complex():
            took += own
            return _Angles(x, angles, angles, t.shape[-1], "interleaved")
    return None

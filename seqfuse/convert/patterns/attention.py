"""Spellings of attention: torch's calls and softmax(q k^T) v by hand, with the GEMMs, norms and RoPE before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Node

from ... import ops
from ..effects import returned
from ..graph import (
    CASTS,
    ahead,
    alike,
    argument,
    arguments,
    back,
    channel,
    either,
    example,
    is_fixed,
    is_last,
    is_same,
    narrow_of,
    operands,
    part_of,
    same_shape,
    same_size,
    spelled,
)
from ..masks import limited
from ..normal import Writer
from ..raising import META, Found, Inner, Raised, Value, View, matcher
from .linear import linear_ending_at, merged
from .norm import FoundNorm, norm_ending_at
from .pointwise import as_scaled
from .rope import FoundRope, rope_at
from .scores import CALL, scores_behind, weighs, without_maximum


def raise_attention(node: Node) -> Found:
    """F.scaled_dot_product_attention."""
    q, k, v = arguments(node, "query", "key", "value")
    how: dict[str, Any] = {
        "causal": bool(argument(node, 5, "is_causal", False)),
        "dropout": argument(node, 4, "dropout_p", 0.0),
        "scale": node.kwargs.get("scale"),
    }
    return _attention_of((q, k, v), argument(node, 3, "attn_mask"), how, node)


def _attention_of(qkv: tuple[Any, Any, Any], mask: Any, how: dict[str, Any], node: Node) -> Found:
    """Products, norms of heads, RoPE and attention, up to heads that lie side by side again.

    Queries, keys and values that are not made by one `Linear`, or by several of one tensor, are read as they are.
    """
    if any(isinstance(number, Node) for number in how.values()):
        return "its scale or dropout is not a fixed number"
    parts = [_heads_of(part) for part in qkv]
    e = example(node)
    out = node if e is not None and e.ndim == 3 else _joined(node) or Inner()
    if isinstance(out, Inner):
        if e is None or e.ndim != 4 or not is_fixed(e.shape[1], e.shape[3]):
            return "its heads are not a dimension of fixed size"
        out.views.append(View(node, 0, e.shape[1], e.shape[3]))
    first = _from_one(parts, how, node)
    if not isinstance(first, str) and _reads(mask, {cast("Heads", part).source for part in parts}):
        first = "its mask is made of its queries, keys or values"
    mask = limited(mask, how, qkv, by_hand=spelled(node) == "matmul", window=not isinstance(first, str))
    if isinstance(first, str):
        across = _across(qkv, parts, mask, how, node, out)
        if across is None:
            return first
        across[0].why = first
        return across
    q, k, v = cast("list[Heads]", parts)
    if (factor := q.factor * k.factor) != 1:
        how["scale"] = factor * (q.size**-0.5 if how.get("scale") is None else how["scale"])
    raised = first
    last = raised[-1].out if raised else q.source
    if isinstance(last, Inner):
        place = q.heads * q.size
        for heads in (k, v):
            if heads.factor == 1:  # another factor is part of the scale
                last.views.append(View(heads.seen, place, heads.heads, heads.size))
            place += heads.heads * heads.size
    attention = ops.Attention(q.heads, k.heads, mask=None if mask is None else channel(mask), **how)
    given = {} if mask is None else {channel(mask): mask}
    raised.append(Raised(attention, last, out, node, {}, given))
    for r in raised:
        r.node = _last_of(out, node)
    return raised


def _reads(node: Any, sources: set[Node]) -> bool:
    """Whether a node is made of some that come before it."""
    stack, seen, first = [node] if isinstance(node, Node) else [], set[Node](), min(sources)
    while stack:
        node = stack.pop()
        if node in sources:
            return True
        if node not in seen and not node < first:
            seen.add(node)
            stack += node.all_input_nodes
    return False


def _last_of(out: Node | Inner, node: Node) -> Node:
    return out if isinstance(out, Node) else node


def _from_one(parts: Sequence[Heads | str], how: dict[str, Any], node: Node) -> list[Raised] | str:
    """What makes queries, keys and values side by side, with norms of heads and RoPE, or why they are not made so."""
    for name, part in zip(("queries", "keys", "values"), parts, strict=True):
        if isinstance(part, str):
            return f"its {name}: {part}"
    q, k, v = cast("list[Heads]", parts)
    sizes = {h.size for h in (q, k, v)}
    if (v.rope, v.norm, v.gain) != (None, None, None) or k.heads != v.heads or len(sizes) != 1:
        return "keys and values differ in heads, or values are normalized or have RoPE"
    if (q.rope is None) != (k.rope is None) or (q.norm is None) != (k.norm is None):
        return "queries and keys are not treated alike"
    if q.rope is not None and k.rope is not None and not q.rope.is_like(k.rope):
        return "queries and keys have RoPE by different angles"
    if v.factor != 1:
        return "values are multiplied by a number: multiply the result instead"
    dtypes = {e.dtype for t in (node, q.source, k.source, v.source) if (e := example(t)) is not None}
    if len(dtypes) != 1:
        return "it computes in another dtype than the GEMMs before it"
    raised = _packed([q, k, v], Inner())
    if isinstance(raised, str):
        return raised
    packed = raised[-1].out if raised else q.source
    if q.norm is not None and k.norm is not None:
        normed = _normed(q, k, q.norm, k.norm, packed, node)
        if isinstance(normed, str):
            return normed
        raised.append(normed)
        packed = normed.out
    if q.gain is not None or k.gain is not None:
        gamma = _side_by_side_gains(q, k, Writer(node))
        scale = ops.LayerScale((q.heads + 2 * k.heads) * q.size, device=META, dtype=dtypes.pop())
        raised.append(Raised(scale, packed, Inner(), node, {"gamma": gamma}))
        packed = raised[-1].out
    if q.rope is not None:
        _, cos, sin, turned, style = q.rope
        angles = {channel(cos): cos, channel(sin): sin}
        rope = ops.RotaryEmbedding(q.heads, k.heads, style=style, rotary_dim=turned, cos=channel(cos), sin=channel(sin))
        raised.append(Raised(rope, packed, Inner(), node, {}, angles))
    return raised


def _across(
    qkv: Sequence[Any], parts: Sequence[Heads | str], mask: Any, how: dict[str, Any], node: Node, out: Node | Inner
) -> list[Raised] | None:
    """Attention to keys and values that are tensors of their own, whatever makes these and the queries."""
    if how.get("window") is not None:
        return None
    factor, rows = 1.0, list[Node]()
    plain = [isinstance(h, Heads) and _is_plain(h) for h in parts]
    whole = [_ungrouped(narrow_of(t)) if isinstance(t, Node) else t for t in qkv]
    examples = [e for t in whole if (e := example(t)) is not None and e.ndim == 4 and e.is_floating_point()]
    if len(examples) != 3 or len({e.dtype for e in (*examples, example(node)) if e is not None}) != 1:
        return None
    heads, sizes = [e.shape[1] for e in examples], [e.shape[3] for e in examples]
    if not is_fixed(*heads, *sizes) or heads[1] != heads[2] or heads[0] % heads[1] or len(set(sizes)) != 1:
        return None
    if how.get("causal") and not same_size(examples[0].shape[2], examples[1].shape[2]):
        return None
    if any(not same_size(e.shape[0], examples[0].shape[0]) for e in examples):
        return None
    leaving = returned(node.graph)  # such as keys for a cache, whose gradients are to be complete
    for t, h, is_whole, name in zip(whole, parts, plain, "qkv", strict=True):
        if isinstance(h, Heads) and is_whole and t not in leaving and (h.factor == 1 or name != "v"):
            rows.append(h.source)
            factor *= h.factor
        else:
            rows.append(_side_by_side(t, node))
    if factor != 1:
        how["scale"] = factor * (sizes[0] ** -0.5 if how.get("scale") is None else how["scale"])
    q, k, v = rows
    given = {channel(k): k, channel(v): v}
    if mask is not None:
        given[channel(mask)] = mask
    how = {name: value for name, value in how.items() if name != "window"}
    operation = ops.CrossAttention(
        heads[0], heads[1], k=channel(k), v=channel(v), mask=None if mask is None else channel(mask), **how
    )
    return [Raised(operation, q, out, _last_of(out, node), {}, given)]


def _is_plain(h: Heads) -> bool:
    """Whether heads are all of a tensor [B, S, H D]."""
    e = example(h.source)
    whole = e is not None and e.ndim == 3 and same_size(e.shape[-1], h.heads * h.size)
    return whole and h.rope is None and h.norm is None and h.gain is None and (h.start, h.part, h.of) == (0, 0, 1)


def _side_by_side(heads: Node, before: Node) -> Node:
    """[B, S, H D] of heads [B, H, S, D]."""
    write = Writer(before)
    return write("flatten", write("transpose", heads, 1, 2), 2)


def _packed(parts: list[Heads], out: Inner) -> list[Raised] | str:
    """The `Linear`, or the merged `Linear`s, that make queries, keys and values side by side, or what lays them so.

    None, if they lie so in a tensor that something else makes, such as a `Linear` and an adapter beside it.
    """
    sources = [p.source for p in parts]
    sizes = [e.shape[-1] for s in sources if (e := example(s)) is not None]
    whole = all(same_size(size, p.heads * p.size) and p.start == 0 for size, p in zip(sizes, parts, strict=False))
    leaving = returned(parts[0].seen.graph)

    def read_outside(place: int, node: Node, size: int) -> None:
        if node not in leaving:
            out.views.append(View(node, place, None, size))

    if all(spelled(s) == "linear" for s in sources) and whole and len(set(sources)) == 3:
        found = merged(sources, out)
        for i, source in enumerate(sources):
            read_outside(sum(sizes[:i]), source, sizes[i])
        return [found] if found is not None else "queries, keys and values are made of different tensors"
    interleaved = [(p.part, p.of, p.heads) for p in parts] == [(i, 3, parts[0].heads) for i in range(3)]
    place = 0
    for p in parts:
        if (p.start, p.of) != ((0, 3) if interleaved else (place, 1)):
            return "queries, keys and values do not lie side by side"
        place += p.heads * p.size
    e = example(sources[0])
    if len(set(sources)) != 1 or e is None or not same_size(e.shape[-1], place):
        return "queries, keys and values are not made by one GEMM"
    source = sources[0]
    found = linear_ending_at(source)
    if not isinstance(found, list):
        return [] if not interleaved else "queries, keys and values are not made by a GEMM with a parameter"
    (r,) = found
    if not interleaved:
        r.out = out
        read_outside(0, source, place)
        return found
    heads, size, made = parts[0].heads, parts[0].size, [Inner() for _ in range(3)]
    laid = (ops.Reshape(heads, 3, size), ops.Transpose(-3, -2), ops.Reshape(3 * heads * size, dims=3))
    r.out = made[0]
    steps = zip(laid, made, (*made[1:], out), strict=True)
    return [r, *(Raised(operation, x, y, source) for operation, x, y in steps)]


def _normed(q: Heads, k: Heads, a: FoundNorm, b: FoundNorm, x: Value, node: Node) -> Raised | str:
    whole = a.size == q.heads * q.size and q.heads > 1
    if b.size != (k.heads * k.size if whole else k.size) or a.size not in (q.size, q.heads * q.size):
        return "norms of queries and keys are of different widths"
    kinds = [(n.kind, n.eps, n.zero_centered, n.weight is None, n.bias is None) for n in (a, b)]
    if kinds[0] != kinds[1]:
        return "norms of queries and keys are of different kinds"
    w = example(a.weight)
    made = ops.QKNorm(
        q.size, q.heads, k.heads, cast(float, a.eps), w is not None, META, None if w is None else w.dtype,
        kind="rms" if a.kind == "rms" else "layer", bias=a.bias is not None, full_width=whole,
        zero_centered=a.zero_centered,
    )  # fmt: skip
    given = {"q_weight": a.weight, "k_weight": b.weight, "q_bias": a.bias, "k_bias": b.bias}
    return Raised(made, x, Inner(), node, {name: p for name, p in given.items() if p is not None})


def _side_by_side_gains(q: Heads, k: Heads, write: Writer) -> Node:
    """The factors of queries, keys and values side by side; those of values are one."""
    parts = list[Node]()
    like = next(h.gain.node for h in (q, k) if h.gain is not None)
    for h in (q, k, None):
        if h is None or h.gain is None:
            parts.append(write("new_ones", like, ((k if h is None else h).heads * q.size,)))
        else:
            gain = write("reshape", h.gain.node, h.gain.heads, h.gain.size)
            parts.append(write("flatten", write("expand", gain, h.heads, h.size)))
    return write.call(torch.cat, parts)


def _joined(node: Node) -> Node | None:
    """[B, S, H D] of heads [B, H, S, D]."""
    e, transposed = example(node), False
    while e is not None:
        following = ahead(node, {"transpose", "permute", "reshape", "view", "contiguous", "flatten"})
        if following is None:
            return None
        t = example(following)
        if t is not None and t.ndim == 3:
            last = e.shape[1] * e.shape[3]
            joined = transposed and same_size(t.shape[-1], last) and same_size(t.shape[1], e.shape[2])
            return following if joined else None
        if not transposed and _is_transpose(following):
            transposed = True
        elif t is None or is_same(following) is None:
            return None
        node = following
    return None


def raise_attention_by_hand(node: Node) -> Found:
    """softmax(scale q k^T, capped, plus biases and a mask) v, as models have it that do not call torch's function."""
    if not weighs(node):
        return None
    e = example(node)
    if e is None or argument(node, 1, "dim") not in (-1, e.ndim - 1):
        return "its softmax is not over the last dimension of scores [B, H, S, S]"
    how: dict[str, Any] = {}
    write = Writer(node)
    logits, sink = _with_sink(without_maximum(argument(node, 0, "input")))
    found = scores_behind(logits, how, write)
    if isinstance(found, str):
        return found
    q, k, masks = found.q, found.k, found.masks
    if any((m := example(t)) is None or not m.is_floating_point() for t, _ in masks):
        return "the tensor added to its scores is not floating point"
    weights, dropout = node if sink is None else next(iter(node.users)), 0.0
    if sink is not None and not (len(node.users) == 1 and part_of(weights) == (node, 0, e.shape[-1] - 1)):
        return "the weight of its sink is read"
    while (following := ahead(weights, {*CASTS, "dropout"})) is not None:
        if spelled(following) == "dropout" and is_same(following) is None:
            if dropout:
                return "its weights are dropped twice"
            dropout = argument(following, 1, "p", 0.5)
        weights = following
    out = ahead(weights, {"matmul"})
    if out is None:
        return f"its weights are read by more, or by something else, than weights @ v: {CALL}"
    how |= {"dropout": dropout, "scale": found.scale, "softcap": found.softcap}
    for factor in found.factors:  # of heads
        q = write("mul", q, factor)
    terms = [t if number == 1 else write("mul", t, number) for t, number in masks]
    mask = terms[0] if terms else None
    for term in terms[1:]:
        mask = write("add", mask, term)
    v: Any = out.args[1]
    if sink is not None:
        if e.ndim != 4 or not is_fixed(*e.shape) or how.get("causal"):
            return "it has a sink, and its sizes are not fixed"
        q, k, v, mask = _as_key(q, k, v, mask, sink, (write, Writer(out)))
    if e.ndim == 3:  # of one head
        q, k, v = write("unsqueeze", q, 1), write("unsqueeze", k, 1), Writer(out)("unsqueeze", v, 1)
        m = example(mask)
        mask = mask if mask is None or m is None or m.ndim < 3 else write("unsqueeze", mask, 1)
    return _attention_of((q, k, v), mask, how, out)


def _with_sink(logits: Any) -> tuple[Any, Node | None]:
    """Scores, and a column that is joined to them of what each row sees beside the keys, whose value is zero."""
    parts: Any = argument(logits, 0, "tensors") if spelled(logits) == "cat" else ()
    sink = example(parts[1]) if len(parts) == 2 and is_last(argument(logits, 1, "dim", 0), logits) else None
    if sink is None or not same_size(sink.shape[-1], 1):
        return logits, None
    return narrow_of(parts[0]), parts[1]


def _as_key(q: Node, k: Node, v: Any, mask: Any, sink: Node, write: tuple[Writer, Writer]) -> tuple[Any, ...]:
    """The same with a sink as a last key of zeros, whose score it is as it is added, and a value of zeros."""
    before, behind = write
    pad = torch.nn.functional.pad
    k, v = (w.call(pad, _ungrouped(narrow_of(t)), (0, 0, 0, 1)) for w, t in ((before, k), (behind, v)))
    keys, column = cast("Tensor", example(k)).shape[2] - 1, cast("Tensor", example(sink)).shape
    mask = before("new_zeros", sink, (1, 1, 1, keys)) if mask is None else mask
    return q, k, v, before.call(torch.cat, (before("expand", mask, *column[:3], keys), sink), -1)


_TRANSPOSED = ((1, 2), (2, 1), (-2, -3), (-3, -2), (1, -2), (-2, 1))

_LIKE_ROPE = ("add", "sub", "cat", "flatten")
"""What RoPE may end with."""


@dataclasses.dataclass
class Heads:
    """Queries, keys or values [B, H, S, D] and what they are made of.

    Attributes:
        seen: the node that attention reads, but for calls that change nothing and copies for groups of heads.
        source: what their elements are taken from, [B, S, *].
        start: where they start in its last dimension.
        heads, size: H and D.
        rope: that of each head.
        norm: of each head, or before they are heads.
        factor: what they are multiplied by.
        part: which of the `of` parts of each head of the source they are, where queries, keys and values interleave.
        gain: a tensor that they are multiplied by before RoPE, for each head or all and each element or all.
    """

    seen: Node
    source: Any
    start: int
    heads: int
    size: int
    rope: FoundRope | None
    norm: FoundNorm | None
    factor: float
    part: int = 0
    of: int = 1
    gain: Gain | None = None


class Gain(NamedTuple):
    """Factors of heads and of their elements, [*, H or 1, *, D or 1] with the other sizes 1."""

    node: Node
    heads: int
    size: int


def _heads_of(node: Any) -> Heads | str:
    """What attention reads as queries, keys or values, or why it cannot be raised."""
    e = example(node)
    if e is None or e.ndim != 4 or not e.is_floating_point() or not is_fixed(e.shape[-1]):
        return "not of four dimensions, the last of a fixed size"
    size = e.shape[-1]
    node = _ungrouped(narrow_of(node))
    seen, factor = node, 1.0
    rope, norm, gain, turns = None, None, None, True
    transposed = False
    part, of, cut, first = 0, 1, None, 0
    while True:
        node = narrow_of(node)
        name = spelled(node)
        if not transposed and _is_transpose(node):
            node, transposed = node.args[0], True
        elif rope is None and norm is None and turns and (turned := rope_at(node, transposed)) is not None:
            node, rope = turned.x, turned
        elif norm is None and (found := norm_ending_at(node)) is not None:
            norm, node, factor = found, found.x, factor * found.factor
        elif norm is None and factor == 1 and (number := as_scaled(node)) is not None:
            node, factor = number
        elif norm is None and gain is None and (gained := _gained(node, transposed)) is not None:
            node, gain = gained
            turns = gain.size == 1  # angles are the same for all heads, and differ for elements
        elif of == 1 and cut is None and (packed := _third_of_five(node, transposed)) is not None:
            node, heads, part, of = packed
            first = 0 if of == 3 else part * heads * size
            break
        elif transposed and name in ("view", "reshape", "unflatten") and _splits_heads(node, size * of):
            heads: Any = example(node).shape[-2]  # pyright: ignore[reportOptionalMemberAccess]
            node = node.args[0]
            break
        elif transposed and of == 1 and cut is None and (cut := _cut(node)) is not None:
            node = node.args[0]
        elif name == "getitem" and of == 1 and cut is None and (third := _third(node, size)) is not None:
            (node, part), of = third, 3
        elif name == "getitem" and part_of(node) is not None:
            return "queries, keys and values lie within each head of one GEMM's result, not side by side"
        else:
            nor = ", nor by RoPE in a spelling that is known" if name in _LIKE_ROPE else ""
            return f"made by {name or 'the model'}, not by a GEMM whose last dimension is split into heads{nor}"
    if norm is None and (found := norm_ending_at(back(node))) is not None:
        norm, node, factor = found, found.x, factor * found.factor
    node = narrow_of(node)
    if norm is None and (found := as_scaled(node)) is not None:
        node, factor = narrow_of(found[0]), factor * found[1]
    stretch = part_of(node)
    source, start = (node, first) if stretch is None else (back(stretch[0]), first + stretch[1])
    if cut is not None:
        start, heads = start + cut[0] * size, cut[1]
    return Heads(seen, source, start, heads, size, rope, norm, factor, part, of, gain)


def _gained(node: Any, transposed: bool) -> tuple[Any, Gain] | None:
    """Heads that a tensor is multiplied by, and the factors, which are the same for all tokens."""
    for x, factor in either(operands(node, "mul")):
        e, f = example(x), example(factor)
        if e is None or f is None or e.ndim != 4 or f.ndim > 4 or f.dtype is not e.dtype or not alike(x, node):
            continue
        batch, *middle, size = (1,) * (4 - f.ndim) + tuple(f.shape)
        tokens, heads = middle if transposed else middle[::-1]
        if is_fixed(heads, size) and same_size(batch, 1) and same_size(tokens, 1):
            return x, Gain(factor, heads, size)
    return None


def _cut(node: Any) -> tuple[int, int] | None:
    """The first of some heads that are taken of [B, S, H, D], and how many they are."""
    e = example(node)
    if spelled(node) != "getitem" or e is None or e.ndim != 4 or not isinstance(node.args[1], tuple):
        return None
    *before, index, after = cast("tuple[Any, ...]", node.args[1])
    whole = example(node.args[0])
    every = before == [Ellipsis] or before == [slice(None), slice(None)]
    if not every or after != slice(None) or whole is None or whole.ndim != 4 or not is_fixed(whole.shape[2]):
        return None
    heads: list[int] = list(range(whole.shape[2]))
    found: list[int] = []
    if isinstance(index, slice):
        stretch = cast("slice[Any, Any, Any]", index)
        fixed = all(n is None or isinstance(n, int) for n in (stretch.start, stretch.stop))
        found = heads[stretch] if fixed and stretch.step in (None, 1) else []
    elif isinstance(index, list):
        several = cast("list[Any]", index)
        found = [heads[several[0]]] if len(several) == 1 and isinstance(several[0], int) else []
    return (found[0], len(found)) if found else None


def _third_of_five(node: Any, transposed: bool) -> tuple[Any, int, int, int] | None:
    """Queries, keys or values as one of three that share a view of five dimensions, [B, S, 3, H, D] or [B, S, H, 3, D].

    Returns:
        What is viewed so, H, which of the three they are, and 3 if these interleave head by head, otherwise 1.
    """
    if spelled(node) != "getitem":
        return None
    view, index, dim = node.args[0], node.args[1], 0
    if spelled(view) == "unbind":
        view, dim = view.args[0], argument(view, 1, "dim", 0)
    elif isinstance(index, tuple):
        *every, index = cast("tuple[Any, ...]", index)
        dim = len(every) if all(i == slice(None) for i in every) else None
    e, order = example(view), list(range(5))
    if e is None or e.ndim != 5 or type(index) is not int or type(dim) is not int:
        return None
    view = back(view)
    if spelled(view) == "permute":
        dims: Any = argument(view, 1, "dims")
        order = [d % 5 for d in (cast("Sequence[int]", dims) if isinstance(dims, list | tuple) else view.args[1:])]
        view = view.args[0]
    before, e = example(view.args[0]) if spelled(view) in ("view", "reshape", "unflatten") else None, example(view)
    if before is None or e is None or before.ndim != 3 or e.ndim != 5 or not same_shape(before.shape[:2], e.shape[:2]):
        return None
    third = order.pop(dim)
    heads = {2: 3, 3: 2}.get(third)
    if heads is None or not is_fixed(*e.shape[2:]) or e.shape[third] != 3:
        return None
    if order != ([0, 1, heads, 4] if transposed else [0, heads, 1, 4]):
        return None
    return view.args[0], e.shape[heads], index % 3, 3 if third == 3 else 1


def _third(node: Any, size: int) -> tuple[Any, int] | None:
    """What a node is the first, second or third part of, along the last dimension, and which of them."""
    found = part_of(node)
    e = None if found is None else example(found[0])
    if found is None or e is None or found[2] != size or not same_size(e.shape[-1], 3 * size) or found[1] % size:
        return None
    return found[0], found[1] // size


def _ungrouped(node: Node) -> Node:
    """Keys or values [B, H, S, D] before each of their heads was repeated for a group of query heads."""
    if spelled(node) == "repeat_interleave":
        inner, after = example(node.args[0]), example(node)
        by_number = is_fixed(argument(node, 1, "repeats")) and argument(node, 2, "dim") in (1, -3)
        if inner is None or after is None or not by_number:
            return node
        return back(node.args[0])
    if spelled(node) != "reshape" or spelled(node.args[0]) != "expand":
        return node
    expanded: Any = node.args[0]
    inserted = expanded.args[0]
    source: Any = inserted.args[0] if spelled(inserted) in ("getitem", "unsqueeze") else None
    s, i, e, r = example(source), example(inserted), example(expanded), example(node)
    if s is None or i is None or e is None or r is None or s.ndim != 4 or e.ndim != 5:
        return node
    if not _only_inserts(inserted) or not same_shape(i.shape, (*s.shape[:2], 1, *s.shape[2:])):
        return node
    if not same_shape((*e.shape[:2], *e.shape[3:]), s.shape) or not same_shape(r.shape[2:], s.shape[2:]):
        return node
    return back(source)


def _only_inserts(node: Node) -> bool:
    """Whether a call adds a dimension of one element and takes every element."""
    if spelled(node) == "unsqueeze":
        return True
    index: Any = node.args[1]
    indices = cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (0,)
    return all(i is None or i is Ellipsis or i == slice(None) for i in indices)


def _is_transpose(node: Node) -> bool:
    """Whether a call swaps the second and the third of four dimensions."""
    name = spelled(node)
    if name == "transpose":
        return tuple(node.args[1:]) in _TRANSPOSED
    order: Any = argument(node, 1, "dims")
    order = cast("Sequence[Any]", order) if isinstance(order, list | tuple) else node.args[1:]
    return name == "permute" and tuple(order) == (0, 2, 1, 3)


def _splits_heads(node: Node, size: int) -> bool:
    before, after = example(node.args[0]), example(node)
    if before is None or after is None or before.ndim != 3 or after.ndim != 4:
        return False
    heads = after.shape[-2]
    same = same_shape(before.shape[:2], after.shape[:2]) and same_size(after.shape[-1], size)
    return same and is_fixed(heads) and same_size(before.shape[-1], heads * size)


MATCHERS = (
    matcher(raise_attention, "scaled_dot_product_attention"),
    matcher(raise_attention_by_hand, "softmax"),
)

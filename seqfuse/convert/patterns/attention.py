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
    elements_before,
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
    swapped,
    view_source,
)
from ..masks import limited
from ..raising import META, Found, Inner, Raised, Value, View, in_turn, matcher
from ..writer import Writer
from .linear import merged, raise_linear
from .norm import FoundNorm, norm_ending_at
from .pointwise import as_scaled
from .rope import FoundRope, rope_at
from .scores import CALL, scores_behind, weighs, without_maximum


def raise_attention(node: Node) -> Found:
    """F.scaled_dot_product_attention."""
    q, k, v = arguments(node, "query", "key", "value")
    mask = argument(node, 3, "attn_mask")
    if (m := example(mask)) is not None and m.requires_grad and any(map(_is_empty, (q, k, v))):
        return "torch does not read its mask, since it has no tokens"
    how: dict[str, Any] = {
        "causal": bool(argument(node, 5, "is_causal", False)),
        "dropout": argument(node, 4, "dropout_p", 0.0),
        "scale": node.kwargs.get("scale"),
    }
    return _attention_of((q, k, v), mask, how, node)


def _is_empty(node: Any) -> bool:
    e = example(node)
    return e is not None and any(same_size(size, 0) for size in e.shape)


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
    if q.rope is not None and k.rope is not None and q.rope[1:] != k.rope[1:]:
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
    write, leaving = Writer(node), returned(node.graph)  # such as keys for a cache, whose gradients are to be complete
    for t, h, is_whole, name in zip(whole, parts, plain, "qkv", strict=True):
        if isinstance(h, Heads) and is_whole and t not in leaving and (h.factor == 1 or name != "v"):
            rows.append(h.source)
            factor *= h.factor
        else:
            rows.append(write("flatten", write("transpose", t, 1, 2), 2))  # [B, S, H D] of heads [B, H, S, D]
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
    found = raise_linear(source) if spelled(source) == "linear" else None
    if not isinstance(found, list):
        return [] if not interleaved else "queries, keys and values are not made by a GEMM with a parameter"
    (r,) = found
    if not interleaved:
        r.out = out
        read_outside(0, source, place)
        return found
    heads, size, r.out = parts[0].heads, parts[0].size, Inner()
    laid = (ops.Reshape(heads, 3, size), ops.Transpose(-3, -2), ops.Reshape(3 * heads * size, dims=3))
    return [r, *in_turn([(operation,) for operation in laid], r.out, out, source)]


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
        if not transposed and swapped(following) == (1, 2):
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


_LIKE_ROPE = ("add", "sub", "cat", "flatten")
"""What RoPE may end with."""


@dataclasses.dataclass
class Heads:
    """Queries, keys or values [B, H, S, D] and what they are made of."""

    seen: Node  # the node that attention reads, but for calls that change nothing and copies for groups of heads
    source: Any  # what their elements are taken from, [B, S, *]
    start: int  # where they start in its last dimension
    heads: int  # H
    size: int  # D
    rope: FoundRope | None  # that of each head
    norm: FoundNorm | None  # of each head, or before they are heads
    factor: float  # what they are multiplied by
    # Which of the `of` parts of each head of the source they are, where queries, keys and values interleave.
    part: int = 0
    of: int = 1
    # A tensor that they are multiplied by before RoPE, for each head or all and each element or all.
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
    seen, factor, transposed = node, 1.0, False
    rope, norm, gain, turns = None, None, None, True
    while True:
        node = narrow_of(node)
        if rope is None and norm is None and turns and (turned := rope_at(node, transposed)) is not None:
            node, rope = turned.x, turned
        elif norm is None and (found := norm_ending_at(node)) is not None:
            norm, node, factor = found, found.x, factor * found.factor
        elif norm is None and factor == 1 and (number := as_scaled(node)) is not None:
            node, factor = number
        elif norm is None and gain is None and (gained := _gained(node, transposed)) is not None:
            node, gain = gained
            turns = gain.size == 1  # angles are the same for all heads, and differ for elements
        elif isinstance(laid := _laid(node, transposed), tuple):
            node, first, heads, part, of = laid
            break
        elif not transposed and swapped(node) == (1, 2):
            node, transposed = node.args[0], True
        elif laid is not None:
            return laid
        else:
            name = spelled(node)
            nor = ", nor by RoPE in a spelling that is known" if name in _LIKE_ROPE else ""
            return f"made by {name or 'the model'}, not by a GEMM whose last dimension is split into heads{nor}"
    if norm is None and (found := norm_ending_at(back(node))) is not None:
        norm, node, factor = found, found.x, factor * found.factor
    node = narrow_of(node)
    if norm is None and (found := as_scaled(node)) is not None:
        node, factor = narrow_of(found[0]), factor * found[1]
    stretch = part_of(node)
    source, start = (node, first) if stretch is None else (back(stretch[0]), first + stretch[1])
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


def _laid(node: Any, transposed: bool) -> tuple[Any, int, int, int, int] | str | None:
    """Where heads [B, H, S, D], or [B, S, H, D], lie in a tensor [B, S, *] of which they are a view, by their strides.

    Returns:
        The tensor, the first element, H, which of three parts of each head they are, and 3 if these interleave head by
        head, otherwise 1; why it is not possible; or `None` if they are not a view of such a tensor.
    """
    e, source = example(node), node
    if e is None or e.ndim != 4 or spelled(node) == "unsqueeze":  # heads that were folded into the batch
        return None
    order = (0, 1, 2, 3) if transposed else (0, 2, 1, 3)
    (batch, rows, heads, size), strides = (e.shape[d] for d in order), [e.stride(d) for d in order]
    while True:
        source = view_source(source)
        if (w := example(source)) is None:
            return None
        if w.ndim == 3 and same_shape((batch, rows), w.shape[:2]):
            break
    steps = zip((batch, rows, size), (*strides[:2], strides[3]), w.stride(), strict=True)
    alike = all(same_size(count, 1) or same_size(step, own) for count, step, own in steps)
    if not alike or not is_fixed(heads, size, strides[2]):
        return None
    start, each = elements_before(e, w), strides[2] // w.stride(2)
    if start is not None and (heads == 1 or each == size):
        return source, start, heads, 0, 1
    if start is not None and each == 3 * size > start and not start % size:
        return source, 0, heads, start // size, 3
    return "queries, keys and values lie within each head of one GEMM's result, not side by side"


def _ungrouped(node: Node) -> Node:
    """Keys or values [B, H, S, D] before each of their heads was repeated for a group of query heads."""
    if spelled(node) == "repeat_interleave":
        inner, after = example(node.args[0]), example(node)
        by_number = is_fixed(argument(node, 1, "repeats")) and argument(node, 2, "dim") in (1, -3)
        if inner is None or after is None or not by_number:
            return node
        return back(node.args[0])
    expanded: Any = node.args[0] if spelled(node) == "reshape" else None
    source = view_source(expanded) if spelled(expanded) == "expand" else None
    source = source if source is None or (i := example(source)) is None or i.ndim == 4 else view_source(source)
    s, e, r = example(source), example(expanded), example(node)
    if s is None or e is None or r is None:
        return node
    repeated = same_shape(e.stride(), (*s.stride()[:2], 0, *s.stride()[2:]))
    alike = same_shape((*e.shape[:2], *e.shape[3:]), s.shape) and same_shape(r.shape[2:], s.shape[2:])
    return back(source) if repeated and alike and elements_before(e, s) == 0 else node


MATCHERS = (
    matcher(raise_attention, "scaled_dot_product_attention"),
    matcher(raise_attention_by_hand, "softmax"),
)

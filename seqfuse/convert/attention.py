"""Attention: scaled_dot_product_attention with the GEMMs, norms and RoPE before it."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from .. import ops
from .graph import ahead, argument, channel, example, is_same, same_size, spelled
from .heads import Heads, heads_of, is_transpose
from .linears import linear_ending_at
from .masks import limited
from .matmuls import merged
from .raising import META, Found, Inner, Raised, Value, View, linear, matcher


@matcher("scaled_dot_product_attention", rank=0)
def raise_attention(node: Node) -> Found:
    """F.scaled_dot_product_attention."""
    q, k, v = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    how: dict[str, Any] = {
        "causal": bool(argument(node, 5, "is_causal", False)),
        "dropout": argument(node, 4, "dropout_p", 0.0),
        "scale": node.kwargs.get("scale"),
    }
    return attention_of((q, k, v), argument(node, 3, "attn_mask"), how, node, [node])


CALL = "call F.scaled_dot_product_attention"
"""What to do instead of another spelling."""


def attention_of(qkv: tuple[Any, Any, Any], mask: Any, how: dict[str, Any], node: Node, took: list[Node]) -> Found:
    """Products, norms of heads, RoPE and attention, up to heads that lie side by side again."""
    if any(isinstance(number, Node) for number in how.values()):
        return "its scale or dropout is no fixed number"
    parts: list[Heads] = []
    for name, part in zip(("queries", "keys", "values"), qkv, strict=True):
        found = heads_of(part, took)
        if isinstance(found, str):
            return f"its {name}: {found}"
        parts.append(found)
    q, k, v = parts
    if v.rope is not None or v.norm is not None or k.heads != v.heads or len({h.size for h in parts}) != 1:
        return "keys and values differ in heads, or values are normalized or have RoPE"
    if (q.rope is None) != (k.rope is None) or (q.norm is None) != (k.norm is None):
        return "queries and keys are not treated alike"
    if q.rope is not None and k.rope is not None and not q.rope.is_like(k.rope):
        return "queries and keys have RoPE by different angles"
    if v.factor != 1:
        return "values are multiplied by a number: multiply the result instead"
    if (factor := q.factor * k.factor) != 1:
        how["scale"] = factor * (q.size**-0.5 if how.get("scale") is None else how["scale"])
    dtypes = {e.dtype for t in (node, *(h.source for h in parts)) if (e := example(t)) is not None}
    if len(dtypes) != 1:
        return "it computes in another dtype than the GEMMs before it"
    out = _joined(node, took)
    if out is None:
        return "its heads are not laid side by side"
    first = _packed(parts, Inner(), took)
    mask = limited(mask, how, qkv, by_hand=spelled(node) == "matmul", window=not isinstance(first, str))
    if isinstance(first, str):
        across = _across(parts, mask, how, out, took)
        return first if across is None else across
    raised, packed = first, first[-1].out if first else q.source
    if q.norm is not None and k.norm is not None:
        normed = _normed(q, k, packed, node)
        if isinstance(normed, str):
            return normed
        raised.append(normed)
        packed = normed.out
    if q.rope is not None:
        _, cos, sin, turned, style = q.rope
        angles = {channel(cos): cos, channel(sin): sin}
        rope = ops.RotaryEmbedding(q.heads, k.heads, style=style, rotary_dim=turned, cos=channel(cos), sin=channel(sin))
        raised.append(Raised(rope, packed, Inner(), [], node, {}, angles))
        packed = raised[-1].out
    last = packed
    if isinstance(last, Inner):
        place = q.heads * q.size
        for heads in (k, v):
            if heads.factor == 1:  # another factor is part of the scale
                last.views.append(View(heads.seen, place, heads.heads, heads.size))
            place += heads.heads * heads.size
    attention = ops.Attention(q.heads, k.heads, mask=None if mask is None else channel(mask), **how)
    given = {} if mask is None else {channel(mask): mask}
    raised.append(Raised(attention, last, out, [*took, out], node, {}, given))
    for r in raised:
        r.node = out
    return raised


def _across(parts: list[Heads], mask: Any, how: dict[str, Any], out: Node, took: list[Node]) -> list[Raised] | None:
    """Attention to keys and values that are made of another tensor."""
    if any(h.rope is not None or h.norm is not None or h.start != 0 for h in parts) or how.get("window") is not None:
        return None
    widths = [(example(h.source), h.heads * h.size) for h in parts]
    if any(e is None or e.ndim != 3 or not same_size(e.shape[-1], width) for e, width in widths):
        return None
    q, k, v = parts
    lengths = [t.shape[-2] for h in (q, k) if (t := example(h.source)) is not None]
    if how.get("causal") and not same_size(*lengths):
        return None
    given = {channel(k.source): k.source, channel(v.source): v.source}
    if mask is not None:
        given[channel(mask)] = mask
    operation = ops.CrossAttention(
        q.heads, k.heads, k=channel(k.source), v=channel(v.source), mask=None if mask is None else channel(mask), **how
    )
    return [Raised(operation, q.source, out, [*took, out], out, {}, given)]


def _packed(parts: list[Heads], out: Inner, took: list[Node]) -> list[Raised] | str:
    """The `Linear`, or the merged `Linear`s, that make queries, keys and values side by side, or what lays them so.

    None, if they lie so in a tensor that something else makes, such as a `Linear` and an adapter beside it.
    """
    sources = [p.source for p in parts]
    sizes = [e.shape[-1] for s in sources if (e := example(s)) is not None]
    whole = all(same_size(size, p.heads * p.size) and p.start == 0 for size, p in zip(sizes, parts, strict=False))
    if all(spelled(s) == "linear" for s in sources) and whole and len(set(sources)) == 3:
        found = merged(sources, out, [])
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
    took += r.took
    if not interleaved:
        r.out = out
        return found
    heads, size, made = parts[0].heads, parts[0].size, [Inner() for _ in range(3)]
    laid = (ops.Reshape(heads, 3, size), ops.Transpose(-3, -2), ops.Reshape(3 * heads * size, dims=3))
    r.out = made[0]
    steps = zip(laid, made, (*made[1:], out), strict=True)
    return [r, *(Raised(operation, x, y, [], source) for operation, x, y in steps)]


def _normed(q: Heads, k: Heads, x: Value, node: Node) -> Raised | str:
    a, b = q.norm, k.norm
    assert a is not None
    assert b is not None
    whole = a.size == q.heads * q.size and q.heads > 1
    if b.size != (k.heads * k.size if whole else k.size) or a.size not in (q.size, q.heads * q.size):
        return "norms of queries and keys are of different widths"
    kinds = [(n.kind, n.eps, n.zero_centered, n.weight is None, n.bias is None) for n in (a, b)]
    if kinds[0] != kinds[1]:
        return "norms of queries and keys are of different kinds"
    w = example(a.weight)
    made = ops.QKNorm(
        q.size, q.heads, k.heads, a.eps, w is not None, META, None if w is None else w.dtype,
        kind="rms" if a.kind == "rms" else "layer", bias=a.bias is not None, full_width=whole,
        zero_centered=a.zero_centered,
    )  # fmt: skip
    given = {"q_weight": a.weight, "k_weight": b.weight, "q_bias": a.bias, "k_bias": b.bias}
    return Raised(made, x, Inner(), [], node, {name: p for name, p in given.items() if p is not None})


def _joined(node: Node, took: list[Node]) -> Node | None:
    """[B, S, H D] of heads [B, H, S, D]."""
    e, transposed = example(node), False
    while e is not None:
        following = ahead(node, {"transpose", "permute", "reshape", "view", "contiguous", "flatten"})
        if following is None:
            return None
        took.append(following)
        t = example(following)
        if t is not None and t.ndim == 3:
            last = e.shape[1] * e.shape[3]
            joined = transposed and same_size(t.shape[-1], last) and same_size(t.shape[1], e.shape[2])
            return following if joined else None
        if not transposed and is_transpose(following):
            transposed = True
        elif t is None or is_same(following) is None:
            return None
        node = following
    return None


@matcher("multi_head_attention_forward", rank=0)
def raise_multi_head_attention(node: Node) -> Found:
    """torch.nn.MultiheadAttention of one tensor."""
    q, k, v = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    if not (q is k is v):
        return f"queries, keys and values of several tensors: make them by Linears, and {CALL}"
    names = (
        "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v", "add_zero_attn",
        "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask", "need_weights", "attn_mask",
        "use_separate_proj_weight",
    )  # fmt: skip
    given = {name: argument(node, i + 3, name) for i, name in enumerate(names)}
    rare = ("bias_k", "bias_v", "add_zero_attn", "use_separate_proj_weight")
    users = {u.args[1]: u for u in node.users if spelled(u) == "getitem"}
    if any(given[name] not in (None, False) for name in rare) or (users.get(1) is not None and users[1].users):
        return "its weights are read (need_weights=True), or it has an option that no operation has"
    if given["key_padding_mask"] is not None or given["attn_mask"] is not None:
        return f"a mask in the form of torch.nn.MultiheadAttention: make q, k and v by a Linear, and {CALL}"
    result = users.get(0)
    took = [node, *users.values()]
    out = None if result is None else ahead(result, {"transpose"})
    if spelled(q) != "transpose" or out is None or set(q.args[1:]) != {0, 1} or set(out.args[1:]) != {0, 1}:
        return "its tensors are not batch first"
    took += [q, out]
    x = q.args[0]
    first = linear(x, given["in_proj_weight"], given["in_proj_bias"], node, [])
    if not isinstance(first, list):
        return "its sizes are not fixed"
    packed, heads = Inner(), Inner()
    first[0].out = packed
    attention = ops.Attention(
        given["num_heads"], causal=bool(node.kwargs.get("is_causal")) and given["attn_mask"] is None,
        dropout=given["dropout_p"] if given["training"] else 0.0,
    )  # fmt: skip
    weight, bias = given["out_proj_weight"], given["out_proj_bias"]
    w = example(weight)
    if w is None:
        return "its sizes are not fixed"
    last = ops.Linear(w.shape[1], w.shape[0], bias is not None, device=META, dtype=w.dtype)
    params = {"weight": weight} | ({} if bias is None else {"bias": bias})
    found = [first[0], Raised(attention, packed, heads, [], node), Raised(last, heads, out, [*took, out], node, params)]
    for r in found:
        r.node = out
    return found

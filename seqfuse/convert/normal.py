"""Normal forms: rewrites equivalent calls of a captured graph to the form that matchers recognize."""

from __future__ import annotations

import contextlib
import inspect
import math
import string
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from .effects import (
    LIKE_ITS_INPUT,
    State,
    are_changed,
    in_place,
    is_fresh,
    keeps_gradient,
    leave,
    states,
    strides_matter,
)
from .graph import (
    VIEWS,
    argument,
    arguments,
    back,
    called,
    example,
    is_fixed,
    is_same,
    numbers,
    same_shape,
    spelled,
    swapped,
    value_of,
)
from .raising import CHEAP
from .writer import Writer

Rule = Callable[[Node, Writer], Node | None]
"""Rewrites a call: returns the node that computes its value, or `None` for a form that it does not rewrite."""


def normalize(graph: Graph, allowed: Callable[[Node], bool]) -> None:
    """Rewrite the calls of a graph that have a normal form; a call is kept if the rewritten one is not equivalent."""
    modes = states(graph.nodes)
    for node in list(graph.nodes):
        rule = _RULES.get(spelled(node) or "")
        if rule is None or not node.users or not allowed(node) or keeps_gradient(node, modes[node]):
            continue
        write = Writer(node, modes[node].autocast)
        wanted = example(node)
        try:
            with torch.set_grad_enabled(wanted is not None and wanted.requires_grad):
                found = None if wanted is None else rule(node, write)
        except Exception:  # a form that the rule does not expect
            found = None
        made = example(found)
        if found is None or made is None or wanted is None or not _is_like(made, wanted) or _wrong_strides(node, made):
            write.undo()
            continue
        write.keep()
        replace(node, found)
        for gone in (node, *(n for n in node.all_input_nodes if spelled(n) == _MULTI_HEAD)):
            if not gone.users:
                graph.erase_node(gone)
    _made_once(graph, allowed, modes)
    for node in reversed(list(graph.nodes)):
        if not node.users and spelled(node) in PURE | _NORMS and not in_place(node) and allowed(node):
            graph.erase_node(node)


def replace(node: Node, found: Node) -> None:
    """Replace a node by another, and recompute the example values of its views as views of the new example."""
    node.replace_all_uses_with(found)
    _view_anew(found)


def _view_anew(node: Node) -> None:
    for user in node.users:
        if spelled(user) not in VIEWS:
            continue
        old, values = value_of(user), [e for t in user.all_input_nodes if (e := example(t)) is not None]
        mode: Any = next((m for e in values if (m := getattr(e, "fake_mode", None))), contextlib.nullcontext())
        held = cast("Sequence[Any]", old if isinstance(old, list | tuple) else [old])
        needs = any(t.requires_grad for t in held if isinstance(t, torch.Tensor))
        # If a view cannot be recomputed, its example stays a view of the old one.
        with contextlib.suppress(Exception), mode, torch.set_grad_enabled(needs):
            user.meta["example_value"] = called(user, value_of)
        _view_anew(user)


def _is_like(made: torch.Tensor, wanted: torch.Tensor) -> bool:
    same = made.dtype is wanted.dtype and made.device == wanted.device and made.requires_grad is wanted.requires_grad
    return same and same_shape(made.shape, wanted.shape)


def _wrong_strides(node: Node, made: torch.Tensor) -> bool:
    """Whether the strides of a call's result matter, and another tensor has other ones."""
    e = example(node)
    moved = e is not None and made.stride() != numbers(e.stride())
    return breaks_views(node, made) or (moved and strides_matter(node))


def breaks_views(node: Node, made: torch.Tensor, dead: Container[Node] = ()) -> bool:
    """Whether a view of a call's result, of a view of it, or of what is made of it element by element, would fail for
    another tensor: in the graph, or by the caller, if the graph returns it.

    Args:
        node: the call.
        made: the tensor instead of its result.
        dead: calls that do not run.
    """
    like = torch.empty_strided(numbers(made.shape), numbers(made.stride()), device="meta")
    stack: list[tuple[Node, Any]] = [(node, like)]
    seen = {node}
    while stack:
        alias, t = stack.pop()
        for user in alias.users:
            name = spelled(user)
            if user in dead or user in seen:
                continue
            if name in ("view", "view_as") and not _can_view(t, user):
                return True
            if user.op == "output" and (e := example(alias)) is not None and e.is_contiguous() > t.is_contiguous():
                return True
            made_of_it = None
            if name in LIKE_ITS_INPUT or (in_place(user) and user.args[:1] == (alias,)):
                made_of_it = t
            elif name in VIEWS or (_elements(user)[:1] == _elements(alias)[:1] != ()):
                made_of_it = _viewed(user, alias, t)
            if made_of_it is not None:
                seen.add(user)
                stack.append((user, made_of_it))
    return False


def _viewed(view: Node, source: Node, t: Any) -> Any:
    """The result of a view of one tensor, or an element of several, for another, if it can be computed."""
    with contextlib.suppress(Exception):
        return called(view, lambda n: t if n is source else numbers((value_of(n),))[0])
    return None


def _can_view(t: torch.Tensor, view: Node) -> bool:
    e = example(view)
    if e is not None:
        with contextlib.suppress(RuntimeError):
            t.view(numbers(e.shape))
            return True
    return False


def _made_once(graph: Graph, allowed: Callable[[Node], bool], modes: Mapping[Node, State]) -> None:
    """Merge equal calls without side effects: models compute angles and masks for queries, and again for keys."""
    made: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if spelled(node) not in PURE - {"clone"} or in_place(node) or not allowed(node):
            continue
        state = modes.get(node)  # not known for calls written by a rule
        mode = (state.autocast, state.grad) if state is not None else node
        first = made.setdefault((repr((node.op, node.target, node.args, node.kwargs)), mode), node)
        if first is node or (state is not None and modes[first].changes != state.changes and _read_changed(node)):
            continue
        # Two results of a model remain two tensors, since a caller may modify one of them.
        if not are_changed([first, node]) and not leave([first, node]):
            replace(node, first)
            graph.erase_node(node)


def _read_changed(node: Node) -> bool:
    """Whether a call reads a tensor that is modified in place."""
    return are_changed([n for n in node.all_input_nodes if example(n) is not None])


_NORMS = {"layer_norm", "rms_norm"}
_MULTI_HEAD = "multi_head_attention_forward"
PURE = CHEAP | {
    "squeeze", "cos", "sin", "conj", "neg", "cat", "stack", "repeat_interleave", "mul", "add", "sub", "truediv", "pow",
    "clone", "detach", "mean",
}  # fmt: skip
"""Calls without side effects: equal ones can be merged, and unread ones removed."""


def _einsum(node: Node, write: Writer) -> Node | None:
    """A contraction of two tensors as a GEMM; of one tensor, if it only permutes, as a permutation."""
    equation, *given = node.args
    operands = cast("Sequence[Any]", given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given)
    shapes = [e.shape for t in operands if (e := example(t)) is not None]
    if not isinstance(equation, str) or "->" not in equation or len(shapes) != len(operands):
        return None
    terms, made = _terms(equation.replace(" ", ""), [len(shape) for shape in shapes])
    if len(terms) == 1 and sorted(terms[0]) == sorted(made) and len(set(made)) == len(made):
        return _permuted(write, operands[0], [terms[0].index(letter) for letter in made])
    if len(terms) != 2 or any(len(set(term)) != len(term) for term in (*terms, made)):
        return None
    (a, b), (x, y) = terms, operands
    if _is_parameter(x) and not _is_parameter(y):
        a, b, x, y = b, a, y, x
    summed = [letter for letter in a if letter in b and letter not in made]
    batch = [letter for letter in made if letter in a and letter in b]
    left, right = ([letter for letter in made if letter in term and letter not in batch] for term in (a, b))
    if not summed or {*a, *b} != {*summed, *batch, *left, *right}:
        return None
    first, second = shapes if x is operands[0] else shapes[::-1]
    size, others = dict(zip(a, first, strict=True)), dict(zip(b, second, strict=True))
    if not same_shape([size[letter] for letter in summed], [others[letter] for letter in summed]):
        return None  # einsum would broadcast a size of 1
    size |= others
    if not batch:
        return _with_matrix(write, (x, a, left), (y, b, right), summed, size, made)
    if not left or not right or len(summed) != 1:
        return None
    if made.index(right[-1]) < made.index(left[-1]):  # so that the product has the strides of the result
        a, b, x, y, left, right = b, a, y, x, right, left
    # Of several letters of one operand, all but the last are batch dimensions, which the other operand broadcasts.
    whole = [letter for letter in made if letter in (*batch, *left[:-1], *right[:-1])]
    rows, columns, (k,) = left[-1], right[-1], summed
    product = _bmm_of(write, _aligned(write, x, a, [*whole, rows, k]), _aligned(write, y, b, [*whole, k, columns]))
    return _permuted(write, product, [[*whole, rows, columns].index(letter) for letter in made])


def _terms(equation: str, dims: list[int]) -> tuple[list[str], str]:
    """The letters of the operands and of the result, with unused capital letters for dots, aligned at the last one."""
    given, _, made = equation.partition("->")
    terms, dots = given.split(","), ""
    free = "".join(letter for letter in string.ascii_uppercase if letter not in equation)
    for i, term in enumerate(terms):
        if "..." in term:
            count = dims[i] - len(term) + 3
            letters = free[len(free) - count :]
            terms[i], dots = term.replace("...", letters), max(dots, letters, key=len)
    return terms, made.replace("...", dots)


def _aligned(write: Writer, t: Node, letters: str, wanted: list[str]) -> Node:
    """A tensor with its dimensions in the wanted order, and a dimension of size 1 for each missing letter."""
    own = [letter for letter in wanted if letter in letters]
    t = _permuted(write, t, [letters.index(letter) for letter in own])
    for place, letter in enumerate(wanted):
        if letter not in letters:
            t = write("unsqueeze", t, place)
    return t


def _with_matrix(
    write: Writer, one: tuple[Node, str, list[str]], other: tuple[Node, str, list[str]], summed: list[str], size: Any,
    made: str,
) -> Node | None:  # fmt: skip
    """A GEMM of [*, K] with a matrix [N, K]."""
    (x, a, left), (w, b, right) = one, other
    if not right or not left or not is_fixed(*(size[letter] for letter in right)):
        return None
    x = _permuted(write, x, [a.index(letter) for letter in (*left, *summed)])
    w = _permuted(write, w, [b.index(letter) for letter in (*right, *summed)])
    if len(summed) > 1:
        x = write("flatten", x, -len(summed))
        w = write("flatten", w, -len(summed))
    if len(right) > 1:
        w = write("flatten", w, 0, len(right) - 1)
    product = write("F.linear", x, w) if _is_parameter(w) else write("matmul", x, write("transpose", w, 0, 1))
    if len(right) > 1:
        product = write("unflatten", product, -1, [size[letter] for letter in right])
    return _permuted(write, product, [[*left, *right].index(letter) for letter in made])


def _permuted(write: Writer, t: Node, order: list[int]) -> Node:
    n = len(order)
    if order == list(range(n)):
        return t
    if n > 1 and order == [*range(n - 2), n - 1, n - 2]:
        return write("transpose", t, -2, -1)
    moved = [i for i, place in enumerate(order) if place != i]
    return write("transpose", t, *moved) if len(moved) == 2 else write("permute", t, *order)


def _is_parameter(node: Any) -> bool:
    """Whether a node is a parameter or a view of one."""
    while isinstance(node, Node) and spelled(node) in _VIEWS and node.args:
        node = node.args[0]
    e = example(node)
    return e is not None and node.op in ("placeholder", "get_attr") and isinstance(e, torch.nn.Parameter)


_VIEWS = {"view", "reshape", "transpose", "permute", "t", "flatten", "unflatten", "getitem", "contiguous"}


def _multi_head_attention(node: Node, write: Writer) -> Node | None:
    """`F.multi_head_attention_forward` as `Linear`s and attention, if its attention weights are not used."""
    bound = inspect.signature(torch.nn.functional.multi_head_attention_forward).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    rare = ("bias_k", "bias_v", "add_zero_attn", "static_k", "static_v")
    q, k, v = given["query"], given["key"], given["value"]
    e, heads = example(q), given["num_heads"]
    if any(given[name] not in (None, False) for name in rare) or e is None or e.ndim != 3:
        return None
    width = given["embed_dim_to_check"]
    if not isinstance(heads, int) or not isinstance(width, int):
        return None
    weight, bias, apart = given["in_proj_weight"], given["in_proj_bias"], given["use_separate_proj_weight"]

    def rows(t: Node | None, first: int, last: int) -> Node | None:
        return t if t is None or last - first == 3 else write("getitem", t, slice(first * width, last * width))

    def batch_first(t: Node) -> Node:
        return cast("Node", t.args[0]) if swapped(t) == (0, 1) else write("transpose", t, 0, 1)

    inputs = {t: batch_first(t) for t in (q, k, v)}
    made: list[Node] = []
    if q is k is v and not apart:
        whole = write("F.linear", inputs[q], weight, bias)
        made = [write("getitem", whole, (Ellipsis, slice(i * width, (i + 1) * width))) for i in range(3)]
    else:
        for i, (name, t) in enumerate(zip(("q", "k", "v"), (q, k, v), strict=True)):
            own = given[f"{name}_proj_weight"] if apart else rows(weight, i, i + 1)
            made.append(write("F.linear", inputs[t], own, rows(bias, i, i + 1)))
    split = [write("transpose", write("unflatten", t, -1, [heads, width // heads]), 1, 2) for t in made]
    mask, padding, weighs = given["attn_mask"], given["key_padding_mask"], given["need_weights"]
    causal = bool(given["is_causal"]) and padding is None and not weighs
    mask = None if causal else _added(write, mask, split[0], heads)
    if padding is not None:
        padding = write("unsqueeze", write("unsqueeze", _as_floats(write, padding, split[0]), 1), 1)
        mask = padding if mask is None else write("add", mask, padding)
    dropout = given["dropout_p"] if given["training"] else 0.0
    if weighs:
        scale = 1 / math.sqrt(width // heads)
        scores = write("matmul", write("mul", split[0], scale), write("transpose", split[1], -2, -1))
        scores = scores if mask is None else write("add", scores, mask)
        shares = write("F.softmax", scores, dim=-1)
        shares = write("F.dropout", shares, p=dropout) if dropout else shares
        out = write("matmul", shares, split[2])
    else:
        out = write("F.attention", *split, mask, dropout, causal)
    joined = write("flatten", write("transpose", out, 1, 2), 2)
    joined = write("F.linear", joined, given["out_proj_weight"], given["out_proj_bias"])
    return write("transpose", joined, 0, 1)


def _as_floats(write: Writer, mask: Node, like: Node) -> Node:
    """A boolean mask, `True` for hidden keys, as a mask that is added to scores; other masks unchanged."""
    e, q = example(mask), example(like)
    if e is None or q is None or e.dtype is not torch.bool:
        return mask
    return write("masked_fill", write("torch.zeros_like", mask, dtype=q.dtype), mask, -math.inf)


def _added(write: Writer, mask: Node | None, q: Node, heads: int) -> Node | None:
    """A mask [S, T] or [B * H, S, T] with the dimensions of scores."""
    if mask is None:
        return None
    e, mask = example(mask), _as_floats(write, mask, q)
    assert e is not None
    if e.ndim == 3:
        return write("unflatten", mask, 0, [-1, heads])
    return write("unsqueeze", write("unsqueeze", mask, 0), 0)


def _baddbmm(node: Node, write: Writer) -> Node | None:
    """The sum of beta times the bias and alpha times a @ b."""
    bias, a, b = (argument(node, i, name) for i, name in enumerate(("input", "batch1", "batch2")))
    alpha, beta = (node.kwargs.get(name, 1) for name in ("alpha", "beta"))
    e = example(bias)
    if beta == 0 and (e is None or e.requires_grad):
        return None  # its gradient is zeros, and that of a tensor that is not read is `None`
    product: Any = _bmm_of(write, a, b)
    merged = spelled(product) == "flatten" and e is not None and e.ndim == 3
    if merged:
        product = product.args[0]
        bias = write("unflatten", bias, 0, [-1, value_of(product).shape[1]])
    product = product if alpha == 1 else write("mul", product, alpha)
    if beta != 0:
        product = write("add", product, bias if beta == 1 else write("mul", bias, beta))
    return write("flatten", product, 0, 1) if merged else product


def _addmm(node: Node, write: Writer) -> Node | None:
    """A GEMM plus a vector, as in Hugging Face's `Conv1D`, as `F.linear` of the tensor that its rows are a view of."""
    bias, flat, right = (argument(node, i, name) for i, name in enumerate(("input", "mat1", "mat2")))
    weight, b = _turned(right), example(bias)
    if weight is None or b is None or b.ndim != 1 or any(node.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    source = flat.args[0] if spelled(flat) in ("view", "reshape") else flat
    before, after, size = example(source), example(flat), value_of(node).shape[1]
    if before is None or after is None or not same_shape(before.shape[-1:], after.shape[-1:]):
        source = flat
    made = write("F.linear", source, weight if weight is not right else write("transpose", right, 0, 1), bias)
    return made if source is flat else write("reshape", made, -1, size)


def _turned(right: Any) -> Any:
    """The weight [out, in] of which the right operand of a GEMM is the transpose, else the operand, if a matrix."""
    e = example(right)
    if e is None or e.ndim != 2:
        return None
    return right if swapped(right) is None else right.args[0]


def _of_merged(node: Node, write: Writer) -> Node | None:
    """An element-wise call, or a softmax over the last dimension, moved from after to before the merging of heads."""
    merged: Any = node.args[0]
    whole, others = _merged(merged), _others(node)
    if whole is None or (spelled(node) == "softmax" and argument(node, 1, "dim") != -1):
        return None
    if spelled(node) == "add" and others:
        (other,) = others
        heads = value_of(whole).shape[1]
        if (
            not _is_of_gemm(whole)
            or not same_shape(value_of(other).shape, value_of(merged).shape)
            or not is_fixed(heads)
        ):
            return None
        total = write.like(node, (whole, write("unflatten", other, 0, [-1, heads])), dict(node.kwargs))
        return write("flatten", total, 0, 1)
    if any((e := example(other)) is None or e.ndim for other in others) and spelled(node) not in ("type_as", "to"):
        return None
    return write("flatten", write.again(whole), 0, 1)


def _type_as(node: Node, write: Writer) -> Node | None:
    """A cast to the dtype that a tensor already has, as the tensor."""
    same = is_same(node)
    return same if same is not None and not _is_returned(node) else _of_merged(node, write)


def _is_of_gemm(node: Any) -> bool:
    """Whether a tensor is the result of an activation GEMM, possibly with element-wise calls after it."""
    while spelled(node) in ("add", "mul", "truediv", "to", "float"):
        node = node.args[0]
    return spelled(node) == "matmul"


def _merged(t: Any) -> Node | None:
    """The tensor [B, H, S, D] that a tensor is a view of, with the first two dimensions merged."""
    whole = t.args[0] if spelled(t) in ("view", "reshape", "flatten") and t.args else None
    before, after = example(whole), example(t)
    if before is None or after is None or before.ndim != 4 or after.ndim != 3:
        return None
    return whole if same_shape(before.shape[2:], after.shape[1:]) else None


def _bmm(node: Node, write: Writer) -> Node | None:
    return _bmm_of(write, *node.args, *node.kwargs.values()) if len(node.args) + len(node.kwargs) == 2 else None


def _matmul(node: Node, write: Writer) -> Node | None:
    """A GEMM with a parameter as `F.linear`; a GEMM of merged heads as a GEMM of heads."""
    a, b = node.args
    weight = _turned(b)
    if weight is not None and weight.op in ("placeholder", "get_attr"):
        return write("F.linear", a, weight if weight is not b else write("transpose", b, 0, 1))
    return None if _unmerged(write, a) is None or _unmerged(write, b) is None else _bmm_of(write, a, b)


def _bmm_of(write: Writer, a: Any, b: Any) -> Node:
    """A batched GEMM; with heads [B, H] as separate dimensions if an operand was merged from them."""
    first, second = _unmerged(write, a), _unmerged(write, b)
    known = first if first is not None else second
    if known is None or not is_fixed(heads := value_of(known).shape[1]):
        return write("matmul", a, b)
    first, second = (write("unflatten", t, 0, [-1, heads]) if w is None else w for t, w in ((a, first), (b, second)))
    return write("flatten", write("matmul", first, second), 0, 1)


def _unmerged(write: Writer, t: Any) -> Node | None:
    """The tensor [B, H, S, D] of [B * H, S, D], also if it is transposed or multiplied by a number."""
    turned = swapped(t) == (1, 2)
    numbers = spelled(t) in ("mul", "truediv") and all((e := example(n)) is not None and not e.ndim for n in _others(t))
    if turned or numbers:
        inner = _unmerged(write, t.args[0])
        if inner is None:
            return None
        return write("transpose", inner, -2, -1) if turned else write.again(inner, t)
    return _merged(back(t))


def _others(call: Node) -> list[Node]:
    return [n for n in call.all_input_nodes if n is not call.args[0]]


def _linear(node: Node, write: Writer) -> Node | None:
    """A `Linear` of [B, S, D] with an additional dimension of size 1: the same without it, as for a norm before it."""
    x: Any = argument(node, 0, "input")
    source = x.args[0] if spelled(x) in ("view", "reshape", "unsqueeze") and x.args else None
    before, after = example(source), example(x)
    if before is None or after is None or (before.ndim, after.ndim) != (3, 4) or source is None:
        return None
    inserted = (at for at in range(3) if same_shape(after.shape, (*before.shape[:at], 1, *before.shape[at:])))
    place = next(inserted, None)
    return None if place is None else write("unsqueeze", write.again(source), place)


def _activation(node: Node, write: Writer) -> Node | None:
    """An in-place activation of a new tensor that nothing else reads as an out-of-place one."""
    x: Any = argument(node, 0, "input")
    if not argument(node, 1, "inplace", False) or not is_fresh(x, node):
        return None
    return write(f"F.{spelled(node)}", x)


def _dropout(node: Node, write: Writer) -> Node | None:
    """An in-place dropout that is inactive, or of a new tensor that nothing else reads, as an out-of-place one."""
    x, p, training, inplace = arguments(node, "input", "p", "training", "inplace")
    if not inplace:
        return _of_merged(node, write)
    if is_same(node) is None and not is_fresh(x, node):
        return None
    return write("F.dropout", x, 0.5 if p is None else p, training is not False)


def _view(node: Node, write: Writer) -> Node | None:
    """A view of a view, or a transpose of a transpose, that has the layout of the first tensor, as that tensor."""
    source: Any = node.args[0]
    while spelled(source) in ("view", "reshape", "flatten", "unflatten", "transpose") and isinstance(source, Node):
        source = source.args[0]
        if same_shape(_elements(source), _elements(node)):
            return None if _is_returned(node) or are_changed([source, node]) else source
    return None


def _elements(node: Any) -> tuple[Any, ...]:
    """A tensor's storage, offset, shape and strides."""
    e = example(node)
    return () if e is None else (e.untyped_storage()._cdata, e.storage_offset(), *e.shape, *e.stride())  # pyright: ignore


def _getitem(node: Node, write: Writer) -> Node | None:
    """Tokens selected from a norm's result, such as the class token: normalizes only these tokens.

    A selection by a list of one number, as Falcon selects the head of keys: the same with a slice and a copy.
    """
    norm, index = cast("Any", node.args)
    if spelled(norm) == _MULTI_HEAD:  # a tuple of output and weights
        alone = index == 0 and not any(user.users for user in norm.users if user is not node)
        return _multi_head_attention(norm, write) if alone else None
    e, parts = example(norm), cast("tuple[Any, ...]", index if isinstance(index, tuple) else (index,))
    numbers = [cast("list[Any]", i)[0] for i in parts if isinstance(i, list)]
    if len(numbers) == 1 and all(i is Ellipsis or i == slice(None) or i == [numbers[0]] for i in parts):
        (at,) = numbers
        part = tuple(slice(at, at + 1 or None) if isinstance(i, list) else i for i in parts)
        made = write("clone", write("getitem", norm, part), memory_format=torch.contiguous_format)
        return made if type(at) is int and same_shape(value_of(made).stride(), value_of(node).stride()) else None
    if spelled(norm) not in _NORMS or list(norm.users) != [node] or e is None or is_same(node) is not None:
        return None
    indices = list(parts)
    while indices[1:] and indices[-1] == slice(None):
        indices.pop()
    whole = e.ndim - len(argument(norm, 1, "normalized_shape"))
    if len(indices) > whole or not all(map(_takes, indices)):
        return None
    if are_changed([norm, *norm.all_input_nodes]):
        return None
    return write.again(write("getitem", argument(norm, 0, "input"), index), norm)


def _cat(node: Node, write: Writer) -> Node | None:
    """A concatenation with only empty tensors, such as the unrotated part of a head if all of it is rotated."""
    alone = is_same(node)
    if alone is None or _is_returned(node) or are_changed([alone, node]):
        return None
    of_any_strides = all(spelled(user) in ("cat", "scaled_dot_product_attention") for user in node.users)
    e, w = example(alone), example(node)
    fits = e is not None and w is not None and same_shape(e.stride(), w.stride())
    return alone if fits or of_any_strides else None


def _takes(index: Any) -> bool:
    """Whether an index is a number, or a slice with numbers."""
    if isinstance(index, slice):
        stretch = cast("slice[Any, Any, Any]", index)
        return all(type(n) is int or n is None for n in (stretch.start, stretch.stop, stretch.step))
    return type(index) is int


def _is_returned(node: Node) -> bool:
    """Whether a graph returns a node, which then must remain a separate tensor: a caller may compare identities."""
    return any(user.op == "output" for user in node.users)


_RULES: dict[str, Rule] = {
    "einsum": _einsum,
    "baddbmm": _baddbmm,
    "addmm": _addmm,
    "bmm": _bmm,
    "matmul": _matmul,
    "linear": _linear,
    **dict.fromkeys(("softmax", "add", "mul", "truediv", "to", "float", "type"), _of_merged),
    "type_as": _type_as,
    **dict.fromkeys(("relu", "silu"), _activation),
    "dropout": _dropout,
    **dict.fromkeys(("view", "reshape", "transpose"), _view),
    "getitem": _getitem,
    "cat": _cat,
}

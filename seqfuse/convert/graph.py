"""Reads the graphs that Dynamo captures: names of calls, arguments, example tensors, views and casts."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

_functorch: Any = torch._C._functorch  # pyright: ignore
_MODULES = {
    "torch",
    "torch.nn.functional",
    "torch._C._nn",
    "torch._C",
    "torch._C._fft",
    "torch._C._linalg",
    "torch.functional",
    "_operator",
    "torch._tensor",
    "seqfuse.convert.experts",
    "seqfuse.convert.dtensor",
}
_ALIKE = {
    "multiply": "mul", "concat": "cat", "concatenate": "cat", "divide": "truediv", "div": "truediv",
    "true_divide": "truediv", "subtract": "sub", "swapaxes": "transpose", "swapdims": "transpose", "mm": "matmul",
    "unsafe_chunk": "chunk", "tensor_split": "chunk", "linalg_matmul": "matmul",
}  # fmt: skip
CASTS = {"float", "double", "half", "bfloat16", "to", "type_as", "type"}
"""Calls that cast to another dtype, or to another device."""
_SAME = {*CASTS, "contiguous", "view", "reshape", "expand", "expand_as", "clone", "identity"}


def spelled(node: Any) -> str | None:
    """The name of a torch call, equal for a function, a method, an operator and an ATen overload."""
    if not isinstance(node, Node) or HIDDEN in node.meta:
        return None
    if node.op == "call_method":
        return _ALIKE.get(name := str(node.target), name)
    return _name_of_function(node.target) if node.op == "call_function" else None


@functools.lru_cache(1024)
def _name_of_function(target: Any) -> str | None:
    if isinstance(target, torch._ops.OpOverload):  # pyright: ignore[reportPrivateUsage]
        if target.namespace != "aten":  # pyright: ignore[reportUnknownMemberType]
            return None
        name = target.overloadpacket.__name__  # pyright: ignore[reportUnknownMemberType]
    elif isinstance(target, torch._ops.HigherOrderOperator):  # pyright: ignore[reportPrivateUsage]
        name = str(target.name())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    elif getattr(target, "__module__", None) in _MODULES:
        name = getattr(target, "__name__", "")
    else:
        return None
    return _ALIKE.get(name, name)


def name_of(node: Node) -> str:
    """The name of any call as the model spells it."""
    target: Any = getattr(node.target, "overloadpacket", node.target)
    name = spelled(node) or getattr(target, "__name__", str(target))
    return node.meta.get(NAMED, name) if name in ("matmul", "linear") else name


_POSITIONAL = {
    "chunk", "split", "dropout", "softmax", "relu", "tanh", "sigmoid", "gelu", "silu", "rsqrt", "pow", "square", "mean",
    "add", "sub", "mul", "truediv", "neg", "unsqueeze", "transpose", "permute", "reshape", "glu", "matmul", "flatten",
}  # fmt: skip


def positional(graph: Graph) -> None:
    """Rewrite `input=` and `other=` of calls as positional arguments."""
    for node in graph.nodes:
        if spelled(node) in _POSITIONAL:
            given = dict(node.kwargs)
            args = [*node.args, given.pop("input")] if not node.args and "input" in given else list(node.args)
            if len(args) == 1 and "other" in given:
                args.append(given.pop("other"))
            node.args, node.kwargs = tuple(args), given


def fold_sizes(graph: Graph) -> None:
    """Replace symbolic sizes that Dynamo has specialized by their numbers."""
    for node in list(graph.nodes):
        number = fixed(value) if issubclass(type(value := value_of(node)), torch.SymInt) else None
        if number is None or spelled(node) != "getitem":
            continue

        def folded(argument: Node, own: Node = node, number: int = number) -> Any:
            return number if argument is own else argument

        for user in list(node.users):
            user.args, user.kwargs = map_arg(user.args, folded), map_arg(user.kwargs, folded)
        source = node.args[0]
        graph.erase_node(node)
        if isinstance(source, Node) and spelled(source) == "size" and not source.users:
            graph.erase_node(source)


def fixed(size: Any) -> int | None:
    """A size as a number, if it is equal in all calls."""
    return size.node.maybe_as_int() if issubclass(type(size), torch.SymInt) else size


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by place or by name."""
    return node.args[index] if index < len(node.args) else node.kwargs.get(name, default)


def arguments(node: Node, *names: str) -> Any:
    """The first arguments of a call, given by place or by these names."""
    return tuple(argument(node, i, name) for i, name in enumerate(names))


def called(node: Node, value: Callable[[Node], Any]) -> Any:
    """The result of a call for the values of its argument nodes."""
    args, kwargs = cast("Any", map_arg((node.args, node.kwargs), value))
    target: Any = node.target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def value_of(node: Any) -> Any:
    """The example value that Dynamo computed for a node: a fake tensor, several, or another value."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None


def example(node: Any) -> Tensor | None:
    """The fake tensor that Dynamo computed for a node; `None` for another value, a DTensor, or one of `torch.func`."""
    return found if is_plain(found := value_of(node)) else None


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a tensor, and neither a DTensor nor one of `torch.func`."""
    return isinstance(value, Tensor) and not is_dtensor(value) and not is_transformed(value)


def is_transformed(value: Any) -> bool:
    """Whether a value is a tensor within a transform of `torch.func`."""
    return isinstance(value, Tensor) and _functorch.is_functorch_wrapped_tensor(value)


def is_dtensor(value: Any) -> bool:
    """Whether a value is a tensor that torch shards over a mesh of processes."""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def alike(a: Any, b: Any) -> bool:
    """Whether two nodes are tensors of one shape and dtype."""
    e, w = example(a), example(b)
    return e is not None and w is not None and e.dtype is w.dtype and same_shape(e.shape, w.shape)


def same_shape(a: Any, b: Any) -> bool:
    """Whether two shapes are one, symbolic sizes by their expression, without a guard."""
    return len(a) == len(b) and all(map(same_size, a, b))


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are one number or one expression, also where a symbol turned out to be a number later."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a == b)


def numbers(shape: Any) -> tuple[int, ...]:
    """Sizes as numbers: those that were captured, where they are symbols."""
    return tuple(size if isinstance(size, int) else size.node.hint for size in shape)


def size_before(node: Node, size: Any) -> Any:
    """A size as it is written before a call: a number, or the node whose value a symbol is; `None` if none is known."""
    if (number := fixed(size)) is not None:
        return number
    before = itertools.takewhile(lambda n: n is not node, node.graph.nodes)
    symbols = ((n, value) for n in before if isinstance(value := value_of(n), torch.SymInt))
    return next((n for n, value in symbols if same_size(value, size)), None)


def is_last(dim: Any, x: Any) -> bool:
    """Whether a dimension that a call is given, as a number or in a list, is the last one alone."""
    dims = list(cast("Sequence[Any]", dim)) if isinstance(dim, list | tuple) else [dim]
    e = example(x)
    return e is not None and e.ndim > 0 and dims in ([-1], [e.ndim - 1])


def fake(node: Node, device: str | None = None) -> Tensor:
    """A tensor as the example of a node: fake under a `FakeTensorMode`, on `meta` without data."""
    e = example(node)
    assert e is not None
    shape, strides = numbers(e.shape), numbers(e.stride())
    return torch.empty_strided(shape, strides, dtype=e.dtype, device=device or e.device, requires_grad=e.requires_grad)


def is_fixed(*sizes: Any) -> bool:
    """Whether sizes are numbers, not symbols."""
    return all(isinstance(size, int) for size in sizes)


def is_same(node: Any) -> Node | None:
    """The argument that a call returns unchanged: a cast to its own dtype, a view of its own shape, an inactive
    dropout.

    A view or copy that the graph returns is not its source: its gradient may be requested, so its readers must read it.
    """
    source = _unchanged_argument(node)
    return None if source is not None and _is_returned_anew(node, source) else source


def _is_returned_anew(node: Node, source: Node) -> bool:
    """Whether a graph returns a call's result, with a gradient, that is a view or copy of its source; but not of keys
    that are put into an empty cache.
    """
    name, e, w = spelled(node) or "", example(node), example(source)
    if e is None or w is None or name in ("dropout", "cat") or (name in CASTS and e.dtype is w.dtype):
        return False
    itself = name == "contiguous" and same_shape(e.stride(), w.stride())
    return not itself and e.requires_grad and any(user.op == "output" for user in node.users)


def _unchanged_argument(node: Any) -> Node | None:
    name = spelled(node)
    if name == "dropout":
        on = argument(node, 2, "training", node.kwargs.get("train", True))  # `torch.dropout` calls it `train`
        off = not argument(node, 1, "p", 0.5) or not on
        return node.args[0] if off and isinstance(node.args[0], Node) else None
    if name == "getitem":
        index: Any = node.args[1]
        every = [index] if not isinstance(index, tuple) else cast("tuple[Any, ...]", index)
        whole = all(i is Ellipsis or (isinstance(i, slice) and cast("Any", i).step in (None, 1)) for i in every)
        source = node.args[0]
        return source if whole and isinstance(source, Node) and alike(source, node) else None
    if name == "cat":
        alone = _joined_alone(node)
        return alone if alike(alone, node) else None
    if name not in _SAME or not node.args or not isinstance(node.args[0], Node):
        return None
    if name == "clone" and any(user.target is getattr for user in node.users):
        return None  # through `data` it may change when it was read, and what was saved for the backward pass with it
    source = node.args[0]
    return source if alike(source, node) and example(source).device == example(node).device else None  # pyright: ignore[reportOptionalMemberAccess]


def unchanged(node: Any) -> Iterator[Any]:
    """A node, then its source before each call that changes nothing."""
    yield node
    while isinstance(node, Node) and (node := is_same(node)) is not None:
        yield node


def back(node: Any) -> Any:
    """The source of a node before calls that change nothing."""
    while (source := is_same(node)) is not None:
        node = source
    return node


def narrow_of(node: Any) -> Any:
    """The source of a node before casts to a wider dtype and calls that change nothing."""
    while isinstance(node, Node) and (source := is_same(node) or _widened(node)) is not None:
        node = source
    return node


def read_by(node: Node) -> list[Node]:
    """The nodes whose elements a call reads, without those of which it only reads dtype, device or shape."""
    name = spelled(node) or ""
    if name in CASTS or name in ("expand_as", "view_as", "reshape_as"):
        return [n for n in node.args[:1] if isinstance(n, Node)]
    return [] if name.startswith("new_") or name.endswith("_like") else node.all_input_nodes


def _widened(node: Node) -> Node | None:
    """The source of a cast to a wider dtype; concatenation with an empty wider tensor, as of a new cache, is a cast."""
    name = spelled(node)
    source: Any = _joined_alone(node) if name == "cat" else node.args[0] if name in CASTS else None
    before, after = example(source), example(node)
    if before is None or after is None or before.device != after.device or not same_shape(before.shape, after.shape):
        return None
    wider = before.is_floating_point() and torch.promote_types(before.dtype, after.dtype) is after.dtype
    return source if wider and not _is_returned_anew(node, source) else None


def _joined_alone(node: Node) -> Node | None:
    """The only non-empty tensor of a `cat`, as with an empty cache."""
    parts: Any = argument(node, 0, "tensors")
    dim = argument(node, 1, "dim", 0)
    full = [p for p in parts if (e := example(p)) is None or not same_size(e.shape[0 if e.ndim == 1 else dim], 0)]
    return full[0] if len(full) == 1 else None


def operands(node: Any, name: str) -> tuple[Any, Any] | None:
    """The two operands of a sum or product, in order; `None` with `alpha` or a rounding mode."""
    if spelled(node) != name or len(node.args) != 2 or dict(node.kwargs) not in ({}, {"alpha": 1}):
        return None
    return node.args[0], node.args[1]


VIEWS = {
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "getitem", "unbind", "chunk", "split",
    "split_with_sizes", "unsqueeze", "expand",
}  # fmt: skip


def view_source(node: Any) -> Node | None:
    """The tensor of which a call returns a view, judged by the shared memory of the examples."""
    source: Any = node.args[0] if spelled(node) in VIEWS and node.args else None
    if spelled(source) in ("unbind", "chunk", "split", "split_with_sizes"):
        source = source.args[0]
    e, w = example(node), example(source)
    if e is None or w is None or any(is_fixed(stride) and not stride for stride in w.stride()):
        return None  # of repeated elements strides do not tell which
    return source if e.untyped_storage()._cdata == w.untyped_storage()._cdata else None  # pyright: ignore


def elements_before(e: Tensor, w: Tensor) -> Any:
    """How many elements of the last dimension of a tensor are before those of a view of it."""
    start, step = e.storage_offset() - w.storage_offset(), w.stride(-1)
    number = fixed(start)
    return None if number is None or not is_fixed(step) or number % step else number // step


def part_of(node: Any) -> tuple[Any, int, int] | None:
    """Of which tensor a node is a stretch of the last dimension, where it starts, and its length."""
    whole = view_source(node) if spelled(node) == "getitem" else None
    e, w = example(node), example(whole)
    if e is None or w is None or not e.ndim or not is_fixed(e.shape[-1], w.shape[-1]):
        return None
    start = elements_before(e, w)
    if start is None or not same_shape(e.shape[:-1], w.shape[:-1]) or not same_shape(e.stride(), w.stride()):
        return None
    return whole, start, e.shape[-1]


def either(pair: tuple[Any, Any] | None) -> tuple[tuple[Any, Any], ...]:
    """Both orders of two operands; nothing for `None`."""
    return () if pair is None else (pair, pair[::-1])


def ahead(node: Node, names: set[str]) -> Node | None:
    """The only user of a node, if it is one of these calls upon it."""
    users = list(node.users)
    found = users[0] if len(users) == 1 else None
    return found if spelled(found) in names and found is not None and found.args[:1] == (node,) else None


def following(node: Node, calls: set[str], most: int) -> list[Node]:
    """A node and the calls behind it, each the only reader of the one before."""
    found = [node]
    while len(found[-1].users) == 1 and len(found) < most:
        (user,) = found[-1].users
        if spelled(user) not in calls and is_same(user) is None:
            break
        found.append(user)
    return found


def unflattened(flat: Any, node: Node) -> tuple[Any, Node]:
    """X and y of a call upon x.view(-1, n), whose result is viewed as [*, m] at once."""
    out = ahead(node, {"view", "reshape"})
    if spelled(flat) in ("view", "reshape") and out is not None:
        x = flat.args[0]
        before, viewed, after = example(x), example(flat), example(out)
        if before is None or viewed is None or after is None or not same_size(before.shape[-1], viewed.shape[-1]):
            return flat, node
        if same_shape(before.shape[:-1], after.shape[:-1]):
            return x, out
    return flat, node


def swapped(node: Any) -> tuple[int, int] | None:
    """The two dimensions that a call swaps, the first one first."""
    e = example(node)
    if e is None or not (spelled(node) in ("t", "transpose", "permute") or node.args[1:] in (("T",), ("mT",))):
        return None
    order = called(node, lambda _: torch.empty(*range(e.ndim), device="meta")).shape
    moved = [dim for dim, place in enumerate(order) if dim != place]
    return (moved[0], moved[1]) if len(moved) == 2 else None


HIDDEN = "seqfuse_hidden"
"""Marks a call that no spelling contains."""

WRITTEN = "seqfuse_written"
"""Marks a node that a matcher wrote for its operations; it is removed if it is not read."""

NAMED = "seqfuse_named"
"""The original name of a GEMM, and of the views around it, that were written for an `einsum` or `bmm`, for reports."""

PATH = "seqfuse_path"
"""The path of the module that called a node, if it is known."""


def owner(node: Node) -> str:
    """The path of the module that a node was called in, as `named_modules` has it; empty for the model's own."""
    if PATH in node.meta:
        return node.meta[PATH]
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path, _ = list(stack.values())[-1]
    path = re.sub(r"^L\['[^']*'\]", "", str(path)).replace("_modules", "")
    return ".".join(re.findall(r"[^.\[\]'\"]+", path))


def channel(node: Node) -> str:
    """The name of the channel that carries the value of a node."""
    return f"v_{node.name}"

"""Reasons why a call of a graph is not converted: its form, the calls around it, or the caller's filter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.fx import Graph, Node

from .chains import RaisedChain
from .graph import argument, is_same, is_transformed, name_of, owner, spelled, value_of
from .patterns.norm import is_root
from .raising import Raised, Value, is_cheap

_KINDS = {
    "GEMM": (
        "linear", "addmm", "matmul", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "einsum", "tensordot", "bilinear",
        "inner", "chain_matmul", "linalg_multi_dot", "_grouped_mm", "grouped_mm", "grouped_mm_fallback", "_scaled_mm",
        "scaled_mm", "mixture",
    ),
    "attention": (
        "scaled_dot_product_attention", "multi_head_attention_forward", "flex_attention",
        "_transformer_encoder_layer_fwd",
    ),
    "norm": ("layer_norm", "rms_norm", "rsqrt", "group_norm", "batch_norm", "instance_norm", "normalize"),
    "activation": (
        "gelu", "silu", "relu", "tanh", "sigmoid", "glu", "leaky_relu", "elu", "mish", "softplus", "relu6", "hardswish",
        "hardsigmoid", "hardtanh", "selu", "celu", "prelu", "logsigmoid", "relu_", "silu_", "tanh_", "sigmoid_",
    ),
    "interpolation": ("lerp", "lerp_"),
    "recurrent layer": (
        "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    ),
    "FFT": (
        *(f"fft_{inverse}{kind}fft{n}" for inverse in ("", "i") for kind in ("", "r", "h") for n in ("", "2", "n")),
        "stft", "istft",
    ),
    "convolution": ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
}  # fmt: skip
_HEAVY = {call: kind for kind, calls in _KINDS.items() for call in calls}
_NORMS = ("norm", "linalg_vector_norm", "std")
"""Calls that count as norms, like roots, only if a matcher has given a reason against raising them."""


@dataclasses.dataclass(frozen=True)
class Left:
    """A call that was not converted.

    Attributes:
        call: the name of the call.
        kind: GEMM, norm, activation, attention, convolution, interpolation, recurrent layer or FFT.
        module: the path of its module.
        reason: the reason.
    """

    call: str
    kind: str
    module: str
    reason: str


def left_in(graph: Graph, reasons: Mapping[Node, str], allowed: Callable[[Node], bool]) -> tuple[Left, ...]:
    """The unconverted calls of a graph that a report lists, with the recorded reason or that of their form."""
    return tuple(
        Left(name_of(n), kind, owner(n), reasons.get(n) or (_form(n, kind) if allowed(n) else NOT_ALLOWED))
        for n in graph.nodes
        if (kind := _kind(n, n in reasons)) is not None
    )


def _kind(node: Node, explained: bool) -> str | None:
    """The kind of an unconverted call in a report, or None; roots and softmax have one only with a recorded reason."""
    name = name_of(node) if node.op in ("call_function", "call_method") else ""
    if explained and name == "softmax":
        return "attention"
    if spelled(node) == "einsum" and not _contracts(node):
        return None
    if name == "normalize" and argument(node, 1, "p", 2.0) != 2:  # a division by a sum
        return None
    return "norm" if explained and (name in _NORMS or is_root(node)) else _HEAVY.get(name)


def _contracts(einsum: Node) -> bool:
    """Whether an einsum sums over an index that tensors share; else it is an element-wise product or a view."""
    equation: Any = einsum.args[0]
    if not isinstance(equation, str):
        return True
    given, _, made = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if "->" not in equation:
        made = "".join(letter for letter in given if given.count(letter) == 1)
    return any(sum(letter in term for term in terms) > 1 and letter not in made for letter in given if letter.isalpha())


def kind_of_module(module: nn.Module) -> str | None:
    """The kind of a module without submodules, as in `Left.kind`."""
    name, where = type(module).__name__, type(module).__module__
    if isinstance(module, nn.Linear | nn.Bilinear) or name == "Conv1D":  # Hugging Face's GEMM
        return "GEMM"
    if isinstance(module, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
        return "convolution"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent layer"
    if "Norm" in name:
        return "norm"
    return "activation" if where.endswith((".activation", ".activations")) else None


def _form(node: Node, kind: str) -> str:
    name = spelled(node) or name_of(node)
    if any(is_transformed(value_of(n)) for n in (node, *node.all_input_nodes)):
        return "it runs within a transform of torch.func"
    return _FORMS.get(name, f"no operation matches {name}" + (" here" if kind == "attention" else ""))


NOT_ALLOWED = "left out by filter_fn"

_FORMS = {
    "linear": "its weight and bias are not tensors of fixed sizes, or its input is not floating point",
    "addmm": "it is not x.view(-1, n) times a parameter, viewed as the dimensions of x again",
    "matmul": "its right operand is not a 2-D parameter, and it is not part of attention",
    "_transformer_encoder_layer_fwd": (
        "torch's own fast path of nn.TransformerEncoderLayer in eval() without gradients: leave it off by "
        "torch.backends.mha.set_fastpath_enabled(False) before the first call"
    ),
    "layer_norm": "it normalizes more than the last dimension, or has a bias and no weight",
    "rms_norm": "it normalizes more than the last dimension",
    **dict.fromkeys(
        ("gelu", "silu", "relu", "tanh", "sigmoid"), "it changes its input in place, or its input is not floating point"
    ),
}
"""By call, the condition of its conversion that it does not meet."""


def alone(
    chain: RaisedChain, operations: Sequence[Raised], reasons: Mapping[Node, str], allowed: Callable[[Node], bool]
) -> str:
    """Why a chain of one operation, or without parameters, is not converted: the names of the calls around it."""
    makers = {node: r for r in operations for node in (*r.took, r.out)}
    readers: dict[Value, Raised] = {node: r for r in reversed(operations) for node in r.took}
    inside, own = {n for r in chain.members for n in (*r.took, r.out)}, {owner(r.node) for r in chain.members}

    def placed(name: str, node: Node, said: str) -> str:
        path = owner(node)
        return f"{name} ({said})" if path in own else f"{name} in {path or 'the model'} ({said})"

    def described(known: Mapping[Value, Raised], node: Node, between: Sequence[str]) -> str | None:
        if node in inside:
            return None
        r = known.get(node)
        if r is None and not allowed(node):
            return placed(name_of(node), node, NOT_ALLOWED)
        if r is None:  # shorter if a separate line explains it
            reason = reasons.get(node, "not recognized")
            why = "left" if _kind(node, node in reasons) is not None else reason
            return placed(name_of(node), node, why.partition(": its ")[0] if why.startswith((ALONE, _BARE)) else why)
        path = f", by way of {' and '.join(between)}" if between else ""
        return placed(type(r.operation).__name__, node, f"in another chain{path}")

    given = [n for r in chain.members for n in (r.x, *r.channels.values()) if isinstance(n, Node)]
    outs = [out for r in chain.members for out in r.ends]
    before, behind = list(map(_maker, given)), [found for out in outs for found in _readers(out)]
    entered = any(node.op in ("placeholder", "get_attr") for node, _ in before)
    left = any(node.op == "output" for node, _ in behind)
    made = _listed("made by", (described(makers, *found) for found in before if found[0].op.startswith("call")))
    read = _listed("read by", (described(readers, *found) for found in behind if found[0].op.startswith("call")))
    into = " and ".join([*made, *["given to the graph"] * entered])
    out = " and ".join([*read, *["returned"] * left])
    sides = "; ".join([*[f"its input is {into}"] * bool(into), *[f"its result is {out}"] * bool(out)])
    names = [type(r.operation).__name__ for r in chain.members if not getattr(r.operation, "is_view", False)]
    why = ALONE if len(names) < 2 else f"{_BARE}{' and '.join(names[:_MOST])}{' ...' * (len(names) > _MOST)}"
    return f"{why}: {sides}" if sides else why


ALONE = "no operation beside it to fuse it with"
_BARE = "no operation has a parameter in its chain of "

_MOST = 2
"""Maximum number of neighbors that are named on one side."""


def _listed(verb: str, said: Iterable[str | None]) -> list[str]:
    names = list(dict.fromkeys(filter(None, said)))
    more = [f"{len(names) - _MOST} more"] if len(names) > _MOST else []
    return [f"{verb} {' and '.join(names[:_MOST] + more)}"] if names else []


def _view(node: Node) -> list[str]:
    """The name of a view or cast; empty if it changes nothing or selects a part of a split."""
    part = spelled(node) == "getitem" and isinstance(node.args[1], int)
    return [] if part or is_same(node) is not None else [name_of(node)]


def _maker(node: Node) -> tuple[Node, list[str]]:
    """The call that computes a value, before views and casts, and their names."""
    between = list[str]()
    while is_cheap(node) and node.args and isinstance(node.args[0], Node):
        between[:0] = _view(node)
        node = node.args[0]
    return node, between


def _readers(node: Node, between: Sequence[str] = ()) -> Iterator[tuple[Node, Sequence[str]]]:
    """The calls that read a value after views and casts, and the names of these."""
    for user in node.users:
        if is_cheap(user):
            yield from _readers(user, [*between, *_view(user)])
        else:
            yield user, between

"""Rewriting a captured graph: chains become calls of regions, everything else stays as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node

from ..plan.schedule import Choice
from ..run.sequential import Fusions
from .bodies import hand_over, run_bodies
from .chains import Chain, chains_of, needed, order_of
from .effects import Effects, states
from .graph import fold_sizes, name_of, owner, positional, spelled
from .inserting import insert, why_not
from .launches import Before, launching
from .masks import nan_in_rows_of_nothing
from .neighbours import ALONE, alone
from .ordering import CannotOrder, sort
from .patterns import MATCHERS
from .patterns.attention import around
from .patterns.linear import beside
from .patterns.norm import is_root
from .patterns.rope import ADDED, PURE
from .positions import is_known
from .raising import Raised, Transposed, raised
from .region import Region
from .report import GraphReport, Left

_KINDS = {
    "GEMM": (
        "linear", "addmm", "matmul", "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "einsum", "tensordot", "bilinear",
        "inner", "chain_matmul", "linalg_multi_dot", "_grouped_mm", "grouped_mm", "grouped_mm_fallback", "_scaled_mm",
        "scaled_mm",
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
"""Calls that are norms, as roots are, where a matcher has a reason why they are not raised."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How graphs are rewritten.

    Attributes:
        fusions: the fusion set of the regions; the default one if `None`.
        allowed: says by the path of a module whether its calls may be converted.
        memory: what chains save for the backward pass.
    """

    fusions: Fusions | None = None
    allowed: Callable[[str], bool] = lambda path: True
    memory: Choice = "save"


def rewrite(gm: GraphModule, options: Options, name: str = "graph") -> list[GraphReport]:
    """Replace the chains of a graph, and those of the bodies of its checkpoints, by regions.

    Args:
        gm: the graph as Dynamo captured it; it is changed.
        options: how.
        name: what reports call the graph.

    Returns:
        A report of the graph, and of each body.
    """
    hand_over(gm)
    bodies = [(child, body) for child, body in gm.named_children() if isinstance(body, GraphModule)]
    reports = [report for child, body in bodies for report in rewrite(body, options, f"{name}, {child}")]
    run_bodies(gm)

    def may(node: Node) -> bool:
        return options.allowed(owner(node))

    graph = gm.graph
    reasons: dict[Node, str] = {}
    positional(graph)
    fold_sizes(graph)
    effects = Effects(graph)
    operations = beside(list(raised(graph, MATCHERS, may, effects, reasons)), effects)
    for node in [node for node in reasons if spelled(node) == "softmax"]:
        for gemm in around(node):
            reasons.setdefault(gemm, "it is part of the attention around softmax, which is left")
    for strict in (False, True):
        regions, dead = _regions(graph, list(operations), options, reasons, strict)
        try:
            if regions:
                for chain, region in regions:
                    given = [g.node if isinstance(g, Transposed) else g for g in region.given]
                    region.before = Before(chain, region.order, graph.nodes, given)
                _replace(gm, regions, dead)
                gm.recompile()
            break
        except CannotOrder:
            continue
    else:
        regions = []
    _erase_unread(graph)
    gm.recompile()
    left = [
        Left(name_of(n), kind, owner(n), reasons.get(n) or _reason(n, may(n)))
        for n in graph.nodes
        if (kind := _kind(n, n in reasons)) is not None
    ]
    found = GraphReport(name, tuple(region for _, region in regions), tuple(left), launching(graph.nodes))
    return [found, *reports]


def _erase_unread(graph: Graph) -> None:
    """Take calls that make masks or angles which nobody reads, or reads any more, out of a graph."""
    for node in reversed(list(graph.nodes)):
        added = node.target in (nan_in_rows_of_nothing, *ADDED) or spelled(node) in PURE
        if not node.users and (added or is_known(node)):
            graph.erase_node(node)


def _kind(node: Node, explained: bool) -> str | None:
    """What a call that is left is in the words of a report; roots and softmax are only where there is a reason."""
    name = name_of(node) if node.op in ("call_function", "call_method") else ""
    if explained and name == "softmax":
        return "attention"
    if name == "einsum" and not _contracts(node):
        return None
    return "norm" if explained and (name in _NORMS or is_root(node)) else _HEAVY.get(name)


def _contracts(einsum: Node) -> bool:
    """Whether an einsum sums over an index of several tensors; without that it is a product of elements or a view."""
    equation: Any = einsum.args[0]
    if not isinstance(equation, str):
        return True
    given, _, made = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if "->" not in equation:
        made = "".join(letter for letter in given if given.count(letter) == 1)
    return any(sum(letter in term for term in terms) > 1 and letter not in made for letter in given if letter.isalpha())


def kind_of(module: nn.Module) -> str | None:
    """What a module without submodules is in the words of a report, as `Left.kind`."""
    name, where = type(module).__name__, type(module).__module__
    if isinstance(module, nn.Linear | nn.Bilinear) or name == "Conv1D":  # which a GEMM is called by Hugging Face
        return "GEMM"
    if isinstance(module, nn.modules.conv._ConvNd):  # pyright: ignore[reportPrivateUsage]
        return "convolution"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent layer"
    if "Norm" in name:
        return "norm"
    return "activation" if where.endswith((".activation", ".activations")) else None


def _regions(
    graph: Graph, operations: list[Raised], options: Options, reasons: dict[Node, str], strict: bool
) -> tuple[list[tuple[Chain, Region]], set[Node]]:
    """The chains that can run as one call, and the nodes that need not run then."""
    apart: set[Raised] = set()
    lone: list[Chain] = []
    while True:
        chains = chains_of(graph, operations, apart, strict)
        outside, dead = needed(graph, chains)
        found: list[tuple[Chain, Region]] = []
        left: list[tuple[Raised, str]] = []
        begins = set[Raised]()
        for chain in chains:
            if len(chain.members) == 1 or not any(r.counts for r in chain.members):
                left += [(r, ALONE) for r in chain.members]
                lone.append(chain)
                continue
            order = order_of(chain, outside)
            left += [(r, "it goes on from a tensor of another shape") for r in order.apart if r in apart]
            begins.update(order.apart)
            if order.apart or left:
                continue
            region = Region(order, options.fusions, options.memory)
            reason = why_not(region, chain)
            left += [(r, reason) for r in chain.members if reason is not None]
            found.append((chain, region))
        if not left and not begins:
            for chain in lone:
                reason = alone(chain, operations, lambda node: _why_left(node, options, reasons))
                reasons.update((t, reason) for r in chain.members for t in r.took)
            return found, dead
        apart |= begins
        for r, reason in left:
            reasons.update((t, reason) for t in r.took)
            operations.remove(r)


def _why_left(node: Node, options: Options, reasons: dict[Node, str]) -> str:
    """Why a call beside an operation was not raised, in a word where it has a line of its own in the report."""
    if not options.allowed(owner(node)):
        return "left out by filter_fn"
    if _kind(node, node in reasons) is not None:
        return "left"
    return reasons.get(node, "not recognized")


def _replace(gm: GraphModule, regions: list[tuple[Chain, Region]], dead: set[Node]) -> None:
    """Call the regions in place of the nodes that they stand for.

    Raises:
        CannotOrder: if no order of the nodes does that; the graph is as it was.
    """
    graph = gm.graph
    state = states(graph.nodes, {r.out for c, _ in regions for r in c.members})
    place = {node: i for i, node in enumerate(graph.nodes)}
    holders: dict[Node, Node] = {}
    every: list[Node] = []
    for i, (chain, region) in enumerate(regions):
        gm.add_submodule(f"seqfuse_{i}", region)
        last = max((r.node for r in chain.members), key=lambda n: place[n])
        added, stands = insert(graph, f"seqfuse_{i}", region, last)
        holders |= stands
        every += added
        state.update((node, chain.state) for node in added)
    for value, holder in holders.items():
        for user in list(value.users):
            if user not in dead and user is not holder:
                user.replace_input_with(value, holder)
    try:
        sort(graph, state, dead)
    except CannotOrder:
        for value, holder in holders.items():
            holder.replace_all_uses_with(value)
        for node in reversed(every):
            graph.erase_node(node)
        for i in range(len(regions)):
            gm.delete_submodule(f"seqfuse_{i}")
        raise
    for node in reversed(list(graph.nodes)):
        if node in dead:
            graph.erase_node(node)


def _reason(node: Node, allowed: bool) -> str:
    if not allowed:
        return "left out by filter_fn"
    name = name_of(node)
    return _FORMS.get(name, f"no operation stands for {name}" + (" here" if _HEAVY[name] == "attention" else ""))


_FORMS = {
    "linear": "its weight and bias are no tensors of fixed sizes, or its input is no tensor of floating-point numbers",
    "addmm": "it is no x.view(-1, n) times a parameter, viewed as the other dimensions of x again",
    "matmul": "neither is a parameter of two dimensions on the right, and they are not part of attention",
    "_transformer_encoder_layer_fwd": (
        "torch's own fast path of nn.TransformerEncoderLayer in eval() without gradients: leave it off by "
        "torch.backends.mha.set_fastpath_enabled(False) before the first call"
    ),
    "layer_norm": "it normalizes more than the last dimension, or has a bias and no weight",
    "rms_norm": "it normalizes more than the last dimension",
    **dict.fromkeys(("gelu", "silu", "relu", "tanh", "sigmoid"), "it changes its input in place, or that is no float"),
}
"""Which form a call has that operations stand for otherwise."""

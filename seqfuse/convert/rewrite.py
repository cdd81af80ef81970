"""Rewrites a captured graph: chains become calls of regions, all other calls are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import posixpath
from collections import Counter
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from .. import ops
from ..env import autocast_of
from ..errors import one_line
from ..fusion import Fusions
from ..operation import FusableOperation
from ..plan import Choice
from ..recipes import Recipe
from .chains import RaisedChain, chains_of, needed, order_of
from .dtensor import localize
from .effects import (
    CannotOrder,
    Effects,
    hide_cuts,
    in_place,
    is_detached,
    sort,
    states,
    strides_matter,
    views_are_changed,
)
from .graph import (
    WRITTEN,
    argument,
    example,
    fake,
    fold_sizes,
    name_of,
    numbers,
    owner,
    positional,
    same_shape,
    spelled,
)
from .launches import Before, itself, launching
from .masks import OUTER, is_known
from .normal import PURE, breaks_views, normalize
from .patterns import MATCHERS
from .patterns.experts import functional
from .patterns.linear import beside, turned
from .patterns.scores import around
from .raising import Raised, raised
from .reasons import ALONE, alone, left_in
from .region import CapturedRegion, excluded, gemms_of, with_gemms
from .report import GraphReport


@dataclasses.dataclass(frozen=True)
class RewriteOptions:
    """Options of rewriting graphs."""

    fusions: Fusions | None = None  # the regions' fusion set; `None` for the default
    # Whether calls of the module at a path may be converted.
    allowed: Callable[[str], bool] = lambda path: True
    memory: Choice = "balanced"  # the memory choice of chains
    recipe: Recipe | None = None  # how operands of GEMMs are quantized
    exclude: tuple[str, ...] = ()  # names of modules that are not quantized

    def quantizes(self, raised: Raised) -> bool:
        """Whether the recipe applies to an operation."""
        has_gemms = self.recipe is not None and with_gemms(raised.operation)
        return has_gemms and not any(excluded(self.exclude, p) for p in gemms_of(raised))


def rewrite(
    gm: GraphModule, options: RewriteOptions, name: str = "graph", checkpointed: bool = False
) -> list[GraphReport]:
    """Replace the chains of a graph, and of the bodies of its checkpoints, by regions; returns a report of each graph.

    `checkpointed`: whether the graph is the body of a checkpoint, or is called within one.
    """
    _hand_over(gm)
    bodies = [(child, body) for child, body in gm.named_children() if isinstance(body, GraphModule)]
    of_bodies: list[tuple[list[Node], list[GraphReport]]] = []
    for child, body in bodies:
        said, again = _body(gm, child, body)
        reports = rewrite(body, options, f"{name}, {said}", checkpointed or again)
        of_bodies.append((gm.graph.find_nodes(op="get_attr", target=child), reports))
    run_bodies(gm)

    graph = gm.graph
    reasons: dict[Node, str] = {}

    def allowed(node: Node) -> bool:
        return options.allowed(owner(node))

    positional(graph)
    hide_cuts(graph)
    localize(gm, allowed)
    fold_sizes(graph)
    normalize(graph, allowed)
    functional(graph)
    effects = Effects(graph)
    operations = turned(beside(list(raised(graph, MATCHERS, allowed, effects, reasons)), effects), effects)
    for node in [node for node in reasons if spelled(node) == "softmax"]:
        for gemm in around(node):
            reasons.setdefault(gemm, "it is part of the attention around softmax, which is left")
    across = [r for r in operations if effects.is_across(r.took)]
    regions: list[tuple[RaisedChain, CapturedRegion]] = []
    for strict, without in ((False, []), (True, []), (True, across), (True, operations)):
        reasons.update((t, ACROSS) for r in without for t in r.took)
        regions, dead = _regions(graph, [r for r in operations if r not in without], options, reasons, allowed, strict)
        for chain, region in regions:
            region.before = Before(chain, region.order, graph.nodes, region.given)
        try:
            if regions:
                _replace(gm, regions, dead)
            break
        except CannotOrder:
            continue
    _erase_unread(graph, {t for chain, _ in regions for r in chain.members for t in r.took})
    gm.recompile()
    left = left_in(graph, reasons, allowed)
    captured = tuple(region for _, region in regions)
    said = [r for reads, reports in of_bodies if not reads or any(node.users for node in reads) for r in reports]
    return [GraphReport(name, captured, left, launching(graph.nodes), checkpointed=checkpointed), *said]


ACROSS = "a tensor is changed in place between its calls, and a value of these is read before that"


def _body(gm: GraphModule, child: str, body: GraphModule) -> tuple[str, bool]:
    """A description of a graph's body with its place, for reports, and whether it is the body of a checkpoint."""
    reads = gm.graph.find_nodes(op="get_attr", target=child)
    call = next((call for node in reads for call in node.users), None)
    if call is None:
        return child, False
    paths = [owner(node).replace(".", "/") for node in body.graph.nodes if node.meta.get("nn_module_stack")]
    path = posixpath.commonpath(paths or [owner(call)]).replace("/", ".") or "the model"
    if call.target is tag_activation_checkpoint:
        return f"checkpointed in {path}", True
    if name_of(call) == "autograd_function_apply":
        return f"autograd function in {path}, {'forward' if call.args[0] in reads else 'backward'}", False
    return f"{child} of {name_of(call)} in {path}", False


def _erase_unread(graph: Graph, took: set[Node]) -> None:
    """Remove unread calls from a graph: those that chains replace, and those that compute masks or angles.

    One of them may be read by `zeros_like`, only for its shape.
    """
    for node in reversed(list(graph.nodes)):
        stood_for = (not in_place(node) and (node in took or spelled(node) in PURE)) or spelled(node) == "zeros_like"
        if not node.users and (WRITTEN in node.meta or stood_for or is_known(node)):
            graph.erase_node(node)


def _regions(
    graph: Graph,
    operations: list[Raised],
    options: RewriteOptions,
    reasons: dict[Node, str],
    allowed: Callable[[Node], bool],
    strict: bool,
) -> tuple[list[tuple[RaisedChain, CapturedRegion]], set[Node]]:
    """The chains that can run as one call, and the nodes that then need not run."""
    apart: set[Raised] = set()
    lone: list[RaisedChain] = []
    while True:
        chains = chains_of(graph, operations, apart, strict)
        outside, dead = needed(graph, chains)
        found: list[tuple[RaisedChain, CapturedRegion]] = []
        left: list[tuple[Raised, str]] = []
        begins = set[Raised]()
        for chain in chains:
            several = sum(not getattr(r.operation, "is_view", False) for r in chain.members) > 1
            lonely = not (several and any(r.counts for r in chain.members))
            lonely = lonely and not any(_is_worth_a_call(t) for r in chain.members for t in r.took)
            if lonely and not any(map(options.quantizes, chain.members)):
                left += [(r, ALONE) for r in chain.members]
                lone.append(chain)
                continue
            order = order_of(chain, outside)
            left += [(r, "it goes on from a tensor of another shape") for r in order.apart if r in apart]
            begins.update(order.apart)
            if order.apart or left:
                continue
            kept_out = {id(r.operation) for r in chain.members if not options.quantizes(r)}
            region = CapturedRegion(order, options.fusions, options.memory, options.recipe, kept_out)
            reason = _why_not(region, chain)
            left += [(r, reason) for r in chain.members if reason is not None]
            found.append((chain, region))
        if not left and not begins:
            for chain in lone:
                reason = alone(chain, operations, reasons, allowed)
                reasons.update((t, r.why or reason) for r in chain.members for t in r.took)
            return found, dead
        apart |= begins
        for r, reason in left:
            reasons.update((t, reason) for t in r.took)
            operations.remove(r)


NORMALIZED = 1 << 17
"""From this number of elements on `F.normalize` is a chain by itself: faster on a CPU; at 1 << 13 it was slower."""


def _is_worth_a_call(node: Node) -> bool:
    """Whether a chain of only this call saves or computes less than torch.

    Unfused attention saves its weights, and `F.normalize` is five calls. For a small tensor the overhead of a chain
    exceeds these, and for a non-contiguous one a chain would save a copy.
    """
    if spelled(node) != "normalize":
        return spelled(node) == "softmax"
    x: Any = argument(node, 0, "input")
    return example(x) is not None and (e := fake(x, "meta")).is_contiguous() and e.numel() >= NORMALIZED


def _replace(gm: GraphModule, regions: list[tuple[RaisedChain, CapturedRegion]], dead: set[Node]) -> None:
    """Replace nodes by calls of their regions.

    Raises:
        CannotOrder: if no order of the nodes allows it; the graph is then unchanged.
    """
    graph = gm.graph
    state = states(graph.nodes, {r.out for c, _ in regions for r in c.members})
    place = {node: i for i, node in enumerate(graph.nodes)}
    holders: dict[Node, Node] = {}
    every: list[Node] = []
    for i, (chain, region) in enumerate(regions):
        gm.add_submodule(f"seqfuse_{i}", region)
        last = max((r.node for r in chain.members), key=lambda n: place[n])
        added, stands = _insert(graph, f"seqfuse_{i}", region, last, dead)
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


def _why_not(region: CapturedRegion, chain: RaisedChain) -> str | None:
    """Why a region cannot replace its chain: its results would have other shapes or dtypes.

    Under autocast a norm may return the dtype that the next GEMM reads, where the model's handwritten norm returns
    float32: results that are read outside are cast then. The caller's saved-tensor hooks do not see this run.
    """
    modes = [node.args for node in chain.state.autocast]
    lowered = bool(modes) or autocast_of(region.device) is not None
    with FakeTensorMode(), saved_tensors_hooks(itself, itself), contextlib.ExitStack() as stack:
        for args in modes:
            stack.enter_context(torch.autocast(*args))  # pyright: ignore[reportArgumentType]
        order = region.order
        try:
            results = region(*region.stand_ins((order.x, *order.channels.values(), *region.given)))
        except Exception as error:
            return one_line(error)
        results = results if len(order.outputs) > 1 else [results]
        region.results = results
        for node, result in zip(order.outputs, results, strict=True):
            e = example(node)
            if e is None:  # a value that is in no node of the graph
                continue
            cast = lowered and result.is_floating_point() and e.is_floating_point()
            if (result.dtype is not e.dtype and not cast) or not same_shape(result.shape, numbers(e.shape)):
                got = f"{result.dtype} {tuple(result.shape)}"
                return f"{node} would be {got} instead of {e.dtype} {tuple(e.shape)}"
            if result.stride() != numbers(e.stride()) and isinstance(node, Node) and strides_matter(node):
                return "its result would have other strides, on which as_strided or an in-place change depends"
    return None


def _insert(
    graph: Graph, name: str, region: CapturedRegion, after: Node, dead: Container[Node]
) -> tuple[list[Node], dict[Node, Node]]:
    """Insert a region's call after a node; returns the added nodes, and the new node for each replaced one."""
    order = region.order
    with graph.inserting_after(after):
        call = graph.call_module(name, ())
    call.args = (order.x, *order.channels.values(), *region.given)
    added, holders = [call], dict[Node, Node]()
    needs = any(e.requires_grad for n in call.all_input_nodes if (e := example(n)) is not None)

    def then(what: str, target: Any, *args: Any) -> Node:
        with graph.inserting_after(added[-1]):
            added.append(graph.create_node(what, target, args))
        return added[-1]

    def laid_like(t: Tensor, holder: Node) -> Node:
        if t.is_contiguous():
            return then("call_method", "contiguous", holder)
        order = sorted(range(t.ndim), key=t.stride, reverse=True)
        rows = then("call_method", "contiguous", then("call_method", "permute", holder, order))
        return then("call_method", "permute", rows, [order.index(dim) for dim in range(t.ndim)])

    def stand_for(node: Node, holder: Node, made: Tensor, made_by: Raised) -> None:
        e = example(node)
        if breaks_views(node, made, dead):
            holder = laid_like(fake(node, "meta"), holder)
        if needs and _may_save_its_result(made_by.operation) and views_are_changed(node):
            holder = then("call_method", "clone", holder)
        if e is not None and e.dtype is not made.dtype:
            holder = then("call_method", "to", holder, e.dtype)
        if is_detached(node):
            holder = then("call_method", "clone", holder)  # torch does not detach a view in place
        elif e is not None and needs and not e.requires_grad:  # a result without gradient among others that have one
            holder = then("call_method", "detach", holder)
        holder.meta = dict(node.meta)
        holders[node] = holder

    makers = {r.out: r for r in order.members}
    for i, (output, made) in enumerate(zip(order.outputs, region.results, strict=True)):
        holder = call if len(order.outputs) == 1 else then("call_function", operator.getitem, call, i)
        if isinstance(output, Node):
            stand_for(output, holder, made, makers[output])
            continue
        for view in output.views:
            stop = view.start + (view.heads or 1) * view.size
            part, like = (
                then("call_function", operator.getitem, holder, (..., slice(view.start, stop))),
                made[..., view.start : stop],
            )
            if view.heads is not None:
                part = then("call_method", "unflatten", part, -1, (view.heads, view.size))
                part = then("call_method", "transpose", part, 1, 2)
                like = like.view(*like.shape[:-1], view.heads, view.size).transpose(1, 2)
            stand_for(view.node, part, like, makers[output])
    region.results = ()
    return added, holders


def _may_save_its_result(operation: FusableOperation) -> bool:
    """Whether an operation may save its result, which the calls that it replaces may not."""
    return isinstance(operation, ops.Attention | ops.CrossAttention) or getattr(operation, "reads", "") == "output"


def _hand_over(gm: GraphModule) -> None:
    """Record on the inputs of a graph's bodies the nodes that are passed to them."""
    for body, call in _called_once(gm):
        for inner, outer in zip(body.graph.find_nodes(op="placeholder"), call.args[1:], strict=True):
            inner.meta[OUTER] = outer


def run_bodies(gm: GraphModule) -> None:
    """Remove unread inputs of bodies, and make calls of bodies run without a compiler."""
    for body, call in _called_once(gm):
        inside = body.graph.find_nodes(op="placeholder")
        call.args = (call.args[0], *(o for i, o in zip(inside, call.args[1:], strict=True) if i.users))
        for inner in inside:
            if not inner.users:
                body.graph.erase_node(inner)
        body.recompile()
    for call in _calls(gm):
        call.target = checkpointed_body


def _calls(gm: GraphModule) -> list[Node]:
    return gm.graph.find_nodes(op="call_function", target=tag_activation_checkpoint)


def _called_once(gm: GraphModule) -> list[tuple[GraphModule, Node]]:
    names: dict[Node, str] = {call: str(call.args[0].target) for call in _calls(gm) if isinstance(call.args[0], Node)}
    count = Counter(names.values())
    bodies = [(gm.get_submodule(name), call) for call, name in names.items() if count[name] == 1]
    return [(body, call) for body, call in bodies if isinstance(body, GraphModule)]


def checkpointed_body(body: GraphModule, *args: Any, **how: Any) -> Any:
    """Run a body as a checkpoint; reports show this name."""
    # Dynamo's call relies on a compiler to repeat dropout's random numbers in the second run.
    how |= {"use_reentrant": False}
    if "_checkpoint_context_fn" in body.meta:
        how["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(body, *args, **how)  # pyright: ignore[reportUnknownVariableType]

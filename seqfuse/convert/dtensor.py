"""Rewrites DTensors in captured graphs, as from torch's tensor parallel styles: local tensors and collectives."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .. import ops
from ..fake import is_fake
from ..group import ParameterShard, Redistribution, named, with_backward
from ..ops.collectives import Collective
from .effects import in_place, states
from .graph import argument, is_dtensor, is_fixed, name_of, spelled, value_of
from .launches import itself
from .normal import replace
from .writer import Writer

# The placement of a tensor is the dimension that is sharded, or one of these.
_REPLICATED, _PARTIAL = "replicated", "partial"


COLLECTIVES: dict[str, Any] = {
    "copy_to_tensor_parallel": ops.CopyToTensorParallel,
    "all_reduce": ops.AllReduce,
    "all_gather": ops.AllGather,
    "reduce_scatter": ops.ReduceScatter,
}


def collective(name: str, group: str, *dim: int) -> Collective:
    """The operation for a call of one of the functions below.

    A captured graph already sums gradients of parameters and draws random numbers as the model does, so the operation
    is marked as if the tensors around it were replicated.
    """
    made: Collective = COLLECTIVES[name](named(group), *dim)
    made.redistribution = Redistribution(made.group, "replicated", "replicated")
    return made


def _calling(name: str) -> Callable[..., Tensor]:
    """A function of x, the name of a group, and, for sharded results or inputs, the dimension."""

    def call(x: Tensor, group: str, *dim: int) -> Tensor:
        return collective(name, group, *dim).reference(x)

    call.__name__ = call.__qualname__ = name
    return call


copy_to_tensor_parallel, all_reduce, all_gather, reduce_scatter = map(_calling, COLLECTIVES)


def part_of_sum(bias: Tensor, size: int) -> Tensor:
    """The part of a bias that each of `size` processes adds before a sum; its gradient is the whole bias's."""
    return with_backward(lambda b: b / size, lambda d: d, bias)


def shard_with_part(x: Any) -> Tensor:
    """The shard of a replicated parameter; its gradient is summed over processes when it is read."""
    from torch.distributed.tensor import Partial

    return x.to_local(grad_placements=[Partial()])


class _Layout(NamedTuple):
    """The layout of a DTensor on a one-dimensional mesh: name and size of the group, and the placement."""

    group: str
    size: int
    placement: int | str


def shards_of(weights: Sequence[Any]) -> dict[str, ParameterShard]:
    """The `shards` of an operation whose weights are DTensors, or nodes of their shards; empty for others.

    Dimensions are those of the matrix of a `Linear`, or of each group of a `GroupedLinear`.
    """
    found = [sharded for weight in weights if (sharded := _sharded(weight)) is not None]
    if not found:
        return {}
    group, dim, parts = found[0]
    parts = tuple(size for _, along, sizes in found for size in sizes if along == 0) if dim == 0 else parts
    return {"weight": ParameterShard(named(group), dim, parts)}


def _sharded(weight: Any) -> tuple[str, int, tuple[int, ...]] | None:
    """The group over which a matrix is sharded, the dimension, and the sizes that are sharded separately."""
    if turned := spelled(weight) == "transpose":
        weight = weight.args[0]
    is_local = isinstance(weight, Node) and _call(weight)[0] == "to_local"
    value: Any = value_of(weight.args[0]) if is_local else weight
    if not is_dtensor(value) or value.device_mesh.ndim != 1 or value.device_mesh.size() == 1:
        return None
    (placement,) = value.placements
    at: int | None = getattr(placement, "dim", None)
    if at is None or (dim := at % value.ndim - (value.ndim - 2)) < 0:  # whole experts
        return None
    times: int = getattr(placement, "split_factor", 1)  # of gate and up in one tensor
    sizes = times * (int(value.shape[at]) // times,)
    return value.device_mesh.get_group().group_name, 1 - dim if turned else dim, sizes


class _AsDTensor(nn.Module):
    """Wraps a shard in a DTensor, for a call that was not rewritten."""

    def __init__(self, like: Any) -> None:
        super().__init__()
        self._mesh, self._placements = like.device_mesh, like.placements

    def forward(self, x: Tensor) -> Tensor:
        """Return the DTensor of this process's shard."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(x, self._mesh, self._placements, run_check=False)  # pyright: ignore


def localize(gm: GraphModule, allowed: Callable[[Node], bool]) -> None:
    """Replace calls on DTensors by calls on this process's shards, and by the collectives that torch runs between them.

    A replicated value has a replicated gradient. A call that computes only a part of this gradient, such as a `Linear`
    sharded along its output features, reads the value through `copy_to_tensor_parallel`, which sums the parts. Other
    calls are kept and read DTensors.
    """
    sharded = [value for node in gm.graph.nodes if is_dtensor(value := value_of(node))]
    for placement in (placement for value in sharded for placement in value.placements):
        # From an embedding with sharded rows: torch keeps it until the result is summed, maybe in a later graph.
        mask: Any = getattr(placement, "mask_buffer", None)
        if mask is not None and is_fake(mask.data):
            mask.data, mask.refcount = None, 0
    if sharded:
        _Localized(gm, allowed).run()


class _Localized:
    def __init__(self, gm: GraphModule, allowed: Callable[[Node], bool]) -> None:
        self.gm, self.allowed = gm, allowed
        self.modes = states(gm.graph.nodes)
        self.local: dict[Node, Node] = {}  # the shards of rewritten DTensors
        self.read: dict[Node, Node] = {}  # the shards of other DTensors
        self.copied: dict[tuple[Node, str], Node] = {}
        self.gathered: set[Node] = set()  # nodes whose gradients are reduce-scattered
        self.wrapped: dict[Node, Node] = {}
        self.write: Any = None

    def run(self) -> None:
        """Rewrite the calls of the graph."""
        gone: list[Node] = []
        for node in list(self.gm.graph.nodes):
            if node.op in ("placeholder", "get_attr"):
                continue
            write = self.write = Writer(node, self.modes[node].autocast)
            memory = dict(self.read), dict(self.copied)
            found = None
            if node.op != "output" and not in_place(node) and self.allowed(node):
                try:
                    # The hooks of a checkpoint around the model would count what these calls save.
                    with (
                        torch.set_grad_enabled(self.modes[node].grad is not False),
                        saved_tensors_hooks(itself, itself),
                    ):
                        found = self._shard(node)
                except Exception:  # an unexpected form
                    found = None
            if found is None or not _is_shard(found, node):
                write.undo()
                self.read, self.copied = memory
                self.gathered.discard(node)
                self._wrap(node)
                continue
            write.keep()
            gone.append(node)
            if is_dtensor(value_of(node)):
                self.local[node] = found
            else:
                replace(node, found)
        for node in reversed(gone):
            if not node.users:
                self.gm.graph.erase_node(node)

    def _wrap(self, node: Node) -> None:
        """Replace the inputs of a kept call by DTensors made from shards."""
        for given in node.all_input_nodes:
            if given not in self.local:
                continue
            if given not in self.wrapped:
                name = f"seqfuse_dtensor_{given.name}"
                self.gm.add_submodule(name, _AsDTensor(value_of(given)))
                with self.gm.graph.inserting_before(node):
                    made = self.gm.graph.call_module(name, (self.local[given],))
                made.meta = dict(given.meta)
                self.wrapped[given] = made
            node.replace_input_with(given, self.wrapped[given])

    def _shard(self, node: Node) -> Node | None:
        """The shard of a call's result, or the result of a call that reads a shard; None for unknown calls."""
        name, args, kwargs = _call(node)
        layout = _layout(node)
        if name == "from_local" and layout is not None and layout.placement != _PARTIAL:
            plain = not kwargs.get("run_check") and kwargs.get("grad_placements") is None and len(args) <= 2
            return cast("Node", node.args[0]) if plain else None
        if name == "to_local":
            return self._to_local(node, args[0] if args else kwargs.get("grad_placements"))
        if layout is None:
            return None
        if name == "redistribute":
            return self._redistribute(node, layout)
        if name == "linear" and not is_dtensor(value_of(node.args[0])):
            return None
        return self._linear(node, layout) if name == "linear" else self._alike(node, layout)

    def _to_local(self, node: Node, grad_placements: Any) -> Node | None:
        source = cast("Node", node.args[0])
        layout, x = _layout(source), self._of(source)
        if layout is None or x is None or layout.placement == _PARTIAL:
            return None
        if grad_placements is None:
            return None if source in self.gathered else x
        (placement,) = grad_placements
        if layout.placement == _REPLICATED and placement.is_partial():
            return self._summed(source, layout)
        return x if placement == value_of(source).placements[0] else None

    def _redistribute(self, node: Node, to: _Layout) -> Node | None:
        source = cast("Node", node.args[0])
        layout, x = _layout(source), self._of(source)
        if layout is None or x is None or not _is_usual(node):
            return None
        if layout.placement == to.placement:
            return None if source in self.gathered else x
        if layout.placement == _PARTIAL:
            if to.placement == _REPLICATED:
                return self.write.call(all_reduce, x, to.group)
            return self.write.call(reduce_scatter, x, to.group, to.placement)
        parts = all(self._reads_a_part(user, node) for user in node.users)
        if isinstance(layout.placement, str) or to.placement != _REPLICATED or not parts:
            return None
        self.gathered.add(node)
        return self.write.call(all_gather, x, to.group, layout.placement)

    def _reads_a_part(self, user: Node, node: Node) -> bool:
        """Whether the backward of a call returns a partial gradient of a replicated tensor, as `Partial` of DTensor."""
        if name_of(user) == "linear":
            x, weight = argument(user, 0, "input"), argument(user, 1, "weight")
            layout = _layout(weight)
            return x is node and layout is not None and layout.placement == 0 and self.allowed(user)
        name, args, kwargs = _call(user)
        given = args[0] if args else kwargs.get("grad_placements")
        return name == "to_local" and given is not None and all(p.is_partial() for p in given)

    def _linear(self, node: Node, layout: _Layout) -> Node | None:
        given = [argument(node, i, name) for i, name in enumerate(("input", "weight", "bias"))]
        x, weight, bias = given
        layouts = [None if t is None else _layout(t) for t in given]
        if layouts[0] is None or layouts[1] is None:
            return None
        placements = [None if at is None else at.placement for at in layouts]
        last = value_of(x).ndim - 1
        if placements[0] == _REPLICATED and placements[1] == 0 and placements[2] in (None, 0):
            if layout.placement != last:
                return None
            own = [self._of(weight), None if bias is None else self._of(bias)]
            return self.write.call(torch.nn.functional.linear, self._summed(x, layouts[0]), *own)
        if placements[0] == last and placements[1] == 1 and placements[2] in (None, _REPLICATED):
            reduced = all(name_of(u) and _call(u)[0] == "redistribute" and _is_usual(u) for u in node.users)
            if layout.placement != _PARTIAL or not reduced:
                return None
            part = None if bias is None else self.write.call(part_of_sum, self._of(bias), layout.size)
            return self.write.call(torch.nn.functional.linear, self._of(x), self._of(weight), part)
        return self._alike(node, layout) if placements[0] != last else None

    def _alike(self, node: Node, layout: _Layout) -> Node | None:
        """A call whose result is sharded like its inputs, along a dimension that it does not reduce."""
        if spelled(node) not in _ALONG_TOKENS or layout.placement == _PARTIAL:
            return None
        at, ndim = layout.placement, value_of(node).ndim
        if isinstance(at, int) and spelled(node) not in _EACH and at == ndim - 1:
            return None
        shards: dict[Node, Node] = {}
        for given in node.all_input_nodes:
            own, t = _layout(given), value_of(given)
            x = self._of(given)
            if own is None or x is None or given in self.gathered:
                return None
            aligned = at - ndim + t.ndim if isinstance(at, int) else None
            if own.placement == _REPLICATED and aligned is not None:
                if spelled(node) in _EACH and aligned >= 0 and t.shape[aligned] != 1:
                    return None
                x = self._summed(given, own)
            elif own.placement != (_REPLICATED if aligned is None else aligned):
                return None
            shards[given] = x
        args: Any = map_arg(node.args, shards.__getitem__)
        return self.write.like(node, args, cast("Any", map_arg(node.kwargs, shards.__getitem__)))

    def _of(self, node: Node) -> Node | None:
        """The shard of a DTensor."""
        found = self.local.get(node, self.read.get(node))
        layout = _layout(node)
        if found is None and layout is not None and layout.placement != _PARTIAL:
            found = self.read[node] = self.write("to_local", node)
        return found

    def _summed(self, node: Node, layout: _Layout) -> Node:
        """A replicated tensor for a call whose backward returns a partial gradient of it: sums these gradients."""
        if (x := self._of(node)) is None or node in self.gathered or not value_of(x).requires_grad:
            return cast("Node", x)
        if (key := (x, layout.group)) not in self.copied:
            parameter = node.op in ("placeholder", "get_attr")
            function, *given = (shard_with_part, node) if parameter else (copy_to_tensor_parallel, *key)
            self.copied[key] = self.write.call(function, *given)
        return self.copied[key]


_EACH = {
    "add", "sub", "mul", "truediv", "neg", "pow", "square", "rsqrt", "gelu", "silu", "relu", "tanh", "sigmoid", "to",
    "float", "type_as",
}  # fmt: skip
"""Element-wise calls."""
_ALONG_TOKENS = {*_EACH, "linear", "layer_norm", "rms_norm", "mean"}
"""Calls that compute each token independently."""


def _layout(node: Any) -> _Layout | None:
    """The layout of a node's DTensor, if it is sharded evenly or not at all over a one-dimensional mesh."""
    value = value_of(node)
    if not is_dtensor(value) or value.device_mesh.ndim != 1:
        return None
    from torch.distributed.tensor import Shard

    (placement,) = value.placements
    group, size = value.device_mesh.get_group(), value.device_mesh.size()
    if type(placement) is Shard:
        dim: int = placement.dim % value.ndim  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        even = is_fixed(value.shape[dim]) and value.shape[dim] % size == 0
        return _Layout(group.group_name, size, dim) if even else None
    if placement.is_partial():
        return _Layout(group.group_name, size, _PARTIAL) if placement.reduce_op == "sum" else None
    return _Layout(group.group_name, size, _REPLICATED) if placement.is_replicate() else None


def _call(node: Node) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The name of a DTensor call, and its arguments except the tensor; torch 2.11 stores these in a closure."""
    name = name_of(node)
    if name.startswith("prim") and inspect.isfunction(node.target):
        held = inspect.getclosurevars(node.target).nonlocals
        return name[5:], tuple(held.get("args_as_value", ())), dict(held.get("kwargs_as_value", {}))
    return name, node.args[1:], dict(node.kwargs)


def _is_usual(node: Node) -> bool:
    """Whether a DTensor is redistributed in its own dtype."""
    _, args, kwargs = _call(node)
    return len(args) <= 2 and not kwargs.keys() - {"device_mesh", "placements", "async_op"}


def _is_shard(made: Node, node: Node) -> bool:
    """Whether the rewritten node is this process's shard of the original result."""
    got, wanted = value_of(made), value_of(node)
    local = wanted.to_local() if is_dtensor(wanted) else wanted
    if not isinstance(got, Tensor) or not isinstance(local, Tensor):
        return False
    return got.shape == local.shape and got.dtype is local.dtype and got.requires_grad is wanted.requires_grad

"""The flat sequence the fuser works on: expanded operations, barriers and their channels."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import ANY  # equals everything

import torch
import torch.nn.modules.module as hooks_of
from torch import Tensor, nn

from ..errors import PlanError, PluginError
from ..group import Group
from ..operation import FusableOperation, UnfusedOperation, config_version
from ..recipes import check_recipe

# Attributes of a module that hold the engine.
OWN = ("_fuser", "_engine")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(getattr(hooks_of, f"_global{name}") for name in HOOKS if hasattr(hooks_of, f"_global{name}"))


# `training` configures an operation.
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__) - {"training"}


def global_hooks() -> bool:
    """Whether global module hooks are registered."""
    return any(_GLOBAL_HOOKS)


class Fingerprint:
    """The state of the modules that a sequence was read from, to compare with their state now.

    Attributes (configuration, training, class, a forward put on an instance, a parameter that is `None`) are compared
    only if some operation had an attribute set since the last call; children and hooks, which change in place, always.

    It holds neither the root nor its attributes, as the root holds the fuser, and the fuser this.
    """

    def __init__(self, modules: Iterable[nn.Module], root: nn.Module) -> None:
        self._config, self._measured = config_version.current, config_version.measured
        self._root, every = weakref.ref(root), list(dict.fromkeys((root, *modules)))
        self._modules = every[1:]
        self._attributes_then = [dict(m.__dict__) for m in every]
        self._attributes_then[0].update((name, ANY) for name in OWN if name in root.__dict__)
        self._types_then = [type(m) for m in every]
        self._children = [m._modules for m in every if m._modules or isinstance(m, nn.Sequential)]  # pyright: ignore[reportPrivateUsage]
        self._children_then = [dict(children) for children in self._children]
        self._keys_then = [list(children) for children in self._children]
        before = self._attributes_then
        self._tensors = [
            v for now in before for name in now.keys() - _OF_EVERY_MODULE if isinstance(v := now[name], Tensor)
        ]
        self._tensors_then = [t.requires_grad for t in self._tensors]
        # Setting an attribute of a torch module inside an operation is not recorded.
        self._others = not all(isinstance(m, FusableOperation) for m in every)
        hooked = [getattr(m, name) for m in self._modules for name in HOOKS]
        self._empty = [h for h in (*hooked, *_GLOBAL_HOOKS) if not h]
        self._full = [h for h in (*hooked, *_GLOBAL_HOOKS) if h]
        self._parameters = [(m._parameters, name) for m in every for name in m._parameters]  # pyright: ignore[reportPrivateUsage]
        self._absent_then = [parameters[name] is None for parameters, name in self._parameters]

    def holds(self) -> bool:
        return (
            (self._config is config_version.current or self._compare())
            and self._children == self._children_then
            and not any(self._empty)
            and (not self._full or all(self._full))
            and (not self._others or self._same(self._attributes_then))
            and (not self._tensors or [t.requires_grad for t in self._tensors] == self._tensors_then)
        )

    def _compare(self) -> bool:
        current = config_version.current
        same = self._measured is config_version.measured and self._same(self._attributes_then)
        if same:
            self._config = current
        return same

    def _now(self) -> list[nn.Module]:
        root = self._root()
        return self._modules if root is None else [root, *self._modules]

    def _same(self, attributes: list[dict[str, Any]]) -> bool:
        try:
            modules = self._now()
            return (
                [m.__dict__ for m in modules] == attributes
                and [*map(list, self._children)] == self._keys_then
                and [*map(type, modules)] == self._types_then
                and [parameters[name] is None for parameters, name in self._parameters] == self._absent_then
            )
        except Exception:  # tensors and arrays have no truth value, and a parameter may be deleted: both are changes
            return False

    def holds_in_full(self) -> bool:
        """Whether the modules are unchanged, including attributes whose setting was not recorded."""
        return self.holds() and self._same(self._attributes_then)

    def same_modules(self) -> bool:
        """Whether the modules are unchanged; measurements, the fusion set and the choice of memory may differ."""
        same = self._same(self._switched({"fusions", "memory", *OWN}))
        return same and self._children == self._children_then and not any(self._empty) and all(self._full)

    def differs_in_switches_only(self) -> bool:
        """Whether only training flags and recipes changed: switches that are likely to be set back."""
        if self._measured is not config_version.measured:
            return False
        rest = self._same(self._switched({"training", "recipe"}))
        return rest and self._children == self._children_then and not any(self._empty) and all(self._full)

    def _switched(self, switches: Collection[str]) -> list[dict[str, Any]]:
        """The earlier attributes of all modules with the current values of the switches."""
        pairs = zip(self._attributes_then, [m.__dict__ for m in self._now()], strict=True)
        return [
            {n: held[n] for held in (then, now) for n in held if (n in switches) is (held is now)}
            for then, now in pairs
        ]


# For a torch module the name of the equivalent operation: the engine imports no operations.
TWINS: dict[type, str] = {
    nn.Dropout: "ops.Dropout", nn.Embedding: "ops.Embedding", nn.GELU: "ops.GeLU", nn.Identity: "ops.Identity",
    nn.LayerNorm: "ops.LayerNorm", nn.Linear: "ops.Linear", nn.ReLU: "ops.ReLU", nn.RMSNorm: "ops.RMSNorm",
    nn.SiLU: "ops.SiLU", nn.Sigmoid: "ops.Sigmoid", nn.Tanh: "ops.Tanh", nn.GLU: 'ops.GLU(packing="up_gate")',
}  # fmt: skip
_CONTAINERS: dict[type, str] = {
    nn.Sequential: "seqfuse.Sequential", nn.TransformerEncoderLayer: "seqfuse.convert",
    nn.TransformerEncoder: "seqfuse.convert",
}  # fmt: skip


class _Never:
    """The type of nodes that no slot matches."""


@dataclasses.dataclass(slots=True)
class Node:
    """One position of the sequence."""

    operation: nn.Module
    path: str
    name: str  # of the class in the user's sequence
    kind: type = _Never
    derives: type | None = None  # the final class a user's subclass derives from
    eager: str | None = None  # the reason why it runs through its own __call__
    inputs: tuple[tuple[str, str], ...] = ()  # extra input, channel
    outputs: tuple[tuple[str, str], ...] = ()
    slots: dict[str, tuple[nn.Module, str]] = dataclasses.field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    crossing: int = 0  # channels that cross the border before this position
    readers: dict[str, set[int]] = dataclasses.field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    seed: int | None = None  # index into the seeds of a call, if it uses a seed now
    rank: int = 0  # of this process, if dropout masks differ between processes
    sum_over: Group | None = None  # the processes over which the gradients of its parameters are summed
    owner: str | None = None  # the class of the container that adds it, such as `Residual` for its `Add`
    recipe: Any = ...  # its low-precision recipe, or that of the innermost container with one; `None` disables it

    @property
    def fusable(self) -> bool:
        """Whether the engine runs it instead of its own `__call__`."""
        return self.eager is None


def located(nodes: Sequence[Node], position: int) -> dict[str, Any]:
    """The place of an error: the operation, its position, and the path of its module."""
    node = nodes[position]
    return {"operation": node.name, "position": position, "path": node.path}


def plain_type(module: nn.Module) -> type:
    """The class of an operation before torch replaced it for parametrizations or `fully_shard`."""
    kind: type[Any] = type(module)
    while issubclass(kind, FusableOperation) and kind.__module__.startswith("torch."):
        kind = kind.__bases__[-1]
    return kind


def has_own_graph(module: nn.Module) -> bool:
    """Whether a parameter was replaced by a tensor with its own graph, which only plain autograd can follow."""
    owners = module.modules() if isinstance(module, UnfusedOperation) and len(module._modules) else (module,)  # pyright: ignore[reportPrivateUsage]
    found = [v for owner in owners for _, v in attributes(owner) if isinstance(v, Tensor) and v.requires_grad]
    return len(found) > 0


def attributes(module: nn.Module) -> list[tuple[str, Any]]:
    """The attributes that a module has beyond those of every `nn.Module`. Under tracing only operations have any, as
    set by the trace.
    """
    held = vars(module)
    if not torch.compiler.is_dynamo_compiling():
        return [(name, held[name]) for name in held.keys() - _OF_EVERY_MODULE]
    if isinstance(module, FusableOperation):
        own = [name for name in module._attributes if name not in _OF_EVERY_MODULE]  # pyright: ignore[reportPrivateUsage]
        return [(name, held[name]) for name in own if name in held]
    return []  # torch 2.11 cannot trace a loop over `vars`


def _why_eager(module: nn.Module, kind: type[Any], hidden: bool) -> str | None:
    if not isinstance(module, FusableOperation):
        twin = TWINS.get(kind, _CONTAINERS.get(kind))
        return "not an operation of this library" + (f"; use {twin}" if twin else "")
    if module.barrier is not None:
        return module.barrier
    if global_hooks() and not hidden:  # members that are not submodules are not the user's modules
        return "global module hooks are registered"
    if [name for name in HOOKS if getattr(module, name)]:  # a generator is several times slower to trace
        return "it has hooks" + ("; what is in it is planned by itself" if isinstance(module, nn.Sequential) else "")
    if "forward" in vars(module):
        return "it has an instance-level forward"
    if module._compiled_call_impl is not None:  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
        return "it is compiled by itself"
    if has_own_graph(module):
        return "a parameter is replaced by a tensor with its own graph"
    if isinstance(module, nn.Sequential):
        return None if vars(kind).get("inlines") else "it is a subclass of a container"
    return None if kind.forward is FusableOperation.forward else "its class overrides forward"


def flatten(root: FusableOperation, seen: list[nn.Module] | None = None) -> list[Node]:
    """Expands `root` into nodes with resolved channels; every visited module is added to `seen`.

    Raises:
        PlanError: for channels that do not fit together, naming operation and position.
    """
    nodes: list[Node] = []
    looked_at: list[nn.Module] = [] if seen is None else seen
    nested: list[range] = []
    _visit((nodes, looked_at, nested), root, "", ())
    _route(nodes, nested, isinstance(root, UnfusedOperation), looked_at)
    return nodes


def _visit(
    into: tuple[list[Node], list[nn.Module], list[range]],
    module: nn.Module,
    path: str,
    within: tuple[nn.Module, ...],
    hidden: bool = False,
) -> None:
    """Adds a module's nodes, the visited modules and the ranges of nested containers to the three lists."""
    # Not nested in `flatten`: a recursive closure is a reference cycle, which would keep all of this alive.
    nodes, looked_at, nested = into
    kind, top = plain_type(module), len(within) == 0  # Dynamo cannot trace `not within`
    if [other for other in within if module is other]:
        message = "it expands to itself, and has neither fwd nor forward to run"
        message = "it holds itself" if isinstance(module, nn.Sequential) else message
        raise PluginError(message, code="SF305", operation=kind.__name__, position=len(nodes), path=path)
    if isinstance(module, FusableOperation):
        looked_at.append(module)
    eager = None if top else _why_eager(module, kind, hidden)
    recipe = _recipe_of((*within, module), kind, path)
    if eager is not None:
        nodes.append(Node(module, path, kind.__name__, eager=eager, recipe=recipe))
        return
    assert isinstance(module, FusableOperation)
    if isinstance(module, UnfusedOperation) and len(module._modules):  # pyright: ignore[reportPrivateUsage]
        looked_at.extend(module.modules())
    members, start = module.expand(), len(nodes)
    if not isinstance(members, tuple) or [member for member in members if not isinstance(member, nn.Module)]:  # pyright: ignore[reportUnnecessaryIsInstance]
        message = f"expand() must return a tuple of modules, not {members!r}"
        raise PluginError(message, code="SF305", operation=kind.__name__, position=start, path=path)
    # Compared by `is`: an `id` would specialize a compiled graph to one object, and each layer would need its own.
    children, at = [*module._modules.items()], 0  # pyright: ignore[reportPrivateUsage]
    for member in members:
        if member is module and isinstance(module, UnfusedOperation):
            exact = bool(getattr(kind, "is_final", False)) or module.is_open
            derives = None if exact else next((b for b in kind.__mro__ if getattr(b, "is_final", False)), None)
            slots = _own_slots(module, members)
            owner = plain_type(within[-1]).__name__ if hidden else None
            matched = kind if exact else _Never
            node = Node(module, path, kind.__name__, matched, derives, slots=slots, owner=owner, recipe=recipe)
            nodes.append(node)
        else:
            if at < len(children) and children[at][1] is member:  # as a container has them
                named, at = children[at][0], at + 1
            else:
                named = next((key for key, child in children if child is member), None)
            key = type(member).__name__.lower() if named is None else named
            _visit(into, member, f"{path}.{key}".lstrip("."), (*within, module), named is None)
    if not top and len(members) > 1:
        nested.append(range(start, len(nodes)))


def _recipe_of(modules: tuple[nn.Module, ...], kind: type, path: str) -> Any:
    """The recipe of the innermost of these nested modules that has one."""
    for module in modules[::-1]:
        if isinstance(module, FusableOperation) and "recipe" in vars(module):
            recipe: Any = vars(module)["recipe"]
            check_recipe(recipe, kind.__name__, path or None)
            return recipe
    return ...


def _own_slots(module: UnfusedOperation, members: tuple[nn.Module, ...]) -> dict[str, tuple[nn.Module, str]]:
    """Parameters that only the first member of an expansion reads."""
    slots = module.parameter_slots()
    if len(members) == 1:
        return slots
    others = [m for m in members if isinstance(m, UnfusedOperation) and m is not module]
    taken = [slot for m in others for slot in m.parameter_slots().values()]
    return {n: (owner, a) for n, (owner, a) in slots.items() if not [t for t in taken if t[0] is owner and t[1] == a]}


def inside_of(module: FusableOperation, seen: list[nn.Module] | None = None) -> list[Node]:
    """The nodes inside a module that runs eagerly; none for a custom `forward`, whose operations are unknown."""
    known = isinstance(module, UnfusedOperation) or plain_type(module).expand is not FusableOperation.expand  # pyright: ignore[reportUnknownMemberType]
    return flatten(module, seen) if known else []


def _channels_of(
    node: Node, seen: list[nn.Module]
) -> tuple[Mapping[str, str | None], tuple[str, ...], tuple[str, ...]]:
    module = node.operation
    if isinstance(module, UnfusedOperation):
        channels, signature = module.channels, module.forward_signature
        read = [name for name in signature.extras if name in channels or name not in signature.optional]
        return channels, tuple(read), module.outputs
    if isinstance(module, FusableOperation):
        inside = inside_of(module, seen)
        made = {c for i in inside for _, c in i.outputs}
        read = [c for i in inside for _, c in i.inputs if c not in made]
        inputs = tuple(dict.fromkeys(read))
        outputs = tuple(c for i in inside for _, c in i.outputs if not i.readers[c])
        return {name: name for name in (*inputs, *outputs)}, inputs, outputs
    return {}, (), ()


def _route(nodes: list[Node], nested: list[range], by_itself: bool, seen: list[nn.Module]) -> None:
    """Assigns a channel to every extra input and output; anonymous ones pair like parentheses."""
    made: dict[str, int] = {}
    read: dict[str, int] = {}
    readers: dict[str, set[int]] = {}
    anonymous: list[tuple[str, int]] = []
    closing: dict[int, list[range]] = {}
    for inside in nested:
        closing.setdefault(inside.stop, []).append(inside)

    def wrong(position: int, message: str) -> PlanError:
        return PlanError(message, code="SF201", **located(nodes, position))

    for position, node in enumerate(nodes):
        node.readers = readers
        channels, inputs, outputs = _channels_of(node, seen)
        if not isinstance(channels, Mapping) or [name for name in (*inputs, *outputs) if name not in channels]:  # pyright: ignore[reportUnnecessaryIsInstance]
            names = ", ".join(repr(name) for name in (*inputs, *outputs))
            message = f"channels must be a dictionary of {names}, not {channels!r}"
            raise PluginError(message, code="SF305", **located(nodes, position))
        if by_itself:
            channels = {name: channel or name for name, channel in channels.items()}
        for name in inputs:
            channel = channels[name]
            if channel in ("self", "x", "env"):
                raise wrong(position, f"a channel cannot be called {channel!r}: calls use that name")
            if channel is None:
                if not anonymous:
                    raise wrong(position, f"its extra input {name!r} is unnamed and no unnamed output is open")
                channel, _ = anonymous.pop()
            read.setdefault(channel, position)
            readers.setdefault(channel, set()).add(position)
            node.inputs += ((name, channel),)
        for name in outputs:
            channel = channels[name]
            if channel is None:
                channel = f"{node.path}#{position}"
                anonymous.append((channel, position))
            elif channel in made:
                raise wrong(position, f"channel {channel!r} is already made at position {made[channel]}")
            elif channel in read:
                raise wrong(
                    position, f"channel {channel!r} is read at position {read[channel]}, before it is made here"
                )
            made[channel] = position
            readers.setdefault(channel, set())
            node.outputs += ((name, channel),)
        for inside in closing.get(position + 1, ()):
            _make_private(nodes, inside, made, read, readers)
    if anonymous:
        raise wrong(anonymous[-1][1], "its unnamed output is never read; close it with an unnamed Add or name it")
    open_until = [0] * (len(nodes) + 2)
    for channel, position in made.items():
        open_until[position + 1] += 1
        open_until[max(readers[channel], default=len(nodes)) + 1] -= 1
    level = 0
    for node, change in zip(nodes, open_until, strict=False):
        level += change
        node.crossing = level


def _make_private(
    nodes: list[Node], inside: range, made: dict[str, int], read: dict[str, int], readers: dict[str, set[int]]
) -> None:
    """Renames the channels that are private to a container, so that other containers can use the same names."""
    for channel in [c for position in inside for _, c in nodes[position].outputs if readers[c]]:
        private = f"{channel}@{inside.start}"
        readers[private] = readers.pop(channel)
        made[private] = made.pop(channel)
        read[private] = read.pop(channel)
        for position in inside:
            node = nodes[position]
            node.inputs = tuple((n, private if c == channel else c) for n, c in node.inputs)
            node.outputs = tuple((n, private if c == channel else c) for n, c in node.outputs)


def public_channels(
    nodes: Sequence[Node], start: int = 0, stop: int | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Channels that enter positions `start..stop`, and those that leave them, both in the order of the sequence."""
    stop = len(nodes) if stop is None else stop
    inside = nodes[start:stop]
    made = [c for node in inside for _, c in node.outputs]
    inputs = dict.fromkeys(c for node in inside for _, c in node.inputs if c not in made)
    readers = nodes[start].readers if inside else {}
    return tuple(inputs), tuple([c for c in made if not readers[c] or [at for at in readers[c] if at >= stop]])

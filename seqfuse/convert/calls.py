"""Statistics on the calls of a converted model: their number, captured graphs, and modules in no graph."""

from __future__ import annotations

import dataclasses
import inspect
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import maybe_get_fake_mode
from torch.fx import GraphModule, Node

from ..env import autocast_of
from ..fake import forget_real
from .graph import PATH, example, is_fixed, owner, value_of

_breaks: list[Any] = torch._dynamo.utils.graph_break_reasons  # pyright: ignore
_MOST = 4
"""Maximum number of tensors in the description of a call."""


class Break(NamedTuple):
    """Where Dynamo ended a graph or skipped code, as file, line and function, outermost first, and the reason."""

    stack: tuple[tuple[str, int, str], ...]
    reason: str

    @property
    def at_a_bucket(self) -> bool:
        """Whether Dynamo cut the model between two buckets of DDP; it says so of the last graph, too."""
        return bool(self.stack) and self.stack[-1][2] == "DDPOptimizer"

    @property
    def place(self) -> str:
        """The file, line and function of the break."""
        if not self.stack:
            return "a place that Dynamo does not say"
        file, line, function = self.stack[-1]
        return f"{os.path.basename(file)}:{line} in {function}"


def _break_of(found: Any) -> Break:
    reason = str(found.reason).partition("\n")[0].rstrip(".:")
    if reason.startswith("generic_jump"):  # Dynamo's word for a branch after which it can continue
        reason = "Data-dependent branching"
    return Break(tuple((frame.filename, frame.lineno or 0, frame.name) for frame in found.user_stack), reason)


@dataclasses.dataclass
class Captured:
    """The call that a graph was captured in, and statistics of its later calls."""

    # Training or eval, without gradients or under autocast, and shapes of the tensors; a dynamic size of the graph
    # is `any`.
    call: str
    after: Break | None = None  # the graph break that it begins after, if any
    until: Break | None = None  # the graph break that ends it, if any
    calls: int = 0  # number of runs
    last: int = 0  # number of the model's last call in which it ran
    # Ids of the called modules in which it ran: several with `regions="layers"`.
    modules: set[int] = dataclasses.field(default_factory=set[int])


@dataclasses.dataclass
class CapturedModules:
    """The modules whose calls or parameters a graph contains."""

    captured: Captured  # the call that it was captured in
    place: weakref.ref[nn.Module]  # the called module; a graph does not keep it alive
    paths: set[str]  # paths of its modules, and of those in equal layers that the graph also serves
    given: dict[int, str]  # paths of the parameters' modules, by index among its inputs
    # The id of the first parameter of each layer that it served.
    first: set[int] = dataclasses.field(default_factory=set[int])

    def serves(self, inputs: Sequence[Any]) -> None:
        """Record a run of the graph, possibly with the parameters of another, equal layer."""
        at, called = next(iter(self.given), None), self.place()
        if at is None or called is None or id(inputs[at]) in self.first:
            return
        self.first.add(id(inputs[at]))
        paths, own = _by_id(called), list(self.paths)
        for place, path in self.given.items():
            here, there = path.split("."), paths.get(id(inputs[place]), path).split(".")
            while here and there and here[-1] == there[-1]:
                del here[-1], there[-1]
            old, new = ".".join(here), ".".join(there)
            self.paths |= {f"{new}{p.removeprefix(old)}" for p in own if f"{p}.".startswith(f"{old}.")}


def _by_id(place: nn.Module) -> dict[int, str]:
    """Paths of modules by id; of parameters, the path of their module."""
    paths: dict[int, str] = {}
    for path, module in named_modules(place):
        paths |= {id(module): path, **{id(p): path for p in module.parameters(recurse=False)}}
    return paths


class ModelCall:
    """A call of a converted module in progress."""

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.module, self._args, self._kwargs = module, args, kwargs
        self._before, self._captured = len(_breaks), False
        self.ran = False  # whether a graph ran in it
        self.failures: list[Exception] = []  # exceptions of Dynamo's captures in it
        self._modes: list[Any] = []  # those of the fake tensors in the graphs captured in it

    def breaks(self) -> list[Break]:
        """The graph breaks since the call began."""
        return [] if len(_breaks) == self._before else list(map(_break_of, self._reasons()))

    def _reasons(self) -> list[Any]:
        return _breaks[self._before :]

    def captures(self, gm: GraphModule, inputs: Sequence[Any]) -> Captured:
        """Describe a graph that Dynamo has just captured in this call."""
        own: Any = getattr(gm, "compile_subgraph_reason", None)
        before = [_break_of(reason) for reason in self._reasons() if reason is not own]
        until = _break_of(own) if own and own.graph_break else None
        # If called code broke, its caller broke at the same line, and the callee's graph begins anew.
        after = before[-1] if before and self._captured else None
        if after is not None and until is not None and after.stack[-1:] == until.stack[-1:]:
            after = None
        self._captured = True
        self._modes += {maybe_get_fake_mode(value_of(node)) for node in gm.graph.find_nodes(op="placeholder")} - {None}
        return Captured(self._described(gm, inputs), after, until)

    def ends(self) -> None:
        """Drop references to real tensors that reports would keep alive with the graphs."""
        for mode in self._modes:
            forget_real(mode)

    def _described(self, gm: GraphModule, inputs: Sequence[Any]) -> str:
        sizes = {
            id(given): [size if is_fixed(size) or str(size).isdigit() else "any" for size in e.shape]
            for given, node in zip(inputs, gm.graph.find_nodes(op="placeholder"), strict=False)
            if (e := example(node)) is not None
        }
        names = inspect.signature(self.module.forward).parameters
        named = [*zip(names, self._args, strict=False), *self._kwargs.items()]
        tensors = [(name, t) for name, t in named if isinstance(t, Tensor)]
        found = ["training" if self.module.training else "eval"]
        if not torch.is_grad_enabled():
            found.append("without gradients")
        if tensors and (dtype := autocast_of(tensors[0][1].device.type)) is not None:
            found.append(f"autocast to {str(dtype).removeprefix('torch.')}")
        for name, t in tensors[:_MOST]:
            found.append(f"{name} [{', '.join(map(str, sizes.get(id(t), t.shape)))}]")
        more = len(tensors) - _MOST
        return ", ".join(found) + (f" and {more} more" if more > 0 else "")


class Calls:
    """The calls of a converted model."""

    def __init__(self, missed: Counter[str]) -> None:
        self.count = 0
        self.missed = missed  # number of calls that ran unconverted, by reason
        self.breaks: dict[Break, int] = {}  # graph breaks, with the number of the call in which each occurred first
        self.failed: Counter[Any] = Counter()  # number of failed captures by kind of call, for calls that run eagerly
        self._seen: list[CapturedModules] = []

    def meet(self, call: ModelCall) -> None:
        """Record the graph breaks of a call that ends."""
        for one in call.breaks():
            self.breaks.setdefault(one, self.count)

    def see(self, captured: Captured, place: nn.Module, gm: GraphModule, inputs: Iterable[Any]) -> CapturedModules:
        """Record the modules in a called module whose calls or parameters a graph contains."""
        paths = _by_id(place)
        bodies = [body for body in gm.modules() if isinstance(body, GraphModule)]
        called = {key for body in bodies for node in body.graph.nodes for key in _modules_of(node)}
        given = {i: paths[id(t)] for i, t in enumerate(inputs) if id(t) in paths}
        of_graph = {paths[key] for key in called & paths.keys()} | {*given.values()}
        seen = CapturedModules(captured, weakref.ref(place), of_graph, given)
        self._seen.append(seen)
        return seen

    def skipped(self, model: nn.Module, places: Iterable[nn.Module]) -> list[tuple[str, nn.Module, str]]:
        """Modules without submodules in no graph, by path, since Dynamo skipped the code of a module around them."""
        paths = paths_of(model)
        found: dict[str, tuple[str, nn.Module, str]] = {}
        for place in places if self.breaks else ():
            inner = dict(named_modules(place))
            left = {path: at for path, module in inner.items() if (at := self._left_at(module)) is not None}
            for path, module in inner.items():
                around = [p for p in left if not p or path == p or path.startswith(f"{p}.")]
                if not around or any(True for _ in module.children()):
                    continue
                where = max(around, key=len)
                since = self.breaks[left[where]]  # an earlier graph may contain it, if a hook was set since
                if not any(path in seen.paths and seen.captured.last >= since for seen in self._seen):
                    code = f"{type(inner[where]).__name__} at {left[where].place}"
                    reason = f"in no graph, as Dynamo left the code of {code}: {left[where].reason}"
                    found[paths[module]] = paths[module], module, reason
        return list(found.values())

    def _left_at(self, module: nn.Module) -> Break | None:
        """The graph break in the forward of a module, or in code that it calls."""
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None:
            return None
        lines = {line for _, _, line in code.co_lines()}
        here = (b for b in self.breaks if any(f == code.co_filename and n in lines for f, n, _ in b.stack))
        return next(here, None)


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """A model's modules, including itself, with their paths."""
    return list(cast("Iterable[tuple[str, nn.Module]]", model.named_modules()))


def paths_of(model: nn.Module) -> dict[nn.Module, str]:
    """The path of each module in a model."""
    return {module: path for path, module in named_modules(model)}


def name_owners(model: nn.Module, place: nn.Module, gm: GraphModule) -> None:
    """Record on each node the path, in the model, of the module that called it.

    Dynamo records paths relative to the module whose code is captured, which may be a submodule after a graph break.
    """
    paths = {id(module): path for path, module in named_modules(model)}
    nodes = [node for body in gm.modules() if isinstance(body, GraphModule) for node in body.graph.nodes]
    start = paths.get(id(place), "")
    for node in nodes:
        known = [paths[module] for module in _modules_of(node) if module in paths]
        if known:
            start = known[-1].removesuffix(owner(node)).rstrip(".")
            node.meta[PATH] = known[-1]
    for node in nodes:
        if not node.meta.get("nn_module_stack"):
            node.meta[PATH] = start


def _modules_of(node: Node) -> Iterator[int]:
    """The ids of the modules around a node's call; keys of repeated calls have a suffix after `@`."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    return (int(name) for key in stack if (name := key.partition("@")[0]).isdigit())

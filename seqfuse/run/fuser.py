"""The fuser: finds the plan for a call and runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import threading
import types
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..autograd import transformed
from ..compiler import CompileError, compile_all, give_up
from ..env import Env, any_autocast, autocast_of, bucket
from ..errors import FallbackWarning, InputError, StateError
from ..fake import is_fake
from ..fusion import FusedOperation, checked
from ..operation import FusableOperation, config_version
from ..plan.facts import any_rows
from ..plan.flatten import flatten, has_own_graph, public_channels
from ..plan.inputs import check_devices, expect_tensor, validate
from ..plan.match import NEAR, Matcher
from ..plan.plan import Plan
from ..plan.quantized import check_stateless
from ..plan.reference import (
    by_reference,
    check_channels,
    draw,
    number_seeds,
    positional_surplus,
    run_eagerly,
    walk_reference,
)
from ..plan.schedule import AnyChoice, Budget, Choice, choice_of
from ..plan.search import Search, plan_region
from ..plan.step import Stretch
from ..recipes import current as quantizing
from ..settings import fusing_now, settings
from .guard import bind as bind_call
from .guard import device, dtype, has_main_grad, requires, shape
from .lower import Context, OnStep, lower
from .node import saved_hooks
from .preview import choice_in, preview
from .regions import (
    Call,
    CompiledRegion,
    OpList,
    Region,
    callers_level,
    collecting_later,
    fusers,
    with_entry,
)
from .shards import check_agreement, mark_shards
from .trial import Weighing, sources_of

KEPT_LISTS = 8
_numbers = itertools.count()
_PLAIN = (Tensor, nn.Parameter)
_F = TypeVar("_F", bound=types.FunctionType)
_one_at_a_time = threading.RLock()
_planning = threading.RLock()


def _fresh_locks() -> None:
    global _one_at_a_time, _planning
    _one_at_a_time, _planning = threading.RLock(), threading.RLock()


def _inlined_only(function: _F) -> _F:
    """A function that torch.compile inlines into a caller, but does not compile as a frame of its own.

    After a graph break in a module of the sequence it would compile the engine's frames, which run no faster compiled.
    """
    with contextlib.suppress(AttributeError):  # of torch's internals, which another version may not have
        frames = cast("Any", torch._C._dynamo.eval_frame)  # pyright: ignore
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


if hasattr(os, "register_at_fork"):  # a forked child would wait for a thread it does not have
    os.register_at_fork(after_in_child=_fresh_locks)


class _Changed(StateError):
    """A parameter was removed in place, `_parameters["bias"] = None`, which is not recorded."""


class Fuser:
    """Plans a sequence with a fusion set and runs the plans; the engine of `Sequential`.

    Args:
        root: a container or an operation.
        fusions: the fusion set, in order of preference between equals.
        owned: whether `root` owns this fuser, which then only has a weak reference to it.
        memory: activation memory, as in `Sequential`.
        on_step: called as `on_step(step, run, *args, **kwargs)` instead of each `run(*args, **kwargs)`, the `fwd` or
            `bwd` of a step; returns its result.

    Raises:
        InputError: (SF105) for another root, such as several operations.
    """

    plain_autograd = True  # runs stretches of views only, and single native operations
    lock: Any = None  # of a root that borrows its parameters in each call: held meanwhile
    place: str | None = None  # the name of its operations in warnings, if not their own

    def __init__(
        self,
        root: FusableOperation,
        fusions: Sequence[type[FusedOperation]] = (),
        owned: bool = False,
        memory: AnyChoice = "fast",
        on_step: OnStep | None = None,
    ) -> None:
        if not isinstance(root, FusableOperation):  # pyright: ignore[reportUnnecessaryIsInstance]
            message = f"Fuser takes an sf.Sequential or one operation, not {type(root).__name__}"
            hint = "sf.Sequential(*operations) runs a list of operations, with its own Fuser"
            raise InputError(message, code="SF105", hint=hint)
        self.owner, self._held = weakref.ref(root), None if owned else root
        self.fusions = checked(fusions)
        self.memory: Choice = choice_of(memory)
        self.on_step = on_step
        self._reset()

    def _reset(self) -> None:
        self._op_lists: tuple[OpList, ...] = ()
        self.last_op_list: OpList | None = None  # that of the last call, which a plan since then may have rebuilt
        self._name = ""  # empty for a fuser that exists in a trace only
        if not torch.compiler.is_compiling():
            self._name = str(next(_numbers))
            fusers[self._name] = self
        self._matcher = Matcher(self.fusions)

    def __getstate__(self) -> dict[str, Any]:
        kept = {"owner": self.root, "_held": self._held, "fusions": self.fusions}
        return {**kept, "memory": self.memory, "on_step": self.on_step}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, owner=weakref.ref(state["owner"]))
        self._reset()

    @property
    def root(self) -> Any:
        """The container or operation; weakly referenced if it owns this fuser."""
        return self.owner()

    @_inlined_only
    def __call__(self, x: Tensor, **channels: Tensor) -> Any:
        """Run the sequence: `y`, or `(y, *outputs)` if it has public extra outputs."""
        if torch.compiler.is_compiling():
            return self._traced(x, channels)
        op_lists = self._op_lists
        op_list = op_lists[0] if op_lists and op_lists[0].fingerprint.holds() else self.op_list()
        self.last_op_list = op_list
        whole = op_list.whole
        if whole is not None and whole.latest is not None and len(channels) == len(op_list.inputs):
            y = whole.latest(x, channels, None)
            if y is not None:
                return (y, *[channels[name] for name in op_list.outputs]) if op_list.outputs else y
        if x.__class__ not in _PLAIN or transformed():
            if not op_list.fingerprint.holds_in_full():  # a parameter was removed in place
                op_list = self._changed()
            if op_list.nodes and op_list.nodes[0].fusable:
                expect_tensor(op_list.nodes[0], x)
            return by_reference(op_list.nodes, op_list.inputs, op_list.outputs, x, channels)
        return self.run(op_list, x, channels)

    def run(self, op_list: OpList, x: Tensor, channels: dict[str, Tensor]) -> Any:
        if torch.is_inference_mode_enabled() and torch.is_grad_enabled():  # in inference mode torch records no graph
            with torch.no_grad():
                return self.run(op_list, x, channels)
        if channels or op_list.inputs:
            check_channels(op_list.nodes, op_list.inputs, channels)
        seeds = draw(op_list.nodes, x) if op_list.random else None
        if op_list.parametrized:
            # The cache belongs to the process: without the lock a thread could read tensors of another thread's graph.
            with _one_at_a_time, parametrize.cached():
                x = self._run_parts(op_list, x, channels, seeds)
        else:
            x = self._run_parts(op_list, x, channels, seeds)
        if op_list.outputs:
            return (x, *[channels[name] for name in op_list.outputs])
        return x

    def _run_parts(
        self, op_list: OpList, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None, first: int = 0
    ) -> Tensor:
        for i, part in enumerate(op_list.parts[first:], first):
            if isinstance(part, Region):
                try:
                    x = self.run_region(op_list, part, x, channels, seeds)
                except _Changed:
                    return self._run_parts(self._changed(), x, channels, seeds, i)
            else:
                x = run_eagerly(op_list.nodes, part, x, channels)
        return x

    def run_region(
        self, op_list: OpList, region: Region, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None
    ) -> Tensor:
        """Plan a region for these tensors and run it."""
        if region.latest is not None and (y := region.latest(x, channels, seeds)) is not None:
            return y
        given, plain = [channels[c] for c in region.channels], True
        try:
            parameters: list[Tensor] = [getattr(owner, name) for owner, name in region.slots]
            # Nothing is read of a tensor of another class: it may refuse that, as weights of torch's per-sample
            # gradients do.
            plain = all(t is None or t.__class__ in _PLAIN or is_fake(t) for t in (x, *parameters, *given))  # pyright: ignore[reportUnnecessaryComparison]
            signature = (_signature(parameters), *map(shape, parameters)) if plain else ()
        except AttributeError:
            if op_list.fingerprint.holds_in_full():
                raise
            raise _Changed("a parameter was taken away in place from a model in stages", code="SF506") from None
        if not plain:
            return walk_reference(op_list.nodes, region.positions, x, channels, seeds)
        autocast = autocast_of(x.device.type) if any_autocast() else None
        deterministic = torch.are_deterministic_algorithms_enabled()
        state = torch.is_grad_enabled(), deterministic, autocast, fusing_now(), quantizing.get()
        about = x.dtype, x.device, x.requires_grad, *state, signature, _signature(given), saved_hooks(False) is None
        key = x.shape, (*map(shape, given),), *about
        with _planning:
            known = region.states.get(key)
            if known is None:
                known = self._planned(op_list, region, about, x, channels, parameters)
                region.states = with_entry(region.states, key, known)
        lowering, call = known
        if settings().debug and not region.compared:
            check_agreement(op_list.nodes, region.positions, lowering.plan, x, seeds)
            region.compared = True
        region.lowering, region.latest = (
            known  # not before: plans that differ between processes are reported in every call
        )
        if call is not None and (y := call(x, channels, seeds)) is not None:
            return y
        if lowering.by_reference:
            return walk_reference(op_list.nodes, region.positions, x, channels, seeds)
        y = bind_call(region, lowering)(x, channels, seeds)  # for tensors without data
        assert y is not None
        return y

    def _planned(
        self, op_list: OpList, region: Region, about: Any, x: Tensor, channels: dict[str, Tensor], own: list[Tensor]
    ) -> tuple[CompiledRegion, Call | None]:
        state, given = about[3:8], [channels[c] for c in region.channels]
        validate(op_list.nodes, region.positions, x.shape, channels)
        if isinstance(self.memory, Budget) and self.memory.bytes is not None:  # bytes of these sizes
            sizes = x.shape, *map(shape, given)
        else:
            sizes = x.shape[-1:], *[bucket(t.numel()) for t in given]
        key = Env.like(x).rows, sizes, *about
        lowering = region.lowerings.get(key)
        if lowering is None:
            with collecting_later():
                lowering = self.bind(op_list, region, x, channels, own)
            region.lowerings = with_entry(region.lowerings, key, lowering)
        if x.__class__ not in _PLAIN or (lowering.by_reference and not lowering.native):
            return lowering, None
        return lowering, bind_call(region, lowering, state, x, own, given)

    def bind(
        self,
        op_list: OpList,
        region: Region,
        x: Tensor,
        channels: dict[str, Tensor],
        parameters: Sequence[Tensor],
    ) -> CompiledRegion:
        """Plan and lower a region for these tensors; tensor subclasses other than fake tensors run by reference."""
        given = {c: channels[c] for c in region.channels}
        # Fake tensors are planned like plain ones. With complex and real tensors together, torch computes the
        # gradients.
        several = (x, *parameters, *given.values())
        exact = is_fake(x) or all(t.__class__ in _PLAIN for t in several)
        exact = exact and len({t.is_complex() for t in several}) == 1 and not has_own_graph(self.root)
        check_devices(op_list.nodes, region.positions, x, given)
        stretch = Stretch.of(op_list.nodes, region.positions, x, given, parameters, Env.like(x))
        # A compiler that traces the call decides which tensors are saved.
        memory = choice_in(self.memory, op_list, region, x) if x.__class__ in _PLAIN else "fast"
        search = Search(stretch, self._matcher, Weighing)
        plan = plan_region(search, memory)
        if x.__class__ in _PLAIN and not _compiled(region, stretch, plan):
            return self.bind(op_list, region, x, channels, parameters)
        planned = dataclasses.replace(stretch, x=None, channels={})
        if isinstance(memory, Budget):
            for refusal in (refusal for refusal in plan.refused if refusal.fusion == f"memory={memory}"):
                first, last = (op_list.nodes[at].name for at in (region.start, region.stop - 1))
                count = region.stop - region.start
                where = self.place or (f"{count} operations, {first} to {last}" if count > 1 else first)
                message = f"{refusal.fusion} for {where}: {refusal.reason}"
                warnings.warn(message, UserWarning, stacklevel=callers_level())
        note = weakref.WeakMethod(self._note_failure)
        context = Context.of(stretch, region.slots, parameters, stretch.fusing.on_error, note, self.on_step, self.lock)
        index = {(id(owner), name): i for i, (owner, name) in enumerate(region.slots)}
        bound = lower(plan, context, op_list.configured) if exact else []
        segments = [(s, [index[id(owner), name] for owner, name in s.parameters]) for s in bound]
        if not exact or not self.plain_autograd or self.on_step is not None:
            return CompiledRegion(plan, planned, segments, not exact)
        inside: list[Any] = [node.operation for node in op_list.nodes[region.start : region.stop]]
        views = all(operation.is_view for operation in inside) and not any(plan.fused)
        adds = any(map(has_main_grad, parameters))
        # Saved-tensor hooks see each tensor once, and those of a checkpoint identify the plan.
        fused: list[Any] = [s.operation for s in (*plan.forward, *plan.backward) if s.fused]
        unasked = memory == "balanced" and not plan.recomputed and not any(f.saves_memory for f in fused)
        plainly = not adds and (memory == "fast" or unasked) and saved_hooks(False) is None
        calls = search.native if plainly else None
        steps = (*plan.forward, *plan.backward)
        natively = calls is not None and all(not step.fused or calls.faster_than(step.operation) for step in steps)
        return CompiledRegion(plan, planned, segments, views, calls.calls if calls is not None and natively else ())

    def _changed(self) -> OpList:
        config_version.bump()
        return self.op_list()

    def _note_failure(self, fusion: str, at: int, reason: str) -> None:
        with _planning:
            if self._matcher.note_failure(fusion, at, reason):
                for op_list in self._op_lists:
                    op_list.forget()

    def refuse_surplus(self, surplus: Sequence[Any], channels: Mapping[str, Tensor]) -> NoReturn:
        """Raise for arguments of a call after x that have no name: channels are passed by keyword."""
        nodes = flatten(self.root)  # not `op_list()`, whose fingerprint Dynamo of torch 2.11 cannot trace
        raise positional_surplus(nodes, public_channels(nodes)[0], len(surplus), channels)

    def op_list(self) -> OpList:
        """The flattened sequence, rebuilt if its fingerprint has changed."""
        for op_list in self._op_lists:
            if op_list.fingerprint.holds():
                self._op_lists = (op_list, *(other for other in self._op_lists if other is not op_list))
                return op_list
        with _planning:
            for op_list in self._op_lists:
                if op_list.fingerprint.holds():
                    return op_list
            kept = [known for known in self._op_lists if known.fingerprint.differs_in_switches_only()]
            with collecting_later():
                op_list = OpList(self.root)
            self._matcher.failures.clear()  # failures are recorded by position
            self._op_lists = (op_list, *kept[: KEPT_LISTS - 1])
            return op_list

    def plan(self, x: Tensor | None = None, *, env: Env | None = None, **channels: Tensor) -> Plan:
        """The plan for an input or an environment.

        Without an input, parameters are assumed to need gradients and the input not; after a barrier, the input does if
        any gradient was needed before.
        """
        with collecting_later():
            return preview(self.root, self._matcher, self._changed(), x, env, channels, self.memory)

    def run_recorded(
        self, op_list: OpList, region: Region, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None
    ) -> Tensor:
        if not is_fake(x):
            return self.run_region(op_list, region, x, channels, seeds)
        lowering = self.bind(op_list, region, x, channels, [getattr(owner, name) for owner, name in region.slots])
        steps = (*lowering.plan.forward, *lowering.plan.backward)
        if any(step.fused and step.operation.kernels for step in steps):
            y = bind_call(region, lowering)(x, channels, seeds)
            assert y is not None
            return y
        # Without Triton kernels, a compiler can fuse more in the references.
        return walk_reference(op_list.nodes, region.positions, x, channels, seeds)

    def plan_of(self, lowering: CompiledRegion) -> Plan:
        """The plan of a region that ran, with near misses."""
        plan, lean = lowering.plan, self.memory != "fast"
        _, refused = self._matcher.find(lowering.stretch, None, lean, near=True)
        near = [refusal for refusal in refused if refusal.reason.startswith(NEAR)]
        return dataclasses.replace(plan, refused=tuple(sorted((*near, *plan.refused), key=lambda refusal: refusal.at)))

    def _traced(self, x: Tensor, channels: dict[str, Tensor]) -> Any:
        """A call under a compiler's trace: the sequence is flattened again, in code that Dynamo can trace."""
        from .dynamo import has_graph_inside, plannable, run_planned

        nodes = flatten(self.root)
        check_stateless(nodes)
        mark_shards(nodes)
        number_seeds(nodes)
        inputs, outputs = public_channels(nodes)
        # The name is read last and is unique: a graph that has read it is specialized to this sequence.
        if type(self) is Fuser and plannable(nodes, x) and self._name and not has_graph_inside(self._name):
            return run_planned(self._name, nodes, inputs, outputs, x, channels)
        return by_reference(nodes, inputs, outputs, x, channels)


def _compiled(region: Region, stretch: Stretch, plan: Plan) -> bool:
    """Compile the C kernels of a plan; `False` if that failed, after which no plan uses C kernels."""
    steps = tuple([(step.key, step.needs) for step in (*plan.forward, *plan.backward)])
    key = steps, any_rows(plan.env), stretch.borders
    if key in region.rehearsed:
        return True
    region.rehearsed[key] = None
    try:
        compile_all(sources_of(plan, stretch))
    except CompileError as error:
        give_up(error)
        warnings.warn(f"fusions run unfused, in ATen calls: {error}", FallbackWarning, stacklevel=2)
        return False
    return True


def default_fusions() -> Sequence[type[FusedOperation]]:
    """The fusion set of a sequence without its own."""
    from ..fusions import default  # a layer above

    return default


@_inlined_only
def fuser_of(operation: FusableOperation) -> Fuser:
    """The fuser that runs a single operation as a sequence."""
    return Fuser(operation, default_fusions())


def _signature(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    kinds = *map(dtype, tensors), *map(device, tensors), *map(type, tensors)
    return (*map(requires, tensors), *kinds, *map(has_main_grad, tensors))

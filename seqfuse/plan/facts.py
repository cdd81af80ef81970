"""The bytes that steps save for the backward pass: found by running them on fake tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..casts import autocasting, cast_once
from ..env import Env
from ..errors import one_line
from ..fake import faking, is_fake, laid_like
from ..operation import FusableOperation, UnfusedOperation
from ..saved import Recompute, Saved
from ..traffic import FLOPS
from .described import describe
from .flatten import HOOKS, Node, global_hooks
from .inputs import check_dtypes
from .reference import run_eagerly, walk_reference
from .schedule import Candidate, Kept
from .step import Step, Stretch

_FILLED = (list, dict, set)


class Unknown(Exception):
    """The result of a module is not known, with that of all behind it."""


def aside(module: nn.Module, mode: Any, made: dict[int, nn.Module] | None = None) -> nn.Module:
    """A copy of a module, and of those in it, with fake tensors for its own: what it changes is changed in the copy.

    It has no hooks, which see the tensors of calls alone, and is not compiled.
    """
    made = {} if made is None else made
    module = module._modules.get("_orig_mod") or module  # pyright: ignore[reportPrivateUsage] # of torch.compile
    if id(module) not in made:
        kept = made[id(module)] = object.__new__(type(module))
        own: dict[str, Any] = kept.__dict__
        own.update(_copied(module.__dict__, mode), _compiled_call_impl=None)
        own.update((name, _copied(module.__dict__[name], mode)) for name in ("_parameters", "_buffers"))
        own.update((name, OrderedDict[int, Any]()) for name in HOOKS)
        inside: Mapping[str, nn.Module | None] = module.__dict__["_modules"]
        own["_modules"] = {name: child if child is None else aside(child, mode, made) for name, child in inside.items()}
        if isinstance(module, FusableOperation):
            own["_engine"] = []
    return made[id(module)]


def _copied(held: Mapping[str, Any], mode: Any) -> dict[str, Any]:
    """Fake tensors for tensors, copies of lists and the like, and the rest as it is."""
    return {
        name: mode.from_tensor(value) if isinstance(value, Tensor) else copy(value) if type(value) in _FILLED else value
        for name, value in held.items()
    }


def run_aside(nodes: Sequence[Node], position: int, x: Tensor, channels: dict[str, Tensor], mode: Any) -> Tensor:
    """What a module that runs eagerly returns for fake tensors. Nothing of it changes, and its hooks are not run.

    Raises:
        Unknown: where it does not run on fake tensors.
    """
    node = nodes[position]
    operation = node.operation
    try:
        if global_hooks():
            raise Unknown("global module hooks are registered")
        stand_in = dataclasses.replace(node, operation=aside(operation, mode))
        return run_eagerly([*nodes[:position], stand_in], position, x, channels)
    except Exception as error:
        if isinstance(operation, UnfusedOperation):  # its parameters may be elsewhere, as those of FSDP are
            channels.update((channel, x) for _, channel in node.outputs)
            return x.new_empty(operation.infer(tuple(x.shape)), dtype=operation.y_dtype)
        raise _unknown(node, position, error) from None


def _unknown(node: Node, position: int, error: Exception) -> Unknown:
    said = str(error).strip().partition("\n")[0]
    said = said if isinstance(error, Unknown) else f"{type(error).__name__}: {said}"
    return Unknown(f"unknown behind {node.name} at {position}, which does not run on fake tensors ({said})")


class Arriving:
    """A sequence that is run part after part; `x` and `channels`, fake tensors, are what enters the next part.

    `unknown` is why they are not known, once they are not.
    """

    def __init__(self, x: Tensor, channels: Mapping[str, Tensor], env: Env, place: torch.device) -> None:
        self.unknown: str | None = None
        self._env, self._place = env, place
        try:
            with self._running() as mode:
                self._mode = mode
                self.x: Tensor = self._like(x)
                self.channels = {name: self._like(t) for name, t in channels.items()}
        except Exception as error:
            self.unknown = f"the input cannot be made without data ({type(error).__name__}: {error})"

    def _like(self, t: Tensor) -> Tensor:
        fake = self._mode.from_tensor(t).detach()
        fake = fake if fake.device == self._place else laid_like(fake, fake.dtype, self._place)
        return fake.requires_grad_(t.requires_grad)

    @contextlib.contextmanager
    def _running(self) -> Generator[Any]:
        autocast = self._env.autocast if self._env.device == self._place.type else None
        casting, mode = autocasting(self._place.type, autocast), getattr(self, "_mode", None)
        with torch.set_grad_enabled(self._env.grad), casting, faking(mode) as mode:
            yield mode

    def apart(self) -> tuple[Tensor, dict[str, Tensor]]:
        """What enters the next part and the channels beside it, as tensors on meta, which can be kept."""
        x, *given = (
            laid_like(t, t.dtype, "meta").requires_grad_(t.requires_grad) for t in (self.x, *self.channels.values())
        )
        return x, dict(zip(self.channels, given, strict=True))

    def run(self, nodes: Sequence[Node], positions: range) -> None:
        """Run the operations of a part, or the module that runs eagerly."""
        if self.unknown is not None:
            return
        with self._running() as mode:
            seeds = torch.empty(len(nodes), dtype=torch.int64, device=self._place)
            for at in positions:
                try:
                    if nodes[at].fusable:
                        self.x = walk_reference(nodes, range(at, at + 1), self.x, self.channels, seeds)
                    else:
                        self.x = run_aside(nodes, at, self.x, self.channels, mode)
                except Exception as error:
                    self.unknown = str(error if isinstance(error, Unknown) else _unknown(nodes[at], at, error))
                    return


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes kept for backward (storages counted once, parameters left out) and FLOPs of the forward pass.

    Of what is planned: what a module saves that runs through its own `__call__` is not counted. `peak` is the most that
    is held at once in either pass: what is saved, and what a pass makes while it runs; without parameters and their
    gradients. `None` where that is not known.
    """

    saved: int
    saved_unfused: int
    flops: int
    peak: int | None = None


def look(stretch: Stretch, candidates: Sequence[Candidate]) -> Kept | str:
    """The tensors that the operations of a stretch and these candidates save, or why they are not known."""
    if stretch.x is None:
        return stretch.unknown or "the shape of the input"
    live = [c for c in candidates if c.stop > stretch.wants.live_from]
    steps = [stretch.step(c.start, c.stop, c.fusion) for c in live if c.fusion.saves_memory or c.fusion.has_record]
    entering = Entering(stretch.x, stretch.channels, stretch.env, stretch.place)
    return footprint((stretch,), steps, entering)


class Entering(NamedTuple):
    """What enters the first of several parts, for an environment, and the device on which they can be tried."""

    x: Tensor
    channels: Mapping[str, Tensor]
    env: Env
    place: torch.device


def measure(parts: Sequence[Stretch | Node], forward: Sequence[Step], entering: Entering) -> Memory | str:
    """The bytes that a forward schedule saves and the FLOPs that it computes, or why they are not known.

    The device is its `place`, where the parameters are, also where the plan is for a machine that is not here: on fake
    tensors no kernel is launched. The operators of the library's own make what they return; a fusion that launches one
    itself is not known.
    """
    env, place = entering.env, entering.place
    if env.autocast is not None and (env.device != place.type or not torch.amp.is_autocast_available(place.type)):
        return f"autocast on {env.device} saves other tensors than on {place.type}, where the parameters are"
    flops = list[int]()

    @contextlib.contextmanager
    def counting() -> Generator[None]:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False, custom_mapping=_formulas()[1]) as counter:
            yield
        flops.append(counter.get_total_flops())

    kept = footprint(parts, forward, entering, counting)
    return kept if isinstance(kept, str) else Memory(_saved_by(kept, forward), kept.unfused, sum(flops))


def _saved_by(kept: Kept, forward: Sequence[Step]) -> int:
    """Bytes that the steps of a forward schedule save."""
    first, tensors = forward[0].start if forward else 0, set[int]()
    for step in forward:
        own = kept.fused.get((step.start, step.operation)) if step.fused else None
        tensors = tensors.union(*kept.own[step.start - first : step.stop - first]) if own is None else tensors | own
    return sum(kept.sizes[t] for t in tensors)


@functools.cache
def _formulas() -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Functions that count FLOPs, by the calls of ATen: of tensors, and those that torch lacks, of shapes."""
    from torch.utils import flop_counter

    of_shapes = cast(Any, flop_counter.shape_wrapper)  # pyright: ignore[reportUnknownMemberType]

    def attention(q: Sequence[int], k: Sequence[int], v: Sequence[int], *_: Any, **__: Any) -> int:
        return 2 * math.prod(q) * k[-2] + 2 * math.prod(q[:-1]) * k[-2] * v[-1]

    # Torch has no formula for the CPU's kernel, and before torch 2.13 none for fewer heads of keys than of queries.
    kernels = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    extra: dict[Any, Any] = {**FLOPS}
    extra |= {getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}"): attention for kernel in kernels}
    ahead = {name: of_shapes(formula) for name, formula in extra.items()}

    def backward(_: Sequence[int], *forward: Any, **__: Any) -> int:  # five GEMMs where the forward pass has two
        return attention(*forward[:3]) * 5 // 2

    back = {
        getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward"): of_shapes(backward) for kernel in kernels
    }
    return {**flop_counter.flop_registry, **ahead, **back}, extra


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """The FLOPs of a call of ATen."""
    formula = _formulas()[0].get(func.overloadpacket)
    return 0 if formula is None else formula(*args, **kwargs, out_val=out)


def footprint(
    parts: Sequence[Stretch | Node], steps: Sequence[Step], entering: Entering, counting: Any = None
) -> Kept | str:
    """The tensors that operations of consecutive parts save, and the fusions of these steps, or why they are not known.

    A module that runs eagerly is run on fake tensors, too; what it saves is not counted. The operations of each part
    run within `counting()`.
    """
    entered = next((part for part in parts if isinstance(part, Stretch)), None)
    if entered is None:
        return Kept([frozenset[int]()] * len(parts), {}, {})
    inside = entered.nodes[entered.start - parts.index(entered) :]
    known = {*entering.channels, *(c for node in inside for _, c in node.outputs)}
    for part in parts:
        for node in part.inside if isinstance(part, Stretch) else ():
            for name, channel in node.inputs:
                if channel not in known:
                    return f"{node.name} reads {name} from {channel!r}, which is not given to plan()"
    try:
        with torch.no_grad(), autocasting(entering.place.type, entering.env.autocast), faking() as mode, cast_once():
            return _footprint(parts, entered, steps, entering, counting, mode)
    except Unknown as error:
        return str(error)
    except Exception as error:
        return one_line(error)


def _footprint(
    parts: Sequence[Stretch | Node],
    entered: Stretch,
    steps: Sequence[Step],
    entering: Entering,
    counting: Any,
    mode: Any,
) -> Kept:
    def like(t: Tensor, dtype: torch.dtype) -> Tensor:
        t = mode.from_tensor(t).detach()
        return t if t.device == place and t.dtype is dtype else laid_like(t, dtype, place)

    nodes, env, place = entered.nodes, entering.env, entering.place
    x = like(entering.x, env.dtype if entering.x.is_floating_point() else entering.x.dtype)
    channels = {name: like(t, t.dtype) for name, t in entering.channels.items()}
    own, before = list[frozenset[int]](), [x]
    seeds = torch.empty(len([n for n in nodes if n.seed is not None]), dtype=torch.int64, device=place)
    tried = _Tried(owned(nodes), seeds, counting is None)
    first = at = entered.start - parts.index(entered)
    for part in parts:
        last = part.positions.stop if isinstance(part, Stretch) else at + 1
        with counting() if counting and isinstance(part, Stretch) else contextlib.nullcontext():
            while at < last:
                if isinstance(part, Stretch):
                    if env.autocast is None:
                        check_dtypes(nodes, range(at, at + 1), [x.dtype])
                    x, saved = tried(part.step(at, at + 1), x, channels, part.env)
                else:
                    tried.leave_out([mode.from_tensor(p) for p in part.operation.parameters()])
                    given = {channel: tried.whole(channels[channel]) for _, channel in nodes[at].inputs}
                    x, saved = run_aside(nodes, at, tried.whole(x), given, mode), frozenset[int]()
                    channels.update(given)
                at += 1
                own.append(saved)
                before.append(x)
    fused: dict[tuple[int, Any], frozenset[int]] = {}
    for step in steps:
        if step.fused:
            alone = dataclasses.replace(step, to=None)  # what is quantized, its reader saves
            y = before[step.stop - first]
            fused[step.start, step.operation] = tried(alone, before[step.start - first], channels, env, y)[1]
    return Kept(own, fused, tried.sizes)


class _Alike:
    """Stands for a tensor like one that a step gave before, and is made only where another step has to run on it."""

    __slots__ = ("dtype", "number", "shape", "strides", "tensor")

    def __init__(self, shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.strides, self.dtype = shape, strides, dtype
        self.number: int | None = None
        self.tensor: Tensor | None = None

    def stride(self) -> tuple[int, ...]:
        """As that of a tensor."""
        return self.strides


class _Form(NamedTuple):
    """What a result is like that is no tensor a step was given."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class _Tried:
    """Steps that were run on fake tensors; one that is like another, as those of equal layers are, is not run again."""

    def __init__(self, owned: set[int], seeds: Tensor, shares: bool) -> None:
        self._owned, self._seeds, self._shares, self.sizes = owned, seeds, shares, dict[int, int]()
        self._numbers: dict[int, int] = {}  # by storage
        self._held: list[Tensor] = []  # so that no storage takes the place of one that went
        # Each result by its form, or by the name of the tensor that it is, and what is saved: such names, or the bytes
        # of other tensors. Names are x, y, seeds, and those of extra inputs and outputs.
        self._known: dict[Any, tuple[dict[str, Any], tuple[str | int, ...]]] = {}
        self._described: dict[int, str] = {}

    def __call__(
        self, step: Step, x: Any, channels: dict[str, Any], env: Env, same: Any = None
    ) -> tuple[Any, frozenset[int]]:
        """Its y, and the numbers of what it saves; `channels`, in which no name is made twice, gains what it makes.

        `same` is the y of its operations, whose channels are there: what it gives is what they give.
        """
        places: dict[str, Any] = {"x": x, **{f"in {name}": channels[channel] for name, channel in step.reads}}
        outputs = [(f"out {name}", channel) for name, channel in step.writes]
        stored = [self._place(t) for t in places.values()]
        forms = [(t.shape, t.dtype, t.stride()) for t in places.values()]
        key: Any = None
        if self._shares:
            alike = [stored.index(place) for place in stored]
            planned = step.needs, step.borders, step.recipes
            key = (type(step.operation), *map(self._about, step.nodes, step.covers), *forms, *alike, *planned)
        if key in self._known:
            results, found = self._known[key]
            for name, form in results.items():
                places[name] = _Alike(*form) if isinstance(form, _Form) else places[form]
            y = places["y"]
            if same is None:
                channels.update((channel, places[name]) for name, channel in outputs)
            else:
                places |= {"y": same, **{name: channels[channel] for name, channel in outputs}}
            places["seeds"] = self._seeds
            return y, frozenset([self._fresh(n) if isinstance(n, int) else self._number(places[n]) for n in found])
        given = {channel: self.whole(channels[channel]) for _, channel in step.reads}
        try:
            y, named, saved = step.returned(step.call(env, self.whole(x), given, self._seeds)[0])
        except RuntimeError as error:
            if not step.fused:
                raise
            cure = "wrap a function that launches kernels in torch.library.custom_op, with register_fake"
            raise RuntimeError(f"{step.name} does not run on fake tensors; {cure}: {error}") from None
        made = {"y": y, **{f"out {name}": named[name] for name, _ in step.writes}}
        if same is None:
            channels.update((channel, made[name]) for name, channel in outputs)
        else:
            for mine, theirs in zip(made.values(), (same, *[channels[c] for _, c in outputs]), strict=True):
                self._numbers[storage_of(mine)] = self._number(theirs)
                self._held.append(mine)
        records = ((record, record.among(saved, self._seeds)) for record in step.saves)
        tensors = [t for record, value in records for t in _tensors(value, record.kept) if is_fake(t)]
        tensors = [t for t in tensors if storage_of(t) not in self._owned]
        if key is not None:
            self._keep(key, {name: self.whole(t) for name, t in places.items()}, made, tensors)
        return y, frozenset(map(self._number, tensors))

    def _keep(self, key: Any, given: dict[str, Tensor], made: dict[str, Tensor], saved: Sequence[Tensor]) -> None:
        """Keep what a step gave, unless a result of it is a view of another tensor."""
        results: dict[str, Any] = {}
        known = dict(given)
        for name, t in made.items():
            is_of = next((other for other, one in known.items() if one is t), None)
            if is_of is None and storage_of(t) in map(storage_of, known.values()):
                return
            results[name] = is_of or _Form(t.shape, t.stride(), t.dtype)
            known[name] = t
        names: dict[int, str | int] = {storage_of(self._seeds): "seeds"}
        names |= {storage_of(t): name for name, t in reversed(known.items())}
        several = {storage_of(t): names.get(storage_of(t), t.untyped_storage().nbytes()) for t in saved}
        self._known[key] = results, tuple(several.values())

    def whole(self, t: Any) -> Tensor:
        """A tensor, made now if it was not needed before."""
        if not isinstance(t, _Alike):
            return t
        if t.tensor is None:
            t.tensor = torch.empty_strided(t.shape, t.strides, dtype=t.dtype, device=self._seeds.device)
            if t.number is not None:
                self._held.append(t.tensor)
                self._numbers[storage_of(t.tensor)] = t.number
        return t.tensor

    def _place(self, t: Any) -> int:
        """What tells the storage of a tensor from others."""
        if isinstance(t, _Alike):
            return -id(t) if t.tensor is None else storage_of(t.tensor)
        return storage_of(t)

    def leave_out(self, tensors: Sequence[Tensor]) -> None:
        """Do not count these: they are parameters."""
        self._owned.update(map(storage_of, tensors))
        self._held += tensors

    def _about(self, node: Node, at: int) -> str:
        if at not in self._described:
            self._described[at] = describe(node)
        return self._described[at]

    def _number(self, t: Any) -> int:
        if isinstance(t, _Alike) and t.tensor is None:
            if t.number is None:
                last = sum([(size - 1) * stride for size, stride in zip(t.shape, t.strides, strict=True)])
                t.number = self._fresh(0 if 0 in t.shape else (last + 1) * t.dtype.itemsize)
            return t.number
        t = self.whole(t)
        self._held.append(t)
        at = self._numbers.get(storage_of(t))
        if at is None:
            at = self._numbers[storage_of(t)] = self._fresh(t.untyped_storage().nbytes())
        return at

    def _fresh(self, size: int) -> int:
        self.sizes[len(self.sizes)] = size
        return len(self.sizes) - 1


def storage_of(t: Tensor) -> int:
    """What tells the storage of a tensor from all others that are alive."""
    return t.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _tensors(record: Saved, kept: Sequence[str]) -> Iterator[Tensor]:
    late: Mapping[str, Recompute] = vars(record).get("_late", {})
    for name in kept:
        value: Any = late[name].tensors if name in late else vars(record).get(name)
        several: tuple[Any, ...] = cast(Any, value) if isinstance(value, tuple) else (value,)
        yield from (t for t in several if isinstance(t, Tensor))


def owned(nodes: Sequence[Node]) -> set[int]:
    """The storages of parameters, which are fake, too, where nothing has data."""
    slots = [slot for node in nodes for slot in node.slots.values()]
    parameters: list[Any] = [owner._parameters.get(name) for owner, name in slots]  # pyright: ignore[reportPrivateUsage]
    return {storage_of(p) for p in parameters if is_fake(p)}


def entering_width(nodes: Sequence[Node]) -> tuple[int, ...] | None:
    """The last dimensions of what enters, as the first operation with parameters says them; `None` if it does not."""
    for node in nodes:
        operation: Any = node.operation
        last: Any = getattr(operation, "in_features", None) or getattr(operation, "normalized_shape", None)
        if last is not None:
            return (last,) if isinstance(last, int) else tuple(last)
        if not isinstance(operation, UnfusedOperation) or operation.parameter_slots():
            return None
    return None

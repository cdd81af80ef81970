"""The fuser: finds the plan for a call and runs it."""

from __future__ import annotations

import dataclasses
import operator
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import operation as operations
from ..autograd import Segment, apply
from ..env import Env, Fusing, _may_autocast, fusing_now, rows_of
from ..errors import InputError, SeqfuseError
from ..fusion import FusedOperation
from ..operation import FusableOperation, UnfusedOperation
from .items import Fingerprint, Item, flatten, public_channels
from .match import Matcher
from .plan import Plan, Wants, merge, plan_region
from .program import Binder
from .show import Memory, measure

KEPT_LISTS = 8
_signature_of = operator.attrgetter("requires_grad", "dtype", "__class__")
_PLAIN = (Tensor, nn.Parameter)


@dataclasses.dataclass(slots=True, eq=False)
class Program:
    """A planned region, bound."""

    plan: Plan
    segments: list[tuple[Segment, tuple[int, ...]]]
    shapes: set[torch.Size]
    by_reference: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Region:
    """A stretch of operations between barriers, with the programs made for it."""

    start: int
    stop: int
    slots: list[tuple[nn.Module, str]]
    plain: list[tuple[dict[str, Any], str]] | None  # where parameters can be read directly
    channels: tuple[str, ...]
    programs: dict[Any, Program] = dataclasses.field(default_factory=lambda: dict[Any, Program]())


class Listing:
    """The list as it was read once: items, regions, channels, and the fingerprint that says whether it still holds."""

    def __init__(self, root: FusableOperation) -> None:
        modules: list[nn.Module] = []
        self.items = flatten(root, modules)
        self.fingerprint = Fingerprint(modules, root)
        self.inputs, self.outputs = public_channels(self.items)
        self.random: dict[int, int] = {}
        self.parametrized = any(map(parametrize.is_parametrized, modules))
        self.parts: list[Region | int] = []
        start = 0
        for position, item in enumerate([*self.items, None]):
            if item is None or not item.fusable:
                if position > start:
                    self.parts.append(self._region(start, position))
                if item is not None:
                    self.parts.append(position)
                start = position + 1
            elif isinstance(item.operation, UnfusedOperation) and item.operation.random:
                self.random[position] = len(self.random)

    def _region(self, start: int, stop: int) -> Region:
        inside = self.items[start:stop]
        slots = list(dict.fromkeys(slot for item in inside for slot in item.slots.values()))
        made = {c for item in inside for _, c in item.outputs}
        channels = tuple(dict.fromkeys(c for item in inside for _, c in item.inputs if c not in made))
        direct = all(name in owner._parameters for owner, name in slots)
        plain = [(owner._parameters, name) for owner, name in slots] if direct else None
        return Region(start, stop, slots, plain, channels)


class Fuser:
    """Operations x fusions x `Env` -> `Plan`, and the code that runs a plan.

    Args:
        root: a container, or one operation.
        fusions: the rule set, in order of preference between equals.
    """

    def __init__(self, root: FusableOperation, fusions: Sequence[type[FusedOperation]] = ()) -> None:
        self.root, self.fusions = root, tuple(fusions)
        self._reset()

    def _reset(self) -> None:
        self._listings: tuple[Listing, ...] = ()
        self._matcher = Matcher(self.fusions)
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {"root": self.root, "fusions": self.fusions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __call__(self, x: Tensor, **channels: Tensor) -> Any:
        """Run the list: `y`, or `(y, *outputs)` where it makes public extra outputs."""
        if torch.compiler.is_compiling() or not isinstance(x, Tensor):
            return self._by_reference(self.root_listing(), x, channels)
        listing = self.listing()
        if x.__class__ not in _PLAIN or _transformed():
            return self._by_reference(listing, x, channels)
        return self.run(listing, x, channels)

    def run(self, listing: Listing, x: Tensor, channels: dict[str, Tensor]) -> Any:
        """Run the planned list on plain tensors."""
        if channels or listing.inputs:
            self._check_channels(listing, channels)
        seeds = _draw(len(listing.random), x) if listing.random else None
        if listing.parametrized:
            with parametrize.cached():
                return self._run_parts(listing, x, channels, seeds)
        return self._run_parts(listing, x, channels, seeds)

    def _run_parts(self, listing: Listing, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None) -> Any:
        for part in listing.parts:
            if part.__class__ is Region:
                x = self._run_region(listing, part, x, channels, seeds)
            else:
                x = _run_alone(listing.items[part], x, channels)  # type: ignore[index]
        if listing.outputs:
            return (x, *[channels[name] for name in listing.outputs])
        return x

    def _run_region(self, listing: Listing, region: Region, x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None) -> Tensor:
        plain = region.plain
        if plain is not None:
            parameters = [owned[name] for owned, name in plain]
        else:
            parameters = [getattr(owner, name) for owner, name in region.slots]
        shape, kind = x.shape, x.device.type
        key = (
            x.dtype,
            x.device,
            x.requires_grad,
            ((x.numel() // (shape[-1] or 1) if shape else 1) - 1).bit_length() if x.numel() else None,
            torch.is_grad_enabled(),
            torch.get_autocast_dtype(kind) if _may_autocast(kind) and torch.is_autocast_enabled(kind) else None,
            torch.are_deterministic_algorithms_enabled(),
            fusing_now(),
            *map(_signature_of, parameters),
            *[_signature_of(channels[c]) for c in region.channels],
        )
        program = region.programs.get(key)
        if program is None:
            program = self._program(listing, region, key, x, channels, parameters)
        if shape not in program.shapes:
            _validate(listing, region, shape)
            if len(program.shapes) < 1024:
                program.shapes.add(shape)
        if program.by_reference:
            return _walk_reference(listing.items, range(region.start, region.stop), listing.random, x, channels, seeds)
        for segment, indices in program.segments:
            x = apply(segment, x, channels, seeds, [parameters[i] for i in indices])
        return x

    def _program(
        self, listing: Listing, region: Region, key: Any, x: Tensor, channels: dict[str, Tensor], parameters: Sequence[Tensor]
    ) -> Program:
        with self._lock:
            known = region.programs.get(key)
            if known is not None:
                return known
            env, fusing = Env.like(x), fusing_now()
            _validate(listing, region, x.shape)
            exact = all(t.__class__ in _PLAIN for t in (*parameters, *(channels[c] for c in region.channels)))
            for item in listing.items[region.start : region.stop]:
                _check_devices(listing, item, x)
            given = {c: channels[c].requires_grad for c in region.channels}
            wants = Wants.of(listing.items, region.start, region.stop, x.requires_grad, given, env.grad)
            plan = plan_region(listing.items, region.start, region.stop, wants, env, fusing, self._matcher)
            dtypes = None
            if env.autocast is not None or any(p.dtype is not x.dtype for p in parameters):
                dtypes = _dtypes(listing, region, x, channels)

            def locate(position: int, error: BaseException, tensor: Any) -> BaseException:
                return _locate(listing, position, error, tensor)

            binder = Binder(listing.items, wants, env, listing.random, dtypes, fusing.on_error, locate)
            index = {(id(owner), name): i for i, (owner, name) in enumerate(region.slots)}
            bound = binder.segments(plan) if exact else []
            segments = [(s, tuple(index[id(owner), name] for owner, name in s.parameters)) for s in bound]
            program = Program(plan, segments, {x.shape}, not exact)
            region.programs = {**region.programs, key: program}
            return program

    def listing(self) -> Listing:
        """The list as it is now; read again only if its fingerprint no longer holds."""
        for listing in self._listings:
            if listing.fingerprint.holds():
                return listing
        with self._lock:
            kept = [known for known in self._listings if known.fingerprint.differs_in_training_only()]
            listing = Listing(self.root)
            self._listings = (listing, *kept[: KEPT_LISTS - 1])
            return listing

    def plan(self, x: Tensor | None = None, *, env: Env | None = None, **channels: Tensor) -> Plan:
        """The plan for an input, or for an environment.

        Without an input, gradients are taken to be wanted for parameters but not for the input. Behind a barrier the
        tensor is taken to be as it was before it, with a gradient wanted if one was wanted before.
        """
        listing = self.listing()
        if x is not None:
            self._check_channels(listing, channels)
            _validate_all(listing, x.shape)
        env = env or (Env.like(x) if x is not None else Env())
        wanted = x is not None and x.requires_grad and env.grad
        known = {name: value.requires_grad for name, value in channels.items()}
        plans: list[Plan] = []
        alone: list[tuple[int, Item]] = []
        for part in listing.parts:
            if isinstance(part, Region):
                wants = Wants.of(listing.items, part.start, part.stop, wanted, known, env.grad)
                plans.append(plan_region(listing.items, part.start, part.stop, wants, env, fusing_now(), self._matcher))
                wanted = wanted or wants.live_from < part.stop
                made = (c for item in listing.items[part.start : part.stop] for _, c in item.outputs)
                known.update(dict.fromkeys(made, wanted))
            else:
                item = listing.items[part]
                alone.append((part, item))
                wanted = wanted or (env.grad and any(p.requires_grad for p in item.operation.parameters()))
                known.update((channel, wanted) for _, channel in item.outputs)
        plan = merge(plans, alone, env, listing.items)
        if x is None or env != Env.like(x):
            return plan

        def memory(_: Plan) -> Memory | None:
            return measure(lambda y, c: self.run(listing, y, c), x, channels, listing.items)

        return dataclasses.replace(plan, measure=memory)

    def root_listing(self) -> Listing:
        """The list read afresh, for a call that is being traced."""
        return Listing(self.root)

    def _by_reference(self, listing: Listing, x: Tensor, channels: dict[str, Tensor]) -> Any:
        """Run every operation's reference under plain autograd."""
        self._check_channels(listing, channels)
        seeds = _draw(len(listing.random), x) if listing.random else None
        x = _walk_reference(listing.items, range(len(listing.items)), listing.random, x, channels, seeds)
        return (x, *[channels[name] for name in listing.outputs]) if listing.outputs else x

    @staticmethod
    def _check_channels(listing: Listing, channels: Mapping[str, Tensor]) -> None:
        for name in listing.inputs:
            if name not in channels:
                at = next(i for i, item in enumerate(listing.items) if any(c == name for _, c in item.inputs))
                message = f"it reads channel {name!r}, which no operation before it makes and the call did not pass"
                raise InputError(message, code="SF103", operation=listing.items[at].name, position=at)
        for name in channels:
            if name not in listing.inputs:
                known = ", ".join(map(repr, listing.inputs)) or "none"
                raise InputError(f"the call passed channel {name!r}; the list reads {known}", code="SF103")


def _run_alone(item: Item, x: Tensor, channels: dict[str, Tensor]) -> Tensor:
    """Call a module through its own `__call__`, with the channels it reads and makes."""
    if not item.inputs and not item.outputs:
        return item.operation(x)
    out = item.operation(x, **{channel: channels[channel] for _, channel in item.inputs})
    if not item.outputs:
        return out
    channels.update(zip((channel for _, channel in item.outputs), out[1:], strict=True))
    return out[0]


def _walk_reference(
    items: Sequence[Item], positions: range, random: Mapping[int, int], x: Tensor, channels: dict[str, Tensor], seeds: Tensor | None
) -> Tensor:
    for position in positions:
        item = items[position]
        if not item.fusable:
            x = _run_alone(item, x, channels)
            continue
        operation: Any = item.operation
        extras: dict[str, Any] = {name: channels[channel] for name, channel in item.inputs}
        if operation.forward_signature.seed:
            extras["seed"] = seeds[random[position]] if seeds is not None and position in random else None
        out = operation.reference(x, **extras)
        if item.outputs:
            x, made = out
            channels.update((channel, made[name]) for name, channel in item.outputs)
        else:
            x = out
    return x


def _transformed() -> bool:
    """Whether a functorch transform or forward-mode AD is active: those see the reference."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0  # type: ignore[attr-defined]


def _draw(count: int, x: Tensor) -> Tensor:
    """One 63-bit seed per active random operation, on x's device, from torch's generator."""
    return torch.empty(count, dtype=torch.int64, device=x.device).random_()


def _validate(listing: Listing, region: Region, shape: Sequence[int]) -> Sequence[int]:
    for position in range(region.start, region.stop):
        operation: Any = listing.items[position].operation
        try:
            shape = operation.infer(tuple(shape))
        except ValueError as error:
            if isinstance(error, SeqfuseError):
                raise
            name, at = listing.items[position].name, position
            hint = f"in {listing.items[position].path!r}" if listing.items[position].path else None
            raise InputError(str(error), code="SF101", operation=name, position=at, hint=hint) from None
    return shape


def _validate_all(listing: Listing, shape: Sequence[int]) -> None:
    """Check shapes up to the first barrier, behind which they are not known."""
    if listing.parts and isinstance(listing.parts[0], Region):
        _validate(listing, listing.parts[0], shape)


def _check_devices(listing: Listing, item: Item, x: Tensor) -> None:
    for name, (owner, attribute) in item.slots.items():
        parameter: Tensor = getattr(owner, attribute)
        if parameter.device != x.device:
            message = f"expects its input on {parameter.device}, where its {name} is, got {x.device}"
            raise InputError(message, code="SF102", operation=item.name, position=listing.items.index(item))


def _locate(listing: Listing, position: int, error: BaseException, tensor: Any) -> BaseException:
    """The error of a failed operation, saying where it happened."""
    item = listing.items[position]
    if isinstance(error, SeqfuseError):
        if error.operation is None or error.position is None:
            error.operation, error.position = item.name, position
        return error
    if isinstance(error, RuntimeError) and isinstance(tensor, Tensor):
        try:
            _check_devices(listing, item, tensor)
        except InputError as clear:
            return clear
    error.add_note(f"in operation {item.name} at position {position}")
    return error


def _dtypes(listing: Listing, region: Region, x: Tensor, channels: Mapping[str, Tensor]) -> list[torch.dtype] | None:
    """Dtype of the tensor entering each position, from a run of the references on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True) if not isinstance(x, FakeTensor) else x.fake_mode
    found = [x.dtype] * region.start
    try:
        with mode, torch.no_grad():
            y = mode.from_tensor(x) if not isinstance(x, FakeTensor) else x
            given = {name: mode.from_tensor(value) for name, value in channels.items()}
            for position in range(region.start, region.stop):
                found.append(y.dtype)
                seeds = torch.zeros(len(listing.random), dtype=torch.int64, device=x.device)
                y = _walk_reference(listing.items, range(position, position + 1), listing.random, y, given, seeds)
    except Exception:
        return None
    return found


class _Alone(Fuser):
    """Runs one operation as a list of one."""

    def __init__(self, root: FusableOperation) -> None:
        super().__init__(root)


operations.alone = _Alone

__all__ = ["Fuser", "Fusing", "rows_of"]

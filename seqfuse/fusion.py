"""Fusions: classes whose fields are the replaced pattern and whose base determines the replaced pass."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self, TypeVar, cast

from torch import Tensor

from .env import Env, Kernels, Savings
from .errors import PluginError, definition_error
from .operation import FusableOperation, Grads, UnfusedOperation, config_version
from .quantized import Quantize, Quantized
from .saved import Layout, Saved, always_saved, check_layout, class_hints
from .signature import Signature, check_pass_names
from .traffic import gain

Requirements = Iterator[tuple[bool, str]]
"""The return type of `requires`: pairs of a condition and the reason given if it is false."""

MAX_VARIADIC = 8

T = TypeVar("T")

# Names of methods that the engine calls, to detect misspelled ones.
_METHODS = "fwd", "bwd", "requires", "saves", "saved_at", "unfused"
_MISSPELT = {"require": "requires", "save": "saves", "unfuse": "unfused"}


@dataclasses.dataclass(frozen=True)
class Slot:
    """A named place in a pattern: its types, whether it is optional, and whether it matches several operations."""

    name: str
    types: tuple[type[UnfusedOperation], ...]
    optional: bool = False
    variadic: bool = False

    @functools.cached_property
    def open_types(self) -> tuple[type, ...]:
        """The abstract types, of which any final subclass matches; other types match exactly."""
        return tuple(t for t in self.types if t.is_open)

    def __str__(self) -> str:
        """The types as written in a pattern."""
        named = " | ".join([t.__name__ for t in self.types] + ["None"] * self.optional)
        return f"tuple[{named}, ...]" if self.variadic else named


def slot_of(cls: type, name: str, hint: Any) -> Slot:
    """The slot declared by the type of a field."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        if len(arguments) != 2 or arguments[1] is not Ellipsis:
            raise definition_error(cls, f"slot {name!r}: a variadic slot is written tuple[X, ...]", name)
        return Slot(name, _classes(cls, name, arguments[0]), variadic=True)
    optional = type(None) in arguments
    chosen = tuple(a for a in arguments if a is not type(None)) if _is_union(origin) else (hint,)
    return Slot(name, tuple(c for part in chosen for c in _classes(cls, name, part)), optional=optional)


def _is_union(origin: Any) -> bool:
    return origin is typing.Union or origin is types.UnionType


def _classes(cls: type, name: str, hint: Any) -> tuple[type[UnfusedOperation], ...]:
    parts: Sequence[Any] = typing.get_args(hint) if _is_union(typing.get_origin(hint)) else (hint,)
    for part in parts:
        if not (isinstance(part, type) and issubclass(part, UnfusedOperation)):
            what = "which is not an operation class"
            if isinstance(part, type) and issubclass(part, FusableOperation):
                what = "a container: what it holds stands in the sequence, for a Residual between a Fork and an Add"
            raise definition_error(cls, f"slot {name!r} has type {part!r}, {what}", name)
        if not part.is_open and not part.is_final:
            base = next(base.__name__ for base in part.__mro__[1:] if getattr(base, "is_final", False))
            never = f"{part.__name__} derives from {base}, so no slot matches it"
            open_to = "derive it from an open class, such as sf.UnfusedOperation or sf.Pointwise"
            raise definition_error(cls, f"slot {name!r}: {never}; {open_to}", name)
    return tuple(parts)


class FusedOperation:
    """A stateless replacement for consecutive unfused operations; the abstract base class of the four kinds of fusion.

    The annotated fields of a subclass are its slots, in order: a final operation class (matched exactly), an abstract
    one (any final subclass), a union, `X | None` (optional), `tuple[X, ...]` (one to eight in sequence). Slots are
    inherited like dataclass fields: a new annotation replaces the type of a slot and keeps its position.

    Attributes:
        outputs: extra tensors (`slot_output`) that `fwd` returns as a dictionary after `y`.
        layout: strides that the passes accept; the engine copies other tensors.
        reach: the largest number of operations that it replaces.
        kernels: the kinds of kernels that the passes have, `"triton"` and possibly `"c"` for CPUs. The fusion is not
            applied if neither can run. Empty for passes of ATen calls.
        native_below: tensors with fewer elements run faster in torch's differentiable calls.
        casts: whether it handles casts between its operations, as under autocast; otherwise it is not applied there.
        quantized: whether it supports operations that a recipe quantizes; otherwise it is not applied to them.
        any_dy: whether `bwd` accepts dy in a dtype other than y's, as `UnfusedOperation.any_dy`.
        separable: whether a backward fusion may run in two calls, as `UnfusedOperation.separable`.
        reorders: whether it reorders multiplications, such as a factor from after a GEMM to before it. Then Inf may
            become NaN, and NaN may become Inf.
        saves_memory: whether it trades time for fewer saved tensors. Such a fusion is only used by the `memory=`
            choices that save memory.

    Raises:
        PluginError: at class definition, quoting the line, for a bad slot, signature or name.
    """

    outputs: ClassVar[tuple[str, ...]] = ()
    layout: ClassVar[Layout] = "contig"
    kernels: ClassVar[tuple[Kernels, ...]] = ()
    native_below: ClassVar[float] = 0
    casts: ClassVar[bool] = False
    quantized: ClassVar[bool] = False
    any_dy: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    reorders: ClassVar[bool] = False
    saves_memory: ClassVar[bool] = False
    slots: ClassVar[tuple[Slot, ...]] = ()
    reach: ClassVar[int] = 0
    forward_signature: ClassVar[Signature] = Signature()
    backward_signature: ClassVar[Signature] = Signature()
    replaces_forward: ClassVar[bool] = False
    replaces_backward: ClassVar[bool] = False
    has_record: ClassVar[bool] = False
    is_contract: ClassVar[bool] = True
    _decided: tuple[Any, dict[Any, Any]] = None, {}  # not compared: equality is that of the slots

    def __init_subclass__(cls, *, contract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.is_contract = contract
        if contract:
            return
        check_pass_names(cls, _MISSPELT, _METHODS)
        kinds = [base.__name__ for base in cls.__mro__ if base.__module__ == __name__ and base is not FusedOperation]
        if len(kinds) != 1:
            known = "ForwardFusion, BackwardFusion, InferenceFusion, or JointFusion, which replaces both passes"
            raise definition_error(cls, f"derive from one of {known}", "class ")
        check_layout(cls, cls.layout)
        if not isinstance(cls.kernels, tuple) or not {*cls.kernels} <= {*typing.get_args(Kernels)}:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise definition_error(cls, f'kernels is a tuple of "triton" and "c", not {cls.kernels!r}', "kernels")
        own = [
            slot_of(cls, name, hint)
            for name, hint in class_hints(cls, sys._getframe(1)).items()  # pyright: ignore[reportPrivateUsage]
            if ClassVar not in (hint, typing.get_origin(hint))
        ]
        for slot in own:
            if slot.name.startswith("_") or hasattr(FusedOperation, slot.name):
                raise definition_error(cls, f"{slot.name!r} cannot be the name of a slot", slot.name)
        # Like dataclass fields: those of the bases first; a redeclared one keeps its position.
        inherited = {slot.name: slot for base in reversed(cls.__mro__[1:]) for slot in vars(base).get("slots", ())}
        cls.slots = tuple({**inherited, **{slot.name: slot for slot in own}}.values())
        cls.reach = sum(MAX_VARIADIC if slot.variadic else 1 for slot in cls.slots)
        defines = any(name in vars(cls) for name in ("fwd", "bwd"))
        if not cls.slots and defines:
            raise definition_error(
                cls, "a fusion needs at least one slot: a field annotated with an operation class", "class "
            )
        if not cls.slots or not (hasattr(cls, "fwd") or hasattr(cls, "bwd")):
            cls.is_contract = True
            return
        cls._check_signatures()

    @classmethod
    def _check_signatures(cls) -> None:
        for pass_, wanted in (("fwd", cls.replaces_forward), ("bwd", cls.replaces_backward)):
            if wanted and not callable(getattr(cls, pass_, None)):
                raise definition_error(cls, f"a {_kind(cls)} needs {pass_}", "class ")
            if not wanted and hasattr(cls, pass_):
                raise definition_error(cls, f"a {_kind(cls)} has no {pass_}", f"def {pass_}")
        if cls.has_record and not issubclass(getattr(cls, "Saved", type(None)), Saved):
            raise definition_error(cls, "a JointFusion needs its own class Saved(sf.Saved)", "class ")
        for name in cls.outputs:
            cls._place(name, "outputs", lambda op: op.outputs)
        if cls.replaces_forward:
            cls.forward_signature = Signature.of(cls, "fwd", ("x",), None, fused=True)
            for name in cls.forward_signature.extras:
                cls._place(name, name, lambda op: (*op.forward_signature.extras, *["seed"] * op.forward_signature.seed))
        if cls.replaces_backward:
            plain = not any(s.variadic for s in cls.slots)
            records = frozenset[str]() if cls.has_record else frozenset(s.name for s in cls.slots)
            taken = ("dy", "saved") if cls.has_record else ("dy",)
            named = "..." if cls.has_record else ", ".join(s.name for s in cls.slots)
            signature = Signature.of(cls, "bwd", taken, None, fused=True, named=named)
            for name in signature.extras:
                if name not in records:
                    if not name.startswith("d_"):
                        slots = [s.name for s in cls.slots]
                        fault = f"bwd names {name!r}, which is not a slot ({', '.join(slots)}) or d_<output>"
                        if name in slots:
                            fault = f"bwd names slot {name!r}; it reads the fusion's own Saved, as saved.<field>"
                        raise definition_error(cls, fault, "def bwd" if name in slots else name)
                    cls._place(name[2:], name, lambda op: op.outputs)
            holding = {s.name for s in cls.slots if any(t.is_open or t.Saved.fields for t in s.types)}
            if plain and (missing := ", ".join(sorted((records & holding) - set(signature.extras)))):
                fault = f"bwd must take by keyword the Saved of every slot that has fields: {missing}"
                raise definition_error(cls, fault, "def bwd")
            cls.backward_signature = signature

    @classmethod
    def _place(cls, name: str, needle: str, offers: Callable[[type[UnfusedOperation]], tuple[str, ...]]) -> None:
        """Check that `name` is a slot, `_` and a name that an operation of the slot defines."""
        slots = [slot for slot in cls.slots if name.startswith(f"{slot.name}_")]
        if not slots:
            raise definition_error(cls, f"{name!r} does not begin with a slot's name", needle)
        if any(slot.variadic or any(t.is_open for t in slot.types) for slot in slots):
            return
        offered = [f"{slot.name}_{what}" for slot in slots for t in slot.types for what in offers(t)]
        if name not in offered:
            known = ", ".join(offered) or "nothing"
            raise definition_error(cls, f"{name!r} is not there: the operations of its slot offer {known}", needle)

    def __init__(self, **slots: Any) -> None:
        self.__dict__.update(slots)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_decided"}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__getstate__() == other.__getstate__()

    def decided(self, key: Hashable, make: Callable[..., T], *arguments: Any) -> T:
        """Cache `make(*arguments)` under `key` until an operation is reconfigured.

        For values that a pass would otherwise recompute in each call; they may only depend on the key and
        configuration.
        """
        version, known = self._decided
        if version is not config_version.current:
            version, known = self._decided = config_version.current, dict[Any, Any]()
        try:
            return known[key]
        except KeyError:
            return known.setdefault(key, make(*arguments))

    def __hash__(self) -> int:
        return hash((type(self), *(id(op) for op in self.operations())))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(type(op).__name__ for op in self.operations())})"

    def operations(self) -> tuple[UnfusedOperation, ...]:
        """The replaced operations, in order."""
        return tuple(op for _, op in self.named_operations())

    def named_operations(self) -> Iterator[tuple[str, UnfusedOperation]]:
        """Each replaced operation with its slot: `"bias"`, or `"acts.2"` in a variadic slot."""
        return records_of(self, self.__dict__)

    def with_operations(self, operations: Iterable[UnfusedOperation]) -> Self:
        """A copy that replaces these operations instead, one for one."""
        given, copy = iter(operations), object.__new__(type(self))
        copy.__dict__.update(self.__getstate__())
        for slot in self.slots:
            value = self.__dict__.get(slot.name)
            if value is not None:
                copy.__dict__[slot.name] = tuple([next(given) for _ in value]) if slot.variadic else next(given)
        return copy

    def requires(self, env: Env) -> Requirements:
        """Yield `(condition, reason)`. At the first false condition the fusion is not applied, for that reason."""
        yield from ()

    def saves(self, env: Env) -> Savings:
        """Estimated savings over the replaced operations; by default computed from their declared `traffic`.

        The default leaves out the time of a `Recompute`.
        """
        passes = {"forward": self.replaces_forward, "backward": self.replaces_backward and env.grad}
        told = isinstance(self, ForwardFusion) and self.forward_signature.needs and not env.grad
        saved = () if told or isinstance(self, InferenceFusion) else tuple(self.saved_at())
        return gain(self.operations(), env, saved=saved, **passes)

    def can_quantize(self, to: Quantize, env: Env) -> bool:
        """Whether `fwd` (`to.role` is `"x"`) or `bwd` (`"dy"`) can quantize its result as `to` describes.

        Such a pass has an argument `to`. If it is given, the pass returns a `Quantized` instead of y or dx.
        """
        return True

    def saved_at(self) -> Iterable[int]:
        """Positions of saved tensors between its operations: number of operations before each; for estimates."""
        for i, operation in enumerate(self.operations()):
            yield from (i + (side == "y") for side in always_saved(operation.Saved))


Fusions = Sequence[type[FusedOperation]]
"""A fusion set, in order of preference between equals."""


class ForwardFusion(FusedOperation, contract=True):
    """Replaces the forward pass only: `fwd(x, ...) -> (y, [outputs,] {slot: Saved})`.

    Each `Saved` must hold exactly the tensors that the `bwd` of the replaced operation reads. The engine fills in a
    `Saved` that follows from configuration and seed (`UnfusedOperation.own_record`). A `fwd` with an argument `needs`
    returns `y` or `(y, outputs)` if `needs` is empty: no gradient is needed, and nothing is saved.
    """

    replaces_forward = True
    fwd: ClassVar[Callable[..., Any]]


class BackwardFusion(FusedOperation, contract=True):
    """Replaces the backward pass only: `bwd(dy, *, <slot>: Saved, ...) -> (dx, {"slot.param": grad})`."""

    replaces_backward = True
    bwd: ClassVar[Callable[..., tuple[Tensor | Quantized | None, Grads]]]


class JointFusion(FusedOperation, contract=True):
    """Replaces both passes and defines its own `Saved`; the pair computes the same results as the operations.

    `fwd(x, ...) -> (y, [outputs,] Saved)` and `bwd(dy, saved, ...) -> (dx, {"slot.param": grad})`. With a method
    `unfused(saved) -> {slot: Saved}`, the unfused operations can take over if its backward pass fails.
    """

    replaces_forward = True
    replaces_backward = True
    has_record = True
    fwd: ClassVar[Callable[..., Any]]
    bwd: ClassVar[Callable[..., tuple[Tensor | Quantized | None, Grads]]]


class InferenceFusion(FusedOperation, contract=True):
    """Replaces the forward pass if no gradient is needed: `fwd(x, ...) -> y`, or `(y, outputs)`."""

    replaces_forward = True
    fwd: ClassVar[Callable[..., Any]]


def _kind(cls: type[FusedOperation]) -> str:
    return next(base.__name__ for base in cls.__mro__ if base.__module__ == __name__)


def records_of(fusion: FusedOperation, by_slot: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The value of each slot with its place: `"bias"`, or `"acts.2"` for a tuple in a variadic slot."""
    for slot in fusion.slots:
        value = by_slot.get(slot.name)
        if slot.variadic and value is not None:
            yield from ((f"{slot.name}.{i}", record) for i, record in enumerate(value))
        elif value is not None:
            yield slot.name, value


def unknown_slots(fusion: FusedOperation, unknown: Iterable[str]) -> str:
    """The message for records saved for slots that do not exist."""
    known = ", ".join(slot.name for slot in fusion.slots)
    return f"it saved records for unknown slots: {', '.join(map(repr, unknown))}; its slots are {known}"


def wrong_record(place: str, operation: UnfusedOperation, own: Saved, found: Any) -> str:
    """The message for a slot's value that is not the `Saved` of its operation."""
    kind = type(operation).__name__
    if found is None:
        return f"slot {place!r} needs {kind}.Saved, it saved nothing"
    got = repr(found) if isinstance(found, Saved) else type(found).__qualname__
    return f"slot {place!r} needs {kind}.Saved({', '.join(own.fields)}), it saved {got}"


def checked(fusions: Any) -> tuple[type[FusedOperation], ...]:
    """Validates a fusion set: a fusion class or several.

    Raises:
        PluginError: for an element that is not a fusion class, or that lacks a required method.
    """
    if isinstance(fusions, str):
        message = f"fusions takes fusion classes, such as sf.fusions.default, not the text {fusions!r}"
        raise PluginError(message, code="SF301")
    chosen: tuple[Any, ...] = (fusions,)
    if isinstance(fusions, Iterable) and not isinstance(fusions, type):
        chosen = tuple(cast(Iterable[Any], fusions))
    for fusion in chosen:
        if not (isinstance(fusion, type) and issubclass(fusion, FusedOperation)):
            raise PluginError(f"a fusion set holds fusion classes, not {fusion!r}", code="SF301")
        if fusion.is_contract:
            what = "has slots but no fwd or bwd" if fusion.slots else "has no slots"
            message = f"{fusion.__name__} {what}, so it cannot be used"
            raise PluginError(message, code="SF301", operation=fusion.__name__)
    return chosen

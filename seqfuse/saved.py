"""Saved tensors: frozen records of named fields."""

from __future__ import annotations

import dataclasses
import inspect
import keyword
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast, dataclass_transform

import torch
from torch import Tensor

from .errors import StateError, definition_error
from .generated import Source, identifier

Layout = Literal["any", "inner_contig", "contig"]
"""The strides that a pass accepts: any, a contiguous last dimension, or contiguous tensors."""

S = TypeVar("S", bound="Saved")
_MISSING = dataclasses.MISSING


def field(*, for_: str | tuple[str, ...] = (), default: Any = _MISSING) -> Any:
    """A field of a `Saved` that is only read for some gradients.

    Args:
        for_: names of the gradients (`"x"`, a parameter, an extra input) that need the field. If none of them is
            needed, it is not saved, and reading it raises `StateError`.
        default: makes the field optional in the constructor.
    """
    names = (for_,) if isinstance(for_, str) else tuple(for_)
    return dataclasses.field(default=default, metadata={"for": frozenset(names)})


class Recompute:
    """Replaces a saved tensor by a function of other saved tensors, evaluated when the field is first read.

    Args:
        fn: a module-level function, or a `functools.partial` of it, that returns the value bit for bit.
        tensors: its arguments, saved (once each) instead of the value.
    """

    __slots__ = ("fn", "tensors")

    def __init__(self, fn: Callable[..., Tensor], *tensors: Tensor) -> None:
        self.fn, self.tensors = fn, tensors

    def __call__(self) -> Tensor:
        if not torch.is_grad_enabled():  # the usual case in backward: entering a context is as slow as an ATen call
            return self.fn(*self.tensors)
        with torch.no_grad():
            return self.fn(*self.tensors)


_RESERVED = ("fields", "kept")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Saved:
    """Named tensors saved for backward; the base class. Instances are frozen and keyword-only.

    Fields are `Tensor`, `Tensor | None`, `tuple[Tensor, ...]` or plain immutable data. A tensor field also accepts a
    `Recompute`.

    Raises:
        PluginError: at class definition, for a field name that is not an identifier or a type hint that does not
            resolve.
        StateError: for a read of a field that no needed gradient reads, so that it was not saved.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    _always: ClassVar[tuple[str, ...]] = ()  # which of x and y are always saved
    _plain: ClassVar[frozenset[str]] = frozenset()
    _tuples: ClassVar[frozenset[str]] = frozenset()
    _for: ClassVar[Mapping[str, frozenset[str]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hints = class_hints(cls, sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        for name in hints:
            if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_") or name in _RESERVED:
                raise definition_error(cls, f"field {name!r} must be a public identifier of its own", name)
            if _holds_tensor(hints[name]) and not _is_known(hints[name]):
                known = "Tensor, Tensor | None, tuple[Tensor, ...] or plain data"
                raise definition_error(cls, f"field {name!r} must be {known}", name)
        # Frozen by the base class: `frozen=True` would generate two more functions per class at import.
        dataclasses.dataclass(kw_only=True, eq=False, init=False, repr=False)(cls)
        declared = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
        cls.fields = tuple(f.name for f in declared)
        cls._always = (*cls._always, *(name for name in ("x", "y") if hints.get(name) is Tensor))
        cls._plain = cls._plain | {name for name, hint in hints.items() if not _holds_tensor(hint)}
        cls._tuples = cls._tuples | {name for name, hint in hints.items() if _may_be_tuple(hint)}
        cls._for = {f.name: f.metadata["for"] for f in declared if f.metadata.get("for")}
        cls.__init__ = _make_init(cls, {f.name: f.default for f in declared})

    if not typing.TYPE_CHECKING:  # type checkers see `dataclass_transform`

        def __setattr__(self, name: str, value: Any) -> None:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

        def __delattr__(self, name: str) -> None:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f for f in self.fields if f in self.__dict__)})"

    def __getattr__(self, name: str) -> Any:
        late = self.__dict__.get("_late")
        if late is not None and name in late:
            value = self.__dict__[name] = late[name]()
            return value
        if name in type(self).fields:
            readers = ", ".join(sorted(type(self)._for.get(name, ()))) or "a gradient"
            raise StateError(
                f"field {name!r} was dropped: only {readers} reads it, and that gradient is not needed",
                code="SF502",
                operation=type(self).__qualname__,
                hint="ask `needs` before reading it",
            )
        known = ", ".join(self.fields) or "none"
        raise AttributeError(f"{type(self).__qualname__} has no field {name!r}; it has {known}")

    @classmethod
    def kept(cls, needs: frozenset[str]) -> tuple[str, ...]:
        """Names of the fields that at least one of the gradients `needs` reads."""
        return tuple([f for f in cls.fields if f not in cls._for or cls._for[f] & needs]) if needs else ()


def check_layout(cls: type, layout: Any) -> None:
    """Raise for a class with an unknown `layout`."""
    known = typing.get_args(Layout)
    if layout not in known:
        raise definition_error(cls, f"layout must be one of {', '.join(known)}, not {layout!r}", "layout")


def always_saved(cls: type[Saved]) -> tuple[str, ...]:
    """Which of x and y a `Saved` always contains."""
    return cls._always  # pyright: ignore[reportPrivateUsage]


def kind_of(cls: type[Saved], name: str) -> Literal["data", "tuple", "tensor"]:
    """Whether a field is plain data, possibly a tuple of tensors, or a tensor or `None`."""
    return "data" if name in cls._plain else "tuple" if name in cls._tuples else "tensor"  # pyright: ignore[reportPrivateUsage]


def _holds_tensor(hint: Any) -> bool:
    return (isinstance(hint, type) and issubclass(hint, Tensor)) or any(map(_holds_tensor, typing.get_args(hint)))


def _may_be_tuple(hint: Any) -> bool:
    return typing.get_origin(hint) is tuple or any(map(_may_be_tuple, typing.get_args(hint)))


def _is_known(hint: Any) -> bool:
    """Whether a hint with a tensor is a tensor, an optional tensor, or a tuple of these."""
    if isinstance(hint, type) and issubclass(hint, Tensor):
        return True
    origin, parts = typing.get_origin(hint), [h for h in typing.get_args(hint) if h not in (type(None), Ellipsis)]
    return origin in (tuple, typing.Union, types.UnionType) and all(map(_is_known, parts))


def class_hints(cls: type, frame: types.FrameType | None) -> dict[str, Any]:
    """Resolve the annotations `cls` itself declares against its module, its namespace and the frames defining it."""
    scope: dict[str, Any] = {}
    module = vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}
    while frame is not None and frame.f_globals.get("__name__") == cls.__module__:
        scope = {**frame.f_locals, **scope}
        frame = frame.f_back
    hints: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(cls).items():
        holder = type("hint", (), {"__annotations__": {name: annotation}})
        try:
            hints.update(typing.get_type_hints(holder, module, {**scope, **vars(cls)}))
        except (NameError, TypeError, AttributeError, SyntaxError) as error:
            raise definition_error(cls, f"the type of {name!r} does not resolve: {error}", name) from error
    return hints


def _make_init(cls: type[Saved], defaults: Mapping[str, Any]) -> Any:
    given = {f: value for f, value in defaults.items() if value is not _MISSING}
    arguments = ", ".join(f"{identifier(f)}=_{f}" if f in given else identifier(f) for f in defaults)
    # No field begins with an underscore, so fields cannot shadow these names.
    source = Source("__init__", f"_self{', *, ' + arguments if arguments else ''}")
    source.constants.update({f"_{f}": value for f, value in given.items()})
    source.constants.update(__Recompute=Recompute, __late=_set_late, __type=type)
    source.add("_d = _self.__dict__")
    for f in defaults:
        if f not in cls._plain:  # pyright: ignore[reportPrivateUsage]
            source.add(f"if __type({f}) is __Recompute: __late(_d, '{f}', {f})", f"else: _d['{f}'] = {f}")
        else:
            source.add(f"_d['{f}'] = {f}")
    init = source.define()
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


def maker(cls: type[S]) -> Callable[..., S]:
    """A constructor with positional fields, without `Recompute`, in a third of the time.

    Trailing fields with defaults may be omitted.
    """
    fields = [f"f{i}" for i in range(len(cls.fields))]
    given = {f.name: f.default for f in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    needed = 1 + max((i for i, name in enumerate(cls.fields) if given[name] is _MISSING), default=-1)
    source = Source("make", ", ".join(f if i < needed else f"{f}=d{i}" for i, f in enumerate(fields)))
    source.constants.update({f"d{i}": given[name] for i, name in enumerate(cls.fields) if i >= needed})
    source.constants.update(new=cls.__new__, cls=cls)
    source.add("r = new(cls)", "d = r.__dict__")
    source.add(*(f"d[{source.put(name)}] = {f}" for name, f in zip(cls.fields, fields, strict=True)), "return r")
    return source.define()


def _set_late(d: dict[str, Any], name: str, value: Recompute) -> None:
    d.setdefault("_late", {})[name] = value


def put_field(d: dict[str, Any], name: str, value: Any) -> None:
    """Sets a field in the attributes of a record."""
    if isinstance(value, Recompute):
        _set_late(d, name, value)
    else:
        d[name] = value


def copied(record: S, kept: Sequence[str], change: Callable[[Tensor], Tensor] = lambda t: t) -> S:
    """A copy with these fields only and `change` applied to each tensor; a `Recompute` stays lazy."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return tuple([changed(one) for one in cast(Sequence[Any], value)])
        if isinstance(value, Recompute):
            return Recompute(value.fn, *map(change, value.tensors))
        return change(value) if isinstance(value, Tensor) else value

    copy, late = object.__new__(type(record)), record.__dict__.get("_late", {})
    for name in kept:
        put_field(copy.__dict__, name, changed(late[name] if name in late else record.__dict__[name]))
    return copy

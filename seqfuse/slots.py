"""Slots: what the fields of a fusion say about the operations that it takes."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Sequence
from typing import Any

from .errors import definition_error
from .operation import FusableOperation, UnfusedOperation


@dataclasses.dataclass(frozen=True)
class Slot:
    """A named place in a pattern: the types it takes, whether it may be empty, whether it takes several operations."""

    name: str
    types: tuple[type[UnfusedOperation], ...]
    optional: bool = False
    variadic: bool = False

    @functools.cached_property
    def open_types(self) -> tuple[type, ...]:
        """Those of which any final subclass fits; of the others the class itself alone."""
        return tuple(t for t in self.types if t.is_open)

    def __str__(self) -> str:
        """The types, as a pattern spells them."""
        named = " | ".join([t.__name__ for t in self.types] + ["None"] * self.optional)
        return f"tuple[{named}, ...]" if self.variadic else named


def slot_of(cls: type, name: str, hint: Any) -> Slot:
    """The slot that the type of a field declares."""
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

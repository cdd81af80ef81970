"""Records of a fusion beside those of the operations it replaces, field by field."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..fusion import FusedOperation, records_of
from ..saved import Recompute, Saved
from .structure import bits


@dataclass(frozen=True, slots=True)
class SavedField:
    """A tensor of one field: as the fusion saved it, as the operation does, as it does in float64."""

    name: str
    fused: Tensor
    unfused: Tensor
    reference: Tensor


def compared(
    fusion: FusedOperation,
    saved: Mapping[str, Any],
    own: Mapping[str, Saved],
    exact: Mapping[str, Saved],
    parameters: Mapping[int, Tensor],
) -> Iterator[SavedField]:
    """The tensors to compare; what needs no numbers is compared here.

    Args:
        fusion: whose records they are.
        saved: by slot, as its `fwd` or `unfused` returned them.
        own: by place, as the operations saved them.
        exact: by place, as they saved them in float64.
        parameters: by `id` of a parameter that an operation saved, the one that the fusion had to save.

    Raises:
        AssertionError: naming slot and field, for a record that is missing, surplus or of another class, plain data
            that differs, a parameter that is not the parameter itself, or a `Recompute` that cannot be trusted.
    """
    found, operations = dict(records_of(fusion, saved)), dict(fusion.named_operations())
    for place, mine in own.items():
        record = found.pop(place, None)
        if record is None and operations[place].own_record(None) is not None:
            continue  # the engine makes it
        if record is None or type(record) is not type(mine):
            made = "nothing" if record is None else type(record).__qualname__
            kind = type(operations[place]).__name__
            raise AssertionError(f"slot {place!r} needs {kind}.Saved, it saved {made}")
        for field in mine.fields:
            name, u = f"field {field!r} of slot {place!r}", stored(mine, field)
            parameter = parameters.get(id(u))
            if parameter is None:
                yield from _tensors(name, stored(record, field), u, stored(exact[place], field))
            elif stored(record, field) is not parameter:
                raise AssertionError(f"{name} must be the parameter itself, not a copy or a view of it")
    if found:
        raise AssertionError(f"it saved records for unknown slots: {', '.join(map(repr, found))}")


def _tensors(name: str, f: Any, u: Any, r: Any) -> Iterator[SavedField]:
    if isinstance(u, tuple) and isinstance(f, tuple):
        mine, its = cast(tuple[Any, ...], f), cast(tuple[Any, ...], u)
        if len(mine) == len(its):
            for i in range(len(its)):
                yield from _tensors(f"{name}[{i}]", mine[i], its[i], r[i])
            return
    if isinstance(u, Tensor) and isinstance(f, Tensor):
        yield SavedField(name, f.detach(), u.detach(), (r.double() if u.is_floating_point() else r).detach())
    elif type(cast(object, f)) is not type(cast(object, u)) or f != u:
        raise AssertionError(f"{name} should be {u!r}, not {f!r}")


def stored(record: Saved, field: str) -> Any:
    """What a record holds in a field, a `Recompute` evaluated without being replaced by its value.

    Raises AssertionError where evaluating it twice gives other bits, or its function is not module-level.
    """
    late: Mapping[str, Recompute] = vars(record).get("_late", {})
    if field not in late or field in vars(record):
        return vars(record)[field]
    fn: Any = late[field].fn
    while isinstance(fn, functools.partial):
        fn = cast(Any, fn).func
    if "<" in getattr(fn, "__qualname__", "<"):
        raise AssertionError(f"field {field!r}: the function of a Recompute must be a module-level one, got {fn!r}")
    once, again = late[field](), late[field]()
    if once.dtype is not again.dtype or not torch.equal(bits(once), bits(again)):
        raise AssertionError(f"field {field!r}: its Recompute gives other bits when evaluated again")
    return once

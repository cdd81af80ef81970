"""What to say of a name that a module does not have: what it is called here, or where it is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from torch import nn


def no_such_name(module: str, name: str, *places: tuple[str, Iterable[str]]) -> AttributeError:
    """The error for `name`, with the name that is meant.

    Args:
        module: the module that was asked.
        places: names by the module that has them, as `("sf.ops", ops.__all__)`; that of the module itself first.
    """
    error = AttributeError(f"module {module!r} has no attribute {name!r}{_hint(name, places)}")
    error.name = name
    return error


def _hint(name: str, places: tuple[tuple[str, Iterable[str]], ...]) -> str:
    if name.startswith("_"):
        return ""
    for place, names in places:
        if found := next((known for known in names if _plain(known) == _plain(name)), None):
            return f"\nHint: did you mean {place}.{found}?"
    place, names = places[0]
    if close := difflib.get_close_matches(name, [*names], 1, 0.75):
        return f"\nHint: did you mean {place}.{close[0]}?"
    if isinstance(found := getattr(nn, name, None), type) and issubclass(found, nn.Module):
        return f"\nHint: torch.nn.{name} runs eagerly in a Sequential; for an activation see sf.Pointwise"
    return ""


def _plain(name: str) -> str:
    return name.replace("_", "").lower()

"""The register of spoiled classes: each with the message that it has to be caught with."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

SPOILED: list[tuple[type, str]] = []


def caught(message: str):
    """Registers a class; `message` is a pattern of the kit's message about it."""

    def register(spoiled: type) -> type:
        SPOILED.append((spoiled, message))
        return spoiled

    return register


def spoil(base: type, method: str, **classes: tuple[str, Callable[..., Any]]) -> None:
    """Registers classes by name that are `base` except for a method, each with the message and that method."""
    for name, (message, instead) in classes.items():
        attributes = {method: instead, "__module__": instead.__module__}
        spoiled = types.new_class(name, (base,), exec_body=lambda body, own=attributes: body.update(own))
        setattr(sys.modules[instead.__module__], name, caught(message)(spoiled))  # where pickle looks for it

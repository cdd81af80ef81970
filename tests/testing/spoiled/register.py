"""The register of spoiled classes: each with the message that it has to be caught with."""

from __future__ import annotations

SPOILED: list[tuple[type, str]] = []


def caught(message: str):
    """Register a class; `message` is a pattern of what the kit says about it."""

    def register(spoiled: type) -> type:
        SPOILED.append((spoiled, message))
        return spoiled

    return register

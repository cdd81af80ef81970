"""Plug-ins: fusions of other distributions in the entry-point group `seqfuse.fusions`.

Listing plug-ins imports nothing; loading one returns its fusions, to be passed to `Sequential(fusions=...)`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

from .errors import PluginError, meant
from .fusion import FusedOperation, checked

GROUP = "seqfuse.fusions"


@dataclasses.dataclass(frozen=True)
class Plugin:
    """An installed plug-in: entry-point name, distribution, version, and the object that the entry point names."""

    name: str
    distribution: str
    version: str
    value: str

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version}, {self.value})"


def available() -> tuple[Plugin, ...]:
    """The installed plug-ins, by name, without importing them."""
    return tuple(sorted((_describe(point) for point in _points()), key=lambda plugin: plugin.name))


def load(name: str) -> tuple[type[FusedOperation], ...]:
    """Import a plug-in and return its fusions.

    Raises:
        PluginError: if the plug-in does not exist, two distributions have the same name, the import fails, or the entry
            point is not a fusion class or a sequence of fusion classes.
    """
    points = [point for point in _points() if point.name == name]
    if not points:
        hint = meant(name, [p.name for p in _points()]) or "sf.plugins.available() lists what is installed"
        raise PluginError(f"no plug-in {name!r} is installed", code="SF304", hint=hint)
    if len(points) > 1:
        owners = ", ".join(str(_describe(point)) for point in points)
        raise PluginError(f"several distributions offer {name!r}: {owners}", code="SF304")
    plugin = _describe(points[0])
    try:
        return checked(points[0].load())
    except (Exception, SystemExit) as error:
        message = f"plug-in {plugin} cannot be used: {type(error).__name__}: {error}"
        raise PluginError(message, code="SF304") from error


def _points() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=GROUP))


def _describe(point: importlib.metadata.EntryPoint) -> Plugin:
    # A partly removed distribution has no metadata and must not hide the others.
    metadata: Any = getattr(point.dist, "metadata", None) or {}
    return Plugin(point.name, str(metadata.get("Name") or "?"), str(metadata.get("Version") or "?"), point.value)

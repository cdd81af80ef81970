"""The settings from `SEQFUSE_*` variables, and `sf.fusing`, which overrides them within a block."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import warnings
from collections.abc import Generator, Iterable
from contextvars import ContextVar
from typing import Any, Literal, cast

from .errors import InputError, meant

OnError = Literal["fallback", "raise"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings from the process environment: data only, parsed once, none names importable code.

    Args:
        fusing: `SEQFUSE_FUSING` (`0`, `1`): whether fusions are used.
        on_error: `SEQFUSE_ON_ERROR` (`fallback`, `raise`): whether a fusion that fails at run time falls back.
        tune: `SEQFUSE_TUNE` (`0`, `1`): whether measurements are read from and written to the user's cache.
        debug: `SEQFUSE_DEBUG` (`0`, `1`): whether processes of a group compare their plans before they run them.
        c_kernels: `SEQFUSE_C_KERNELS` (`0`, `1`): whether fusions run as compiled C on a CPU.
        cpu_gemms: `SEQFUSE_CPU_GEMMS` (`auto`, `torch`): whether the processor decides how a CPU computes GEMMs.
    """

    fusing: bool = True
    on_error: OnError = "fallback"
    tune: bool = True
    debug: bool = False
    c_kernels: bool = True
    cpu_gemms: Literal["auto", "torch"] = "auto"


@functools.cache
def settings() -> Settings:
    """The settings of this process; warns about `SEQFUSE_*` variables that are unknown or do not parse."""
    found, wrong = parsed()
    for message in wrong:
        warnings.warn(message, UserWarning, stacklevel=2)
    return found


def parsed() -> tuple[Settings, list[str]]:
    """The settings from the current `SEQFUSE_*` variables, and a message for each invalid one."""
    switch = {"0": False, "1": True}
    allowed: dict[str, dict[str, Any]] = {
        f"SEQFUSE_{name}": switch for name in ("FUSING", "TUNE", "DEBUG", "C_KERNELS")
    }
    allowed["SEQFUSE_ON_ERROR"] = {"fallback": "fallback", "raise": "raise"}
    allowed["SEQFUSE_CPU_GEMMS"] = {"auto": "auto", "torch": "torch"}
    found, wrong = dict[str, Any](), list[str]()
    for name, text in os.environ.items():
        if not name.startswith("SEQFUSE_"):
            continue
        if name not in allowed:
            wrong.append("; ".join(filter(None, (f"unknown environment variable {name}", meant(name, allowed)))))
        elif text not in allowed[name]:
            wrong.append(f"{name}={text!r} is none of {', '.join(allowed[name])}; ignored")
        else:
            found[name.removeprefix("SEQFUSE_").lower()] = allowed[name][text]
    return Settings(**found), wrong


Chosen = frozenset[str | type[Any]]  # fusions by name or class


@dataclasses.dataclass(frozen=True, eq=False)
class Fusing:
    """The currently allowed fusions, and the effect of a failure; equal instances are the same object."""

    enabled: bool
    on_error: OnError
    only: tuple[Chosen, ...] = ()  # one set for each `fusing` block with `only`
    exclude: Chosen = frozenset()
    unmeasured: bool = False
    all_costs: bool = False  # whether every applicable fusion is used, longest first, whatever it costs
    off: str = "fusing is off"  # the reason if it is not enabled

    def allows(self, fusion: type) -> str | None:
        """`None` if this fusion may be used, otherwise the reason why not."""
        if not self.enabled:
            return self.off
        if self.only and not all(_among(fusion, chosen) for chosen in self.only):
            return "not named by sf.fusing(only=...)"
        return "excluded by sf.fusing(exclude=...)" if self.exclude and _among(fusion, self.exclude) else None


def _among(fusion: type, chosen: Chosen) -> bool:
    return fusion in chosen or fusion.__name__ in chosen


current_fusing: ContextVar[Fusing | None] = ContextVar("seqfuse_fusing", default=None)


def fusing_now() -> Fusing:
    """The innermost `fusing` block, or the settings."""
    return current_fusing.get() or default_fusing()


@functools.cache
def default_fusing() -> Fusing:
    """The settings' choice, outside any `fusing` block."""
    return _fusing_of(settings().fusing, settings().on_error, (), Chosen(), False)


_fusing_of = functools.lru_cache(maxsize=256)(Fusing)


@contextlib.contextmanager
def fusing(
    enabled: bool | None = None,
    *,
    only: str | type[Any] | Iterable[str | type[Any]] | None = None,
    exclude: str | type[Any] | Iterable[str | type[Any]] = (),
    on_error: OnError | None = None,
    unmeasured: bool | None = None,
) -> Generator[None]:
    """Context manager: choose which fusions may be used. Omitted arguments keep the values of the surrounding block.

    Args:
        enabled: `False` runs every operation unfused; `True` turns fusing on again.
        only: allowed fusions, as one or several names or classes, from those allowed outside. An unknown name is an
            error when a sequence is planned, as a plug-in may be loaded within the block.
        exclude: further fusions to disable, as names or classes.
        on_error: `"fallback"` runs the unfused operations if a fusion fails, `"raise"` raises its error.
        unmeasured: whether to use C kernels for tensors so small that no speedup is expected.

    Raises:
        InputError: (SF106) for any other value.
    """
    switches = enabled, unmeasured
    if any(value not in (None, True, False) for value in switches) or on_error not in (None, "fallback", "raise"):
        given = f"enabled={enabled!r}, on_error={on_error!r}, unmeasured={unmeasured!r}"
        hint = 'enabled and unmeasured are True or False, on_error "fallback" or "raise"'
        raise InputError(f"fusing({given})", code="SF106", hint=hint)
    outer = fusing_now()
    chosen = outer.only if only is None else tuple(dict.fromkeys((*outer.only, _several(only))))
    allowed = outer.enabled if enabled is None else enabled
    free = outer.unmeasured if unmeasured is None else unmeasured
    excluded = outer.exclude | _several(exclude)
    token = current_fusing.set(_fusing_of(allowed, on_error or outer.on_error, chosen, excluded, free, outer.all_costs))
    try:
        yield
    finally:
        current_fusing.reset(token)


@contextlib.contextmanager
def at_all_costs() -> Generator[None]:
    """A block in which every applicable fusion is used, longest first, whatever it costs."""
    outer = fusing_now()
    token = current_fusing.set(
        _fusing_of(outer.enabled, outer.on_error, outer.only, outer.exclude, outer.unmeasured, True)
    )
    try:
        yield
    finally:
        current_fusing.reset(token)


def _several(fusions: Any) -> Chosen:
    one = isinstance(fusions, str | type) or not isinstance(fusions, Iterable)
    given: tuple[Any, ...] = (cast(Any, fusions),) if one else tuple(cast(Iterable[Any], fusions))
    for named in given:
        if not isinstance(named, str | type):
            raise InputError(f"only and exclude take names or classes of fusions, not {named!r}", code="SF106")
    return frozenset(given)

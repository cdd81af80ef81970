"""Errors and warnings: one clear sentence that names the operation, its position and what was expected.

`docs/errors.md` lists the codes.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

# Messages of the driver, which RuntimeErrors of Triton's launcher and of other extensions contain.
_LOST = re.compile(
    "illegal (memory access|instruction)|misaligned address|device-side assert|unspecified launch|launch timed out"
    "|uncorrectable ECC|hardware stack error|invalid program counter"
)


class SeqfuseError(Exception):
    """Base class of all seqfuse errors, with `code`, `operation`, `path`, `position` and `hint`."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        operation: str | None = None,
        position: int | str | None = None,
        path: str | None = None,
        hint: str | None = None,
    ) -> None:
        self.message, self.code, self.hint = message, code, hint
        self.operation, self.position, self.path = operation, position, path
        super().__init__(message)

    def __str__(self) -> str:
        where = _where(self.position, self.path)
        operation = "" if self.operation is None else f" ({self.operation})" if where else f" {self.operation}"
        return f"{self.code}{where and ' '}{where}{operation}: {self.message}" + hinted(self.hint)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(type(self), self.message, code=self.code), (), self.__dict__


def _where(position: int | str | None, path: str | None) -> str:
    """The module's path in the model, and the position in the op sequence, which counts the Bias of a Linear."""
    named = [] if not path or path == str(position) else [repr(path)]
    return ", ".join([*named, *([] if position is None else [f"position {position}"])])


def hinted(hint: str | None) -> str:
    """The hint as the last line of a message."""
    return f"\nHint: {hint}" if hint else ""


def one_line(error: BaseException) -> str:
    """An error as a reason in a plan or report: its class and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def step_note(name: str, position: int, path: str | None, what: str = "operation ") -> str:
    """A note on an error of torch or of user code: the operation that raised it."""
    return f"in {what}{name} at {_where(position, path)}"


class InputError(SeqfuseError, ValueError):
    """An argument of a call, such as a tensor, channel or option, does not fit."""


class RangeError(InputError, IndexError):
    """An index is out of range, such as a token id beyond the vocabulary; an `IndexError`, as in torch."""


class PlanError(SeqfuseError, RuntimeError):
    """An op sequence cannot be planned."""


class PluginError(SeqfuseError, TypeError):
    """An operation, fusion or plug-in breaks its contract; names the class and, if known, its distribution."""


class KernelError(SeqfuseError, RuntimeError):
    """A fused pass failed and there is no fallback."""


class StateError(SeqfuseError, RuntimeError):
    """The state of an object does not allow the call, such as a read of a saved tensor that was dropped."""


class FallbackWarning(UserWarning):
    """A fusion failed, so the unfused operations ran instead; issued once per plan and reason."""


class CacheWarning(UserWarning):
    """A cache on disk could not be used."""


def device_is_lost(error: BaseException) -> bool:
    """Whether an error is a sticky device error, after which nothing can run on the device."""
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None
    )


def nearest(name: Any, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The known name that equals `name` except for case and underscores, or the most similar one above `alike`."""
    known = list(known)
    same = (one for one in known if one.replace("_", "").lower() == str(name).replace("_", "").lower())
    return next(same, None) or next(iter(difflib.get_close_matches(str(name), known, 1, alike)), None)


def meant(name: Any, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The hint for an unknown name: the similar known name, if there is one."""
    close = nearest(name, known, alike)
    return f"did you mean {close!r}?" if close else None


def no_such_name(module: str, name: str, *places: tuple[str, Iterable[str]]) -> AttributeError:
    """The AttributeError for a missing name, with a hint at a similar name or at the module that has it.

    Args:
        module: the module without the name.
        name: the name.
        places: modules and their names, as `("sf.ops", ops.__all__)`; the module itself first.
    """
    hint = None
    if not name.startswith("_"):
        for alike, where in ((1.0, places), (0.75, places[:1])):
            found = ((place, nearest(name, names, alike)) for place, names in where)
            hint = hint or next((f"did you mean {place}.{close}?" for place, close in found if close), None)
        eager = getattr(nn, name, None)
        if isinstance(eager, type) and issubclass(eager, nn.Module):
            hint = hint or f"torch.nn.{name} runs eagerly in a Sequential; for an activation see sf.Pointwise"
    error = AttributeError(f"module {module!r} has no attribute {name!r}{hinted(hint)}")
    error.name = name
    return error


def author_line(subject: Any, needle: str = "") -> str:
    """The author's source line of `subject` that contains `needle`, as `file:line: text`, or the best known place."""
    target = getattr(subject, "__func__", subject)
    try:
        lines, first = inspect.getsourcelines(target)
        path = inspect.getsourcefile(target)
    except (OSError, TypeError):
        return f"{getattr(target, '__module__', '?')}.{getattr(target, '__qualname__', target)}"
    word = re.escape(needle)
    for pattern in (rf"^\s*{word}\s*[:=]", rf"(?<!\w){word}(?!\w)", word):
        for offset, line in enumerate(lines):
            if needle and re.search(pattern, line):
                return f"{path}:{first + offset}: {line.strip()}"
    return f"{path}:{first}: {lines[0].strip()}"


def definition_error(subject: Any, message: str, needle: str = "", hint: str | None = None) -> PluginError:
    """The error for a class that violates its contract at its definition, quoting the author's line."""
    name = getattr(subject, "__qualname__", str(subject))
    return PluginError(f"{message}\n    {author_line(subject, needle)}", code="SF301", operation=name, hint=hint)

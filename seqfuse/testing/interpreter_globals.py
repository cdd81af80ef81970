"""Globals that an interpreted kernel may read and a compiled one may not: an error, as it is where it is compiled."""

# pyright: basic, reportGeneralTypeIssues=false
# Functions of kernels have no types.
from __future__ import annotations

import dis
import types
import weakref
from typing import Any

_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def refuse_globals(function: Any) -> None:
    """Raise NameError for a number or text that a kernel, or a function it calls, reads as a global of its module.

    The compiler takes those alone that are `tl.constexpr`.
    """
    import triton.language as tl

    if not isinstance(function, types.FunctionType) or function in _seen:
        return
    stated = function.__globals__.get("__annotations__", {})
    for name in {i.argval for i in dis.get_instructions(function) if i.opname == "LOAD_GLOBAL"}:
        value = function.__globals__.get(name)
        if isinstance(value, int | float | str) and "constexpr" not in str(stated.get(name, "")):
            raise NameError(
                f"{function.__name__} reads the global {name} = {value!r}, which Triton compiles as a constexpr alone: "
                f"{name} = tl.constexpr({value!r})"
            )
        if not isinstance(value, tl.constexpr):
            refuse_globals(getattr(value, "fn", None))
    _seen.add(function)

"""Models that ask whether they are compiled: while a converted one is captured, its own code is told that it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from .calls import Call

_TOLD = ("torch", __name__.partition(".")[0])
"""Packages whose code is always told the truth."""


def answer_as_eager(current: Callable[[], Call | None]) -> None:
    """Let the model's own code that asks whether it is compiled be told that it is not, in what Dynamo captures.

    So its branches are those that it takes without the conversion; some models save more where they are compiled.
    Torch, this library, and code that the model shares with others, such as that for masks of Hugging Face, are told
    the truth: many of their branches are there because Dynamo cannot follow the other one. Nothing is exported, whoever
    asks.

    Args:
        current: the call of a converted model that goes on in this thread, if one does.
    """
    variables = cast("Any", torch._dynamo.variables.torch)  # pyright: ignore
    handlers = cast("dict[Any, Any]", variables.TorchInGraphFunctionVariable._get_handlers())
    states = cast("dict[Any, bool | None]", variables.tracing_state_functions())
    asked = {ask: handlers[ask] for ask, told in states.items() if told}

    def answer(variable: Any, tracing: Any, *args: Any, **kwargs: Any) -> Any:
        call = current()
        exporting = variable.value is torch.compiler.is_exporting
        if call is not None and (exporting or _asks_itself(tracing, call.module)):
            return variables.ConstantVariable.create(False)
        return asked[variable.value](variable, tracing, *args, **kwargs)

    handlers.update(dict.fromkeys(asked, answer))


def _asks_itself(tracing: Any, model: nn.Module) -> bool:
    """Whether code of a model's modules asks something, by itself or by a function of another file that it calls."""
    kinds = {type(module) for module in model.modules()}
    own = {name for kind in kinds for name in (kind.__module__, getattr(kind.forward, "__module__", ""))}
    own = {name for name in own if name.partition(".")[0] not in _TOLD}
    first = name = _module_of(tracing)
    while tracing is not None and name == first:
        tracing = getattr(tracing, "parent", None)
        name = _module_of(tracing)
    return first in own or (first.partition(".")[0] not in _TOLD and name in own)


def _module_of(tracing: Any) -> str:
    """The name of the Python module whose code Dynamo traces."""
    return "" if tracing is None else tracing.f_globals.get("__name__", "")

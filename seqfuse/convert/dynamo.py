"""What is changed in Dynamo while it captures a converted model, and what it says where it fails to."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._guards import CompileContext

from .calls import ModelCall

config: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
_local = threading.local()
_CAPTURING, _FAKES = "torch._dynamo.convert_frame", "torch._subclasses.fake_tensor"
_METRICS = "torch._dynamo.metrics_context"
_TOLD = ("torch", __name__.partition(".")[0])
"""Packages whose code is always told the truth."""


def current_call() -> ModelCall | None:
    """The call of a converted model that goes on in this thread, if one does."""
    return vars(_local).get("call")


def begin(call: ModelCall | None) -> None:
    """Let this be the call that goes on in this thread."""
    _local.call = call


def set_until_the_call_ends(name: str, value: object) -> None:
    """Set an option of Dynamo until `set_back`."""
    vars(_local).setdefault("set", {}).setdefault(name, getattr(config, name))
    setattr(config, name, value)


def set_back() -> None:
    """Give the options of Dynamo that were set in a call the values that they had."""
    for name, value in vars(_local).pop("set", {}).items():
        setattr(config, name, value)


def follow_captures() -> None:
    """Be told when Dynamo begins to capture, as a reset of Dynamo forgets who is."""
    if _capture_begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_capture_begins)


def _capture_begins(_: object) -> None:
    """A call of which a part ran cannot run again from its beginning, where Dynamo fails in a later part of it.

    So Dynamo lets that part of the code run as it is.
    """
    call = current_call()
    if call is not None and call.ran:
        set_until_the_call_ends("suppress_errors", True)


def captured_before() -> int:
    """How often Dynamo captured the code before that it captures now."""
    now = CompileContext.current_compile_id()
    return (now and now.frame_compile_id) or 0


def runs_alone(call: Callable[..., Any], conversion_of: Callable[[nn.Module], Any]) -> Callable[..., Any]:
    """Let a call of a converted module run by itself where a compiler captures the code around it.

    Args:
        call: what such modules are called by; Dynamo does not capture it.
        conversion_of: the conversion of a module, `None` of one that has none.

    Returns:
        `call`, which runs without the compiler around it.
    """
    torch._dynamo.eval_frame.skip_code(call.__code__)  # pyright: ignore
    kind = cast("Any", torch._dynamo.variables.nn_module.UnspecializedNNModuleVariable)  # pyright: ignore
    inlined: Callable[..., Any] = kind.call_function

    def call_function(variable: Any, tracing: Any, *args: Any) -> Any:
        conversion = conversion_of(variable.value) if current_call() is None else None
        root = tracing.output.root_tx
        if conversion is not None and not root.export:
            if not (root.one_graph or tracing.error_on_graph_break or tracing.output.current_tracer.parent):
                raise torch._dynamo.exc.Unsupported("a converted model runs by itself")  # pyright: ignore
            conversion.take_in()
        return inlined(variable, tracing, *args)

    kind.call_function = call_function
    return cast("Any", torch.compiler).disable(call)


compiler_around: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # pyright: ignore
"""What captures the frames that are called now: a function, or no function if nothing does."""


def is_of_capture(error: BaseException) -> bool:
    """Whether an error was raised while Dynamo captured, and not by what runs."""
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):  # pyright: ignore
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == _CAPTURING for frame, _ in frames)


def first_of(error: BaseException, handled: BaseException | None) -> str:
    """The first line of the error that led to another, but for one that was being handled before the call."""
    while (cause := error.__cause__ or error.__context__) not in (None, handled):
        error = cause
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def mark_growing(cache: Any) -> None:
    """Spare the graph of a first decoding step: the keys and values of Hugging Face's dynamic caches grow in each."""
    for layer in getattr(cache, "layers", ()):
        for t in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(t, torch.Tensor) and t.ndim == 4 and not getattr(layer, "is_compileable", True):
                torch._dynamo.maybe_mark_dynamic(t, 2)  # pyright: ignore


def not_warning(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Leave `logger.warning_once` and its like, of Hugging Face, out of what Dynamo captures: it ends a graph there.

    Other calls of a logger end it, so that they log.
    """
    once = {getattr(logging.Logger, name) for name in ("warning_once", "info_once") if hasattr(logging.Logger, name)}
    ignored: set[Any] = config.ignore_logger_methods
    if type(ignored) is not set:  # a tuple, say, that somebody put there
        return compiled
    added = once - ignored

    def call(*args: Any, **kwargs: Any) -> Any:
        ignored.update(added)
        try:
            return compiled(*args, **kwargs)
        finally:
            ignored.difference_update(added)

    return call


def _answer_as_eager() -> None:
    """Let the model's own code that asks whether it is compiled be told that it is not, in what Dynamo captures.

    So its branches are those that it takes without the conversion; some models save more where they are compiled.
    Torch, this library, and code that the model shares with others, such as that for masks of Hugging Face, are told
    the truth: many of their branches are there because Dynamo cannot follow the other one. Nothing is exported, whoever
    asks.
    """
    variables = cast("Any", torch._dynamo.variables.torch)  # pyright: ignore
    handlers = cast("dict[Any, Any]", variables.TorchInGraphFunctionVariable._get_handlers())
    states = cast("dict[Any, bool | None]", variables.tracing_state_functions())
    asked = {ask: handlers[ask] for ask, told in states.items() if told}

    def answer(variable: Any, tracing: Any, *args: Any, **kwargs: Any) -> Any:
        call = current_call()
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


def _name_nothing_for_logs() -> None:
    """Spare a capture what Dynamo prepares for a log that is off: it tokenizes each file that it traces for one."""
    tracing: Any = torch._dynamo.symbolic_convert  # pyright: ignore
    named: Callable[[str, int], str | None] | None = getattr(tracing, "get_funcname", None)
    logged: Callable[[str], bool] = torch._logging._internal.log_state.is_artifact_enabled  # pyright: ignore
    if named is not None:

        def get_funcname(filename: str, line: int) -> str | None:
            if current_call() is None or logged("trace_call") or logged("trace_source"):
                return named(filename, line)
            return None

        tracing.get_funcname = get_funcname


def _is_logged(record: logging.LogRecord) -> bool:
    """Whether torch logs why a call was not captured: of a converted model the report has it, so its call is told."""
    call = current_call()
    if call is None:
        return True
    if record.name == _CAPTURING and record.exc_info is not None and record.levelno == logging.WARNING:
        call.failures += [error for error in record.exc_info[1:2] if isinstance(error, Exception)]
        return False
    if record.name == _METRICS:  # torch 2.11 cannot sort the functions that it is to ignore
        return False
    return record.name != _FAKES or not str(record.msg).startswith("failed while attempting to run meta")


_answer_as_eager()
_name_nothing_for_logs()
for _name in (_CAPTURING, _FAKES, _METRICS):
    logging.getLogger(_name).addFilter(_is_logged)

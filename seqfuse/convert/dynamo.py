"""Changes to Dynamo while it captures a converted model, and handling of its failures."""

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
"""Packages for which `is_compiling` and the like keep their true answer."""


def current_call() -> ModelCall | None:
    """The current call of a converted model in this thread, if any."""
    return vars(_local).get("call")


def begin(call: ModelCall | None) -> None:
    """Set the current call of this thread."""
    _local.call = call


def set_until_the_call_ends(name: str, value: object) -> None:
    """Set a Dynamo option until `set_back`."""
    vars(_local).setdefault("set", {}).setdefault(name, getattr(config, name))
    setattr(config, name, value)


def set_back() -> None:
    """Restore the Dynamo options that were set in a call."""
    for name, value in vars(_local).pop("set", {}).items():
        setattr(config, name, value)


def follow_captures() -> None:
    """Register for the start of captures; registered again if a reset of Dynamo removed it."""
    if _capture_begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_capture_begins)


def _capture_begins(_: object) -> None:
    """After a part of a call has run, a failure of Dynamo in a later part cannot be handled by running the call again.

    So Dynamo runs that part of the code eagerly instead of raising.
    """
    call = current_call()
    if call is not None and call.ran:
        set_until_the_call_ends("suppress_errors", True)


def captured_before() -> int:
    """How often Dynamo has captured the code that it captures now."""
    now = CompileContext.current_compile_id()
    return (now and now.frame_compile_id) or 0


def runs_alone(call: Callable[..., Any], conversion_of: Callable[[nn.Module], Any]) -> Callable[..., Any]:
    """Make calls of a converted module run by themselves if a compiler captures the code around them.

    Args:
        call: the function that calls such modules; Dynamo does not capture it.
        conversion_of: the conversion of a module, or `None`.

    Returns:
        `call`, run outside the surrounding compiler.
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
"""Returns the compiler that captures frames called now: a function, or something else if there is none."""


def compiles_in_another_thread() -> bool:
    """Whether `torch.compiler.is_compiling`, which is one answer for all threads, is true because of another one."""
    lock: Any = torch._dynamo.convert_frame.compile_lock  # pyright: ignore
    if not torch.compiler.is_compiling() or lock._is_owned():
        return False
    if free := lock.acquire(blocking=False):
        lock.release()
    return not free


def is_of_capture(error: BaseException) -> bool:
    """Whether an error was raised while Dynamo captured, not by the code that runs."""
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):  # pyright: ignore
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == _CAPTURING for frame, _ in frames)


def first_of(error: BaseException, handled: BaseException | None) -> str:
    """The first line of the error that caused another, except errors that were already handled before the call."""
    while (cause := error.__cause__ or error.__context__) not in (None, handled):
        error = cause
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def mark_growing(cache: Any) -> None:
    """Mark the growing dimension of Hugging Face's dynamic caches, which saves a graph for the first decoding step."""
    for layer in getattr(cache, "layers", ()):
        for t in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(t, torch.Tensor) and t.ndim == 4 and not getattr(layer, "is_compileable", True):
                torch._dynamo.maybe_mark_dynamic(t, 2)  # pyright: ignore


def not_warning(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Ignore `logger.warning_once` and the like, of Hugging Face, while Dynamo captures: each would end a graph.

    Other logging calls still end a graph, so that they log.
    """
    once = {getattr(logging.Logger, name) for name in ("warning_once", "info_once") if hasattr(logging.Logger, name)}
    ignored: set[Any] = config.ignore_logger_methods
    if type(ignored) is not set:  # for example a tuple set by the user
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
    """While Dynamo captures, answer "no" if the model's own code checks whether it is compiled.

    So it takes the same branches as without the conversion; some models save more when compiled. Torch, this library,
    and code shared between models, such as Hugging Face's for masks, get the true answer, since many of their branches
    exist because Dynamo cannot capture the other one. `is_exporting` is false for all code.
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
    """Whether code of a model's modules makes the check, directly or through a function of another file."""
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
    """Skip work of Dynamo for a log that is off: it would tokenize each traced file."""
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
    """Whether a log record is kept; failures to capture a converted model are recorded in its call and reported."""
    call = current_call()
    if call is None:
        return True
    if record.name == _CAPTURING and record.exc_info is not None and record.levelno == logging.WARNING:
        call.failures += [error for error in record.exc_info[1:2] if isinstance(error, Exception)]
        return False
    if record.name == _METRICS:  # torch 2.11 fails to sort the functions to ignore
        return False
    return record.name != _FAKES or not str(record.msg).startswith("failed while attempting to run meta")


_answer_as_eager()
_name_nothing_for_logs()
for _name in (_CAPTURING, _FAKES, _METRICS):
    logging.getLogger(_name).addFilter(_is_logged)

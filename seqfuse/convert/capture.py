"""Capturing a model: what is called instead of it, and the way back."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import torch
from torch import nn
from torch._guards import CompileContext
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule  # pyright: ignore[reportPrivateUsage]
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore[reportPrivateUsage]

from ..operation import UnfusedOperation
from ..run.sequential import Sequential
from .asking import answer_as_eager
from .buffers import Buffers
from .calls import Call, Calls, name_owners
from .failures import first_of, is_of_capture, log_less
from .report import GraphReport, Left, counted, text_of
from .rewriting import Options, kind_of, rewrite

_dynamo: Any = torch._dynamo.config  # pyright: ignore[reportPrivateUsage]
_frames = itertools.count()
_SHORTCUTS = ("skip_nnmodule_hook_guards", "use_recursive_dict_tags_for_guards")
_TRIES = 3
"""How often a kind of call is captured that Dynamo fails to capture, although it runs."""
_local = threading.local()


class Backend:
    """A backend of `torch.compile` that runs the chains of each captured graph through plans.

    Args:
        options: how graphs are rewritten.
        then: what runs the rest of a graph: `None`, as it ran before, or `"inductor"`.

    Attributes:
        graphs: a report for each graph that was captured.
        missed: how many calls of graphs ran as they were captured, by the reason.
    """

    def __init__(self, options: Options, then: Literal["inductor"] | None = None) -> None:
        self.options, self.then = options, then
        self.graphs: list[GraphReport] = []
        self.missed: Counter[str] = Counter()
        self._numbers = itertools.count()

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Rewrite a graph; the callable that runs it."""
        buffers = Buffers(gm, example_inputs)
        reports = rewrite(gm, self.options, f"graph {next(self._numbers)}")
        before = _captured_before()
        limit: int | None = _dynamo.recompile_limit if before + 1 >= _dynamo.recompile_limit else None
        self.graphs += [dataclasses.replace(report, limit=limit, again=before > 0) for report in reports]
        if self.then is None:
            # By itself Dynamo's module compiles its code in its first call, and prints it where that raises.
            _LazyGraphModule.force_recompile(gm)
            return buffers.checked(gm.forward, self.missed)
        from .rest import compiled_rest  # what it needs takes long to import

        return buffers.checked(compiled_rest(gm), self.missed)


def _captured_before() -> int:
    """How often Dynamo captured the code before that it captures now."""
    now = CompileContext.current_compile_id()
    return (now and now.frame_compile_id) or 0


class Conversion:
    """What `convert` did to a model; printed, what became of each graph that was captured.

    Attributes:
        model: the model, the same object as before.
        graphs: a report for each graph captured up to now; none before the first call.
    """

    def __init__(self, model: nn.Module, places: Sequence[nn.Module], backend: Backend) -> None:
        self.model, self._backend = model, backend
        self._places, self._calls = places, Calls(backend.missed)

        reference = weakref.ref(self)  # Dynamo keeps every backend that was called, and would keep the model with it

        # No `partial`, which torch would print, with the model in it.
        def captured(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            conversion = reference()
            assert conversion is not None  # the call that is captured holds it
            return _captured(conversion.model, conversion._calls, conversion._backend, gm, inputs)

        compiled = torch.compile(_frame_of(self._calls), backend=captured)  # pyright: ignore[reportUnknownMemberType]
        compiled = _not_warning(compiled)
        self._before = [(place, call_impl(place)) for place in places]
        for place, _ in self._before:
            call = functools.partial(_guarded, self._calls, compiled, place)
            vars(call)["conversion"] = self
            place._compiled_call_impl = call  # pyright: ignore[reportPrivateUsage]

    @property
    def graphs(self) -> tuple[GraphReport, ...]:
        """A report for each graph."""
        return tuple(self._backend.graphs)

    def undo(self) -> None:
        """Let the model run as it did before; a second time, nothing happens."""
        for place, before in self._before:
            place._compiled_call_impl = before  # pyright: ignore[reportPrivateUsage]
            if before is None:  # as it was: the class says so
                del place._compiled_call_impl  # pyright: ignore[reportPrivateUsage]
        self._before = []

    @property
    def left(self) -> tuple[Left, ...]:
        """The GEMMs, norms and activations of the model that no graph has, where Dynamo left the code around them."""
        skipped = self._calls.skipped(self.model, self._places)
        return tuple(
            Left(type(module).__name__, kind, path, reason)
            for path, module, reason in skipped
            if (kind := kind_of(module)) is not None
        )

    def __str__(self) -> str:
        modules = cast("Iterable[tuple[str, nn.Module]]", self.model.named_modules())
        paths = {module: path for path, module in modules}
        layers = [paths.get(place, "") for place in self._places]
        text = [text_of(self.graphs, self._calls, self.left, layers, undone=not self._before)]
        text += [f"{path}: traced as torch calls; its own plan and fusions are not used" for path in _own(self.model)]
        return "\n".join(text)

    def __repr__(self) -> str:
        undone = "" if self._before else ", undone"
        return f"<Conversion of {type(self.model).__name__}, {counted(len(self.graphs), 'graph')}{undone}>"


def _own(model: nn.Module) -> list[str]:
    """The outermost operations and sequences of this library in the model, each by class and path."""
    found: dict[str, str] = {}
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        if isinstance(module, Sequential | UnfusedOperation) and not any(f"{path}.".startswith(f"{p}.") for p in found):
            found[path] = f"{type(module).__name__} {path}" if path else type(module).__name__
    return list(found.values())


def _captured(
    model: nn.Module, calls: Calls, backend: Backend, gm: GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    # Read when Dynamo makes the guards of this graph, right after this. The first overlooks hooks that are set later;
    # the second, where it is the default (torch 2.11), another class and another requires_grad. `_guarded` sets them
    # back.
    before: dict[str, Any] = vars(_local).setdefault("set", {})
    for name in _SHORTCUTS:
        before.setdefault(name, getattr(_dynamo, name))
        setattr(_dynamo, name, False)
    call: Call = vars(_local)["call"]
    captured = call.captures(gm, example_inputs)
    calls.see(captured, call.module, gm, example_inputs)
    name_owners(model, call.module, gm)
    known = len(backend.graphs)
    run = backend(gm, example_inputs)
    backend.graphs[known:] = [dataclasses.replace(report, captured=captured) for report in backend.graphs[known:]]

    def running(*args: Any) -> Any:
        captured.calls += 1
        captured.last = calls.count
        now: Call | None = vars(_local).get("call")
        if now is not None and not now.ran:
            now.ran = True
            if captured.until is not None:
                # The call cannot run again from its beginning, if Dynamo fails behind the break; so Dynamo lets that
                # part of the code run as it is. `_guarded` sets it back.
                vars(_local).setdefault("set", {}).setdefault("suppress_errors", _dynamo.suppress_errors)
                _dynamo.suppress_errors = True
        return run(*args)

    return running


def call_impl(module: nn.Module) -> Callable[..., Any] | None:
    """What a call of a module runs in place of its class's own, if anything."""
    return module._compiled_call_impl  # pyright: ignore


def _frame_of(calls: Calls) -> Callable[..., Any]:
    """What Dynamo captures: a frame of ours, because it skips those of torch.nn.

    With the module as an argument layers share a graph. The code object and its name are its own: Dynamo keeps graphs
    by code object, up to a limit, and by file, line and name which sizes differed, which it then takes for symbols.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # Dynamo, which takes that for a constant, lets the frame run as it is
            calls.missed["Dynamo captured nothing for them"] += 1
        return module._call_impl(*args, **kwargs)  # pyright: ignore

    code = call.__code__.replace(co_name=f"call_{next(_frames)}")
    return types.FunctionType(code, call.__globals__, "call", None, call.__closure__)


def _guarded(calls: Calls, compiled: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Within the capture of a larger model or a trace; Dynamo refuses to run while FX traces, as `make_fx` does.
    traced = torch.jit.is_tracing() or is_fx_symbolic_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if torch.compiler.is_compiling() or traced:
        return module._call_impl(*args, **kwargs)  # pyright: ignore
    calls.count += 1
    if _has_any_global_hook():  # no guard of Dynamo sees hooks that are set for all modules
        calls.missed["hooks of all modules were set"] += 1
        return module._call_impl(*args, **kwargs)  # pyright: ignore
    if calls.failed and calls.failed[_kind(module, args, kwargs)] >= _TRIES:
        calls.missed[f"Dynamo failed to capture {_TRIES} calls like them"] += 1
        return module._call_impl(*args, **kwargs)  # pyright: ignore
    _mark_growing(kwargs.get("past_key_values"))
    handled = sys.exception()
    outer, call = vars(_local).get("call"), Call(module, args, kwargs)
    _local.call = call
    try:
        return compiled(module, *args, **kwargs)
    except Exception as error:
        if call.ran or not is_of_capture(error):
            raise
        call.failures.append(error)
    finally:
        _local.call = outer
        calls.meet(call)
        where = "behind a graph break " if call.ran else ""
        calls.missed.update({f"{where}Dynamo failed to capture them: {first_of(e, handled)}" for e in call.failures})
        for name, value in vars(_local).pop("set", {}).items():
            setattr(_dynamo, name, value)
    result: Any = module._call_impl(*args, **kwargs)  # pyright: ignore  # which raises what it raised before
    calls.failed[_kind(module, args, kwargs)] += 1
    return result  # pyright: ignore


def _kind(module: nn.Module, args: Sequence[Any], kwargs: Iterable[str]) -> tuple[Any, ...]:
    """What calls have in common that Dynamo captures alike, for the most part."""
    return (id(module), module.training, torch.is_grad_enabled(), len(args), *kwargs)


answer_as_eager(lambda: getattr(_local, "call", None))
log_less(lambda: getattr(_local, "call", None))


def _not_warning(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Leave `logger.warning_once` and its like, of Hugging Face, out of what Dynamo captures: it ends a graph there.

    Other calls of a logger end it, so that they log.
    """
    once = {getattr(logging.Logger, name) for name in ("warning_once", "info_once") if hasattr(logging.Logger, name)}
    ignored: set[Any] = _dynamo.ignore_logger_methods
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


def _mark_growing(cache: Any) -> None:
    """Spare the graph of a first decoding step: the keys and values of Hugging Face's dynamic caches grow in each."""
    for layer in getattr(cache, "layers", ()):
        for t in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(t, torch.Tensor) and t.ndim == 4 and not getattr(layer, "is_compileable", True):
                torch._dynamo.maybe_mark_dynamic(t, 2)  # pyright: ignore

"""The entry points: what they are given is checked here, before anything is captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast

from torch import nn
from torch.fx import GraphModule

from ..errors import InputError
from ..fusion import checked
from ..plan.schedule import MODES, Budget, Choice
from ..run.sequential import Fusions
from .capture import Backend, Conversion, call_impl
from .rewriting import Options

_OPTIONS = ("fusions", "memory", "then")


def backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="seqfuse")`: the chains of the model's graphs run through plans.

    Args:
        gm: a graph that Dynamo captured.
        example_inputs: its inputs.
        options: `fusions`, `memory` and `then`, as those of `convert`.
        mode: none is known.

    Raises:
        InputError: (SF106) for another option, a value that an option does not take, or a mode.
    """
    where = 'backend="seqfuse"'
    given = dict(options or {})
    unknown = ", ".join(repr(name) for name in given if name not in _OPTIONS)
    if unknown or mode is not None:
        hint = "regions and filter_fn are those of sf.convert" if {"regions", "filter_fn"} & given.keys() else None
        message = f"takes the options {', '.join(map(repr, _OPTIONS))}, got {unknown or f'mode={mode!r}'}"
        raise InputError(message, code="SF106", operation=where, hint=hint)
    fusions, memory, then = given.get("fusions"), given.get("memory", "save"), given.get("then")
    _check_options(where, then, fusions, memory)
    return Backend(Options(fusions, memory=memory), then)(gm, example_inputs)


def start(
    model: nn.Module,
    regions: Literal["model", "layers"],
    then: Literal["inductor"] | None,
    fusions: Fusions | None,
    filter_fn: Callable[[nn.Module, str], bool] | None,
    memory: Choice,
) -> Conversion:
    """`convert`, whose arguments these are."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _wrong(f"expects a torch.nn.Module, got {type(model).__name__}")
    if regions not in ("model", "layers"):
        raise _wrong(f'regions must be "model" or "layers", got {regions!r}')
    _check_options("convert", then, fusions, memory)
    _check_filter(filter_fn)
    _check_not_converted(model)
    places = [model] if regions == "model" else _layers(model)
    if not places:
        none = "no ModuleList or Sequential in it has a member with submodules"
        raise _wrong(f"{type(model).__name__} has no layers: {none}", 'use regions="model"')

    def allowed(path: str) -> bool:
        if filter_fn is None:
            return True
        try:
            module = model.get_submodule(path)
        except AttributeError:  # a module that is not the model's own
            return True
        return filter_fn(module, path)

    return Conversion(model, places, Backend(Options(fusions, allowed, memory), then))


def find(model: nn.Module) -> Conversion:
    """`conversion`, whose argument this is."""
    inside = ""
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        found = _conversion_at(module)
        if found is not None and (module is model or found.model is model):
            return found
        inside = inside or (path if found is not None else "")
    message = f"{type(model).__name__} is not converted" + (" as a whole" if inside else "")
    part = "if it is a part of a converted model, ask for that model"
    hint = f"a part of it is: sf.conversion(model.get_submodule({inside!r}))" if inside else part
    raise InputError(message, code="SF106", operation="conversion", hint=hint)


def _wrong(message: str, hint: str | None = None, where: str = "convert") -> InputError:
    return InputError(message, code="SF106", operation=where, hint=hint)


def _check_options(where: str, then: Any, fusions: Any, memory: Any) -> None:
    if then not in (None, "inductor"):
        raise _wrong(f'then must be None or "inductor", got {then!r}', where=where)
    checked(() if fusions is None else fusions)
    if memory not in MODES and not (isinstance(memory, Budget) and memory.part is not None):
        hint = "a model is captured graph by graph, so bytes are for a Sequential alone: try sf.Budget(part=0.65)"
        raise _wrong(f"memory must be one of {', '.join(MODES)} or sf.Budget(part=...), got {memory!r}", hint, where)


def _check_filter(filter_fn: Any) -> None:
    """Refuse what cannot be called with a module and a path; it is called in the middle of a capture."""
    hint = "such as filter_fn=lambda module, path: not path.startswith('lm_head')"
    if filter_fn is not None and not callable(filter_fn):
        raise _wrong(f"filter_fn must be a function of a module and its path, got {filter_fn!r}", hint)
    try:
        takes = None if filter_fn is None else inspect.signature(filter_fn)
    except (TypeError, ValueError):  # a callable without a signature
        return
    try:
        _ = takes and takes.bind(None, "")
    except TypeError:
        message = f"filter_fn must take two arguments, a module and its path, and takes {takes}"
        raise _wrong(message, hint) from None


def _check_not_converted(model: nn.Module) -> None:
    for path, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
        found = _conversion_at(module)
        if found is None:
            continue
        name = type(model).__name__
        if module is model or found.model is model:
            raise _wrong(f"{name} is converted already", "sf.conversion(model).undo() ends that")
        hint = f"sf.conversion(model.get_submodule({path!r})).undo() ends that"
        raise _wrong(f"a part of {name}, {path!r}, is converted already", hint)


def _conversion_at(module: nn.Module) -> Conversion | None:
    return getattr(call_impl(module), "conversion", None)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of modules that are called and have modules of their own."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and module not in inside and len(module) > 0:
            found += _called(module)
            inside.update(module.modules())
    return list(dict.fromkeys(found))


def _called(container: nn.Module) -> Iterator[nn.Module]:
    """The children that have modules of their own; of a list or a dict, which nobody can call, those in it."""
    for child in container.children():  # which leaves out None
        if type(child).forward is nn.Module.forward and "forward" not in vars(child):
            yield from _called(child)
        elif any(True for _ in child.children()):
            yield child

"""Captures a model: entry points, the replaced call of the model, and the undoing of a conversion."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule  # pyright: ignore[reportPrivateUsage]
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn.modules.module import _has_any_global_hook  # pyright: ignore[reportPrivateUsage]

from .. import ops
from ..env import Env
from ..errors import InputError, hinted, meant
from ..fusion import Fusions, checked
from ..operation import UnfusedOperation
from ..pictures.text import counted
from ..plan import MODES, AnyChoice, Budget, flatten, recipe_at
from ..recipes import Recipe, check_recipe
from ..run import Sequential
from . import UNQUANTIZED, dynamo
from .applied import run_as_code
from .buffers import Buffers
from .calls import Calls, Captured, ModelCall, name_owners, named_modules, paths_of
from .dtensor import shards_of
from .effects import is_state
from .experts import take_over
from .reasons import Left, kind_of_module
from .region import CapturedRegion, excluded
from .report import GraphReport, text_of
from .rewrite import RewriteOptions, rewrite

_frames = itertools.count()
_tracing: Callable[[], Any] = torch._C._get_tracing_state  # pyright: ignore
_OPTIONS = ("regions", "then", "fusions", "filter_fn", "memory", "recipe", "exclude")
"""The options of `convert`, which are not attributes of a conversion."""
_TRIES = 3
"""How often Dynamo tries to capture a kind of call that runs eagerly but cannot be captured."""


def backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """`torch.compile(model, backend="seqfuse")`: chains of known operations run through plans.

    Args:
        gm: a graph that Dynamo captured.
        example_inputs: its inputs.
        options: `fusions`, `memory`, `then`, `recipe` and `exclude`, as in `convert`.
        mode: not supported.

    Raises:
        InputError: (SF106) for an unknown option, a bad value, or a mode.
    """
    where, given = 'backend="seqfuse"', options or {}
    unknown = ", ".join(repr(name) for name in given if name not in ("fusions", "memory", "then", "recipe", "exclude"))
    if unknown or mode is not None:
        hint = "regions and filter_fn are those of sf.convert" if {"regions", "filter_fn"} & given.keys() else None
        message = (
            f"takes the options 'fusions', 'memory', 'then', 'recipe', 'exclude', got {unknown or f'mode={mode!r}'}"
        )
        raise _wrong(message, hint, where)
    return _backend(where, **given)(gm, example_inputs)


def start(
    model: nn.Module,
    regions: Literal["model", "layers"],
    filter_fn: Callable[[nn.Module, str], bool] | None,
    **options: Any,
) -> Conversion:
    """Implements `convert`, with the same arguments."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _wrong(f"expects a torch.nn.Module, got {type(model).__name__}")
    if regions not in ("model", "layers"):
        raise _wrong(f'regions must be "model" or "layers", got {regions!r}')

    def allowed(path: str) -> bool:
        if filter_fn is None:
            return True
        try:
            module = model.get_submodule(path)
        except AttributeError:  # a module outside the model
            return True
        return filter_fn(module, path)

    made = _backend("convert", allowed, **options)
    if filter_fn is not None:
        _check_filter(filter_fn)
    _check_not_converted(model)
    if regions == "model" and _is_never_called(model):
        hint = 'convert the module that calls its members, or use regions="layers"'
        raise _wrong(f"{type(model).__name__} has no forward, so it is never called", hint)
    _check_not_replicated(model)
    _check_recipe_fits(model, made.options)
    _warn_of_unknown(model, made.options)
    places = [model] if regions == "model" else _layers(model)
    if not places:
        none = "no ModuleList or Sequential in it has a member with submodules"
        raise _wrong(f"{type(model).__name__} has no layers: {none}", 'use regions="model"')
    _check_excluded_alike(model, places, made.options)
    return Conversion(model, places, made)


def find(model: nn.Module) -> Conversion:
    """Implements `conversion`, with the same argument."""
    inside = list(conversions_in(model))
    own = next((found for path, found in inside if not path or found.model is model), None)
    if own is not None:
        return own
    name = type(model).__name__
    hint = "if it is a part of a converted model, ask for that model; convert a loaded copy again"
    if not inside:
        raise _wrong(f"{name} is not converted", hint, "conversion")
    hint = f"a part of it is: sf.conversion(model.get_submodule({inside[0][0]!r}))"
    raise _wrong(f"{name} is not converted as a whole", hint, "conversion")


def _wrong(message: str, hint: str | None = None, where: str = "convert") -> InputError:
    return InputError(message, code="SF106", operation=where, hint=hint)


def _backend(
    where: str,
    allowed: Callable[[str], bool] = lambda path: True,
    *,
    fusions: Fusions | None = None,
    memory: AnyChoice = "balanced",
    then: Literal["inductor"] | None = None,
    recipe: Recipe | None = None,
    exclude: Sequence[str] = UNQUANTIZED,
) -> ChainBackend:
    if then not in (None, "inductor"):
        raise _wrong(f'then must be None or "inductor", got {then!r}', where=where)
    checked(() if fusions is None else fusions)
    memory = "fast" if memory == "save" else memory
    if memory not in MODES and not (isinstance(memory, Budget) and memory.part is not None):
        hint = "a model is captured graph by graph, so bytes are for a Sequential alone: try sf.Budget(part=0.65)"
        if isinstance(memory, str):
            hint = meant(memory, MODES)
        elif isinstance(memory, float) and 0 <= memory <= 1:
            hint = f"sf.Budget(part={memory:g})"
        raise _wrong(f"memory must be one of {', '.join(MODES)} or sf.Budget(part=...), got {memory!r}", hint, where)
    check_recipe(recipe, where)
    if recipe is not None and recipe.keeps_state:
        hint = "Float8CurrentScaling has one scale for a tensor, too"
        message = f"{recipe} keeps scales in operations, and those of a converted model are its graphs'"
        raise InputError(message, code="SF108", operation=where, hint=hint)
    named = tuple(exclude) if isinstance(exclude, Iterable) and not isinstance(exclude, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
    if named is None or not all(isinstance(name, str) for name in named):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _wrong(f"exclude takes names of modules, got {exclude!r}", 'such as exclude=("lm_head",)', where)
    return ChainBackend(RewriteOptions(fusions, allowed, memory, recipe, named), then)


def _check_recipe_fits(model: nn.Module, options: RewriteOptions) -> None:
    """Raise if a strict recipe cannot quantize a Linear that is not excluded, or a device has no kernels for it."""
    recipe = options.recipe
    for path, module in named_modules(model) if recipe is not None else ():
        weight = getattr(module, "weight", None)
        if type(module) is nn.Linear and isinstance(weight, Tensor) and not excluded(options.exclude, path):
            assert recipe is not None
            stands_for = ops.Linear(module.in_features, module.out_features, False, "meta", weight.dtype)
            stands_for.shards = shards_of([weight])
            env = dataclasses.replace(Env.of(weight.device), dtype=weight.dtype, recipe=recipe)
            try:
                recipe_at(flatten(stands_for), 0, weight.dtype, env)
            except InputError as error:
                error.position, error.path = None, path
                raise


def _warn_of_unknown(model: nn.Module, options: RewriteOptions) -> None:
    """Warn about names in `exclude` that no module has, except the default names."""
    paths = [path for path, _ in named_modules(model)] if options.recipe is not None else []
    for name in options.exclude if paths else ():
        if name not in UNQUANTIZED and not any(excluded((name,), path) for path in paths):
            hint = meant(name, {part for path in paths for part in path.split(".")})
            message = f"convert: exclude names {name!r}, and no module of the model has that name{hinted(hint)}"
            warnings.warn(message, UserWarning, stacklevel=4)


def _check_excluded_alike(model: nn.Module, places: Sequence[nn.Module], options: RewriteOptions) -> None:
    """Raise if `exclude` matches different parts of equal layers, since these share a graph."""
    if options.recipe is None or len(places) == 1:
        return
    paths, known = paths_of(model), dict[str, tuple[str, set[str]]]()
    for at, place in ((paths[place], place) for place in places):
        named = {name for name, _ in named_modules(place) if excluded(options.exclude, f"{at}.{name}".rstrip("."))}
        first, before = known.setdefault(repr(place), (at, named))
        if named != before:
            message = f"exclude differs between {first} and {at}, which are alike and share a graph"
            raise _wrong(message, 'regions="model" has a name for each layer')


def _check_filter(filter_fn: Any) -> None:
    """Raise if `filter_fn` cannot be called with a module and a path, since it is called in the middle of a capture."""
    hint = "such as filter_fn=lambda module, path: not path.startswith('lm_head')"
    if not callable(filter_fn):
        raise _wrong(f"filter_fn must be a function of a module and its path, got {filter_fn!r}", hint)
    try:
        takes = inspect.signature(filter_fn)
    except ValueError:  # a callable without a signature
        return
    try:
        takes.bind(None, "")
    except TypeError:
        message = f"filter_fn must take two arguments, a module and its path, and takes {takes}"
        raise _wrong(message, hint) from None


def _check_not_converted(model: nn.Module) -> None:
    name = type(model).__name__
    for path, found in conversions_in(model):
        if not path or found.model is model:
            raise _wrong(f"{name} is converted already", "sf.conversion(model).undo() ends that")
        hint = f"sf.conversion(model.get_submodule({path!r})).undo() ends that"
        raise _wrong(f"a part of {name}, {path!r}, is converted already", hint)


def _check_not_replicated(model: nn.Module) -> None:
    for path, module in named_modules(model):
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            where = f" at {path!r}" if path else ""
            said = f"the DataParallel{where} copies its module in each call, and a copy is not converted"
            raise _wrong(said, "convert the module in it, and use DistributedDataParallel, one process for each device")


def conversions_in(model: nn.Module) -> Iterator[tuple[str, Conversion]]:
    """The paths of converted modules in a model, with their conversions."""
    for path, module in named_modules(model):
        if (found := _conversion_of(module)) is not None:
            yield path, found


def _layers(model: nn.Module) -> list[nn.Module]:
    """The members with submodules of the outermost lists of modules; instead of nested lists, their members."""
    found: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and module not in inside and len(module) > 0:
            found += _called(module)
            inside.update(module.modules())
    return list(dict.fromkeys(found))


def _called(container: nn.Module) -> Iterator[nn.Module]:
    """The children with submodules; instead of a list or dict, which cannot be called, its members."""
    for child in container.children():  # leaves out None
        if _is_never_called(child):
            yield from _called(child)
        elif any(True for _ in child.children()):
            yield child


def _is_never_called(module: nn.Module) -> bool:
    """Whether a module has no forward, such as a `ModuleList` or `ModuleDict`."""
    return type(module).forward is nn.Module.forward and "forward" not in vars(module)


class ChainBackend:
    """A backend of `torch.compile` that runs the chains of each captured graph through plans."""

    def __init__(self, options: RewriteOptions, then: Literal["inductor"] | None = None) -> None:
        self.options, self.then = options, then  # backend of all other calls: `None` for eager, or Inductor
        self.graphs: list[GraphReport] = []
        self.missed: Counter[str] = Counter()  # number of calls of graphs that ran as captured, by reason
        self._numbers = itertools.count()

    def __call__(
        self, gm: GraphModule, example_inputs: Sequence[Any], captured: Captured | None = None
    ) -> Callable[..., Any]:
        """Rewrite a graph, captured in the given call if known; returns the function that runs it."""
        buffers = Buffers(gm, example_inputs)
        before, most = dynamo.captured_before(), dynamo.config.recompile_limit
        about: dict[str, Any] = {"limit": most if before + 1 >= most else None, "again": before > 0}
        for report in rewrite(gm, self.options, f"graph {next(self._numbers)}"):
            self.graphs.append(dataclasses.replace(report, captured=captured, **about))
        if self.then is None:
            run_as_code(gm)
            # Otherwise Dynamo's module would compile its code in the first call, and print it if that raises.
            _LazyGraphModule.force_recompile(gm)
            return buffers.checked(gm.forward, self.missed)
        return buffers.checked(compiled_rest(gm), self.missed)


_OWN = Sequential, UnfusedOperation
"""Classes of this library with their own plans."""
_ENDED = "runs unconverted since model.compile(): torch.compile(model) keeps the conversion"
_TAKEN_IN = (
    "was compiled unconverted, in a graph that must not break: calls by code under fullgraph=True or by a compiled "
    "checkpoint do not use the conversion"
)


class Conversion:
    """The result of `convert`; `print` shows each captured graph.

    A copy or pickle of the model is not converted; a reference to its conversion becomes `None`.

    Attributes:
        model: the model, the same object.
        graphs: a report for each graph captured so far; empty before the first call.
    """

    def __init__(self, model: nn.Module, places: Sequence[nn.Module], backend: ChainBackend) -> None:
        self.model, self._backend = model, backend
        self._places, self._calls, self._taken_in = places, Calls(backend.missed), False

        reference = weakref.ref(self)  # Dynamo keeps each called backend alive, and would keep the model

        # Not a `partial`, whose repr in torch's logs would contain the model.
        def capture(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            conversion = reference()
            assert conversion is not None  # the captured call holds a reference
            return conversion._capture(gm, inputs)

        compiled = dynamo.not_warning(torch.compile(_frame_of(self._calls), backend=capture))  # pyright: ignore
        self._experts, self._kept = take_over(model)
        self._before = [(place, _call_impl(place)) for place in places]
        for place, _ in self._before:
            call = functools.partial(_guarded, self._calls, compiled, place)
            vars(call)["conversion"] = self
            place._compiled_call_impl = call  # pyright: ignore[reportPrivateUsage]

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OPTIONS:
            hint = f"sf.conversion(model).undo() and then sf.convert(model, {name}=...)"
            raise _wrong(f"{name} cannot be changed after the conversion", hint, "conversion")
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @property
    def graphs(self) -> tuple[GraphReport, ...]:
        """A report for each graph."""
        return tuple(self._backend.graphs)

    def undo(self) -> None:
        """Revert the conversion; no effect the second time."""
        for place, before in self._before:
            place._compiled_call_impl = before  # pyright: ignore[reportPrivateUsage]
            if before is None:  # restores the attribute of the class
                del place._compiled_call_impl  # pyright: ignore[reportPrivateUsage]
        self._before = []
        for module, config in self._experts:
            module.config = config
            del module.seqfuse_unit
        self._experts = []

    def take_in(self) -> None:
        """Report, and warn once, that a compiler captures the model unconverted, in a graph that must not break."""
        if not self._taken_in:
            warnings.warn(f"{type(self.model).__name__} {_TAKEN_IN}", UserWarning, stacklevel=2)
        self._taken_in = True

    @property
    def left(self) -> tuple[Left, ...]:
        """GEMMs, norms and activations that are in no captured graph: Dynamo did not trace the code around them, or
        they are outside the captured layers.
        """
        skipped = self._calls.skipped(self.model, self._places) + self._around()
        return tuple(
            Left(type(module).__name__, kind, path, reason)
            for path, module, reason in skipped
            if (kind := kind_of_module(module)) is not None
        )

    def _around(self) -> list[tuple[str, nn.Module, str]]:
        """Modules without submodules outside the layers, by path; captured graphs cannot contain them."""
        apart = {module for place in self._places for module in place.modules()}
        apart.update(m for module in self.model.modules() if isinstance(module, _OWN) for m in module.modules())
        reason = 'outside the layers of regions="layers"'
        around = [(path, module, reason) for path, module in named_modules(self.model) if module not in apart]
        return [found for found in around if self.graphs and not any(True for _ in found[1].children())]

    def _capture(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        # Dynamo reads these when it creates this graph's guards, directly after this. The first default misses hooks
        # that are set later; the second, where it is the default (torch 2.11), changes of class and of requires_grad.
        dynamo.set_until_the_call_ends("skip_nnmodule_hook_guards", False)
        dynamo.set_until_the_call_ends("use_recursive_dict_tags_for_guards", False)
        dynamo.set_until_the_call_ends("record_runtime_overhead", False)  # for profilers; costs two calls in each call
        dynamo.follow_captures()
        calls, call = self._calls, dynamo.current_call()
        assert call is not None  # the captured call
        captured = call.captures(gm, inputs)
        seen = calls.see(captured, call.module, gm, inputs)
        name_owners(self.model, call.module, gm)
        run = self._backend(gm, inputs, captured)

        def running(*args: Any) -> Any:
            captured.calls += 1
            captured.last = calls.count
            seen.serves(args)
            if (now := dynamo.current_call()) is not None:
                now.ran = True
                captured.modules.add(id(now.module))
            return run(*args)

        return running

    def __str__(self) -> str:
        return self.report()

    def report(self, *, launches: bool = False) -> str:
        """The printed report: chains of each graph, saved bytes of each `memory=`, and calls that were not converted.

        Args:
            launches: whether to compare kernel launches with eager torch also on a CPU, where they matter little.
        """
        paths = paths_of(self.model)
        layers = [paths.get(place, "") for place in self._places]
        about: dict[str, Any] = {"undone": not self._before, "launches": launches}
        text = [text_of(self.graphs, self._calls, self.left, layers, **about)]
        text += [f"{type(self.model).__name__} {_TAKEN_IN}"] * self._taken_in
        ended = [place for place, _ in self._before if _conversion_of(place) is not self]
        text += [f"{type(place).__name__} {_ENDED}" for place in ended]
        text += [
            f"{path}: traced as torch calls; its own plan and fusions are not used"
            for path in _own(self.model, self._places)
        ]
        return "\n".join(text)

    def __repr__(self) -> str:
        undone = "" if self._before else ", undone"
        return f"<Conversion of {type(self.model).__name__}, {counted(len(self.graphs), 'graph')}{undone}>"


def _own(model: nn.Module, places: Iterable[nn.Module]) -> list[str]:
    """Class and path of the outermost operations and sequences of this library in the captured modules."""
    captured = {module for place in places for module in place.modules()}
    found: dict[str, str] = {}
    for path, module in named_modules(model):
        if module in captured and isinstance(module, _OWN) and not any(f"{path}.".startswith(f"{p}.") for p in found):
            found[path] = f"{type(module).__name__} {path}" if path else type(module).__name__
    return list(found.values())


def _call_impl(module: nn.Module) -> Callable[..., Any] | None:
    """The function that replaces the class's implementation of a call, if any."""
    return module._compiled_call_impl  # pyright: ignore


def _frame_of(calls: Calls) -> Callable[..., Any]:
    """The frame that Dynamo captures; not one of torch.nn, since Dynamo skips those.

    Since the module is an argument, layers share a graph. Each conversion has its own code object and name: Dynamo
    stores graphs by code object, up to a limit, and by file, line and name the sizes that differed, which it then makes
    symbolic.
    """

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a constant for Dynamo: only an uncaptured frame gets here
            calls.missed["Dynamo captured nothing for them"] += 1
        return module._call_impl(*args, **kwargs)  # pyright: ignore

    code = call.__code__.replace(co_name=f"call_{next(_frames)}")
    return types.FunctionType(code, call.__globals__, "call", None, call.__closure__)


def _guarded(calls: Calls, compiled: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # During the capture of a larger model or a trace; Dynamo refuses to run under FX tracing, as by `make_fx`.
    traced = torch.compiler.is_compiling() or _tracing() is not None
    if traced or is_fx_symbolic_tracing():  # pyright: ignore[reportPrivateImportUsage]
        if dynamo.compiles_in_another_thread():
            calls.count += 1
            calls.missed["torch was compiling in another thread"] += 1
        return module._call_impl(*args, **kwargs)  # pyright: ignore
    if callable(dynamo.compiler_around()):
        return _alone(calls, compiled, module, *args, **kwargs)
    calls.count += 1
    # Under a transform Dynamo would skip the frame for good. Its guards do not see global module hooks.
    transformed = peek_interpreter_stack() is not None  # pyright: ignore[reportUnnecessaryComparison]
    if transformed or _has_any_global_hook():
        calls.missed["a transform of torch.func was active" if transformed else "hooks of all modules were set"] += 1
        return module._call_impl(*args, **kwargs)  # pyright: ignore
    if calls.failed and calls.failed[_kind(module, args, kwargs)] >= _TRIES:
        calls.missed[f"Dynamo failed to capture {_TRIES} calls like them"] += 1
        return module._call_impl(*args, **kwargs)  # pyright: ignore
    dynamo.mark_growing(kwargs.get("past_key_values"))
    handled = sys.exception()
    outer, call = dynamo.current_call(), ModelCall(module, args, kwargs)
    dynamo.begin(call)
    try:
        return compiled(module, *args, **kwargs)
    except Exception as error:
        if call.ran or not dynamo.is_of_capture(error):
            raise
        call.failures.append(error)
    finally:
        dynamo.begin(outer)
        call.ends()
        calls.meet(call)
        where = "behind a graph break " if call.ran else ""
        failed = {dynamo.first_of(error, handled) for error in call.failures}
        calls.missed.update(f"{where}Dynamo failed to capture them: {first}" for first in failed)
        dynamo.set_back()
    result: Any = module._call_impl(*args, **kwargs)  # pyright: ignore  # raises the model's own error
    calls.failed[_kind(module, args, kwargs)] += 1
    return result  # pyright: ignore


def _conversion_of(module: nn.Module) -> Conversion | None:
    return getattr(_call_impl(module), "conversion", None)


_alone = dynamo.runs_alone(_guarded, _conversion_of)


def _kind(module: nn.Module, args: Sequence[Any], kwargs: Iterable[str]) -> tuple[Any, ...]:
    """The common key of calls that Dynamo most likely captures in the same way."""
    return (id(module), module.training, torch.is_grad_enabled(), len(args), *kwargs)


def compiled_rest(gm: GraphModule) -> Callable[..., Any]:
    """A graph whose parts between regions are compiled by Inductor, each at its first call."""
    from torch.fx.passes.split_module import split_module  # slow to import

    part, of = 0, dict[Node, int]()
    before: bool | None = None
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        here = node.op == "call_module" and isinstance(gm.get_submodule(str(node.target)), CapturedRegion)
        apart = here or is_state(node)
        if before is not None and (apart or before):
            part += 1
        of[node], before = part, apart
    split = split_module(gm, gm, lambda node: of[node])
    for name, child in list(split.named_children()):
        assert isinstance(child, GraphModule)
        calls = [n for n in child.graph.nodes if n.op in ("call_function", "call_method", "call_module")]
        alone = len(calls) == 1 and (calls[0].op == "call_module" or is_state(calls[0]))
        if not alone:
            setattr(split, name, _Compiled(child))
    return split.forward


class _Compiled(torch.nn.Module):
    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self._run = torch.compile(body)  # pyright: ignore[reportUnknownMemberType]

    def forward(self, *args: Any) -> Any:
        return self._run(*args)

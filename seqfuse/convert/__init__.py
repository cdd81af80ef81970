"""Converting existing models: Dynamo captures the forward pass; chains of known operations run through plans."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch import nn

from ..fusion import Fusions
from ..plan import AnyChoice
from ..recipes import Recipe

if TYPE_CHECKING:
    from .capture import Conversion, backend
    from .reasons import Left
    from .report import GraphReport

__all__ = ["Conversion", "GraphReport", "Left", "backend", "conversion", "convert"]

UNQUANTIZED = ("lm_head", "router", "gate", "shared_expert_gate")
"""Names of modules that a recipe excludes by default."""

_LATE = {"Conversion": "capture", "backend": "capture", "GraphReport": "report", "Left": "reasons"}


def convert(
    model: nn.Module,
    *,
    regions: Literal["model", "layers"] = "model",
    then: Literal["inductor"] | None = None,
    fusions: Fusions | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    memory: AnyChoice = "balanced",
    recipe: Recipe | None = None,
    exclude: Sequence[str] = UNQUANTIZED,
) -> Conversion:
    """Convert a model in place: chains of known operations run through fused plans.

    The model remains the same object, with its class, state-dict keys, parameters and hooks. Dynamo captures its
    forward pass at the next call, before autograd. Calls that match an operation of the library run through plans in
    both passes. All other calls run eagerly. Parameters are read in each call, so training, loading, moving, adapters
    and sharding work as before.

    Args:
        model: any `torch.nn.Module`.
        regions: `"model"` captures the whole model, `"layers"` each layer: members with submodules of its `ModuleList`s
            and `Sequential`s, also in nested lists and dicts. Equal layers share one graph, which is faster to capture,
            and Dynamo need not be able to trace the code between layers.
        then: backend of all other calls: `None` (eager) or `"inductor"`.
        fusions: the fusion set; by default `sf.fusions.default`.
        filter_fn: `filter_fn(module, path)`, with a path as in `named_modules`: whether calls of the module, without
            its submodules, may be converted.
        memory: activation memory against time, as in `Sequential`: `"fast"`, `"balanced"`, `"lean"`, `"least"`, or
            `sf.Budget(part=0.3)`, a fraction of the bytes that each chain saves unfused. The default of a `Sequential`
            is `"fast"`; of a converted model it is `"balanced"`, which saves less at nearly the same speed.
        recipe: low-precision recipe of the GEMMs in chains, such as `sf.recipes.Float8BlockScaling()`. Other GEMMs,
            listed in the report as left, are not quantized.
        exclude: modules that are not quantized, as paths or names in paths, such as `"lm_head"` or `"layers.0"`; by
            default the output layer and routers of experts. If Linears are merged into one GEMM, excluding one excludes
            all. With `regions="layers"` it must be the same for equal layers. An unknown name is a warning.

    Returns:
        The conversion. `print` it after a call; `undo()` reverts it; `conversion(model)` returns it again.

    Raises:
        InputError: (SF106) if `model` is not a module, has no forward, is already converted, contains a `DataParallel`
            over several devices, or has no layers for `"layers"`, for an unknown recipe, and if `exclude` differs
            between equal layers; (SF108) if a strict recipe does not fit a Linear of the model, or the device has no
            kernels for it.
    """
    from .capture import start  # imported here, since its torch modules take long to import

    return start(model, regions, filter_fn, fusions=fusions, memory=memory, then=then, recipe=recipe, exclude=exclude)


def conversion(model: nn.Module) -> Conversion:
    """The conversion of a converted model, to print or undo it.

    Args:
        model: the model, or one of the layers that `regions="layers"` converted.

    Raises:
        InputError: (SF106) for a model that is not converted, or only as a submodule.
    """
    from .capture import find

    return find(model)


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

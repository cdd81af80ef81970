"""Converting existing models: Dynamo captures the forward pass, chains of known operations run through plans."""

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
"""Names of modules that a recipe leaves as they are by default."""

_LATE = {"Conversion": "capture", "backend": "capture", "GraphReport": "report", "Left": "reasons"}


def convert(
    model: nn.Module,
    *,
    regions: Literal["model", "layers"] = "model",
    then: Literal["inductor"] | None = None,
    fusions: Fusions | None = None,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    memory: AnyChoice = "fast",
    recipe: Recipe | None = None,
    exclude: Sequence[str] = UNQUANTIZED,
) -> Conversion:
    """Run a model's chains of known operations through fused plans, in place.

    The model stays the object that it is, of its class, with its keys, parameters and hooks. Dynamo captures its
    forward pass at the next call, before autograd; what the library has operations for (in the spellings of torch and
    of Hugging Face) runs through plans, with their backward passes; everything else runs as it did. Parameters are read
    in each call: training, loading, moving, adapters and sharding go on as before.

    Args:
        model: any `torch.nn.Module`.
        regions: `"model"` captures the model as a whole; `"layers"` each of its layers, which are the members of its
            `ModuleList`s and `Sequential`s that have submodules of their own, and the members of lists and dicts among
            these. Layers that are alike share one graph, so that is quicker to capture, and code between the layers
            that Dynamo cannot trace does no harm.
        then: what runs the rest: `None`, as before, or `"inductor"`.
        fusions: the fusion set; the default one if left out.
        filter_fn: says of a module and its path, as `named_modules` has them, whether its own calls may be converted.
        memory: what the chains save for the backward pass, at the price of time, as of a `Sequential`: `"fast"`, what
            makes it fastest, `"balanced"`, `"lean"`, `"least"`, or `sf.Budget(part=0.3)`: each chain holds at most this
            part of what it saves unfused.
        recipe: how the operands of GEMMs in chains are quantized, such as `sf.recipes.Float8BlockScaling()`. GEMMs that
            no chain has, which the report names as left, are not quantized.
        exclude: modules that are not quantized: their paths, or names in these, such as `"lm_head"` or `"layers.0"`. By
            default the output layer and what routes tokens to experts. Where Linears are merged into one GEMM, one
            of them excludes all. With `regions="layers"` the same in all layers that are alike, which share a graph. A
            name that no module has is warned of.

    Returns:
        The conversion: `print` it after a call, `undo()` ends it. `conversion(model)` returns it again.

    Raises:
        InputError: (SF106) for what is no module, is converted already or has no repeated layers to convert, for
            another recipe, and for `exclude` that differs between layers that share a graph; (SF108) where a strict
            recipe does not fit a Linear of the model, or its device has no kernels for the recipe.
    """
    from .capture import start  # here, because what it needs of torch takes long to import

    return start(model, regions, filter_fn, fusions=fusions, memory=memory, then=then, recipe=recipe, exclude=exclude)


def conversion(model: nn.Module) -> Conversion:
    """The conversion of a model that `convert` was given, to print it or to undo it.

    Args:
        model: the model, or one of the layers that `regions="layers"` converted.

    Raises:
        InputError: (SF106) for a model that is not converted, or only as a part of a larger one.
    """
    from .capture import find

    return find(model)


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(f".{_LATE[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

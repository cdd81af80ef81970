"""Fused training kernels for PyTorch that you can read, extend and switch off.

`convert(model)` runs your model with fused forward and backward plans. Print its result after a call.
`Sequential(*operations)` does the same for a model built from `ops`. Print its `plan(x)`. Layers are in `nn`, losses in
`losses`. `memory="lean"` saves less for the backward pass, `fusing(False)` switches fusions off, and `tune` measures
them. `recipes` quantize GEMMs to 8 bits. Subclass `Pointwise`, `UnfusedOperation` and the classes named `...Fusion` to
add operations and fusions. `testing` tests them.
"""

import importlib
import typing

try:
    import torch as _torch  # noqa: F401  # pyright: ignore[reportUnusedImport]  # said here in one sentence, and not by the first file that needs it
except ModuleNotFoundError as _missing:
    if _missing.name != "torch":
        raise
    raise ModuleNotFoundError(
        "seqfuse needs PyTorch 2.11 or later: pip install 'torch>=2.11', or choose a build at https://pytorch.org",
        name="torch",
    ) from None

from . import errors, fusions, ops, plugins, recipes
from .convert import conversion, convert
from .env import Env, Savings
from .errors import (
    CacheWarning,
    FallbackWarning,
    InputError,
    KernelError,
    PlanError,
    PluginError,
    RangeError,
    SeqfuseError,
    StateError,
)
from .errors import no_such_name as _no_such_name
from .fusion import BackwardFusion, ForwardFusion, FusedOperation, InferenceFusion, JointFusion, Requirements
from .maingrad import accumulated
from .operation import FusableOperation, Grads, Traffic, UnfusedOperation
from .plan import Budget, Plan
from .pointwise import Gated, Pointwise
from .recipes import low_precision
from .run import Fuser, Sequential, remap_keys
from .saved import Recompute, Saved, field
from .scaling import update_scales
from .settings import fusing
from .tune import tune

if typing.TYPE_CHECKING:
    from . import inference, losses, nn, testing

__version__ = "0.2.0"
__all__ = [
    "BackwardFusion",
    "Budget",
    "CacheWarning",
    "Env",
    "FallbackWarning",
    "ForwardFusion",
    "FusableOperation",
    "FusedOperation",
    "Fuser",
    "Gated",
    "Grads",
    "InferenceFusion",
    "InputError",
    "JointFusion",
    "KernelError",
    "Plan",
    "PlanError",
    "PluginError",
    "Pointwise",
    "RangeError",
    "Recompute",
    "Requirements",
    "Saved",
    "Savings",
    "SeqfuseError",
    "Sequential",
    "StateError",
    "Traffic",
    "UnfusedOperation",
    "accumulated",
    "conversion",
    "convert",
    "errors",
    "field",
    "fusing",
    "fusions",
    "inference",
    "losses",
    "low_precision",
    "nn",
    "ops",
    "plugins",
    "recipes",
    "remap_keys",
    "testing",
    "tune",
    "update_scales",
]

_LATE = ("inference", "losses", "nn", "testing")  # imported when first asked for: not everybody needs them


def __getattr__(name: str) -> typing.Any:
    if name in _LATE:
        return importlib.import_module(f".{name}", __name__)
    places: list[tuple[str, list[str]]] = [("sf", __all__), ("sf.ops", ops.__all__)]
    if not name.startswith("_"):
        late = ((room, importlib.import_module(f".{room}", __name__)) for room in ("nn", "losses", "testing"))
        places += [(f"sf.{room}", module.__all__) for room, module in late]
    raise _no_such_name(__name__, name, *places)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

"""seqfuse: small operations in, fused kernels out."""

from . import errors, fusions, inference, losses, nn, ops, plugins, testing
from .env import Env, Savings, fusing
from .errors import (
    CacheWarning,
    FallbackWarning,
    InputError,
    KernelError,
    PlanError,
    PluginError,
    SeqfuseError,
    StateError,
)
from .fuser import Fuser, Plan, Sequential, remap_keys
from .fusion import BackwardFusion, ForwardFusion, FusedOperation, InferenceFusion, JointFusion, Requirements
from .maingrad import accumulated
from .operation import FusableOperation, Gated, Grads, Pointwise, UnfusedOperation
from .saved import Recompute, Saved, field
from .tune import tune

Sequential.default_fusions = fusions.default

__version__ = "0.1.0.dev0"
__all__ = [
    "BackwardFusion",
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
    "Recompute",
    "Requirements",
    "Saved",
    "Savings",
    "SeqfuseError",
    "Sequential",
    "StateError",
    "UnfusedOperation",
    "accumulated",
    "errors",
    "field",
    "fusing",
    "fusions",
    "inference",
    "losses",
    "nn",
    "ops",
    "plugins",
    "remap_keys",
    "testing",
    "tune",
]

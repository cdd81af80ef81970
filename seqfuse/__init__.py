"""seqfuse: small operations in, fused kernels out."""

from . import errors, fusions, ops, plugins, testing
from .env import Env, Savings, fusing
from .errors import CacheWarning, FallbackWarning, InputError, KernelError, PlanError, PluginError, SeqfuseError, StateError
from .fuser import Fuser, Plan, Sequential
from .fusion import BackwardFusion, ForwardFusion, FusedOperation, InferenceFusion, JointFusion, Requirements
from .operation import FusableOperation, Gated, Grads, Pointwise, UnfusedOperation
from .saved import Recompute, Saved, field

Sequential.default_fusions = fusions.default

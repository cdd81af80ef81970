"""The fusions, by family: one class per pattern and pass. A `Sequential` uses `default`.

To add a fusion, write its class in the file of its family, import it here, and list it, with the reason, in `triton`,
`aten` or `lean`. Schedules are chosen by cost; the order of these tuples only breaks ties.
"""

from ..fusion import FusedOperation
from .boundary import (
    BlockBoundary,
    BlockBoundaryActivation,
    BlockBoundaryBackward,
    UnpermuteBoundary,
    UnpermuteBoundaryBackward,
)
from .chain import (
    BiasDropoutAdd,
    BiasDropoutAddBackward,
    LinearBiasPointwise,
    PointwiseChain,
    PointwiseChainBackward,
    PointwiseChainJoint,
)
from .experts import (
    GatedGroupedLinearUnpermute,
    GatedGroupedLinearUnpermuteBoundary,
    GatherGroupedLinear,
    PermuteGroupedLinear,
    RecomputeGatedGroupedLinearUnpermute,
)
from .feedforward import ActivationLinearJoint
from .gated import BiasGated, BiasGatedBackward, BiasGatedScale
from .heads import (
    BiasQKNorm,
    BiasQKNormBackward,
    BiasQKNormRotary,
    BiasQKNormRotaryAttention,
    BiasQKNormRotaryBackward,
)
from .linear import (
    AllReduceLinearBackward,
    BackwardLinearAdd,
    BackwardLinearScale,
    BackwardMergedLinearAdd,
    ForwardLinearScaleAdd,
    LinearBias,
    LinearBiasAct,
    LinearBiasActOneDNN,
    LinearBiasAdd,
    LinearBiasBackward,
    LinearBiasGeLU,
    ScaleAdd,
)
from .norm import (
    NormActivationJoint,
    NormBackward,
    NormForward,
)
from .recompute import RecomputeActivation, RecomputeHeads, RecomputeNorm

aten: tuple[type[FusedOperation], ...] = (
    LinearBiasActOneDNN,  # without gradients, for a large GEMM: bias and activation inside it
    LinearBiasGeLU,  # without gradients: bias and GeLU in the GEMM's epilogue on a GPU, in place on a CPU
    LinearBiasAct,  # the activation in place, which saves a tensor; on a GPU bias and ReLU in the GEMM's epilogue
    LinearBiasAdd,  # the residual sum in place, which saves a tensor
    LinearBias,  # a GEMM that starts from the bias, instead of a GEMM and a pass over its output
    ForwardLinearScaleAdd,  # factor and sum in the GEMM, instead of one or two passes after it
    ScaleAdd,  # one pass instead of two
    AllReduceLinearBackward,  # the all-reduce of dx over processes is sent while dweight is computed
    BackwardLinearAdd,  # the GEMM that computes dx also adds the gradient of the Fork's branch
    BackwardMergedLinearAdd,  # the same with several weights
    BackwardLinearScale,  # the factor of a Scale in the GEMMs, instead of a pass over the gradient
    LinearBiasBackward,  # the same kernels, in one step of the engine instead of two
)
"""Fusions of ATen calls, on any device, without Triton or a C compiler.

If its requirements hold, none is slower than the operations that it replaces. ATen cannot add and normalize in one
pass, or compute the gradients of an activation and the bias before it in one pass: see `triton`.
"""

triton: tuple[type[FusedOperation], ...] = (
    LinearBiasPointwise,  # torch's GEMM with the bias in its epilogue, then an activation in one pass
    BiasGated,  # a bias and a gated unit in one pass
    BiasGatedScale,  # bias, gated unit and a factor per token in one pass; saves only x
    BiasDropoutAdd,  # bias, dropout and residual sum in one pass
    GatherGroupedLinear,  # the first GEMM of experts gathers tokens by index; they are never sorted
    GatedGroupedLinearUnpermute,  # factors of experts before the second GEMM, whose output is not saved
    GatedGroupedLinearUnpermuteBoundary,  # the same with the residual sum and the norm after the experts
    BiasGatedBackward,  # gradients of a bias and a gated unit in one pass
    BiasDropoutAddBackward,  # gradients of bias, dropout and residual sum in one pass
    BlockBoundary,  # bias, dropout, residual sum and norm in one pass; stores no mask, writes the residual stream once
    BlockBoundaryActivation,  # the same with up to eight activations and factors after the norm
    NormActivationJoint,  # a norm and up to eight activations and factors; neither writes nor saves the norm's output
    BlockBoundaryBackward,  # the backward of a block's boundary in one pass
    UnpermuteBoundary,  # the sum over a token's experts, the residual sum and the norm in one pass
    UnpermuteBoundaryBackward,  # their gradients in one pass
    NormForward,  # a norm with a gain of 1 + weight or in another dtype, for which ATen copies x to float32
    NormBackward,  # adds the gradient of the residual stream, and reads x once for dx and all sums over tokens
    PointwiseChain,  # two to nine activations, factors, biases and dropouts in one pass
    PointwiseChainJoint,  # saves only the input of the first of several consecutive activations
    PointwiseChainBackward,  # their gradients in one pass
    BiasQKNormRotaryAttention,  # all of this and attention; in decoding one kernel also writes the KV cache
    BiasQKNormRotary,  # bias, norm of heads and RoPE between the QKV GEMM and attention, in one pass
    BiasQKNorm,  # the same without RoPE
    BiasQKNormRotaryBackward,  # their gradients in one pass
    BiasQKNormBackward,  # their gradients in one pass
)
"""Fusions with Triton kernels, many of which have C kernels for CPUs; not applied if neither can run."""

lean: tuple[type[FusedOperation], ...] = (
    ActivationLinearJoint,  # of an activation and a GEMM, saves the pre-activation; torch's own GEMMs
    PermuteGroupedLinear,  # saves the tokens unsorted, and sorts them by expert again
    RecomputeGatedGroupedLinearUnpermute,  # recomputes a gated unit of experts and its factors
    RecomputeHeads,  # recomputes queries, keys and values: a norm and a GEMM in the backward pass
    RecomputeNorm,  # recomputes the output of the norm before a GEMM
    RecomputeActivation,  # recomputes the output of the activation before a GEMM
)
"""Fusions that save less for backward and take longer; the last three call the `fwd` and `bwd` of the operations.

They are used if `memory=` saves memory, as in `Sequential(..., memory="lean")`.
"""

default: tuple[type[FusedOperation], ...] = (*triton, *aten, *lean)
"""The fusion set of a `Sequential` by default: `(*triton, *aten, *lean)`."""

# Computed, so that each fusion is named once, in its tuple. Type checkers cannot evaluate this.
_names = sorted(fusion.__name__ for fusion in default)
__all__ = [*_names, "aten", "default", "lean", "triton"]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]

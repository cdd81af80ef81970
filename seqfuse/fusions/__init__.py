"""The fusions: one file for one pattern, forward and backward. `default` is what a `Sequential` uses.

To add one: write its file, import it here, and give it a line, with the reason, in `triton`, `aten` or `lean`. The plan
is chosen by cost; the order of these tuples decides only between schedules of equal cost.
"""

from ..fusion import FusedOperation
from .activation_linear import ActivationLinearBackward as ActivationLinearBackward
from .activation_linear import ActivationLinearJoint as ActivationLinearJoint
from .all_reduce_linear import AllReduceLinearBackward as AllReduceLinearBackward
from .backward_linear_add import BackwardLinearAdd as BackwardLinearAdd
from .bias_dropout_add import BiasDropoutAdd as BiasDropoutAdd
from .bias_dropout_add import BiasDropoutAddBackward as BiasDropoutAddBackward
from .bias_gated import BiasGated as BiasGated
from .bias_gated import BiasGatedBackward as BiasGatedBackward
from .bias_qk_norm_rotary import BiasQKNorm as BiasQKNorm
from .bias_qk_norm_rotary import BiasQKNormBackward as BiasQKNormBackward
from .bias_qk_norm_rotary import BiasQKNormRotary as BiasQKNormRotary
from .bias_qk_norm_rotary import BiasQKNormRotaryBackward as BiasQKNormRotaryBackward
from .bias_qk_norm_rotary_attention import BiasQKNormRotaryAttention as BiasQKNormRotaryAttention
from .block_boundary import BlockBoundary as BlockBoundary
from .block_boundary import BlockBoundaryBackward as BlockBoundaryBackward
from .block_boundary_activation import BlockBoundaryActivation as BlockBoundaryActivation
from .block_end import BlockEndBackward as BlockEndBackward
from .linear_activation_linear import LinearActivationLinear as LinearActivationLinear
from .linear_bias import LinearBias as LinearBias
from .linear_bias import LinearBiasBackward as LinearBiasBackward
from .linear_bias import LinearBiasBackwardTriton as LinearBiasBackwardTriton
from .linear_bias_activation import LinearBiasAct as LinearBiasAct
from .linear_bias_activation import LinearBiasActivation as LinearBiasActivation
from .linear_bias_activation import LinearBiasActOneDNN as LinearBiasActOneDNN
from .linear_bias_activation import LinearBiasGeLU as LinearBiasGeLU
from .linear_bias_add import LinearBiasAdd as LinearBiasAdd
from .linear_bias_dropout_add import LinearBiasDropoutAdd as LinearBiasDropoutAdd
from .linear_bias_pointwise import LinearBiasPointwise as LinearBiasPointwise
from .linear_scale import BackwardLinearScale as BackwardLinearScale
from .linear_scale import ForwardLinearScaleAdd as ForwardLinearScaleAdd
from .merged_linear import BackwardMergedLinearAdd as BackwardMergedLinearAdd
from .merged_linear import MergedLinearGated as MergedLinearGated
from .norm import NormBackward as NormBackward
from .norm import NormForward as NormForward
from .norm_activation import NormActivation as NormActivation
from .norm_activation import NormActivationJoint as NormActivationJoint
from .norm_linear_activation_linear import NormLinearActivationLinear as NormLinearActivationLinear
from .pointwise_chain import PointwiseChain as PointwiseChain
from .pointwise_chain import PointwiseChainBackward as PointwiseChainBackward
from .pointwise_chain import PointwiseChainJoint as PointwiseChainJoint
from .recompute import RecomputeActivation as RecomputeActivation
from .recompute import RecomputeHeads as RecomputeHeads
from .recompute import RecomputeNorm as RecomputeNorm
from .scale_add import ScaleAdd as ScaleAdd

aten: tuple[type[FusedOperation], ...] = (
    LinearBiasActOneDNN,  # without gradients, for a large GEMM: bias and activation inside it
    LinearBiasGeLU,  # without gradients: bias and GeLU in the GEMM's epilogue on a GPU, in place on a CPU
    LinearBiasAct,  # the activation in place, which saves a tensor; on a GPU bias and ReLU in the GEMM's epilogue
    LinearBiasAdd,  # the residual sum in place, which saves a tensor
    LinearBias,  # a GEMM that starts from the bias, instead of a GEMM and a pass over its output
    ForwardLinearScaleAdd,  # factor and sum in the GEMM, instead of one or two passes behind it
    ScaleAdd,  # one pass instead of two
    AllReduceLinearBackward,  # the sum of dx over several processes is sent while dweight is computed
    BackwardLinearAdd,  # the GEMM that computes dx adds to the gradient that arrives at the Fork before it
    BackwardMergedLinearAdd,  # the same of several weights
    BackwardLinearScale,  # the factor of a Scale in the GEMMs, instead of a pass over the gradient
    LinearBiasBackward,  # the same kernels, one step of the engine instead of two
)
"""Fusions made of ATen calls; they apply on any device, without Triton or a C compiler.

Each is not slower than the operations it replaces where its requirements hold, as `benchmarks/bench_aten.py` measures,
paired and interleaved. ATen has nothing for add and norm in one pass, or for a backward that computes the gradient of a
bias or an activation inside a GEMM: those are in `triton`.
"""

triton: tuple[type[FusedOperation], ...] = (
    LinearBiasActivation,  # an activation or a gated unit, and a dropout, in the GEMM's epilogue
    MergedLinearGated,  # a gated unit in the epilogue of one GEMM that reads the weights of gate and up
    LinearBiasDropoutAdd,  # dropout and the residual sum in the GEMM's epilogue
    LinearBiasPointwise,  # torch's GEMM with the bias in its epilogue, and an activation in one pass behind it
    BiasGated,  # a bias and a gated unit in one pass
    BiasDropoutAdd,  # bias, dropout and residual sum in one pass
    BlockEndBackward,  # the next, with the gradients of the bias, dropout and residual sum that end a block
    ActivationLinearBackward,  # gradients of an activation or a gated unit and its bias, in the GEMM that computes dx
    LinearBiasBackwardTriton,  # the bias's gradient in the GEMM that computes dweight, where that is small enough
    BiasGatedBackward,  # gradients of a bias and a gated unit in one pass
    BiasDropoutAddBackward,  # gradients of bias, dropout and residual sum in one pass
    BlockBoundary,  # bias, dropout, residual sum and norm in one pass; stores no mask, writes the residual stream once
    BlockBoundaryActivation,  # the same with up to eight activations and factors after the norm
    NormActivationJoint,  # a norm and up to eight activations and factors; neither writes nor saves the norm's output
    NormActivation,  # a norm and an activation in one pass; does not write the norm's output
    BlockBoundaryBackward,  # the backward of a block's boundary in one pass
    NormForward,  # a norm with a gain of 1 + weight or in another dtype, for which ATen copies x to float32
    NormBackward,  # adds the gradient of the residual stream, and reads x once for dx and all sums over tokens
    PointwiseChain,  # two to nine activations, factors, biases and dropouts in one pass
    PointwiseChainJoint,  # of activations side by side saves only the input of the first
    PointwiseChainBackward,  # their gradients in one pass
    BiasQKNormRotaryAttention,  # the next with attention; a step of decoding writes its keys and values too
    BiasQKNormRotary,  # bias, norm of heads and RoPE between the QKV GEMM and attention, in one pass
    BiasQKNorm,  # the same without RoPE
    BiasQKNormRotaryBackward,  # their gradients in one pass
    BiasQKNormBackward,  # their gradients in one pass
)
"""Fusions made of Triton kernels, many of which a CPU runs as C; not applied where none runs, not yet run on a GPU."""

lean: tuple[type[FusedOperation], ...] = (
    NormLinearActivationLinear,  # of a whole feed-forward block saves its input and the pre-activation
    LinearActivationLinear,  # of two GEMMs and an activation between them saves the pre-activation
    ActivationLinearJoint,  # of an activation and a GEMM saves the pre-activation; torch's own GEMMs
    RecomputeHeads,  # makes queries, keys and values again: a norm and a GEMM in the backward pass
    RecomputeNorm,  # makes what the norm before a GEMM gave again
    RecomputeActivation,  # makes what the activation before a GEMM gave again
)
"""Fusions that save less for the backward pass and take longer; the last three are made of the operations' own calls.

They are candidates where a `Sequential` is to save memory: `Sequential(..., memory="lean")`, or another choice.
"""

default: tuple[type[FusedOperation], ...] = (*triton, *aten, *lean)
"""What a `Sequential` uses unless told otherwise: `(*triton, *aten, *lean)`."""

# Computed, so that a fusion is named once, in its tuple: a checker cannot read that.
_names = sorted(fusion.__name__ for fusion in default)
__all__ = [*_names, "aten", "default", "lean", "triton"]  # noqa: PLE0604  # pyright: ignore[reportUnsupportedDunderAll]

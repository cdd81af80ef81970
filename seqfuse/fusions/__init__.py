"""The fusions: one file each, one substitution each. `default` is what a `Sequential` uses unless told otherwise.

`default` is `triton`, then `aten`: which cover wins is decided by cost, and the order only between equals.

None of `aten` needs Triton. Each is there because ATen offers the substitution and it is not slower than what it
replaces where its requirements hold, as `benchmarks/bench_aten.py` measures it, paired and interleaved:

* `LinearBias`: a product that starts from the bias, in place of a product and a pass over its output.
* `LinearBiasAct`, `LinearBiasAdd`: the activation or the residual sum in place of the product, which saves a tensor.
* `ScaleAdd`: one pass in place of two.
* `LinearBiasBackward`: the same kernels, one step of the engine in place of two.
* `AllReduceLinearBackward`: the sum of dx over several processes is sent while dweight is made.
* `LinearBiasActOneDNN`: where nothing needs a gradient and the product is large enough, bias and activation inside it.

ATen has nothing for add and norm in one pass, or for a backward that makes a bias gradient or an activation's gradient
inside a product. Those are in `triton`, made of Triton kernels, which have not yet run on a GPU; where no Triton kernel
can run they are refused. `Sequential(..., fusions=fusions.aten)` does without them.

* `LinearBiasActivation`, `LinearBiasActivationInference`: the activation in the product's epilogue, and a dropout after
  it; in training the pre-activation is stored where the activation's gradient reads it.
* `WideLinearActivationLinear`: of two products and what is between them only the pre-activation is kept, where they are
  so wide that writing the activation again, inside a product of the backward pass, takes next to no time.
* `LinearGated`, `LinearGatedInference`: a gated unit there, from two accumulators, and a dropout after it.
* `LinearBiasDropoutAdd`: dropout and the residual sum there.
* `ActivationLinearBackward`, `GatedLinearBackward`: the gradients of the activation, or the gated unit, and of the bias
  before it in the product that makes dx.
* `LinearBiasBackwardTriton`: a bias's gradient in the product that makes the weight's, where that is small enough.
* `BlockEndBackward`: these with the bias, dropout and residual sum after the product, at the end of a block.
* `BiasActivation`, `BiasActivationInference`, `BiasActivationBackward`: one pass each way, for products better left to
  torch.
* `BiasDropoutAdd`, `BiasDropoutAddBackward`: the same of dropout between a bias and a residual sum.
* `BiasGated`, `BiasGatedBackward`: the same of a gated unit.
* `BlockBoundary`, `BlockBoundaryBackward`: bias, dropout, residual sum and norm in one pass each way; the residual
  stream is written once and no mask is stored.
* `NormActivationJoint`, `NormActivation`: the norm's result is not written; the first does not keep it either, and
  takes up to eight activations and factors.
* `BlockBoundaryActivation`: a block's boundary and the activations and factors after its norm, likewise.
* `BiasQKNormRotary`, `BiasQKNorm`, `BiasQKNormRotaryInference`, `BiasQKNormRotaryBackward`, `BiasQKNormBackward`: what
  stands between the product that makes queries, keys and values and attention: bias, norm of heads, rotation.
* `BiasQKNormRotaryAttention`: the same with attention behind it; a step of decoding writes its row into the cache in
  the same pass.
* `NormBackward`: the gradient of the residual stream in the norm's backward, and all sums over rows in the same pass.
* `NormForward`: a norm of a half input by a gain of 1 + weight or in another dtype, which ATen copies to float32.
* `PointwiseChain`, `PointwiseChainInference`, `PointwiseChainBackward`: two to nine activations, factors, biases and
  dropouts in one pass each way; `PointwiseChainJoint`: of activations side by side only what the first takes is kept.

In `lean` are those that keep less for the backward pass and take longer, for whoever asks for them:
`Sequential(..., fusions=(*fusions.lean, *fusions.default))`.

* `LinearActivationLinear`: of two products and what is between them only the pre-activation, however narrow they are.
* `NormLinearActivationLinear`: of a whole feed-forward block its input and the pre-activation.
"""

from ..fusion import FusedOperation
from .activationlinear import ActivationLinearBackward
from .allreducelinear import AllReduceLinearBackward
from .biasactivation import BiasActivation, BiasActivationBackward, BiasActivationInference
from .biasdropoutadd import BiasDropoutAdd, BiasDropoutAddBackward
from .biasgated import BiasGated, BiasGatedBackward
from .biasqknormrotary import (
    BiasQKNorm,
    BiasQKNormBackward,
    BiasQKNormRotary,
    BiasQKNormRotaryBackward,
    BiasQKNormRotaryInference,
)
from .biasqknormrotaryattention import BiasQKNormRotaryAttention
from .blockboundary import BlockBoundary, BlockBoundaryBackward
from .blockboundaryactivation import BlockBoundaryActivation
from .blockend import BlockEndBackward
from .gatedlinear import GatedLinearBackward
from .linearactivationlinear import LinearActivationLinear, WideLinearActivationLinear
from .linearbias import LinearBias, LinearBiasBackward
from .linearbias_triton import LinearBiasBackwardTriton
from .linearbiasact import LinearBiasAct
from .linearbiasact_onednn import LinearBiasActOneDNN
from .linearbiasactivation import LinearBiasActivation, LinearBiasActivationInference
from .linearbiasadd import LinearBiasAdd
from .linearbiasdropoutadd import LinearBiasDropoutAdd
from .lineargated import LinearGated, LinearGatedInference
from .normactivation import NormActivation, NormActivationJoint
from .normbackward import NormBackward
from .normforward import NormForward
from .normlinearactivationlinear import NormLinearActivationLinear
from .pointwisechain import PointwiseChain, PointwiseChainBackward, PointwiseChainInference, PointwiseChainJoint
from .scaleadd import ScaleAdd

aten: tuple[type[FusedOperation], ...] = (
    LinearBiasActOneDNN,
    LinearBiasAct,
    LinearBiasAdd,
    LinearBias,
    ScaleAdd,
    AllReduceLinearBackward,
    LinearBiasBackward,
)
"""Fusions made of calls of ATen; they apply on any device, without Triton."""

triton: tuple[type[FusedOperation], ...] = (
    LinearBiasActivationInference,
    LinearGatedInference,
    BiasActivationInference,
    WideLinearActivationLinear,
    LinearBiasActivation,
    LinearGated,
    LinearBiasDropoutAdd,
    BiasActivation,
    BiasGated,
    BiasDropoutAdd,
    BlockEndBackward,
    ActivationLinearBackward,
    LinearBiasBackwardTriton,
    GatedLinearBackward,
    BiasActivationBackward,
    BiasGatedBackward,
    BiasDropoutAddBackward,
    BlockBoundary,
    BlockBoundaryActivation,
    NormActivationJoint,
    NormActivation,
    BlockBoundaryBackward,
    NormForward,
    NormBackward,
    PointwiseChainInference,
    PointwiseChainJoint,
    PointwiseChain,
    PointwiseChainBackward,
    BiasQKNormRotaryAttention,
    BiasQKNormRotaryInference,
    BiasQKNormRotary,
    BiasQKNorm,
    BiasQKNormRotaryBackward,
    BiasQKNormBackward,
)
"""Fusions made of Triton kernels, refused where none can run; not yet run on a GPU."""

lean: tuple[type[FusedOperation], ...] = (NormLinearActivationLinear, LinearActivationLinear)
"""Fusions that keep less for the backward pass and take longer, for whoever asks for them."""

default: tuple[type[FusedOperation], ...] = (*triton, *aten)
"""What a `Sequential` uses unless told otherwise: `(*triton, *aten)`."""

__all__ = [
    "ActivationLinearBackward",
    "AllReduceLinearBackward",
    "BiasActivation",
    "BiasActivationBackward",
    "BiasActivationInference",
    "BiasDropoutAdd",
    "BiasDropoutAddBackward",
    "BiasGated",
    "BiasGatedBackward",
    "BiasQKNorm",
    "BiasQKNormBackward",
    "BiasQKNormRotary",
    "BiasQKNormRotaryAttention",
    "BiasQKNormRotaryBackward",
    "BiasQKNormRotaryInference",
    "BlockBoundary",
    "BlockBoundaryActivation",
    "BlockBoundaryBackward",
    "BlockEndBackward",
    "GatedLinearBackward",
    "LinearActivationLinear",
    "LinearBias",
    "LinearBiasAct",
    "LinearBiasActOneDNN",
    "LinearBiasActivation",
    "LinearBiasActivationInference",
    "LinearBiasAdd",
    "LinearBiasBackward",
    "LinearBiasBackwardTriton",
    "LinearBiasDropoutAdd",
    "LinearGated",
    "LinearGatedInference",
    "NormActivation",
    "NormActivationJoint",
    "NormBackward",
    "NormForward",
    "NormLinearActivationLinear",
    "PointwiseChain",
    "PointwiseChainBackward",
    "PointwiseChainInference",
    "PointwiseChainJoint",
    "ScaleAdd",
    "WideLinearActivationLinear",
    "aten",
    "default",
    "lean",
    "triton",
]

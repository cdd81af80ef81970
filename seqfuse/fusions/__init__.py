"""The fusions: one file each, one substitution each. `default` is what a `Sequential` uses unless told otherwise.

None of these needs Triton. Each is here because ATen offers the substitution and it is not slower than what it
replaces where its requirements hold, as `benchmarks/bench_aten.py` measures it, paired and interleaved:

* `LinearBias`: a product that starts from the bias, in place of a product and a pass over its output.
* `LinearBiasAct`, `LinearBiasAdd`: the activation or the residual sum in place of the product, which saves a tensor.
* `ScaleAdd`: one pass in place of two.
* `LinearBiasBackward`: the same kernels, one step of the engine in place of two.
* `LinearBiasActOneDNN`: where nothing needs a gradient and the product is large enough, bias and activation inside it.

Not among these, because ATen has nothing for them: add and norm in one pass, and any backward that makes a bias
gradient or an activation's gradient inside a product. Those are in `triton`, made of Triton kernels, which have not yet
run on a GPU: `Sequential(..., fusions=(*fusions.triton, *fusions.default))`.

* `LinearBiasActivation`, `LinearBiasActivationInference`: the activation in the product's epilogue; in training the
  pre-activation is stored where the activation's gradient reads it.
* `LinearGated`, `LinearGatedInference`: a gated unit there, from two accumulators.
* `LinearBiasDropoutAdd`: dropout and the residual sum there.
* `ActivationLinearBackward`, `GatedLinearBackward`: the gradients of the activation, or the gated unit, and of the bias
  before it in the product that makes dx.
* `BiasActivation`, `BiasActivationInference`, `BiasActivationBackward`: one pass each way, for products better left to
  torch.
* `BiasDropoutAdd`, `BiasDropoutAddBackward`: the same of dropout between a bias and a residual sum.
* `BiasGated`, `BiasGatedBackward`: the same of a gated unit.
* `BlockBoundary`, `BiasDropoutAddNorm`, `BlockBoundaryBackward`: bias, dropout, residual sum and norm in one pass each
  way; the residual stream is written once and no mask is stored.
* `NormActivationJoint`, `NormActivation`: the norm's result is not written; the first does not keep it either.
* `BiasQKNormRotary`, `BiasQKNorm`, `BiasQKNormRotaryInference`, `BiasQKNormRotaryBackward`, `BiasQKNormBackward`: what
  stands between the product that makes queries, keys and values and attention: bias, norm of heads, rotation.
* `NormBackward`: the gradient of the residual stream in the norm's backward, and all sums over rows in the same pass.
* `NormForward`: a norm of a half input by a gain of 1 + weight or in another dtype, which ATen copies to float32.
"""

from ..fusion import FusedOperation
from .activationlinear import ActivationLinearBackward
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
from .blockboundary import BiasDropoutAddNorm, BlockBoundary, BlockBoundaryBackward
from .gatedlinear import GatedLinearBackward
from .linearbias import LinearBias, LinearBiasBackward
from .linearbiasact import LinearBiasAct
from .linearbiasact_onednn import LinearBiasActOneDNN
from .linearbiasactivation import LinearBiasActivation, LinearBiasActivationInference
from .linearbiasadd import LinearBiasAdd
from .linearbiasdropoutadd import LinearBiasDropoutAdd
from .lineargated import LinearGated, LinearGatedInference
from .normactivation import NormActivation, NormActivationJoint
from .normbackward import NormBackward
from .normforward import NormForward
from .scaleadd import ScaleAdd

default: tuple[type[FusedOperation], ...] = (
    LinearBiasActOneDNN,
    LinearBiasAct,
    LinearBiasAdd,
    LinearBias,
    ScaleAdd,
    LinearBiasBackward,
)

triton: tuple[type[FusedOperation], ...] = (
    LinearBiasActivationInference,
    LinearGatedInference,
    BiasActivationInference,
    LinearBiasActivation,
    LinearGated,
    LinearBiasDropoutAdd,
    BiasActivation,
    BiasGated,
    BiasDropoutAdd,
    ActivationLinearBackward,
    GatedLinearBackward,
    BiasActivationBackward,
    BiasGatedBackward,
    BiasDropoutAddBackward,
    BlockBoundary,
    BiasDropoutAddNorm,
    NormActivationJoint,
    NormActivation,
    BlockBoundaryBackward,
    NormForward,
    NormBackward,
    BiasQKNormRotaryInference,
    BiasQKNormRotary,
    BiasQKNorm,
    BiasQKNormRotaryBackward,
    BiasQKNormBackward,
)

__all__ = [
    "ActivationLinearBackward",
    "BiasActivation",
    "BiasActivationBackward",
    "BiasActivationInference",
    "BiasDropoutAdd",
    "BiasDropoutAddBackward",
    "BiasDropoutAddNorm",
    "BiasGated",
    "BiasGatedBackward",
    "BiasQKNorm",
    "BiasQKNormBackward",
    "BiasQKNormRotary",
    "BiasQKNormRotaryBackward",
    "BiasQKNormRotaryInference",
    "BlockBoundary",
    "BlockBoundaryBackward",
    "GatedLinearBackward",
    "LinearBias",
    "LinearBiasAct",
    "LinearBiasActOneDNN",
    "LinearBiasActivation",
    "LinearBiasActivationInference",
    "LinearBiasAdd",
    "LinearBiasBackward",
    "LinearBiasDropoutAdd",
    "LinearGated",
    "LinearGatedInference",
    "NormActivation",
    "NormActivationJoint",
    "NormBackward",
    "NormForward",
    "ScaleAdd",
    "default",
    "triton",
]

"""The operations: one file each, with its math, the tensors that it saves, its reference and both passes."""

from typing import TYPE_CHECKING

from ..names import no_such_name as _no_such_name
from .add import Add
from .allgather import AllGather
from .allreduce import AllReduce
from .attention import Attention
from .bias import Bias
from .copytotensorparallel import CopyToTensorParallel
from .crossattention import CrossAttention
from .dropout import Dropout
from .droppath import DropPath
from .embedding import Embedding
from .fork import Fork
from .geglu import GEGLU
from .gelu import GELU, GeLU
from .glu import GLU
from .identity import Identity
from .layernorm import LayerNorm
from .layerscale import LayerScale
from .linear import Linear
from .mergedlinear import MergedLinear
from .multiply import Multiply
from .positionembedding import PositionEmbedding
from .qknorm import QKNorm
from .quickgelu import QuickGeLU
from .reducescatter import ReduceScatter
from .reglu import ReGLU
from .relu import ReLU
from .reshape import Reshape
from .residual import Residual
from .rmsnorm import RMSNorm
from .rotaryembedding import RotaryEmbedding
from .scale import Scale
from .sigmoid import Sigmoid
from .silu import SiLU
from .squaredrelu import SquaredReLU
from .swiglu import SwiGLU
from .take import Take
from .tanh import Tanh
from .transpose import Transpose

IdentityForwardAllReduceBackward = CopyToTensorParallel
"""Its name before."""

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "Add",
    "AllGather",
    "AllReduce",
    "Attention",
    "Bias",
    "CopyToTensorParallel",
    "CrossAttention",
    "DropPath",
    "Dropout",
    "Embedding",
    "Fork",
    "GeLU",
    "Identity",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "MergedLinear",
    "Multiply",
    "PositionEmbedding",
    "QKNorm",
    "QuickGeLU",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "Residual",
    "RotaryEmbedding",
    "Scale",
    "SiLU",
    "Sigmoid",
    "SquaredReLU",
    "SwiGLU",
    "Take",
    "Tanh",
    "Transpose",
]

if not TYPE_CHECKING:  # type checkers know what is here

    def __getattr__(name: str) -> object:
        layers = ("FeedForward", "MultiHeadAttention", "TransformerLayer")
        raise _no_such_name(__name__, name, ("sf.ops", __all__), ("sf.nn", layers))


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

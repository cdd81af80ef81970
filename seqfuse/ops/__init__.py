"""The operations, by family: each with its math, the tensors that it saves, its reference and both passes."""

from typing import TYPE_CHECKING

from ..errors import no_such_name as _no_such_name
from .activations import GELU, Clamp, ClampedSiLU, GeLU, QuickGeLU, ReLU, Sigmoid, SiLU, SquaredReLU, Tanh
from .attention import Attention, CrossAttention
from .channels import Add, Fork, Multiply, Residual, Take, TokenScale
from .collectives import AllGather, AllReduce, CopyToTensorParallel, ReduceScatter
from .dropout import Dropout, DropPath
from .embedding import Embedding, PositionEmbedding
from .experts import Permute, Route, Unpermute
from .gated import GEGLU, GLU, QGEGLU, ClampedSwiGLU, ReGLU, ScaledSwiGLU, SReGLU, SwiGLU
from .grouped import GroupedLinear
from .linear import Bias, Linear
from .mergedlinear import MergedLinear
from .norm import L2Norm, LayerNorm, RMSNorm
from .qknorm import QKNorm
from .rope import RotaryEmbedding
from .scale import LayerScale, Scale
from .shape import Identity, Reshape, Transpose

IdentityForwardAllReduceBackward = CopyToTensorParallel
"""Former name of `CopyToTensorParallel`."""

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "Add",
    "AllGather",
    "AllReduce",
    "Attention",
    "Bias",
    "Clamp",
    "ClampedSiLU",
    "ClampedSwiGLU",
    "CopyToTensorParallel",
    "CrossAttention",
    "DropPath",
    "Dropout",
    "Embedding",
    "Fork",
    "GeLU",
    "GroupedLinear",
    "Identity",
    "L2Norm",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "MergedLinear",
    "Multiply",
    "Permute",
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
    "Route",
    "SReGLU",
    "Scale",
    "ScaledSwiGLU",
    "SiLU",
    "Sigmoid",
    "SquaredReLU",
    "SwiGLU",
    "Take",
    "Tanh",
    "TokenScale",
    "Transpose",
    "Unpermute",
]

if not TYPE_CHECKING:  # type checkers see the names above

    def __getattr__(name: str) -> object:
        layers = ("FeedForward", "MultiHeadAttention", "TransformerLayer")
        raise _no_such_name(__name__, name, ("sf.ops", __all__), ("sf.nn", layers))


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

"""The operations: one file each, with its math, its record, its reference and both passes."""

from .add import Add
from .bias import Bias
from .dropout import Dropout
from .fork import Fork
from .geglu import GEGLU
from .gelu import GELU, GeLU
from .glu import GLU
from .identity import Identity
from .layernorm import LayerNorm
from .linear import Linear
from .quickgelu import QuickGeLU
from .reglu import ReGLU
from .relu import ReLU
from .reshape import Reshape
from .residual import Residual
from .rmsnorm import RMSNorm
from .scale import Scale
from .sigmoid import Sigmoid
from .silu import SiLU
from .squaredrelu import SquaredReLU
from .swiglu import SwiGLU
from .tanh import Tanh

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "Add",
    "Bias",
    "Dropout",
    "Fork",
    "GeLU",
    "Identity",
    "LayerNorm",
    "Linear",
    "QuickGeLU",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "Reshape",
    "Residual",
    "Scale",
    "SiLU",
    "Sigmoid",
    "SquaredReLU",
    "SwiGLU",
    "Tanh",
]

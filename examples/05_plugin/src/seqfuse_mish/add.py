"""A residual sum and Mish in one pass over memory."""

import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops

from .kernels import add_mish
from .operation import Mish


class AddMish(sf.ForwardFusion):
    """y = mish(z), z = x + other; z is stored for the gradient, as Mish keeps it.  All: [*, H]."""

    add: ops.Add
    act: Mish

    kernels = ("triton",)

    def requires(self, env: sf.Env) -> sf.Requirements:
        yield env.dtype in (torch.float32, torch.float16, torch.bfloat16), "its kernel computes in float32"

    def fwd(self, x: Tensor, *, add_other: Tensor) -> tuple[Tensor, dict[str, sf.Saved]]:
        z, y = add_mish(x, add_other)
        return y, {"add": ops.Add.Saved(), "act": self.act.record(z, y)}

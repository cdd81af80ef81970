"""A norm by itself, where ATen would copy its input to float32."""

from __future__ import annotations

from torch import Tensor

from ..env import Env, Savings
from ..fusion import ForwardFusion, Requirements
from ..ops import LayerNorm, RMSNorm
from ._norm import Record, converts, copies, kernels_take, norm_fwd, pass_bytes


class NormForward(ForwardFusion):
    """y = norm(x) in one pass for a half input and a gain of 1 + weight, or parameters in another dtype.

    ATen's kernels take neither: the operation copies x to float32 and y back. Where they do, nothing is faster here.
    x, y: [*, H]. Saves what the operation saves.
    """

    norm: LayerNorm | RMSNorm

    triton = True

    def requires(self, env: Env) -> Requirements:
        yield from kernels_take(self.norm, env)
        yield converts(self.norm, env), "ATen's kernel makes one pass as well"

    def saves(self, env: Env) -> Savings:
        return Savings(launches=2, bytes=copies(self.norm, env) * pass_bytes(self.norm, env))

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, Record]]:
        out, record = norm_fwd(self.norm, x)
        return out.y, {"norm": record}

"""A norm by itself: forward where ATen's kernel is the slower one, and backward with the `Fork` before it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..hardware import C_NORM_WORTHWHILE
from ..operation import Grads
from ..ops import Fork, LayerNorm, RMSNorm
from ._norm import Record, gradients_of, kernels_take, norm_fwd, recorded_bwd


class NormForward(ForwardFusion):
    """y = norm(x) in one pass for a half input and a gain of 1 + weight, or parameters in another dtype.

    ATen's kernels take neither: the operation copies x to float32 and y back. Where they do, nothing is faster here,
    unless y is cast for what comes next, as under autocast: y is then written in that dtype. On a CPU ATen makes an
    RMSNorm of several operators, and its LayerNorm takes longer than the C kernel's but in float32 and for few numbers.
    x, y: [*, H]. Saves what the operation saves.
    """

    norm: LayerNorm | RMSNorm

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from kernels_take(self.norm, env)
        wasteful = self.norm.converts(env) or self.norm.y_is_cast(env)
        yield wasteful or _is_faster_in_c(self.norm, env), "ATen's kernel makes one pass as well"

    def saves(self, env: Env) -> Savings:
        if isinstance(self.norm, RMSNorm) or not _is_faster_in_c(self.norm, env):
            return super().saves(env)
        # One pass over memory as well, and 0.1 to 0.5 of the time of reading x less on AVX2, in either dtype.
        return super().saves(env) + Savings(bytes=0.2 * env.tokens * self.norm.normalized_shape[-1] * env.itemsize)

    def fwd(self, x: Tensor, *, dtype: torch.dtype | None = None) -> tuple[Tensor, dict[str, Record]]:
        out, record = norm_fwd(self.norm, x, dtype=dtype)
        return out.y, {"norm": record}


class NormBackward(BackwardFusion):
    """dx = norm'(dy) + d_fork_out, and the sums over rows for the norm's parameters, from one pass over dy and x.

    The gradient of the residual stream is added before dx is written. Sums are made in float32, in a fixed order, and
    rounded once. ATen reads dy and x a second time for them. dy, d_fork_out, dx: [*, H].
    """

    fork: Fork | None
    norm: LayerNorm | RMSNorm

    kernels = ("triton", "c")
    any_dy = True
    layout = "any"  # its kernel is handed copies of what does not fit

    def requires(self, env: Env) -> Requirements:
        yield from kernels_take(self.norm, env)

    def bwd(
        self,
        dy: Tensor,
        *,
        norm: LayerNorm.Saved | RMSNorm.Saved,
        d_fork_out: Tensor | None = None,
        needs: frozenset[str],
    ) -> tuple[Tensor | None, Grads]:
        if "x" not in needs and "norm.weight" not in needs:
            return None, recorded_bwd(self.norm, dy, norm, needs, dx=False)[1]
        weight, dstream = norm.weight if "x" in needs else None, d_fork_out
        key = needs, weight is not None, dstream is not None
        return self.decided(key, gradients_of, self.norm, *key)(dy, norm, weight, dstream)


def _is_faster_in_c(norm: LayerNorm | RMSNorm, env: Env) -> bool:
    """Whether the forward takes less time than ATen's because it is compiled C."""
    if env.kernels != "c":
        return False
    few = (env.rows or 0) * norm.normalized_shape[-1] < C_NORM_WORTHWHILE
    return isinstance(norm, RMSNorm) or env.dtype.itemsize == 2 or not few

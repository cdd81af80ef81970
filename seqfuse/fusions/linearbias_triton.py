"""Linear and Bias backward, with the sums over rows in the Triton product that makes the weight's gradient."""

from __future__ import annotations

from torch import Tensor

from ..env import Env, Savings
from ..fusion import BackwardFusion, Requirements
from ..maingrad import Accumulated, accumulated
from ..operation import Grads
from ..ops import Bias, Linear
from ..ops.linear import weight_grad
from ._gemm import as_rows, kernel_takes, like, tf32, worth


class LinearBiasBackwardTriton(BackwardFusion):
    """dweight = dy^T x and dbias, the sum of dy over all rows, in one product: dy is read once for both.

    dx = dy weight is torch's product. The sum is of float32 numbers and in a fixed order. Where one of the two is not
    wanted, the other is torch's as well. It is worth a pass over dy, and so pays where a row of x is short.

    dy: [*, out_features], x, dx: [*, in_features].
    """

    linear: Linear
    bias: Bias

    triton = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        return kernel_takes(self.linear, self.bias, env)

    def saves(self, env: Env) -> Savings:
        return worth(self.linear, env, 1, 1, self.linear.out_features)

    def bwd(
        self,
        dy: Tensor,
        *,
        linear: Linear.Saved,
        bias: Bias.Saved,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        rows = as_rows(dy)
        dx: Tensor | None = None
        grads: dict[str, Tensor | Accumulated | None] = {}
        if "x" in needs:
            dx = like(rows, linear.weight).mm(linear.weight).view(*dy.shape[:-1], linear.weight.shape[1])
        summed = "bias.bias" in needs
        if "linear.weight" not in needs:
            return dx, {"bias.bias": rows.sum(0, dtype=self.bias.read().dtype) if summed else None}
        # Last: what fails before it may fall back.
        buffer, d = main_grads.pop("linear.weight", None), like(rows, linear.x)
        if summed and (buffer is None or buffer.is_contiguous()):
            from ..kernels.gemm import linear_wgrad_bias

            dtype = self.bias.read().dtype
            made, grads["bias.bias"] = linear_wgrad_bias(
                d, as_rows(linear.x), main_grad=buffer, sums_dtype=dtype, tf32=tf32()
            )
            grads["linear.weight"] = made if buffer is None else accumulated
            return dx, grads
        if summed:
            grads["bias.bias"] = rows.sum(0, dtype=self.bias.read().dtype)
        grads["linear.weight"] = weight_grad(d, linear.x, buffer)
        return dx, grads

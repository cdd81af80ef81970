"""Linear, an optional Bias, an optional Dropout and the Add that closes a residual, in one Triton GEMM."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env
from ..fusion import ForwardFusion, Requirements
from ..ops import Add, Bias, Dropout, Linear
from ._gemm import bias_of, kernel_takes, kernel_takes_dropout, mask, tf32, weight_of
from ._kernels import sum_dtype


class LinearBiasDropoutAdd(ForwardFusion):
    """y = other + dropout(x weight^T + bias) in one GEMM, made of its float32 sums and rounded once.

    The mask is the one that the operations make of the same seed; none is stored.

    x: [*, in_features], other, y: [*, out_features]; where `other` has another dtype, y has the one torch promotes to.
    Saves what the operations save.
    """

    linear: Linear
    bias: Bias | None
    dropout: Dropout | None
    add: Add

    kernels = ("triton",)
    needs_measurement = True
    layout = "inner_contig"

    def requires(self, env: Env) -> Requirements:
        yield from kernel_takes(self.linear, self.bias, env)
        yield from kernel_takes_dropout(self.dropout)

    def fwd(self, x: Tensor, *, add_other: Tensor, dropout_seed: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        from ..kernels import gemm

        weight = weight_of(self.linear, x)
        shape = (*x.shape[:-1], weight.shape[0])
        if add_other.shape != shape:
            self.add.fwd(x.new_empty(shape), other=add_other)  # raises, saying what does not fit
        dropout = mask(self.dropout, dropout_seed)
        dtype = sum_dtype(x, add_other)
        y, _ = gemm.linear(x, weight, bias_of(self.bias), dropout=dropout, residual=add_other, dtype=dtype, tf32=tf32())
        return y, {"linear": Linear.Saved(x=x, weight=self.linear.weight_for(x))}

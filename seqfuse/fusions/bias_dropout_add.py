"""An optional Bias, Dropout and an optional Add, each way in one pass over memory by a Triton kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..env import Env
from ..fusion import BackwardFusion, ForwardFusion, Requirements
from ..operation import Grads
from ..ops import Add, Bias, Dropout
from ._kernels import sum_dtype
from ._linear import as_rows
from ._pointwise import kernel_takes_chain


class BiasDropoutAdd(ForwardFusion):
    """y = other + dropout(x + bias) in one pass, rounded once; the mask is that of the operations, and is not stored.

    x, other, y: [*, H]; where `other` has another dtype, y has the one torch promotes to. Saves what the operations
    save.
    """

    bias: Bias | None
    dropout: Dropout
    add: Add | None

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from kernel_takes_chain(self.bias, env)
        yield self.dropout.random, "nothing is dropped here"

    def fwd(
        self, x: Tensor, *, add_other: Tensor | None = None, dropout_seed: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        drop = self.dropout
        operands: list[Any] = [dropout_seed]
        dtype = x.dtype
        if self.bias is not None:
            operands.insert(0, self.bias.read())
        if self.add is not None:
            assert add_other is not None
            if add_other.shape != x.shape:
                self.add.fwd(x, other=add_other)  # raises, saying what does not fit
            operands.append(add_other)
            dtype = sum_dtype(x, add_other)
        upscale = drop.mode == "upscale_in_train"
        y: Any = _kernel(self.bias is not None, drop.p, upscale, self.add is not None, dtype=dtype)(x, *operands)[0]
        return y, {}


class BiasDropoutAddBackward(BackwardFusion):
    """dx = dropout(dy) and its sum over all rows, which is dbias, in one pass;  dother = dy.

    The mask is made again from the seed; the sum is of float32 numbers and in a fixed order. dy, dx: [*, H].
    """

    bias: Bias | None
    dropout: Dropout
    add: Add | None

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        yield from kernel_takes_chain(self.bias, env)
        yield self.dropout.random, "nothing is dropped here"

    def bwd(self, dy: Tensor, *, dropout: Any, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:

        wanted = "x" in needs, "bias.bias" in needs
        dx, dbias = branch_bwd(dy, self.bias, self.dropout, dropout, *wanted)
        return dx, {"bias.bias": dbias, "add.other": dy if "add.other" in needs else None}


def branch_bwd(
    dy: Tensor, bias: Bias | None, dropout: Dropout | None, saved: Dropout.Saved | None, branch: bool, sums: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients before a bias and a dropout, and of the bias, each if wanted, in one pass."""
    if dropout is None or saved is None or saved.seed is None:
        if not sums or bias is None:
            return dy if branch else None, None
        # By itself this sum is no better made by another kernel than torch's.
        return dy if branch else None, as_rows(dy).sum(0, dtype=bias.dtype)
    if not (branch or sums):
        return None, None
    upscale, dtypes = dropout.mode == "upscale_in_train", (bias.dtype,) if sums and bias is not None else ()
    dx, *totals = _kernel(False, saved.p, upscale, False, sums, dtypes=dtypes, result=branch)(dy, saved.seed)
    return dx, totals[0] if totals else None


@functools.lru_cache(256)
def _kernel(
    bias: bool, p: float, upscale: bool, add: bool, sums: bool = False, **of: Any
) -> Callable[..., tuple[Tensor | None, ...]]:
    """The chain of these steps; what else it is made of is for the kernel."""
    from ..kernels import pointwise as steps

    before = [steps.bias()] if bias else []
    after = ([steps.add()] if add else []) + ([steps.column_sum()] if sums else [])
    return steps.pointwise_of(steps.Chain(*before, steps.dropout(p, upscale), *after), **of)

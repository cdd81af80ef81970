"""Two GEMMs with an activation or a gated unit between them, of which only the pre-activation is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import saved as context
from ..env import Env, Savings
from ..fusion import JointFusion, Requirements
from ..maingrad import Accumulated
from ..operation import Grads
from ..ops import Add, Bias, Dropout, Linear
from ..ops.linear import weight_grad
from ..pointwise import Gated, Pointwise
from ._gemm import (
    bias_of,
    epilogue,
    epilogue_takes,
    kernel_takes,
    kernel_takes_dropout,
    mask,
    tf32,
    weight_of,
)
from ._kernels import device, sum_dtype
from ._linear import as_rows
from .bias_dropout_add import branch_bwd
from .block_end import drops

if TYPE_CHECKING:
    from ..kernels.gemm import Gradients


class LinearActivationLinear(JointFusion):
    """y = other + out_dropout(h out^T + out_bias), h = dropout(act(z)), z = x weight^T + bias, where h is not kept.

    With d = out_dropout'(dy), whose sum over all rows is dout_bias, and dh = dropout'(d out): dz = act'(z) dh, or that
    of a gated unit, its sum, which is dbias, and h itself, made again from z, leave one GEMM;  dout = d^T h,
    dweight = dz^T x, dx = dz weight, dother = dy.  h of the backward pass is made of the rounded z, as it is where
    nothing is fused; what was dropped is decided again from the seeds.

    This trades a pass over h for the memory that h would take from the forward to the backward pass.

    x: [*, in_features], z: [*, F], of a gated unit [*, 2 F], h: [*, F], other, y: [*, out_features].
    Source: Chen et al. 2016, arXiv:1604.06174, of keeping less and making it again.
    """

    linear: Linear
    bias: Bias | None
    act: Pointwise | Gated
    dropout: Dropout | None
    out: Linear
    out_bias: Bias | None
    out_dropout: Dropout | None
    add: Add | None

    kernels = ("triton",)
    needs_measurement = saves_memory = True
    casts = True  # the activation is written in the dtype of z, whatever it gives
    layout = "inner_contig"

    class Saved(context.Saved):
        x: Tensor = context.field(for_="linear.weight")  # [*, in_features]
        weight: Tensor = context.field(for_="x")  # [F, in_features], the parameter itself
        z: Tensor  # [*, F], of a gated unit [*, 2 F]
        out_weight: Tensor = context.field(for_=("x", "bias.bias", "linear.weight"))  # the parameter itself
        seed: Tensor | None  # [] int64
        p: float
        out_seed: Tensor | None  # [] int64
        out_p: float

    def requires(self, env: Env) -> Requirements:
        yield env.grad, "where nothing needs a gradient nothing is kept"
        yield from epilogue_takes(self.linear, self.bias, self.act, env, self.dropout)
        yield from kernel_takes(self.out, self.out_bias, env)
        yield from kernel_takes_dropout(self.out_dropout)
        reads_input = isinstance(self.act, Gated) or self.act.reads == "input"
        yield reads_input, f"{type(self.act).__name__} keeps its output, which the GEMM after it keeps as well"

    def saves(self, env: Env) -> Savings:
        # The GEMM that makes dz writes h again.
        return super().saves(env) - Savings(bytes=float(env.tokens * self.out.in_features * env.itemsize))

    def saved_at(self) -> tuple[int, ...]:
        return 0, 1 + (self.bias is not None)

    def fwd(
        self,
        x: Tensor,
        *,
        dropout_seed: Tensor | None = None,
        out_dropout_seed: Tensor | None = None,
        add_other: Tensor | None = None,
    ) -> tuple[Tensor, Saved]:
        from ..kernels import gemm

        weight, out = weight_of(self.linear, x), weight_of(self.out, x)
        seed, out_seed = _active(self.dropout, dropout_seed), _active(self.out_dropout, out_dropout_seed)
        h, z = epilogue(x, self.linear, self.bias, self.act, mask(self.dropout, seed), store_pre=True)
        assert z is not None
        record = self.Saved(
            x=x, weight=weight, z=z, out_weight=out, seed=seed, p=_p(self.dropout),
            out_seed=out_seed, out_p=_p(self.out_dropout),
        )  # fmt: skip
        if self.out_bias is None and out_seed is None and add_other is None:
            return h.matmul(out.t()), record
        dtype = x.dtype
        if add_other is not None:
            assert self.add is not None
            shape = (*x.shape[:-1], out.shape[0])
            if add_other.shape != shape:
                self.add.fwd(x.new_empty(shape), other=add_other)  # raises, saying what does not fit
            dtype = sum_dtype(x, add_other)
        drop = mask(self.out_dropout, out_seed)
        bias = bias_of(self.out_bias)
        return gemm.linear(h, out, bias, dropout=drop, residual=add_other, dtype=dtype, tf32=tf32())[0], record

    def bwd(
        self, dy: Tensor, saved: Saved, *, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, Grads]:
        dx, grads, d, h, dz = self.gradients(dy, saved, needs)
        # Last: what fails before them may fall back.
        if d is not None and h is not None:
            grads["out.weight"] = weight_grad(d, h, main_grads.pop("out.weight", None))
        if dz is not None and "linear.weight" in needs:
            grads["linear.weight"] = weight_grad(dz, saved.x, main_grads.pop("linear.weight", None))
        return dx, grads

    def gradients(
        self, dy: Tensor, saved: context.Saved, needs: frozenset[str]
    ) -> tuple[Tensor | None, dict[str, Tensor | Accumulated | None], Tensor | None, Tensor | None, Tensor | None]:
        """dx, all gradients but those of weights, and what makes them as far as they are wanted: d, h and dz."""
        grads: dict[str, Tensor | Accumulated | None] = {"add.other": dy if "add.other" in needs else None}
        before = not needs.isdisjoint({"x", "linear.weight", "bias.bias"})
        wanted = before or "out.weight" in needs, "out_bias.bias" in needs
        dropped = Dropout.Saved(seed=saved.out_seed, p=saved.out_p)
        d, grads["out_bias.bias"] = branch_bwd(dy, self.out_bias, self.out_dropout, dropped, *wanted)
        if d is None:
            return None, grads, None, None, None
        # The operations hand on a gradient in their own dtype where the residual has another.
        d = d if d.dtype is saved.z.dtype else d.to(saved.z.dtype)
        if not before:
            return None, grads, d, self._again(saved), None
        dz, grads["bias.bias"], h, _ = self._inner(d, saved, needs)
        dx = as_rows(dz).mm(saved.weight).view(*dz.shape[:-1], saved.weight.shape[1]) if "x" in needs else None
        return dx, grads, d, h, dz

    def _inner(self, dy: Tensor, saved: context.Saved, needs: frozenset[str]) -> Gradients:
        """dz, its sum over all rows and h."""
        from ..kernels import gemm

        act, drop = self.act, mask(self.dropout, saved.seed, saved.p)
        around: dict[str, Any] = {"t": saved.z, "dropout": drop, "tf32": tf32()}
        around |= {"sums": "bias.bias" in needs, "emit": "out.weight" in needs}
        if isinstance(act, Gated):
            return gemm.linear_dgrad_gated(dy, saved.out_weight, act=device(act.activation), **around)
        return gemm.linear_dgrad(dy, saved.out_weight, act=device(act), **around)

    def _again(self, saved: context.Saved) -> Tensor:
        h: Tensor = self.act.fwd(saved.z)[0]
        return h if self.dropout is None else self.dropout.fwd(h, seed=saved.seed)[0]

    def unfused(self, saved: context.Saved) -> dict[str, context.Saved]:
        """What the operations themselves would have saved."""
        kept: Any = vars(saved).get  # what no gradient reads was dropped
        records: dict[str, Any] = {
            "linear": Linear.Saved(x=kept("x"), weight=kept("weight")),
            "act": self.act.fwd(saved.z)[1],
            "out": Linear.Saved(x=self._again(saved), weight=kept("out_weight")),
        }
        if self.dropout is not None:
            records["dropout"] = Dropout.Saved(seed=saved.seed, p=saved.p)
        if self.out_dropout is not None:
            records["out_dropout"] = Dropout.Saved(seed=saved.out_seed, p=saved.out_p)
        return records


def _active(dropout: Dropout | None, seed: Tensor | None) -> Tensor | None:
    return seed if drops(dropout) else None


def _p(dropout: Dropout | None) -> float:
    return 0.0 if dropout is None else dropout.p

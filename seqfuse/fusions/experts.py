"""Fusions of experts: gather tokens in the GEMM, or again for backward; apply factors before the second GEMM."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import saved as context
from ..casts import dtype_of
from ..env import Env, Savings
from ..fusion import ForwardFusion, JointFusion, Requirements
from ..hardware import RECOMPUTING, STEP
from ..kernels import kernels_of
from ..maingrad import Accumulated, accumulated
from ..operation import Grads
from ..ops import Add, Fork, GroupedLinear, LayerNorm, Permute, RMSNorm, Unpermute
from ..ops._grouped import grouped_bias_grad, grouped_linear, tf32
from ..ops._parameters import parameter
from ..ops.experts import by_pair, by_row, sorted_rows, summed
from ..pointwise import Gated
from ..traffic import gain
from ._shared import act_fits, kernels_read, kernels_run, numbers_of, with_parameters
from .boundary import boundary_around, boundary_fits, experts_bwd, pairs_of
from .gated import gated_kernel
from .norm import NormRecord, run_norm


class PermuteGroupedLinear(ForwardFusion):
    """y_g = x_g weight_g^T + bias_g, x_g the tokens of expert g, which are gathered again for backward instead of
    saved.

    dweight_g = dy_g^T x_g. Costs one more gather in the backward pass; saves `top_k` fewer rows per token.

    x: [*, in_features], y: [*, top_k, out_features].
    Source: Chen et al. 2016, arXiv:1604.06174 (recompute).
    """

    permute: Permute
    linear: GroupedLinear

    outputs = ("permute_offsets", "permute_rows")
    saves_memory = True
    layout = "any"

    def saves(self, env: Env) -> Savings:
        """One step of the engine, minus another gather in the backward pass."""
        gather = float(env.tokens * self.permute.top_k * self.linear.in_features * env.itemsize)
        return Savings(launches=STEP - 1 - RECOMPUTING, bytes=-2 * gather)

    def fwd(self, x: Tensor, *, permute_experts: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        rows, made, of_permute = self.permute.fwd(x, experts=permute_experts)
        y, of_linear = self.linear.run(rows, made["offsets"])
        again = functools.partial(_again, of_linear.x.dtype)
        late = context.Recompute(again, x, made["rows"], made["offsets"])
        record = GroupedLinear.Saved(x=late, weight=of_linear.weight, offsets=of_linear.offsets)  # pyright: ignore
        outputs = {f"permute_{name}": t for name, t in made.items()}
        return y, outputs, {"permute": of_permute, "linear": record}


def _again(dtype: torch.dtype, x: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    return sorted_rows(x, rows, offsets).to(dtype)


class GatherGroupedLinear(JointFusion):
    """y_g = x_g weight_g^T + bias_g, where the GEMM gathers the tokens x_g of expert g; they are never sorted.

    Both passes read tokens through an index: dweight_g = dy_g^T x_g, dx_t = sum over the rows of token t of dy
    weight_g. Neither pass writes or saves `top_k` rows per token.

    x: [*, in_features], y: [*, top_k, out_features].
    Source: Tan et al. 2024, arXiv:2403.08245.
    """

    permute: Permute
    linear: GroupedLinear

    kernels = ("triton",)
    outputs = ("permute_offsets", "permute_rows")

    class Saved(context.Saved):
        x: Tensor  # [*, in_features]
        weight: Tensor  # [groups, out_features, in_features], the parameter
        order: Tensor  # [tokens top_k] int64, the (token, expert) pair of each row
        rows: Tensor  # [*, top_k] int64
        offsets: Tensor  # [groups]

    def requires(self, env: Env) -> Requirements:
        yield from kernels_read("input", env.dtype, env)
        yield env.dtype.itemsize <= 4, "its kernel sums in float32, not in float64"
        yield dtype_of(self.linear, "weight") is env.dtype, "input and weight must have one dtype"
        aligned = not any(size * env.dtype.itemsize % 16 for size in self.linear.features)
        torchs = aligned and env.dtype is torch.bfloat16 and env.arch.startswith(("sm_9", "sm_10"))
        yield not torchs, "torch's GEMM of groups is used here, which reads rows that are sorted"

    def saves(self, env: Env) -> Savings:
        """The pass that sorts tokens, except for reading them."""
        gather = float(env.tokens * self.permute.top_k * self.linear.in_features * env.itemsize)
        return Savings(launches=1 + STEP, bytes=2 * gather)

    def fwd(self, x: Tensor, *, permute_experts: Tensor) -> tuple[Tensor, dict[str, Tensor], Saved]:
        self.permute.check(x.shape, permute_experts)
        order, rows, offsets = self.permute.sorted(permute_experts)
        given, weight, bias = self.linear.operands(x)
        how: dict[str, Any] = {"order": order, "top_k": self.permute.top_k, "tf32": tf32(given)}
        y = kernels_of("grouped").grouped_gemm(given.reshape(-1, given.shape[-1]), weight, offsets, bias, **how)
        saved = self.Saved(x=given, weight=weight, order=order, rows=rows, offsets=offsets)
        return y.view(*rows.shape, -1), {"permute_offsets": offsets, "permute_rows": rows}, saved

    def bwd(
        self,
        dy: Tensor,
        saved: Saved,
        *,
        d_permute_offsets: Tensor | None,
        d_permute_rows: Tensor | None,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        rows, dx = dy.reshape(-1, dy.shape[-1]), None
        grads: dict[str, Tensor | Accumulated | None] = {}
        if "x" in needs:
            d = grouped_linear(rows, saved.weight.mT, saved.offsets, None)
            dx = summed(d.view(*saved.rows.shape, -1), saved.rows, saved.offsets, None)
        if "linear.bias" in needs:
            grads["linear.bias"] = grouped_bias_grad(rows, saved.offsets)
        if "linear.weight" in needs:
            x = saved.x.reshape(-1, saved.x.shape[-1])
            how: dict[str, Any] = {"order": saved.order, "top_k": self.permute.top_k, "tf32": tf32(x)}
            grad = kernels_of("grouped").grouped_outer(rows, x, saved.offsets, **how)
            buffer = main_grads.pop("linear.weight", None)
            if buffer is not None:
                buffer.add_(grad)
            grads["linear.weight"] = grad if buffer is None else accumulated
        return dx, grads

    def unfused(self, saved: Saved) -> dict[str, Any]:
        """The `Saved` of each operation, for the unfused backward pass."""
        x = sorted_rows(saved.x, saved.rows, saved.offsets)
        record = GroupedLinear.Saved(x=x, weight=saved.weight, offsets=saved.offsets)
        return {"permute": Permute.Saved(rows=saved.rows, offsets=saved.offsets), "linear": record}


_OF_X, _OF_WEIGHT = frozenset({"x"}), frozenset({"weight"})


class _FactorsBeforeGEMM(JointFusion):
    """Base of fusions that multiply the input of the experts' second GEMM by the experts' factors."""

    gated: Gated
    linear: GroupedLinear
    unpermute: Unpermute

    kernels = ("triton", "c")
    reorders = True

    class Saved(context.Saved):
        x: Tensor  # [*, top_k, 2 F]
        scaled: Tensor | None  # [*, top_k, F], p h; `None` where it is recomputed
        scales: Tensor  # [*, top_k], factor of each row
        weight: Tensor  # [groups, H, F], the parameter, or its cast
        rows: Tensor  # [*, top_k] int64
        offsets: Tensor  # [groups]

    def requires(self, env: Env) -> Requirements:
        yield env.grad, "where nothing needs a gradient nothing is saved"
        yield from kernels_run(env)
        yield from act_fits(self.gated, env)
        yield parameter(self.linear, "bias") is None, "a bias of the GEMM has the factors of its output"
        yield self.unpermute.probs is not None, "Unpermute has no factors"
        yield self.linear.offsets == self.unpermute.offsets, "GEMM and Unpermute have other offsets"
        yield all(dtype is env.dtype for dtype in env.along[:-1]), "an operation in it gives another dtype"

    def saves(self, env: Env) -> Savings:
        """The gated unit's passes, and a read of the GEMM's output; two small passes sort the factors.

        On a CPU these are about ten calls, and the gradient of the factors recomputes the unit.
        """
        read = float(env.tokens * self.linear.out_features * env.itemsize)
        unit = gain((self.gated,), env, forward=True, backward=True, saved=(0,))
        if env.device == "cpu":
            return unit + Savings(launches=4 * STEP - 10, bytes=read - 3 * self._made(env))
        return unit + Savings(launches=4 * STEP - 2, bytes=read)

    def _made(self, env: Env) -> float:
        """The size of the unit's output in bytes."""
        return float(env.tokens * self.linear.in_features * env.itemsize)

    def _scaled(self, x: Tensor, scales: Tensor) -> Tensor:
        """The gated unit's output, times a factor per row."""
        kernel = self.decided(numbers_of(self.gated), gated_kernel, self.gated, ("gated", "token_scale"))
        (scaled,) = kernel(x, scales.reshape(x.shape[:-1]))
        assert scaled is not None
        return scaled

    def _outputs(
        self, x: Tensor, ends: Tensor, rows: Tensor, offsets: Tensor, probs: Tensor, /
    ) -> tuple[Tensor, dict[str, Any]]:
        """The experts' outputs, including factors, and the tensors to save."""
        self.unpermute.check(x, rows, probs)
        scales = by_row(probs, rows)
        y, record = self.linear.run(self._scaled(x, scales), ends)
        own = {"scaled": record.x, "scales": scales, "weight": record.weight}
        return y, {"x": x, **own, "rows": rows, "offsets": offsets}

    def _gradients(
        self, dy: Tensor, saved: Any, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, dict[str, Tensor | Accumulated | None]]:
        """The gradients, from the gradient of the experts' outputs, [*, top_k, H]."""
        before, dots, wanted = "x" in needs, "unpermute.probs" in needs, "linear.weight" in needs
        record = functools.partial(GroupedLinear.Saved, weight=saved.weight, offsets=saved.offsets)
        grads: dict[str, Tensor | Accumulated | None] = {}
        dx, scaled = None, saved.scaled
        if before or dots:
            d, _ = self.linear.bwd(dy, record(x=saved.x), needs=_OF_X)
            assert d is not None
            again = before and wanted and scaled is None
            key = before, dots, again, saved.weight.dtype, saved.scales.dtype, numbers_of(self.gated)
            steps, given = ["dot_gated"] * dots, [saved.x] * dots
            if before:
                steps += ["token_scale", *["emit_gated"] * again, "dgated"]
                given += [saved.scales.reshape(d.shape[:-1]), *[saved.x] * again, saved.x]
            dtypes = [*[saved.scales.dtype] * dots, *[saved.weight.dtype] * again]
            dx, *made = self.decided(key, gated_kernel, self.gated, steps, before, dtypes)(d, *given)
            del d
            scaled = made.pop() if again else scaled
            if dots:
                assert made[0] is not None
                grads["unpermute.probs"] = by_pair(made[0], saved.rows, saved.offsets)
        if wanted:  # last: after an error before it, a fallback may still run
            scaled = self._scaled(saved.x, saved.scales).to(saved.weight.dtype) if scaled is None else scaled
            buffer = main_grads.pop("linear.weight", None)
            of_buffer = {} if buffer is None else {"weight": buffer}
            _, of_linear = self.linear.bwd(dy, record(x=scaled), needs=_OF_WEIGHT, main_grads=of_buffer)
            grads["linear.weight"] = of_linear["weight"]
        return dx, grads

    def unfused(self, saved: Any) -> dict[str, Any]:
        """The `Saved` of each operation, for the unfused backward pass."""
        h, of_gated = self.gated.fwd(saved.x)
        y, of_linear = with_parameters(self.linear, {"weight": saved.weight}).run(h, saved.offsets)
        probs = by_pair(saved.scales, saved.rows)
        back = Unpermute.Saved(x=y, probs=probs, rows=saved.rows, offsets=saved.offsets)
        return {"gated": of_gated, "linear": of_linear, "unpermute": back}


class GatedGroupedLinearUnpermute(_FactorsBeforeGEMM):
    """y_t = sum_j p_j h_j weight_g^T, h = act(gate) up, over the rows j of token t; p is probs.

    The factors multiply the input of the GEMM, so its output is not saved for their gradient. With d = dy weight_g, dp
    = sum over features of d h, in the pass of the gated unit's gradient, whose dy is p d;  dweight_g = dy^T (p h).

    x, [gate; up]: [*, top_k, 2 F], probs: [*, top_k], y: [*, H].
    Source: Shazeer et al. 2017, arXiv:1701.06538; factors before the second GEMM: Fedus et al. 2021, arXiv:2101.03961.
    """

    def fwd(
        self,
        x: Tensor,
        *,
        linear_offsets: Tensor,
        unpermute_rows: Tensor,
        unpermute_offsets: Tensor,
        unpermute_probs: Tensor,
    ) -> tuple[Tensor, _FactorsBeforeGEMM.Saved]:
        y, fields = self._outputs(x, linear_offsets, unpermute_rows, unpermute_offsets, unpermute_probs)
        return summed(y, unpermute_rows, unpermute_offsets, None), self.Saved(**fields)

    def bwd(
        self, dy: Tensor, saved: _FactorsBeforeGEMM.Saved, *, needs: frozenset[str], main_grads: dict[str, Tensor]
    ) -> tuple[Tensor | None, Grads]:
        rows = sorted_rows(dy if dy.dtype is saved.x.dtype else dy.to(saved.x.dtype), saved.rows, saved.offsets)
        return self._gradients(rows, saved, needs, main_grads)


class RecomputeGatedGroupedLinearUnpermute(GatedGroupedLinearUnpermute):
    """y_t = sum_j p_j h_j weight_g^T, h = act(gate) up; recomputes p h in the pass of the gated unit's gradient.

    Costs one more tensor written in the backward pass; saves that tensor less. dweight comes after dx.

    x, [gate; up]: [*, top_k, 2 F], probs: [*, top_k], y: [*, H].
    Source: Chen et al. 2016, arXiv:1604.06174 (recompute).
    """

    saves_memory = True

    def saves(self, env: Env) -> Savings:
        return super().saves(env) - Savings(bytes=self._made(env))

    def _outputs(self, x: Tensor, *given: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y, fields = super()._outputs(x, *given)
        return y, {**fields, "scaled": None}


class GatedGroupedLinearUnpermuteBoundary(_FactorsBeforeGEMM):
    """z = sum_j p_j h_j weight_g^T + other, h = act(gate) up, y = norm(z), fork_out = z: with the norm of the next
    block.

    As `GatedGroupedLinearUnpermute`, but the sum over the experts of a token, the residual sum and the norm are one
    pass. In the backward pass the norm's kernel writes the gradients of the experts' outputs.

    x, [gate; up]: [*, top_k, 2 F], probs: [*, top_k], other, y, z: [*, H].
    Source: as `GatedGroupedLinearUnpermute`.
    """

    add: Add
    fork: Fork | None
    norm: LayerNorm | RMSNorm

    any_dy = True
    outputs = ("fork_out",)

    class Saved(_FactorsBeforeGEMM.Saved):
        z: Tensor  # [*, H]
        mean: Tensor | None  # [*] float32; LayerNorm only
        rstd: Tensor  # [*] float32
        gain: Tensor | None  # [H], the weight of the norm, the parameter

    def requires(self, env: Env) -> Requirements:
        yield from super().requires(env)
        yield from boundary_fits(None, self.norm, None, env)

    def saves(self, env: Env) -> Savings:
        behind = (self.unpermute, self.add, *([] if self.fork is None else [self.fork]), self.norm)
        return super().saves(env) + gain(behind, env, forward=True, backward=True, saved=(len(behind) - 1,))

    def fwd(
        self,
        x: Tensor,
        *,
        linear_offsets: Tensor,
        unpermute_rows: Tensor,
        unpermute_offsets: Tensor,
        unpermute_probs: Tensor,
        add_other: Tensor,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, dict[str, Tensor], Saved]:
        y, fields = self._outputs(x, linear_offsets, unpermute_rows, unpermute_offsets, unpermute_probs)
        pairs = pairs_of(unpermute_rows, unpermute_offsets, None)
        around, _ = boundary_around(None, None, y, add_other, None, dtype=dtype)
        out, record = run_norm(self.norm, y, pairs=pairs, **around)
        assert out.stream is not None
        saved = self.Saved(**fields, z=out.stream, mean=out.mean, rstd=out.rstd, gain=record.weight)
        return out.y, {} if self.fork is None else {"fork_out": out.stream}, saved

    def bwd(
        self,
        dy: Tensor,
        saved: Saved,
        *,
        d_fork_out: Tensor | None = None,
        needs: frozenset[str],
        main_grads: dict[str, Tensor],
    ) -> tuple[Tensor | None, Grads]:
        spread = not needs.isdisjoint(("x", "unpermute.probs", "linear.weight"))
        pairs = pairs_of(saved.rows, saved.offsets, None)
        around: dict[str, Any] = {"dpairs": spread, "branch_dtype": saved.x.dtype, "pairs": pairs}
        rows, grads = experts_bwd(self.norm, dy, self._of_norm(saved), needs, d_fork_out, around)
        if rows is None:
            return None, grads
        dx, of_experts = self._gradients(rows, saved, needs, main_grads)
        return dx, {**grads, **of_experts}

    def _of_norm(self, saved: Saved) -> NormRecord:
        if saved.mean is None:
            return RMSNorm.Saved(x=saved.z, rstd=saved.rstd, weight=saved.gain)
        return LayerNorm.Saved(x=saved.z, mean=saved.mean, rstd=saved.rstd, weight=saved.gain)

    def unfused(self, saved: Any) -> dict[str, Any]:
        return {**super().unfused(saved), "norm": self._of_norm(saved)}

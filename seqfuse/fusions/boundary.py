"""Block boundaries: the end of one residual block, the residual stream, and the norm that begins the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env, any_autocast, autocast_of
from ..fusion import BackwardFusion, ForwardFusion, JointFusion, Requirements
from ..kernels import kernels_of
from ..operation import Grads
from ..ops import Add, Bias, Dropout, Fork, LayerNorm, RMSNorm, Scale, Unpermute
from ..ops._lowprecision import as_codes, as_quantized
from ..ops._parameters import parameter
from ..ops.experts import dtype_of_sums
from ..pointwise import Pointwise
from ..quantized import COLUMNS, Quantize, Quantized
from ._shared import as_one_activation, factors_of, functions_fit, kernels_read, own_records, sum_dtype, with_parameters
from .norm import (
    NormRecord,
    bias_gradient,
    gives_own,
    gradients_of,
    is_worthwhile,
    norm_bwd_to,
    norm_fits,
    norm_to,
    run_decided,
    run_norm,
    run_norm_bwd,
)


class BlockBoundary(ForwardFusion):
    """z = dropout(x + bias) + other, y = norm(z), fork_out = z: the boundary of two blocks in one pass.

    z is written once. The norm saves it, and between pre-norm blocks it is also the residual stream. Without a `Fork`
    before the norm (post-norm), nothing else reads it. The dropout mask is recomputed from the seed. x, other, y, z:
    [*, H], bias: [H]. Saves the same tensors as the operations.
    """

    bias: Bias | None
    dropout: Dropout | None
    add: Add
    fork: Fork | None
    norm: LayerNorm | RMSNorm

    kernels = ("triton", "c")
    outputs = ("fork_out",)

    def requires(self, env: Env) -> Requirements:
        yield from boundary_fits(self.bias, self.norm, self.dropout, env)

    def can_quantize(self, to: Quantize, env: Env) -> bool:
        return is_worthwhile(to, env)

    def fwd(
        self,
        x: Tensor,
        *,
        add_other: Tensor,
        dropout_seed: Tensor | None = None,
        dtype: torch.dtype | None,
        to: Quantize | None = None,
    ) -> tuple[Tensor | Quantized, dict[str, Tensor], dict[str, Any]]:
        given = self.bias, self.dropout, x, add_other, dropout_seed, dtype
        if to is not None and x.numel():
            y, stream, record = norm_to(self.norm, x, to, **boundary_around(*given)[0])
        else:
            row, seed = None if self.bias is None else self.bias.read(), dropout_seed
            seed = None if self.dropout is None or not self.dropout.random else seed
            key = add_other.dtype, None if row is None else row.dtype, seed is None, dtype, any_autocast()
            others = [t for t in (None if row is None else row.contiguous(), seed) if t is not None]
            out, record = run_decided(self, self.norm, x, key, lambda: boundary_around(*given)[0], *others, add_other)
            y, stream = out.y, out.stream
        assert stream is not None
        return y, {} if self.fork is None else {"fork_out": stream}, {"norm": record}


class BlockBoundaryBackward(BackwardFusion):
    """All gradients of a block boundary in one pass: dz = norm'(dy) + d_fork_out, dx = dropout'(dz), dother = dz.

    The same pass sums the gradients of the norm's parameters and the bias over tokens, in float32 and a fixed order,
    rounded once. Without dropout dx is dz. dy, d_fork_out, dx: [*, H].
    """

    bias: Bias | None
    dropout: Dropout | None
    add: Add
    fork: Fork | None
    norm: LayerNorm | RMSNorm

    kernels = ("triton", "c")
    any_dy = True

    def requires(self, env: Env) -> Requirements:
        yield from boundary_fits(self.bias, self.norm, self.dropout, env)

    def can_quantize(self, to: Quantize, env: Env) -> bool:
        # With blocks of 128, or in float32, neither a second sum along rows nor dropout fits in registers.
        light = isinstance(self.norm, RMSNorm) and (self.dropout is None or not self.dropout.random)
        return is_worthwhile(to, env) and (light or (to.block != COLUMNS and env.autocast is None))

    def bwd(
        self,
        dy: Tensor,
        *,
        norm: LayerNorm.Saved | RMSNorm.Saved,
        dropout: Dropout.Saved | None = None,
        d_fork_out: Tensor | None = None,
        needs: frozenset[str],
        dtype: torch.dtype | None = None,
        to: Quantize | None = None,
    ) -> tuple[Tensor | Quantized | None, Grads]:
        seed, p = (None, 0.0) if dropout is None else (dropout.seed, dropout.p)
        if to is not None and "x" in needs and dy.numel():
            around: dict[str, Any] = {"seed": seed, "p": p, "dstream": d_fork_out, "branch_dtype": dtype}
            if "bias.bias" in needs and self.bias is not None:
                around["dpre_bias"] = self.bias.dtype
            wanted, around["largest"] = as_codes(to, dy)
            other = "add.other" in needs
            out, grads = norm_bwd_to(self.norm, dy, norm, wanted, needs, dx=other, **around)
            grads |= {"add.other": out.stream if other else None, "bias.bias": out.dpre_bias}
            return as_quantized(out.codes, wanted, dy.shape, dtype or norm.x.dtype, dy.device), grads
        before = not needs.isdisjoint(_BEFORE)
        if not before and "norm.weight" not in needs:
            return None, bias_gradient(self.norm, dy, norm)
        weight = norm.weight if before else None
        cast = dtype is not None and dtype is not norm.x.dtype
        key = needs, weight is not None, d_fork_out is not None, seed is not None
        run = self.decided((key, p, cast, dtype), self._gradients, *key, p, cast, dtype)
        return run(dy, norm, weight, d_fork_out, seed)

    def _gradients(
        self,
        needs: frozenset[str],
        weighted: bool,
        added: bool,
        dropped: bool,
        p: float,
        cast: bool,
        dtype: torch.dtype | None,
    ) -> Callable[..., Any]:
        first, others, around = asked_around(self.bias, needs, p if dropped else None, cast, dtype)
        before = not needs.isdisjoint(_BEFORE)
        return gradients_of(self.norm, needs, weighted, added, dropped, before, first, others, **around)


_BEFORE = frozenset({"x", "bias.bias", "add.other"})
"""The gradients of a boundary that depend on its norm's dx."""


class UnpermuteBoundary(ForwardFusion):
    """z = sum_j p_j x_j + other over the rows j of a token, y = norm(z), fork_out = z: experts, residual stream, norm.

    One pass for the sum over the experts of a token, the residual sum and the norm of the next block. z is written
    once, the sum over experts never. x: [*, top_k, H], probs: [*, top_k], other, y, z: [*, H]. Saves the same tensors
    as the operations.
    """

    unpermute: Unpermute
    add: Add
    fork: Fork | None
    norm: LayerNorm | RMSNorm

    kernels = ("triton", "c")
    outputs = ("fork_out",)

    def requires(self, env: Env) -> Requirements:
        yield from boundary_fits(None, self.norm, None, env)

    def fwd(
        self,
        x: Tensor,
        *,
        unpermute_rows: Tensor,
        unpermute_offsets: Tensor,
        unpermute_probs: Tensor | None = None,
        add_other: Tensor,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
        self.unpermute.check(x, unpermute_rows, unpermute_probs)
        given: dict[str, Any] = {"rows": unpermute_rows, "offsets": unpermute_offsets}
        pairs = pairs_of(**given, probs=unpermute_probs)
        around, _ = boundary_around(None, None, x, add_other, None, dtype=dtype)
        out, record = run_norm(self.norm, x, pairs=pairs, **around)
        assert out.stream is not None
        kept = None if unpermute_probs is None else x
        own = Unpermute.Saved(x=kept, probs=unpermute_probs, **given)
        outputs = {} if self.fork is None else {"fork_out": out.stream}
        return out.y, outputs, {"unpermute": own, "norm": record}


class UnpermuteBoundaryBackward(BackwardFusion):
    """All gradients of `UnpermuteBoundary` in one pass: dz = norm'(dy) + d_fork_out, dx_j = p_j dz, dother = dz.

    dp_j = sum over features of dz x_j. The same pass sums the gradients of the norm's parameters over tokens, in
    float32 and a fixed order. dy, d_fork_out: [*, H], dx: [*, top_k, H].
    """

    unpermute: Unpermute
    add: Add
    fork: Fork | None
    norm: LayerNorm | RMSNorm

    kernels = ("triton", "c")
    any_dy = True

    def requires(self, env: Env) -> Requirements:
        yield from boundary_fits(None, self.norm, None, env)

    def bwd(
        self,
        dy: Tensor,
        *,
        unpermute: Unpermute.Saved,
        norm: LayerNorm.Saved | RMSNorm.Saved,
        d_fork_out: Tensor | None = None,
        needs: frozenset[str],
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor | None, Grads]:
        spread, dots = "x" in needs, "unpermute.probs" in needs
        pairs = pairs_of(unpermute.rows, unpermute.offsets, unpermute.probs if spread else None)
        around: dict[str, Any] = {"dpairs": spread, "branch_dtype": dtype, "pairs": pairs}
        if dots:
            assert unpermute.x is not None
            probs = unpermute.probs if spread else None
            around |= {"other": unpermute.x, "dfactors": dtype_of_sums(unpermute.x, probs)}
        return experts_bwd(self.norm, dy, norm, needs, d_fork_out, around)


def pairs_of(rows: Tensor, offsets: Tensor, probs: Tensor | None) -> Any:
    """The rows of tokens and experts as an argument of norm kernels."""
    top_k = rows.shape[-1]
    flat = rows.reshape(-1, top_k).contiguous()
    return kernels_of("permute").Pairs(flat, offsets, None if probs is None else probs.reshape(-1, top_k).contiguous())


def experts_bwd(
    norm: LayerNorm | RMSNorm,
    dy: Tensor,
    saved: NormRecord,
    needs: frozenset[str],
    dstream: Tensor | None,
    around: dict[str, Any],
) -> tuple[Tensor | None, Grads]:
    """The gradients of a norm whose input sums rows of experts: of these rows, and of other tensors by name."""
    streams = "add.other" in needs
    before = streams or around["dpairs"] or "dfactors" in around
    if not before and "norm.weight" not in needs:
        return None, bias_gradient(norm, dy, saved)
    mean = saved.mean if isinstance(saved, LayerNorm.Saved) else None
    given = dy, saved.x, mean, saved.rstd, saved.weight if before else None, None, needs
    out, grads = run_norm_bwd(norm, *given, dx=streams, dstream=dstream, **(around if before else {}))
    if streams:
        grads["add.other"] = out.dx
    if out.dfactors is not None:
        grads["unpermute.probs"] = out.dfactors
    return out.dpairs, grads


class BlockBoundaryActivation(JointFusion):
    """z = dropout(x + bias) + other, y = act(norm(z)), fork_out = z, and all gradients, one pass each.

    As `BlockBoundary` and `BlockBoundaryBackward`, with act up to eight activations and constant factors after the
    norm. Nothing between z and y is written or saved: the backward pass recomputes it from z in registers.

    x, other, y, z: [*, H], bias, weight, shift: [H], mean, rstd: [*].
    """

    bias: Bias | None
    dropout: Dropout | None
    add: Add
    fork: Fork | None
    norm: LayerNorm | RMSNorm
    acts: tuple[Pointwise | Scale, ...]

    kernels = ("triton", "c")
    any_dy = True
    outputs = ("fork_out",)

    class Saved(context.Saved):
        z: Tensor  # [*, H]
        mean: Tensor | None  # [*] float32; LayerNorm only
        rstd: Tensor  # [*] float32
        weight: Tensor | None  # [H], the parameter
        shift: Tensor | None  # [H], the bias of the norm
        seed: Tensor | None  # [] int64
        p: float
        factors: tuple[float, ...]  # constant factors

    def requires(self, env: Env) -> Requirements:
        yield from boundary_fits(self.bias, self.norm, self.dropout, env)
        yield from functions_fit(self.acts, env)
        yield from gives_own(self.norm, env.part(-2 - len(self.acts)))

    def saved_at(self) -> tuple[int, ...]:
        return (len(self.operations()) - len(self.acts) - 1,)

    def fwd(
        self, x: Tensor, *, add_other: Tensor, dropout_seed: Tensor | None = None, dtype: torch.dtype | None
    ) -> tuple[Tensor, dict[str, Tensor], Saved]:
        factors = factors_of(self.acts)
        around, seed = boundary_around(self.bias, self.dropout, x, add_other, dropout_seed, dtype=dtype)
        out, _ = run_norm(self.norm, x, act=as_one_activation(self.acts, factors), **around)
        assert out.stream is not None
        saved = self.Saved(
            z=out.stream, mean=out.mean, rstd=out.rstd, weight=parameter(self.norm, "weight"),
            shift=parameter(self.norm, "bias"),
            seed=seed, p=0.0 if self.dropout is None else self.dropout.p, factors=factors,
        )  # fmt: skip
        return out.y, {} if self.fork is None else {"fork_out": out.stream}, saved

    def bwd(
        self,
        dy: Tensor,
        saved: Saved,
        *,
        d_fork_out: Tensor | None = None,
        needs: frozenset[str],
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor | None, Grads]:
        act = as_one_activation(self.acts, saved.factors)
        given = dy, saved.z, saved.mean, saved.rstd, saved.weight, saved.shift, needs
        cast, p = dtype is not None and dtype is not saved.z.dtype, None if saved.seed is None else saved.p
        first, others, around = asked_around(self.bias, needs, p, cast, dtype)
        around |= {"act": act, "dstream": d_fork_out, "seed": saved.seed, "dx": not needs.isdisjoint(_BEFORE)}
        out, grads = run_norm_bwd(self.norm, *given, **around)
        grads |= {name: getattr(out, result) for name, result in others.items()}
        return None if first is None else getattr(out, first), grads

    def unfused(self, saved: Saved) -> dict[str, Any]:
        """The `Saved` of each operation, for the unfused backward pass."""
        z, record = with_parameters(self.norm, {"weight": saved.weight, "bias": saved.shift}).fwd(saved.z)
        own: dict[str, Any] = {"norm": record, "acts": own_records(self.acts, z, saved.factors)}
        return own if self.dropout is None else {**own, "dropout": Dropout.Saved(seed=saved.seed, p=saved.p)}


def asked_around(
    bias: Bias | None, needs: frozenset[str], p: float | None, cast: bool, dtype: torch.dtype | None
) -> tuple[str | None, dict[str, str], dict[str, Any]]:
    """Which results of the kernel are gradients of the branch and of other slots, and the arguments to compute them.

    The gradient of the branch is a separate result with dropout (p is not `None`), or if its dtype differs (`cast`);
    otherwise it is the gradient of the stream.
    """
    branch, others, around = "x" in needs, dict[str, str](), dict[str, Any]()
    if p is not None:
        around["p"] = p
    if p is not None or (cast and branch):
        around |= {"dbranch": branch, "branch_dtype": dtype}
    if "bias.bias" in needs and bias is not None:
        around["dpre_bias"], others["bias.bias"] = bias.dtype, "dpre_bias"
    if "add.other" in needs:
        others["add.other"] = "dx"
    return (None if not branch else "dbranch" if "dbranch" in around else "dx"), others, around


def boundary_around(
    bias: Bias | None, dropout: Dropout | None, x: Tensor, other: Tensor, seed: Tensor | None, dtype: torch.dtype | None
) -> tuple[dict[str, Any], Tensor | None]:
    """The norm kernel's arguments for the operations before the norm, in its order, and the seed if it is read.

    `dtype` is the dtype of y.
    """
    stream, around = sum_dtype(x, other), dict[str, Any]()
    if bias is not None:
        row = bias.read()
        if row.dtype is not x.dtype and autocast_of(x.device.type) is None:  # else the bias is cast to x's dtype
            stream = sum_dtype(x, other, row)
        around["pre_bias"] = row.contiguous()
    if dropout is None or not dropout.random:
        seed = None
    else:
        around |= {"seed": seed, "p": dropout.p}
    return {**around, "residual": other, "dtype": dtype or stream, "stream_dtype": stream}, seed


def boundary_fits(bias: Bias | None, norm: LayerNorm | RMSNorm, dropout: Dropout | None, env: Env) -> Requirements:
    """Requirements of the kernels for a boundary."""
    yield from norm_fits(norm, env)
    if bias is not None:
        yield from kernels_read("bias", bias.dtype, env)
    upscale = dropout is None or dropout.mode == "upscale_in_train"
    yield upscale, "its kernel scales what dropout keeps: mode must be upscale_in_train"

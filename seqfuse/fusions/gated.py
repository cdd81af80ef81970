"""Gated units in one pass over memory, forward and backward: with the bias before, and a factor per token after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import saved as context
from ..env import Env
from ..fusion import BackwardFusion, ForwardFusion, JointFusion, Requirements
from ..kernels import kernels_of
from ..operation import Grads
from ..ops import Bias, TokenScale
from ..pointwise import Gated
from ..quantized import COLUMNS, Quantize, Quantized
from ._shared import act_fits, bias_fits, kernels_run, numbers_of, unit_of
from .chain import chain_of, quantized_chain


class BiasGated(ForwardFusion):
    """y = act(gate) up, [gate; up] = x + bias, in one pass; x + bias is written for the gradient of the gated unit.

    x, [gate; up]: [*, 2 F], y: [*, F]. Saves the same tensors as the operations.
    """

    bias: Bias | None
    gated: Gated

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        return _gated_fits(self.bias, self.gated, env)

    def can_quantize(self, to: Quantize, env: Env) -> bool:
        # After a bias, a tile of 128 x 128 does not fit in registers.
        return self.gated.packing != "interleaved" and (self.bias is None or to.block != COLUMNS)

    def fwd(self, x: Tensor, *, to: Quantize | None = None) -> tuple[Tensor | Quantized, dict[str, Any]]:
        gated, bias = self.gated, self.bias
        steps = ("gated",) if bias is None else ("bias", "store", "gated")
        kernel = self.decided((numbers_of(gated), to), gated_kernel, gated, steps, True, (), to)
        y: Any
        packed: Any = x
        if bias is None:
            (y,) = kernel(x)
        else:
            y, packed = kernel(x, bias.read())
        return y, {"gated": gated.record(packed, y)}


class BiasGatedBackward(BackwardFusion):
    """dx = [dgate; dup], dgate = dy up act'(gate), dup = dy act(gate), dbias = sum of dx over all tokens.

    One pass; the sum is in float32 and a fixed order. dy: [*, F], dx: [*, 2 F].
    """

    bias: Bias | None
    gated: Gated

    kernels = ("triton", "c")

    def requires(self, env: Env) -> Requirements:
        return _gated_fits(self.bias, self.gated, env)

    def can_quantize(self, to: Quantize, env: Env) -> bool:
        # The gradients of gate and up are adjacent; each must consist of whole tiles.
        width = to.operation.features[1]
        return self.gated.packing != "interleaved" and width % (2 * COLUMNS) == 0

    def bwd(
        self, dy: Tensor, *, gated: Any, needs: frozenset[str], to: Quantize | None = None
    ) -> tuple[Tensor | Quantized | None, Grads]:
        steps = ("dgated", "column_sum") if "bias.bias" in needs else ("dgated",)
        key, to = (needs, numbers_of(self.gated), to), to if "x" in needs else None
        dx, *sums = self.decided(key, gated_kernel, self.gated, steps, "x" in needs, (), to)(dy, gated.x)
        return dx, {"bias.bias": sums[0]} if sums else {}


class BiasGatedScale(JointFusion):
    """y = act(gate) up scales, [gate; up] = x + bias, and all gradients, one pass each; h is not saved.

    With h = act(gate) up, dscales = sum of dy h over the features of each token; [dgate; dup] is the gradient of the
    gated unit for scales dy; h is recomputed from x in registers. dbias = sum of [dgate; dup] over all tokens.
    x, [gate; up]: [*, 2 F], scales: [*] or [*, 1], y: [*, F].
    """

    bias: Bias | None
    gated: Gated
    scale: TokenScale

    kernels = ("triton", "c")

    class Saved(context.Saved):
        x: Tensor  # [*, 2 F]
        bias: Tensor | None  # the parameter
        scales: Tensor  # [*] or [*, 1]

    def requires(self, env: Env) -> Requirements:
        return _gated_fits(self.bias, self.gated, env)

    def saved_at(self) -> tuple[int, ...]:
        return (0,)

    def fwd(self, x: Tensor, *, scale_scales: Tensor) -> tuple[Tensor, Saved]:
        bias = None if self.bias is None else self.bias.read()
        self.scale.check((*x.shape[:-1], 1), scale_scales)
        steps = (*["bias"] * (bias is not None), "gated", "token_scale")
        kernel = self.decided(numbers_of(self.gated), gated_kernel, self.gated, steps)
        y: Any
        (y,) = kernel(x, *[] if bias is None else [bias], scale_scales.reshape(x.shape[:-1]))
        return y, self.Saved(x=x, bias=bias, scales=scale_scales)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, Grads]:
        bias, scales = saved.bias, saved.scales
        dots, sums, before = "scale.scales" in needs, "bias.bias" in needs, "x" in needs or "bias.bias" in needs
        steps = [*["shift"] * (bias is not None), *["dot_gated"] * dots]
        steps += [*["token_scale", "dgated"] * before, *["column_sum"] * sums]
        dtypes = [*[scales.dtype] * dots, *[bias.dtype for _ in range(sums) if bias is not None]]
        key = "backward", needs, numbers_of(self.gated), *dtypes
        kernel = self.decided(key, gated_kernel, self.gated, tuple(steps), "x" in needs, dtypes)
        behind = [scales.reshape(dy.shape[:-1]), saved.x] * before
        dx, *made = kernel(dy, *[] if bias is None else [bias], *[saved.x] * dots, *behind)
        grads: dict[str, Tensor | None] = {}
        if dots:
            grads["scale.scales"] = made[0].view(scales.shape) if made[0] is not None else None
        if sums:
            grads["bias.bias"] = made[-1]
        return dx, grads

    def unfused(self, saved: Saved) -> dict[str, Any]:
        """The `Saved` of each operation, for the unfused backward pass."""
        h, gated = self.gated.fwd(saved.x if saved.bias is None else saved.x + saved.bias.to(saved.x.dtype))
        return {"gated": gated, "scale": TokenScale.Saved(x=h, scales=saved.scales)}


def _gated_fits(bias: Bias | None, gated: Gated, env: Env) -> Requirements:
    yield from kernels_run(env)
    yield from bias_fits(bias, env)
    yield from act_fits(gated, env)
    yield env.leaving is env.dtype, "the gated unit gives another dtype"


def gated_kernel(
    gated: Gated,
    steps: Sequence[str],
    result: bool = True,
    dtypes: Sequence[torch.dtype] = (),
    to: Quantize | None = None,
) -> Callable[..., tuple[Any, ...]]:
    """The kernel of the chain of these steps of a gated unit; `dtypes` of extra results, by default that of x."""
    of = unit_of(gated)
    chain = chain_of(
        [(s, *of) if "gated" in s else (s, True) if s == "shift" else (s,) for s in steps]  # a packed bias
    )
    if to is not None:
        return quantized_chain(chain, to, dtypes)
    return kernels_of("pointwise").pointwise_of(chain, None, dtypes, result)

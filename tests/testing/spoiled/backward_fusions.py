"""Spoiled backward, joint and inference fusions: each breaks one rule, with the message expected of the kit."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import seqfuse as sf
from seqfuse import ops

from ..kinds import AddForkBias, BiasAct, BiasGeLU, LinearBias, LinearBiasJoint, NormLinear, rows
from .register import caught, spoil

# Backward fusions.


@caught("gradient 'bias.weight'; known are 'linear.weight', 'bias.bias'")
class NamesAGradientWrongly(LinearBias):
    def bwd(self, dy, *, linear, bias, needs):
        dx, grads = super().bwd(dy, linear=linear, bias=bias, needs=needs)
        return dx, {"linear.weight": grads["linear.weight"], "bias.weight": grads["bias.bias"]}


class EditsGradients(LinearBias):
    def bwd(self, dy, *, linear, bias, needs):
        dx, grads = super().bwd(dy, linear=linear, bias=bias, needs=needs)
        return self.edit(dx, dict(grads), dy, linear, needs)


def setting(name, value, when=lambda dy, needs: True):
    """An edit that replaces a needed gradient by another."""

    def edit(self, dx, grads, dy, linear, needs):
        return dx, {**grads, name: value(dy, linear, grads)} if name in needs and when(dy, needs) else grads

    return edit


spoil(
    EditsGradients, "edit",
    ShapesAGradientWrongly=(
        r"gradient 'bias.bias' should be float32\[9\] on cpu, not float32\[1, 9\]",
        setting("bias.bias", lambda dy, linear, grads: rows(dy).sum(0, keepdim=True)),
    ),
    LeavesAGradientInFloat32=(
        "gradient 'bias.bias' should be bfloat16",
        setting("bias.bias", lambda dy, linear, grads: rows(dy).float().sum(0)),
    ),
    ForgetsAGradient=(
        "returned no gradient 'linear.weight', which is needed",
        lambda self, dx, grads, dy, linear, needs: (dx, {"bias.bias": grads["bias.bias"]}),
    ),
    ForgetsDx=("returned no gradient of x, which is needed", lambda self, dx, grads, dy, linear, needs: (None, grads)),
    ReadsTheWeightOfTheModule=(
        "bwd reads the parameter 'linear.weight' of its module, which may have changed; read it from `saved`",
        lambda self, dx, grads, dy, linear, needs: (dy @ self.linear.weight if "x" in needs else None, grads),
    ),
    ReturnsDyAsAGradient=(
        "(shares its storage with dy|shares its memory with the incoming gradient)",
        setting("bias.bias", lambda dy, linear, grads: dy, lambda dy, needs: dy.ndim == 1),
    ),
    DoublesTheBiasGradient=(
        "bias.bias.grad: (max|rms|tile|element|bias)",
        setting("bias.bias", lambda dy, linear, grads: 2 * grads["bias.bias"]),
    ),
    SwallowsANaNOfDy=(
        r"dy one_nan: .*\n  bias.bias.grad: structure",
        setting("bias.bias", lambda dy, linear, grads: rows(dy).nansum(0)),
    ),
    ClampsDx=(
        r"dy large: .*\n  d_x: (max|rms|tile|element|bias)",
        lambda self, dx, grads, dy, linear, needs: (None if dx is None else dx.clamp(-1e4, 1e4), grads),
    ),
    DropsTheLastRowOfTheWeightGradient=(
        "linear.weight.grad: (max|rms|tile|element|bias)",
        setting("linear.weight", lambda dy, linear, grads: rows(dy)[:-1].t() @ rows(linear.x)[:-1]),
    ),
    AccumulatesInLowPrecision=(
        "linear.weight.grad: (max|rms|tile|element|bias)",
        setting(
            "linear.weight",
            lambda dy, linear, grads: (rows(dy).bfloat16().t() @ rows(linear.x).bfloat16()).to(dy.dtype),
        ),
    ),
    IgnoresNeeds=(
        "bwd gives a gradient of 'linear.weight', which is not needed",
        lambda self, dx, grads, dy, linear, needs: (
            dx, {**grads, "linear.weight": torch.zeros_like(linear.weight)} if needs == {"x"} else grads
        ),
    ),
    MutatesDy=(
        "bwd: dy was modified",
        lambda self, dx, grads, dy, linear, needs: (dy.data.mul_(2), (dx, grads))[1],
    ),
    MutatesARecord=(
        "bwd: linear.x was modified",
        lambda self, dx, grads, dy, linear, needs: (
            "linear.weight" in needs and linear.x.data.zero_(), (dx, grads)
        )[1],
    ),
)  # fmt: skip


@caught("field 'x' was dropped: only weight reads it")
class ReadsADroppedField(LinearBias):
    def bwd(self, dy, *, linear, bias, needs):
        linear.x.sum()
        return super().bwd(dy, linear=linear, bias=bias, needs=needs)


@caught("d_x: (max|rms|tile|element|bias)")
class DropsTheGradientOfTheResidual(AddForkBias):
    def bwd(self, dy, *, add, fork, bias, d_fork_out, needs):
        return super().bwd(dy, add=add, fork=fork, bias=bias, d_fork_out=None, needs=needs)


@caught("bfloat16, .* bwd gives the gradient 'add.other' in torch.float32 for an input in torch.bfloat16")
class WidensTheGradientOfAnExtraInput(AddForkBias):
    def bwd(self, dy, *, add, fork, bias, d_fork_out, needs):
        dx, grads = super().bwd(dy, add=add, fork=fork, bias=bias, d_fork_out=d_fork_out, needs=needs)
        other = grads["add.other"]
        return dx, {**grads, "add.other": other if other is None or other.dtype.itemsize > 2 else other.float()}


memory: dict[object, torch.Tensor] = {}


@caught("another call changes the results of the one before: d_x: bits differ")
class ReusesTheMemoryOfDx(AddForkBias):
    def bwd(self, dy, *, add, fork, bias, d_fork_out, needs):
        dx, grads = super().bwd(dy, add=add, fork=fork, bias=bias, d_fork_out=d_fork_out, needs=needs)
        return memory.setdefault((dx.shape, dx.dtype), torch.empty_like(dx)).copy_(dx), grads


@caught("no gradient 'add.other', which is needed")
class DropsTheGradientOfAnExtraInput(AddForkBias):
    def bwd(self, dy, *, add, fork, bias, d_fork_out, needs):
        d, grads = super().bwd(dy, add=add, fork=fork, bias=bias, d_fork_out=d_fork_out, needs=needs)
        return d, {"bias.bias": grads["bias.bias"]}


class TanhBackward(sf.BackwardFusion):
    """Returns something else for a dy with gaps between its rows."""

    act: ops.Tanh

    layout = "any"

    def bwd(self, dy, *, act):
        dx = dy * (1 - act.y * act.y)
        return (dx if dy.is_contiguous() else self.spoilt(dx)), {}


spoil(
    TanhBackward, "spoilt",
    WidensForAStridedDy=("the gradient of x should be like float32.*, not float64", lambda self, dx: dx.double()),
    AddsADimensionForAStridedDy=(r"the gradient of x should be like .*, not float32\[1, ", lambda self, dx: dx[None]),
)  # fmt: skip


# Joint fusions and inference.


@caught("d_x: (max|rms|tile|element|bias)")
class ForgetsTheBiasInTheDerivative(BiasAct):
    def fwd(self, x):
        return super().fwd(x)[0], self.Saved(z=x)


@caught("d_x: (max|rms|tile|element|bias)")
class MissesATermOfDx(BiasGeLU):
    def bwd(self, dy, saved):
        cdf = 0.5 * (1 + torch.erf(saved.z / 2**0.5))
        return dy * cdf, {"bias.bias": rows(dy * cdf).sum(0)}


@caught("(y|d_x): (max|rms|tile|element|bias)")
class TakesTanhForErf(BiasGeLU):
    def fwd(self, x):
        z = x + self.bias.bias
        return F.gelu(z, approximate="tanh"), self.Saved(z=z)


spoil(
    LinearBiasJoint, "keep",
    SavesACopyOfTheWeight=(
        "field 'weight' must be the parameter 'linear.weight' itself, not a copy of it",
        lambda self, weight: weight.clone(),
    ),
    SavesATransposedCopy=(
        "field 'weight' must be the parameter 'linear.weight' itself, not a copy of it",
        lambda self, weight: weight.t().contiguous().t(),
    ),
)  # fmt: skip


@caught("saved.x is a copy of x, which takes its own memory: save x itself")
class SavesACopyOfTheInput(LinearBiasJoint):
    def fwd(self, x):
        y, saved = super().fwd(x)
        return y, self.Saved(x=x.clone(), weight=saved.weight)


@caught(r"no gradient: .*\n  y: (max|rms|tile|element|bias)")
class ForgetsTheBiasWhereNothingNeedsAGradient(BiasAct):
    def fwd(self, x, *, env):
        y, saved = super().fwd(x)
        return y if env.grad else self.act.reference(x), saved


spoil(
    BiasAct, "unfused",
    UnfusesToTheWrongRecord=(
        "field 'x' of slot 'act'",
        lambda self, s: {"bias": self.bias.Saved(), "act": self.act.record(2 * s.z, self.act.reference(2 * s.z))},
    ),
)  # fmt: skip


@caught("y: (max|rms|tile|element|bias)")
class MissesEps(NormLinear):
    def fwd(self, x):
        norm = self.norm
        y = F.layer_norm(x.float(), norm.normalized_shape, norm.weight.float(), norm.bias.float(), 0.0).to(x.dtype)
        return F.linear(y, self.linear.weight, None if self.bias is None else self.bias.bias)


@caught("must return y")
class ReturnsAPair(NormLinear):
    def fwd(self, x):
        return super().fwd(x), None


spoil(
    NormLinear, "fwd",
    ForgetsTheBiasWhereItIsOptional=(
        "y: (max|rms|tile|element|bias)",
        lambda self, x: F.linear(self.norm.fwd(x)[0], self.linear.weight),
    ),
)  # fmt: skip


PACKED: dict[torch.Tensor, torch.Tensor] = {}


@caught("after its parameters changed, .*y")
class KeepsAPackedWeight(NormLinear):
    def fwd(self, x):
        weight = self.linear.weight
        packed = PACKED.setdefault(weight, weight.detach().clone())
        return F.linear(self.norm.fwd(x)[0], packed, None if self.bias is None else self.bias.bias)

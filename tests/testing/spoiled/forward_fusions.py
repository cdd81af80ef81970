"""Spoiled forward fusions: each breaks one rule, with the message expected of the kit."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

import seqfuse as sf
from seqfuse import ops

from ..kinds import Activations, AddNorm, BiasNorm, GeLULinear
from .register import caught, spoil

# Forward fusions: saved tensors.


@caught(r"missing 1 required keyword-only argument: 'weight'")
class ForgetsAField(BiasNorm):
    def fwd(self, x):
        y, saved = super().fwd(x)
        norm = saved["norm"]
        return y, {**saved, "norm": self.norm.Saved(x=norm.x, mean=norm.mean, rstd=norm.rstd)}


@caught("slot 'norm' needs LayerNorm.Saved, it saved nothing")
class ForgetsARecord(BiasNorm):
    def fwd(self, x):
        y, saved = super().fwd(x)
        return y, {"bias": saved["bias"]}


@caught(r"slot 'bias' needs Bias.Saved\(\), it saved LayerNorm.Saved")
class SwapsRecords(BiasNorm):
    def fwd(self, x):
        y, saved = super().fwd(x)
        return y, {"bias": saved["norm"], "norm": saved["bias"]}


class EditsTheRecord(BiasNorm):
    def edit(self, x, mean, rstd, weight):
        raise NotImplementedError

    def fwd(self, x):
        y, saved = super().fwd(x)
        norm = saved["norm"]
        x, mean, rstd, weight = self.edit(norm.x, norm.mean, norm.rstd, norm.weight)
        return y, {**saved, "norm": self.norm.Saved(x=x, mean=mean, rstd=rstd, weight=weight)}


@caught("saved.act.x is a copy of x, which takes its own memory: save x itself")
class CopiesTheInput(GeLULinear):
    def fwd(self, x):
        y, saved = super().fwd(x)
        return y, {**saved, "act": self.act.Saved(x=x.clone())}


spoil(
    EditsTheRecord, "edit",
    SwapsMeanAndRstd=("field 'mean' of slot 'norm': max", lambda self, x, mean, rstd, weight: (x, rstd, mean, weight)),
    CastsAField=(
        r"field 'rstd' of slot 'norm' should be float32\[\d+\] on cpu, not bfloat16",
        lambda self, x, mean, rstd, weight: (x, mean, rstd.bfloat16(), weight),
    ),
    ShapesAFieldWrongly=(
        r"field 'mean' of slot 'norm' should be float32\[\d+\] on cpu, not float32\[\d+, 1\]",
        lambda self, x, mean, rstd, weight: (x, mean[..., None], rstd, weight),
    ),
    CopiesTheParameter=(
        "field 'weight' of slot 'norm' must be the parameter itself",
        lambda self, x, mean, rstd, weight: (x, mean, rstd, weight.clone()),
    ),
    SavesTheInputInLowPrecision=(
        "field 'x' of slot 'norm': (max|rms|tile|element|bias)",
        lambda self, x, mean, rstd, weight: (x.to(torch.bfloat16).to(x.dtype), mean, rstd, weight),
    ),
)  # fmt: skip


@caught("d_x: (max|rms|tile|element|bias)")
class SavesWhatItThenOverwrites(GeLULinear):
    def fwd(self, x):
        y, saved = super().fwd(x)
        kept = x.clone()
        saved["act"] = self.act.Saved(x=kept)
        kept.mul_(1.01)
        return y, saved


@caught("field 'x': the function of a Recompute must be a module-level one")
class RecomputesByAClosure(GeLULinear):
    def fwd(self, x):
        y, saved = super().fwd(x)
        weight = self.linear.weight
        return y, {**saved, "linear": self.linear.Saved(x=sf.Recompute(lambda: F.gelu(x)), weight=weight)}


ticks = itertools.count()


def unsteady_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) + (next(ticks) % 2) * 1e-6


@caught("(a second backward through the same graph differs|its Recompute gives other bits)")
class RecomputesOtherBits(GeLULinear):
    def fwd(self, x):
        y, saved = super().fwd(x)
        weight = self.linear.weight
        return y, {**saved, "linear": self.linear.Saved(x=sf.Recompute(unsteady_gelu, x), weight=weight)}


# Forward fusions: results.


class EditsTheOutput(BiasNorm):
    def fwd(self, x):
        y, saved = super().fwd(x)
        return self.edit(y, x), saved


spoil(
    EditsTheOutput, "edit",
    RoundsTwice=("y: (max|rms|tile|element|bias)", lambda self, y, x: y.to(torch.float16).to(y.dtype)),
    SwallowsNaN=("y: structure: NaN or Inf differs", lambda self, y, x: y.nan_to_num()),
    LosesTheLastOfOddRows=(
        "y: (max|tile|element)",
        lambda self, y, x: torch.cat((y[:-1], 0 * y[-1:])) if y.ndim == 2 and len(y) % 2 else y,
    ),
    ChangesItsMind=(
        "bits differ",
        lambda self, y, x: torch.where(y > y.mean(), y, y * (1 + torch.finfo(y.dtype).eps * (next(ticks) % 2))),
    ),
)  # fmt: skip


@caught("y: structure|y: (max|rms|tile|element|bias)")
class IgnoresStrides(BiasNorm):
    layout = "any"

    def fwd(self, x):
        wide = torch.as_strided(x, x.shape, torch.empty(x.shape).stride(), x.storage_offset())
        return super().fwd(wide if x.stride() != wide.stride() and 0 not in x.stride() else x)


@caught("fork_out: (max|rms|tile|element|bias)")
class EmitsTheWrongTensor(AddNorm):
    def fwd(self, x, *, add_other):
        y, _, saved = super().fwd(x, add_other=add_other)
        return y, {"fork_out": x + 0}, saved


@caught("(d_x|y): (max|rms|tile|element|bias)")
class RunsVariadicSlotsBackward(Activations):
    def fwd(self, x):
        records = []
        for act in reversed(self.acts):
            x, record = act.fwd(x)
            records.insert(0, record)
        return x, {"acts": tuple(records)}


# Forward fusions: side effects.


class DoesSomethingElse(BiasNorm):
    def fwd(self, x):
        self.act(x)
        return super().fwd(x)


spoil(
    DoesSomethingElse, "act",
    MutatesItsInput=(r"fwd: x was modified, first at", lambda self, x: x.data.add_(1e-3)),
    MutatesAParameter=(r"fwd: bias of Bias was modified, first at", lambda self, x: self.bias.bias.data.mul_(1.5)),
    DrawsRandomNumbers=("fwd drew from torch's CPU generator", lambda self, x: torch.rand(1)),
    ConfiguresAnOperation=("fwd changed eps of LayerNorm", lambda self, x: setattr(self.norm, "eps", 2e-5)),
    HasState=("fwd changed last of the fusion", lambda self, x: setattr(self, "last", x)),
    LeavesAHook=(
        "fwd changed _forward_hooks.* of Bias",
        lambda self, x: self.bias.register_forward_hook(lambda *_: None),
    ),
    Fails=("ZeroDivisionError", lambda self, x: 1 // 0),
)  # fmt: skip


class Untouching(sf.ForwardFusion):
    scale: ops.Scale

    def fwd(self, x):
        return x * self.scale.factor, {"scale": self.scale.Saved(factor=self.scale.factor)}


@caught("y shares its storage with x; the operation allocates its own")
class ReturnsAView(Untouching):
    def fwd(self, x):
        y, saved = super().fwd(x)
        return (x.view_as(x) if self.scale.factor == 1 else y), saved


@caught("kept shares its storage with x; the operation allocates its own")
class HandsItsInputToAChannel(sf.ForwardFusion):
    scale: ops.Scale
    fork: ops.Fork

    outputs = ("fork_out",)

    def fwd(self, x):
        y = x * self.scale.factor
        out = x.view_as(x) if self.scale.factor == 1 else y
        return y, {"fork_out": out}, {"scale": self.scale.Saved(factor=self.scale.factor)}


@caught("field 'factor' of slot 'scale' should be -0.75, not -0.5")
class SavesOtherPlainData(Untouching):
    def fwd(self, x):
        return super().fwd(x)[0], {"scale": self.scale.Saved(factor=-0.5)}

"""Spoiled operations: each breaks one rule, with the message expected of the kit."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf

from .register import caught, spoil


class Affine(sf.UnfusedOperation, open=True):
    """y = x weight + bias, with everything that a mutant can spoil."""

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")  # [*, H]
        weight: Tensor = sf.field(for_="x")  # [H]

    def __init_subclass__(cls, **rest) -> None:
        if "reference" not in vars(cls):  # which a class with another fwd must have
            cls.reference = Affine.reference
        super().__init_subclass__(**rest)

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.size = size
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def reference(self, x):
        return x * self.weight + self.bias

    def fwd(self, x):
        return torch.addcmul(self.bias, x, self.weight), self.Saved(x=x, weight=self.weight)

    def bwd(self, dy, saved, *, needs):
        rows = (-1, self.size)
        dx = dy * saved.weight if "x" in needs else None
        dweight = (dy * saved.x).reshape(rows).sum(0) if "weight" in needs else None
        dbias = dy.reshape(rows).sum(0).clone() if "bias" in needs else None
        return dx, {"weight": dweight, "bias": dbias}


# Results and saved tensors.


@caught(r"NarrowsItsOutput, x in bfloat16 and parameters in float32: y is torch.bfloat16, and torch.float32 from")
class NarrowsItsOutput(Affine):
    def fwd(self, x):
        y = torch.addcmul(self.bias, x, self.weight)
        return y.to(x.dtype), self.Saved(x=x, weight=self.weight)


@caught(r"DoublesBatches, float32, x \(2, 3, 6\)")
class DoublesBatches(Affine):
    def fwd(self, x):
        y = torch.addcmul(self.bias, x, self.weight)
        return y * 2 if x.dim() == 3 else y, self.Saved(x=x, weight=self.weight)


@caught(r"KeepsAWiderX, bfloat16, .*saved.x is a copy of x, which takes its own memory: save x itself")
class KeepsAWiderX(Affine):
    def fwd(self, x):
        return torch.addcmul(self.bias, x, self.weight), self.Saved(x=x.float(), weight=self.weight)

    def bwd(self, dy, saved, *, needs):
        x = saved.x.to(dy.dtype) if "weight" in needs else None
        weight = saved.weight if "x" in needs else None
        return super().bwd(dy, self.Saved(x=x, weight=weight), needs=needs)


@torch.library.custom_op("seqfuse_tests::affine", mutates_args=())
def _affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addcmul(bias, x, weight)


@_affine.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float64)


spoil(
    Affine, "fwd",
    SaysAnotherDtypeOfItsOutput=(
        r"fwd gives y as float64 \(7, 6\) on fake tensors, and as float32 \(7, 6\) on real ones: .* its operator",
        lambda self, x: (_affine(x, self.weight, self.bias), self.Saved(x=x, weight=self.weight)),
    ),
    KeepsACopyOfTheWeight=(
        "field 'weight' must be the parameter 'weight' itself",
        lambda self, x: (self.reference(x), self.Saved(x=x, weight=self.weight.detach().clone())),
    ),
)  # fmt: skip


@caught("y: (max|rms|tile|element|bias)")
class MultipliesByOne(Affine):
    """Hidden by initial parameters, all ones and zeros."""

    def fwd(self, x):
        return x + 0, self.Saved(x=x, weight=self.weight)


@caught("structure: NaN or Inf differs")
class SwallowsInfinity(Affine):
    def fwd(self, x):
        y, saved = super().fwd(x)
        return y.clamp(-1e30, 1e30), saved


@caught(r"huge: y: -?inf at \(\d, \d\), where the operations give")
class OverflowsOnItsWay(Affine):
    def fwd(self, x):
        _, saved = super().fwd(x)
        return torch.addcmul(self.bias, x * 2.0**40, self.weight * 2.0**-40), saved


@caught("d_x: (max|rms|tile|element|bias)")
class ReadsStridedGradientsAsIfContiguous(Affine):
    def bwd(self, dy, saved, *, needs):
        if not dy.is_contiguous() and 0 not in dy.stride() and dy.storage_offset() == 0:
            dy = torch.as_strided(dy, dy.shape, torch.empty(dy.shape).stride()).nan_to_num()
        return super().bwd(dy, saved, needs=needs)


@caught(r"x \(6,\), given: (IndexError|RuntimeError)")
class NeedsTwoDimensions(Affine):
    def bwd(self, dy, saved, *, needs):
        assert dy.sum(1) is not None
        return super().bwd(dy, saved, needs=needs)


@caught("Jacobian|d_x: ")
class DerivesSomethingElseThanItsReference(sf.Pointwise):
    def reference(self, x):
        return F.relu(x) + 1e-3 * x.detach()

    def bwd(self, dy, saved):
        return dy * (saved.x > 0), {}


spoil(
    sf.Pointwise, "reference",
    DoesNotInferItsShape=(r"infer\(33, 6\) says \(33, 6\), the output has \(33, 3\)", lambda self, x: x[..., ::2] * 2),
    RollsARow=(
        r"RollsARow is not a Pointwise: y at \(\d+, \d\) changes with x at \(\d+, \d\)",
        lambda self, x: x.roll(1, -1),
    ),
    SubtractsTheMean=(
        r"SubtractsTheMean is not a Pointwise: y at \(0, 0\) changes with x at",
        lambda self, x: x - x.mean(),
    ),
    SumsUp=("SumsUp is not a Pointwise", lambda self, x: x.cumsum(0)),
    DividesByTheLargest=("DividesByTheLargest is not a Pointwise", lambda self, x: x / x.abs().amax(-1, keepdim=True)),
    MirrorsRows=("MirrorsRows is not a Pointwise", lambda self, x: x.flip(-1)),
)  # fmt: skip


@caught("derivative_reference")
class StatesAnotherDerivative(sf.Pointwise):
    reads = "output"

    def reference(self, x):
        return torch.tanh(x)

    def derivative_reference(self, y):
        return 1 - y

    def bwd(self, dy, saved):
        return dy * (1 - saved.y * saved.y), {}


# Which gradients it computes, and from which tensors.


class EditsGradients(Affine, open=True):
    def bwd(self, dy, saved, *, needs):
        return self.edit(*super().bwd(dy, saved, needs=needs), dy.reshape(-1, self.size), needs)


spoil(
    EditsGradients, "edit",
    ForgetsTheInput=(
        "weight.grad: (max|rms|tile|element|bias)",
        lambda self, dx, grads, dy, needs: (dx, {**grads, "weight": dy.sum(0) if "weight" in needs else None}),
    ),
    DoublesAGradient=(
        "bias.grad: (max|rms|tile|element|bias)",
        lambda self, dx, grads, dy, needs: (dx, {**grads, "bias": 2 * dy.sum(0) if "bias" in needs else None}),
    ),
    IgnoresNeeds=(
        "gives a gradient of 'bias', which is not needed",
        lambda self, dx, grads, dy, needs: (dx, {**grads, "bias": dy.sum(0)}),
    ),
    ComputesDifferentlyWithFewerNeeds=(
        "bits differ|gradients needed",
        lambda self, dx, grads, dy, needs: (
            dx if dx is None or "bias" in needs else dx * (1 + 2 * torch.finfo(dx.dtype).eps), grads
        ),
    ),
    ForgetsAGradient=(
        "returned no gradient 'bias', which is needed",
        lambda self, dx, grads, dy, needs: (dx, {"weight": grads["weight"]}),
    ),
    WidensDx=(
        r"the gradient of x should be like float32\[7, 6\] on cpu, not float64|bwd gives dx as torch.float64",
        lambda self, dx, grads, dy, needs: (None if dx is None else dx.double(), grads),
    ),
)  # fmt: skip


@caught("field 'x' was dropped: only weight reads it")
class ReadsADroppedField(Affine):
    def bwd(self, dy, saved, *, needs):
        saved.x.sum()
        return super().bwd(dy, saved, needs=needs)


@caught("field 'x' is declared for 'wieght'; gradients of DeclaresAnUnknownReader are")
class DeclaresAnUnknownReader(Affine):
    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="wieght")
        weight: Tensor = sf.field(for_="x")


@caught("SavesWhatNobodyReads saves 'bias' and its bwd never reads it")
class SavesWhatNobodyReads(Affine):
    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")
        weight: Tensor = sf.field(for_="x")
        bias: Tensor

    def fwd(self, x):
        y = torch.addcmul(self.bias, x, self.weight)
        return y, self.Saved(x=x, weight=self.weight, bias=self.bias)


@caught("SavesSeveralThatNobodyReads saves 'both' and its bwd never reads it")
class SavesSeveralThatNobodyReads(Affine):
    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")
        weight: Tensor = sf.field(for_="x")
        both: tuple[Tensor, ...]

    def fwd(self, x):
        y = torch.addcmul(self.bias, x, self.weight)
        return y, self.Saved(x=x, weight=self.weight, both=(self.weight, self.bias))


@caught("bwd reads the parameter 'weight' of its module, which may have changed; read it from `saved`")
class ReadsTheWeightOfTheModule(Affine):
    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")

    def fwd(self, x):
        return torch.addcmul(self.bias, x, self.weight), self.Saved(x=x)

    def bwd(self, dy, saved, *, needs):
        x = saved.x if "weight" in needs else dy
        return super().bwd(dy, Affine.Saved(x=x, weight=self.weight), needs=needs)


@caught(r"in evaluation, .*\n  y: max")
class DoublesInTraining(Affine):
    def reference(self, x):
        return super().reference(x) * (2 if self.training else 1)

    def fwd(self, x):
        y, saved = super().fwd(x)
        return 2 * y, saved

    def bwd(self, dy, saved, *, needs):
        return super().bwd(2 * dy, saved, needs=needs)


# Large sizes, mixed dtypes, several calls.


@caught(r"DropsTokensBehindItsTile, float32, x \(130, 6\), given: .*\n  y: max")
class DropsTokensBehindItsTile(Affine):
    def fwd(self, x):
        y, saved = super().fwd(x)
        y.view(-1, self.size)[128:] = 0
        return y, saved


@caught("x in bfloat16 and parameters in float32: bwd gives the gradient 'weight' in torch.bfloat16")
class RoundsAGradientOfAWiderParameter(Affine):
    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return dx, {**grads, "weight": grads["weight"].to(saved.x.dtype) if "weight" in needs else None}


class Both(sf.UnfusedOperation, open=True):
    """y = x + 2 other, rest = 3 x."""

    outputs = ("rest",)

    class Saved(sf.Saved):
        """Empty."""

    def fwd(self, x, *, other):
        return x + 2 * other, {"rest": 3 * x}, self.Saved()

    def bwd(self, dy, saved, *, d_rest, needs):
        dx = dy if d_rest is None else dy + 3 * d_rest
        return dx if "x" in needs else None, {"other": 2 * dy if "other" in needs else None}


@caught("bfloat16, .* normal: bwd gives the gradient 'other' in torch.float32 for an input in torch.bfloat16")
class WidensTheGradientOfAnInput(Both):
    def reference(self, x, *, other):
        return x + 2 * other, {"rest": 3 * x}

    def bwd(self, dy, saved, *, d_rest, needs):
        dx, grads = super().bwd(dy, saved, d_rest=d_rest, needs=needs)
        return dx, {"other": g.float() if (g := grads["other"]) is not None and g.dtype == torch.bfloat16 else g}


@caught(r"x \(7, 6\), normal, no gradient of rest: .*\n  d_x: max")
class TakesGradientsOfAllOutputs(Both):
    def reference(self, x, *, other):
        return x + 2 * other, {"rest": 3 * x}

    def bwd(self, dy, saved, *, d_rest, needs):
        return super().bwd(dy, saved, d_rest=dy if d_rest is None else d_rest, needs=needs)


@caught("fwd: other was modified, first at")
class MutatesAnExtraInput(Both):
    def reference(self, x, *, other):
        return x + 2 * other, {"rest": 3 * x}

    def fwd(self, x, *, other):
        found = super().fwd(x, other=other)
        other.data.mul_(2)
        return found


@caught("bwd: d_rest was modified, first at")
class MutatesAnExtraGradient(Both):
    def reference(self, x, *, other):
        return x + 2 * other, {"rest": 3 * x}

    def bwd(self, dy, saved, *, d_rest, needs):
        found = super().bwd(dy, saved, d_rest=d_rest, needs=needs)
        if d_rest is not None:
            d_rest.data.mul_(2)
        return found

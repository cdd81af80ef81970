"""`check_op` passes every operation of the library and catches each spoiled one, by name."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.errors import PluginError
from seqfuse.testing import check_op, seeded_randn

X = seeded_randn((4, 6), 0)
MUTANTS: list[tuple[type[sf.UnfusedOperation], str]] = []


def caught(message: str):
    """Register a spoiled operation, with what the kit has to say about it."""

    def register(operation):
        MUTANTS.append((operation, message))
        return operation

    return register


LIBRARY = [
    ops.Linear(6, 5),
    ops.Linear(6, 5, bias=False),
    ops.Bias(6),
    ops.LayerNorm(6),
    ops.LayerNorm(6, elementwise_affine=False),
    ops.RMSNorm(6, zero_centered=True),
    ops.GeLU(),
    ops.Tanh(),
    ops.SwiGLU(),
    ops.Dropout(0.3),
    ops.Dropout(0.3, mode="downscale_in_infer"),
    ops.Fork("out"),
    ops.Add("residual"),
    ops.Reshape(2, 3),
]


@pytest.mark.parametrize("operation", LIBRARY, ids=repr)
def test_passes_a_correct_operation(operation: sf.UnfusedOperation):
    before = {name: p.clone() for name, p in operation.named_parameters()}
    assert check_op(operation, X) is None
    assert all(torch.equal(p, before[name]) for name, p in operation.named_parameters())


class Affine(sf.UnfusedOperation, open=True):
    """y = x weight + bias, with everything that a mutant can spoil."""

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")  # [*, H]
        weight: Tensor = sf.field(for_="x")  # [H]

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


class Correct(Affine):
    reference = Affine.reference


def test_passes_an_operation_of_ones_own():
    check_op(Correct(), X, dtypes=(torch.float32, torch.float16, torch.float64))


# What it computes.


@caught("weight.grad: (max|rms|tile|element|bias)")
class ForgetsTheInput(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return dx, {**grads, "weight": dy.reshape(-1, self.size).sum(0).clone() if "weight" in needs else None}


@caught("bias.grad: (max|rms|tile|element|bias)")
class DoublesAGradient(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return dx, {**grads, "bias": 2 * grads["bias"] if "bias" in needs else None}


@caught("y: (max|rms|tile|element|bias)")
class MultipliesByOne(Affine):
    """Hidden by fresh parameters, all ones and zeros."""

    reference = Affine.reference

    def fwd(self, x):
        return x + 0, self.Saved(x=x, weight=self.weight)


@caught("structure: NaN or Inf differs")
class SwallowsInfinity(Affine):
    reference = Affine.reference

    def fwd(self, x):
        y, saved = super().fwd(x)
        return y.clamp(-1e30, 1e30), saved


@caught("d_x: (max|rms|tile|element|bias)")
class ReadsStridedGradientsAsIfContiguous(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        if 0 not in dy.stride() and dy.storage_offset() == 0:
            dy = torch.as_strided(dy, dy.shape, torch.empty(dy.shape).stride()).nan_to_num()
        return super().bwd(dy, saved, needs=needs)


@caught(r"x \(6,\), given: (IndexError|RuntimeError)")
class NeedsTwoDimensions(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        assert dy.sum(1) is not None
        return super().bwd(dy, saved, needs=needs)


@caught("Jacobian|d_x: ")
class DerivesSomethingElseThanItsReference(sf.Pointwise):
    def reference(self, x):
        return F.relu(x) + 1e-3 * x.detach()

    def bwd(self, dy, saved):
        return dy * (saved.x > 0), {}


@caught(r"infer\(33, 6\) says \(33, 6\), the output has \(33, 3\)")
class DoesNotInferItsShape(sf.Pointwise):
    def reference(self, x):
        return x[..., ::2] * 2


@caught("derivative_reference")
class StatesAnotherDerivative(sf.Pointwise):
    reads = "output"

    def reference(self, x):
        return torch.tanh(x)

    def derivative_reference(self, y):
        return 1 - y

    def bwd(self, dy, saved):
        return dy * (1 - saved.y * saved.y), {}


# Which gradients it computes, from what.


@caught("gives a gradient of 'bias', which is not wanted")
class IgnoresNeeds(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return dx, {**grads, "bias": dy.reshape(-1, self.size).sum(0)}


@caught("bits differ|gradients wanted")
class ComputesDifferentlyWithFewerNeeds(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return (dx if dx is None or "bias" in needs else dx * (1 + 2 * torch.finfo(dx.dtype).eps)), grads


@caught("field 'x' was dropped: only weight reads it")
class ReadsADroppedField(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        saved.x.sum()
        return super().bwd(dy, saved, needs=needs)


@caught("field 'x' is declared for 'wieght'; gradients of DeclaresAnUnknownReader are")
class DeclaresAnUnknownReader(Affine):
    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="wieght")
        weight: Tensor = sf.field(for_="x")

    reference = Affine.reference


@caught("SavesWhatNobodyReads saves 'bias' and its bwd never reads it")
class SavesWhatNobodyReads(Affine):
    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="weight")
        weight: Tensor = sf.field(for_="x")
        bias: Tensor

    reference = Affine.reference

    def fwd(self, x):
        y = torch.addcmul(self.bias, x, self.weight)
        return y, self.Saved(x=x, weight=self.weight, bias=self.bias)


@caught("returned no gradient 'bias', which is wanted")
class ForgetsAGradient(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return dx, {"weight": grads["weight"]}


@caught("bwd gives dx as torch.float64")
class WidensDx(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return None if dx is None else dx.double(), grads


# What it leaves behind.


class DoesSomethingElse(Affine, open=True):
    def fwd(self, x):
        self.act(x)
        return super().fwd(x)


@caught("fwd: x was modified")
class MutatesItsInput(DoesSomethingElse):
    reference = Affine.reference

    def act(self, x):
        x.data.mul_(1.01)


@caught("fwd: weight of the operation was modified")
class MutatesAParameter(DoesSomethingElse):
    reference = Affine.reference

    def act(self, x):
        self.weight.data.mul_(1.01)


@caught("fwd changed last of the operation")
class RemembersItsInput(DoesSomethingElse):
    reference = Affine.reference

    def act(self, x):
        self.last = x


@caught("fwd changed the default dtype")
class ChangesTheDefaultDtype(DoesSomethingElse):
    reference = Affine.reference

    def act(self, x):
        torch.set_default_dtype(torch.float64)


@caught("fwd drew from torch's CPU generator")
class DrawsRandomNumbers(DoesSomethingElse):
    reference = Affine.reference

    def act(self, x):
        torch.rand(1)


@caught("bwd: dy was modified")
class MutatesDy(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        found = super().bwd(dy, saved, needs=needs)
        dy.data.mul_(2)
        return found


@caught("bwd: saved.x was modified")
class MutatesItsRecord(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        found = super().bwd(dy, saved, needs=needs)
        if "weight" in needs:
            saved.x.data.zero_()
        return found


@caught("bias.grad shares its storage with weight.grad")
class ReturnsOneTensorTwice(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        if {"weight", "bias"} <= needs:
            both = torch.stack((grads["weight"], grads["bias"]))
            grads = {"weight": both[0], "bias": both[1]}
        return dx, grads


ticks = itertools.count()


@caught("bits differ|a second backward")
class ChangesItsMind(Affine):
    reference = Affine.reference

    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return (dx if dx is None or next(ticks) % 2 else dx * (1 + torch.finfo(dx.dtype).eps)), grads


# Copies of it.


@caught("a state_dict round trip")
class LoadsHalfOfItsState(Affine):
    reference = Affine.reference

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        super()._load_from_state_dict(
            {f"{prefix}weight": state_dict[f"{prefix}weight"]}, prefix, *rest[:-3], [], [], []
        )


@caught("a deep copy")
class CopiesHalfOfItself(Affine):
    reference = Affine.reference

    def __deepcopy__(self, memo):
        made = type(self)().to(self.weight.dtype)
        made.load_state_dict(self.state_dict())
        made.copies = getattr(self, "copies", 0) + 1
        return made

    def fwd(self, x):
        y, saved = super().fwd(x)
        return (y if getattr(self, "copies", 0) < 3 else y * (1 + torch.finfo(y.dtype).eps)), saved


@caught("keys of the state dict and names of parameters differ")
class SavesExtraState(Affine):
    reference = Affine.reference

    def get_extra_state(self):
        return {"size": self.size}

    def set_extra_state(self, state):
        self.size = state["size"]


@caught("cannot be fused or checked: its class overrides forward")
class OverridesForward(Affine):
    reference = Affine.reference

    def forward(self, x):
        return x


@pytest.mark.parametrize(("operation", "message"), MUTANTS, ids=[operation.__name__ for operation, _ in MUTANTS])
def test_catches(operation: type[sf.UnfusedOperation], message: str):
    with pytest.raises((AssertionError, PluginError), match=message) as error:
        check_op(operation(), X)
    assert operation.__name__ in str(error.value)
    assert torch.get_default_dtype() is torch.float32


def test_there_is_a_mutant_for_every_way_to_break_the_contract():
    assert len(MUTANTS) >= 25

"""Spoiled operations with side effects, or whose copies do less."""

from __future__ import annotations

import itertools

import torch

import seqfuse as sf

from .operations import Affine
from .register import caught, spoil

# State left behind.


class DoesSomethingElse(Affine, open=True):
    def fwd(self, x):
        self.act(x)
        return super().fwd(x)


spoil(
    DoesSomethingElse, "act",
    MutatesItsInput=("fwd: x was modified", lambda self, x: x.data.mul_(1.01)),
    MutatesAParameter=("fwd: weight of the operation was modified", lambda self, x: self.weight.data.mul_(1.01)),
    RemembersItsInput=("fwd changed last of the operation", lambda self, x: setattr(self, "last", x)),
    SeedsTheGenerator=("fwd drew from torch's CPU generator", lambda self, x: torch.manual_seed(0)),
)  # fmt: skip


@caught("fwd: count of the operation was modified")
class CountsInABuffer(Affine):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=False)

    def fwd(self, x):
        self.count.add_(1)
        return super().fwd(x)


@caught("bwd: dy was modified")
class MutatesDy(Affine):
    def bwd(self, dy, saved, *, needs):
        found = super().bwd(dy, saved, needs=needs)
        dy.data.mul_(2)
        return found


@caught("bwd: saved.x was modified")
class MutatesItsRecord(Affine):
    def bwd(self, dy, saved, *, needs):
        found = super().bwd(dy, saved, needs=needs)
        if "weight" in needs:
            saved.x.data.zero_()
        return found


@caught("bias.grad shares its storage with weight.grad; return a new tensor")
class ReturnsOneTensorTwice(Affine):
    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        if {"weight", "bias"} <= needs:
            both = torch.stack((grads["weight"], grads["bias"]))
            grads = {"weight": both[0], "bias": both[1]}
        return dx, grads


ticks = itertools.count()


@caught("bits differ|a second backward")
class ChangesItsMind(Affine):
    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return (dx if dx is None or next(ticks) % 2 else dx * (1 + torch.finfo(dx.dtype).eps)), grads


# State that one call leaves to another.

between: dict[object, torch.Tensor] = {}


def reused(name: str, t: torch.Tensor) -> torch.Tensor:
    """Memory that the next tensor of that name and shape reuses."""
    with torch.no_grad():
        return between.setdefault((name, t.shape, t.dtype), torch.empty_like(t)).copy_(t)


@caught("another call changes the results of the one before: weight.grad: bits differ")
class ReadsTheLastInput(Affine):
    def fwd(self, x):
        between["x"] = x
        return super().fwd(x)

    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return dx, grads | ({"weight": (dy * between["x"]).reshape(-1, 6).sum(0)} if "weight" in needs else {})


@caught("another call changes the results of the one before: d_x: bits differ")
class ReusesTheMemoryOfDx(Affine):
    def bwd(self, dy, saved, *, needs):
        dx, grads = super().bwd(dy, saved, needs=needs)
        return dx if dx is None else reused("dx", dx), grads


@caught("a call fails if another one runs before its backward pass: one of the variables needed for gradient")
class ReusesTheMemoryOfWhatItSaves(Affine):
    class Saved(sf.Saved):
        double: torch.Tensor
        weight: torch.Tensor

    def fwd(self, x):
        y = torch.addcmul(self.bias, x, self.weight)
        return y, self.Saved(double=reused("double", 2 * x), weight=self.weight)

    def bwd(self, dy, saved, *, needs):
        return super().bwd(dy, Affine.Saved(x=saved.double / 2, weight=saved.weight), needs=needs)


# Copies of it.


@caught("a state_dict round trip")
class LoadsHalfOfItsState(Affine):
    def _load_from_state_dict(self, state_dict, prefix, *rest):
        super()._load_from_state_dict(
            {f"{prefix}weight": state_dict[f"{prefix}weight"]}, prefix, *rest[:-3], [], [], []
        )


@caught("a deep copy")
class CopiesHalfOfItself(Affine):
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
    def get_extra_state(self):
        return {"size": self.size}

    def set_extra_state(self, state):
        self.size = state["size"]


spoil(
    Affine, "forward",
    OverridesForward=("cannot be fused or checked: its class overrides forward", lambda self, x: x),
)  # fmt: skip

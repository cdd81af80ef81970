"""A correct fusion of each kind, on ATen, for the tests of the kit to check and to spoil."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import seqfuse as sf
from seqfuse import ops


class BiasNorm(sf.ForwardFusion):
    """Saves tensors for a bias and a norm in one forward."""

    bias: ops.Bias
    norm: ops.LayerNorm

    def fwd(self, x):
        y, record = self.norm.fwd(x + self.bias.bias)
        return y, {"bias": self.bias.Saved(), "norm": record}


class AddNorm(sf.ForwardFusion):
    """A channel in, a channel out."""

    add: ops.Add
    fork: ops.Fork
    norm: ops.LayerNorm
    outputs = ("fork_out",)

    def fwd(self, x, *, add_other):
        z = x + add_other
        y, record = self.norm.fwd(z)
        return y, {"fork_out": z}, {"add": self.add.Saved(), "fork": self.fork.Saved(), "norm": record}


class Activations(sf.ForwardFusion):
    """A variadic slot."""

    acts: tuple[sf.Pointwise, ...]

    def fwd(self, x):
        records = []
        for act in self.acts:
            x, record = act.fwd(x)
            records.append(record)
        return x, {"acts": tuple(records)}


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x)


class GeLULinear(sf.ForwardFusion):
    """Recomputes the GEMM's input in the backward pass."""

    act: ops.GeLU
    linear: ops.Linear

    def requires(self, env):
        yield self.act.approximate == "none", "the recomputation knows the exact GeLU only"

    def fwd(self, x):
        y, record = self.linear.fwd(gelu(x))
        return y, {
            "act": self.act.Saved(x=x),
            "linear": self.linear.Saved(x=sf.Recompute(gelu, x), weight=record.weight),
        }


def rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.ndim > 1 else x.unsqueeze(0)


class BiasDropout(sf.ForwardFusion):
    """Takes a seed."""

    bias: ops.Bias
    drop: ops.Dropout

    def fwd(self, x, *, seed):
        y, record = self.drop.fwd(x + self.bias.bias, seed=seed)
        return y, {"bias": self.bias.Saved(), "drop": record}


class LinearBias(sf.BackwardFusion):
    """Gradients of a GEMM and its bias from one pass over dy."""

    linear: ops.Linear
    bias: ops.Bias

    def requires(self, env):
        yield self.linear.weight.dtype == self.bias.bias.dtype, "weight and bias must have one dtype"

    def bwd(self, dy, *, linear, bias, needs):
        dx = dy @ linear.weight if "x" in needs else None
        dweight = rows(dy).t() @ rows(linear.x) if "linear.weight" in needs else None
        dbias = rows(dy).sum(0) if "bias.bias" in needs else None
        return dx, {"linear.weight": dweight, "bias.bias": dbias}


class AddForkBias(sf.BackwardFusion):
    """Gradients of channels, in and out."""

    add: ops.Add
    fork: ops.Fork
    bias: ops.Bias

    def bwd(self, dy, *, add, fork, bias, d_fork_out, needs):
        d = dy if d_fork_out is None else dy + d_fork_out
        dbias = rows(dy).sum(0) if "bias.bias" in needs else None
        return d, {"add.other": d if "add.other" in needs else None, "bias.bias": dbias}


class BiasAct(sf.JointFusion):
    """Saves z = x + b, or recomputes it; falls back."""

    bias: ops.Bias
    act: sf.Pointwise

    class Saved(sf.Saved):
        z: Tensor

    def fwd(self, x):
        b = self.bias.bias
        return self.act.reference(x + b), self.Saved(z=sf.Recompute(torch.add, x, b))

    def bwd(self, dy, saved):
        record = self.act.record(saved.z, self.act.reference(saved.z))
        dz, _ = self.act.bwd(dy, record)
        return dz, {"bias.bias": rows(dz).sum(0)}

    def unfused(self, saved):
        z = saved.z
        return {"bias": self.bias.Saved(), "act": self.act.record(z, self.act.reference(z))}


class BiasGeLU(sf.JointFusion):
    """Cannot fall back in the backward pass."""

    bias: ops.Bias
    act: ops.GeLU

    class Saved(sf.Saved):
        z: Tensor

    def fwd(self, x):
        z = x + self.bias.bias
        return self.act.reference(z), self.Saved(z=z)

    def bwd(self, dy, saved):
        dz, _ = self.act.bwd(dy, self.act.Saved(x=saved.z))
        return dz, {"bias.bias": rows(dz).sum(0)}


class LinearBiasJoint(sf.JointFusion):
    """Saves a parameter, as a view of it."""

    linear: ops.Linear
    bias: ops.Bias

    class Saved(sf.Saved):
        x: Tensor
        weight: Tensor

    def keep(self, weight):
        return weight.view_as(weight)

    def fwd(self, x):
        weight = self.linear.weight
        return F.linear(x, weight, self.bias.bias), self.Saved(x=x, weight=self.keep(weight))

    def bwd(self, dy, saved):
        return dy @ saved.weight, {"linear.weight": rows(dy).t() @ rows(saved.x), "bias.bias": rows(dy).sum(0)}


class Branch(sf.JointFusion):
    """Owns the channel of a residual branch."""

    fork: ops.Fork
    bias: ops.Bias | None
    act: ops.GeLU
    add: ops.Add

    class Saved(sf.Saved):
        z: Tensor

    def fwd(self, x):
        z = x if self.bias is None else x + self.bias.bias
        return x + self.act.reference(z), self.Saved(z=z)

    def bwd(self, dy, saved, *, needs):
        dz, _ = self.act.bwd(dy, self.act.Saved(x=saved.z))
        dbias = {"bias.bias": rows(dz).sum(0)} if "bias.bias" in needs else {}
        return (dy + dz if "x" in needs else None), dbias


class NormLinear(sf.InferenceFusion):
    """An optional slot."""

    norm: ops.LayerNorm
    linear: ops.Linear
    bias: ops.Bias | None

    def requires(self, env):
        alike = self.bias is None or self.linear.weight.dtype == self.bias.bias.dtype
        yield alike, "weight and bias must have one dtype"

    def fwd(self, x):
        y, _ = self.norm.fwd(x)
        return F.linear(y, self.linear.weight, None if self.bias is None else self.bias.bias)


KINDS = (
    *(BiasNorm, AddNorm, Activations, GeLULinear, BiasDropout),
    *(LinearBias, AddForkBias),
    *(BiasAct, BiasGeLU, Branch),
    NormLinear,
)

"""Fusions of every kind written with ATen calls, the sequences that they fuse, and ways to compare all results of a
run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.ops.activations import gelu_backward
from seqfuse.testing import assert_fused_close, seeded_randn

Grads = dict[str, Tensor | None]


def rows(t: Tensor) -> Tensor:
    """Sum over all but the last dimension, in its own memory."""
    return t.sum(tuple(range(t.ndim - 1))) if t.ndim > 1 else t.clone()


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


class Doubles(sf.UnfusedOperation, open=True):
    """y = 2 x: a base of operations with a side effect."""

    class Saved(sf.Saved):
        x: Tensor

    def reference(self, x: Tensor) -> Tensor:
        return 2 * x

    def fwd(self, x: Tensor) -> Any:
        return 2 * x, self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return 2 * dy, {}


def stepwise(self: Any, x: Tensor) -> Any:
    """A forward fusion whose `fwd` calls its operations one after another."""
    saved: dict[str, Any] = {}
    for slot, operation in zip(self.slots, self.operations(), strict=True):
        x, saved[slot.name] = operation.fwd(x)
    return x, saved


# Bias and an activation, in all four kinds.


def shifted(x: Tensor, bias: Tensor) -> Tensor:
    """x + bias, in the dtypes of `Bias` under autocast."""
    casts = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return x + (bias.to(x.dtype) if casts else bias)


def of_bias(act: type[sf.Pointwise], *names: str) -> tuple[Any, ...]:
    """Fusions of a Bias and an activation by these names: for forward, backward, both and inference. The joint fusion
    saves x where the operations may save y, so that neither can read the other's saved tensors."""

    class Saved(sf.Saved):
        x: Tensor
        shift: Tensor

    def forward(self: Any, x: Tensor) -> Any:
        z = shifted(x, self.bias.bias)
        y = self.act.reference(z)
        return y, {"bias": ops.Bias.Saved(), "act": self.act.record(z, y)}

    def backward(self: Any, dy: Tensor, *, bias: sf.Saved, act: Any) -> Any:
        dx, _ = self.act.bwd(dy, act)
        return dx, {"bias.bias": rows(dx)}

    def both(self: Any, x: Tensor) -> Any:
        return self.act.reference(shifted(x, self.bias.bias)), self.Saved(x=x, shift=self.bias.bias)

    def both_backward(self: Any, dy: Tensor, saved: Any) -> Any:
        z = shifted(saved.x, saved.shift)
        dx, _ = self.act.bwd(dy, self.act.record(z, self.act.reference(z)))
        return dx, {"bias.bias": rows(dx)}

    def inference(self: Any, x: Tensor) -> Tensor:
        return self.act.reference(shifted(x, self.bias.bias))

    kinds: tuple[tuple[type, dict[str, Any]], ...] = (
        (sf.ForwardFusion, {"fwd": forward}),
        (sf.BackwardFusion, {"bwd": backward}),
        (sf.JointFusion, {"fwd": both, "bwd": both_backward, "Saved": Saved}),
        (sf.InferenceFusion, {"fwd": inference}),
    )
    slots = {"__annotations__": {"bias": ops.Bias, "act": act}, "__module__": __name__}
    return tuple(type(name, (base,), slots | passes) for name, (base, passes) in zip(names, kinds, strict=False))


PAIR = BiasReLU, BiasReLUBack = of_bias(ops.ReLU, "BiasReLU", "BiasReLUBack")
BiasGeLUForward, BiasGeLUBackward, BiasGeLUJoint, BiasGeLUInference = of_bias(
    ops.GeLU, "BiasGeLUForward", "BiasGeLUBackward", "BiasGeLUJoint", "BiasGeLUInference"
)
KINDS = BiasTanhForward, BiasTanhBackward, BiasTanhJoint, BiasTanhInference = of_bias(
    ops.Tanh, "BiasTanhForward", "BiasTanhBackward", "BiasTanhJoint", "BiasTanhInference"
)


class BiasGeLURecomputing(sf.ForwardFusion):
    """Saves x and the bias; the value between the two is recomputed."""

    bias: ops.Bias
    act: ops.GeLU

    def fwd(self, x: Tensor) -> Any:
        bias = self.bias.bias
        y = F.gelu(x + bias, approximate=self.act.approximate)
        return y, {"bias": ops.Bias.Saved(), "act": ops.GeLU.Saved(x=sf.Recompute(add, x, bias))}


# Linear, Bias, GeLU: fusions that skip gradients which are not needed.


class LinearBiasGeLUForward(sf.ForwardFusion):
    linear: ops.Linear
    bias: ops.Bias
    act: ops.GeLU

    def fwd(self, x: Tensor) -> Any:
        weight = self.linear.weight
        z = F.linear(x, weight, self.bias.bias)
        return F.gelu(z, approximate=self.act.approximate), {
            "linear": ops.Linear.Saved(x=x, weight=weight),
            "bias": ops.Bias.Saved(),
            "act": ops.GeLU.Saved(x=z),
        }


def _linear_backward(dz: Tensor, saved: Any, needs: frozenset[str]) -> Any:
    dx = dz @ saved.weight if "x" in needs else None
    grads: Grads = {"linear.weight": None, "bias.bias": None}
    if "linear.weight" in needs:
        grads["linear.weight"] = dz.reshape(-1, dz.shape[-1]).t() @ saved.x.reshape(-1, saved.x.shape[-1])
    if "bias.bias" in needs:
        grads["bias.bias"] = rows(dz)
    return dx, grads


class LinearBiasGeLUBackward(sf.BackwardFusion):
    linear: ops.Linear
    bias: ops.Bias
    act: ops.GeLU

    def bwd(self, dy: Tensor, *, linear: Any, bias: sf.Saved, act: Any, needs: frozenset[str]) -> Any:
        return _linear_backward(gelu_backward(dy, act.x, approximate=self.act.approximate), linear, needs)


class LinearBiasGeLUJoint(sf.JointFusion):
    linear: ops.Linear
    bias: ops.Bias
    act: ops.GeLU

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="linear.weight")
        weight: Tensor = sf.field(for_="x")
        z: Tensor

    def fwd(self, x: Tensor) -> Any:
        z = F.linear(x, self.linear.weight, self.bias.bias)
        y = F.gelu(z, approximate=self.act.approximate)
        return y, self.Saved(x=x, weight=self.linear.weight, z=z)

    def bwd(self, dy: Tensor, saved: Any, *, needs: frozenset[str]) -> Any:
        return _linear_backward(gelu_backward(dy, saved.z, approximate=self.act.approximate), saved, needs)


class LinearBiasGeLUInference(sf.InferenceFusion):
    linear: ops.Linear
    bias: ops.Bias
    act: ops.GeLU

    def fwd(self, x: Tensor) -> Tensor:
        return F.gelu(F.linear(x, self.linear.weight, self.bias.bias), approximate=self.act.approximate)


# Any Pointwise in a row: abstract types, a variadic slot, an optional one.


class ChainForward(sf.ForwardFusion):
    bias: ops.Bias | None
    acts: tuple[sf.Pointwise, ...]

    def fwd(self, x: Tensor) -> Any:
        saved: dict[str, Any] = {}
        if self.bias is not None:
            x, saved["bias"] = self.bias.fwd(x)
        made: list[sf.Saved] = []
        for act in self.acts:
            x, record = act.fwd(x)
            made.append(record)
        return x, {**saved, "acts": tuple(made)}


class ChainBackward(sf.BackwardFusion):
    bias: ops.Bias | None
    acts: tuple[sf.Pointwise, ...]

    def bwd(self, dy: Tensor, *, acts: tuple[Any, ...], bias: sf.Saved | None = None) -> Any:
        for act, record in reversed(list(zip(self.acts, acts, strict=True))):
            dy, _ = act.bwd(dy, record)
        return dy, {} if self.bias is None else {"bias.bias": rows(dy)}


class ChainJoint(sf.JointFusion):
    """Saves only the input and recomputes the chain."""

    bias: ops.Bias | None
    acts: tuple[sf.Pointwise, ...]

    class Saved(sf.Saved):
        x: Tensor
        shift: Tensor | None
        names: tuple[str, ...]

    def fwd(self, x: Tensor) -> Any:
        shift = None if self.bias is None else self.bias.bias
        y, _ = self._forward(x, shift)
        return y, self.Saved(x=x, shift=shift, names=tuple(type(a).__name__ for a in self.acts))

    def _forward(self, x: Tensor, shift: Tensor | None) -> tuple[Tensor, list[Any]]:
        x, made = x if shift is None else x + shift, []
        for act in self.acts:
            x, record = act.fwd(x)
            made.append(record)
        return x, made

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        _, made = self._forward(saved.x, saved.shift)
        for act, record in reversed(list(zip(self.acts, made, strict=True))):
            dy, _ = act.bwd(dy, record)
        return dy, {} if self.bias is None else {"bias.bias": rows(dy)}


class BiasActForward(sf.ForwardFusion):
    """A union."""

    bias: ops.Bias
    act: ops.ReLU | ops.Tanh

    def fwd(self, x: Tensor) -> Any:
        y = torch.relu(x + self.bias.bias) if isinstance(self.act, ops.ReLU) else torch.tanh(x + self.bias.bias)
        return y, {"bias": ops.Bias.Saved(), "act": self.act.Saved(y=y)}


class BiasActBackward(sf.BackwardFusion):
    bias: ops.Bias
    act: ops.ReLU | ops.Tanh

    def bwd(self, dy: Tensor, *, bias: sf.Saved, act: Any) -> Any:
        dx = torch.where(act.y <= 0, 0, dy) if isinstance(self.act, ops.ReLU) else dy * (1 - act.y.square())
        return dx, {"bias.bias": rows(dx)}


# The boundary of two residual blocks: the sum is the new residual stream and goes on.


class AddForkForward(sf.ForwardFusion):
    add: ops.Add
    fork: ops.Fork
    outputs = ("fork_out",)

    def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
        y = x + add_other
        return y, {"fork_out": y}, {"add": ops.Add.Saved(), "fork": ops.Fork.Saved()}


class AddForkBackward(sf.BackwardFusion):
    add: ops.Add
    fork: ops.Fork

    def bwd(self, dy: Tensor, *, add: sf.Saved, fork: sf.Saved, d_fork_out: Tensor) -> Any:
        d = dy + d_fork_out
        return d, {"add.other": d}


class AddForkJoint(sf.JointFusion):
    add: ops.Add
    fork: ops.Fork
    outputs = ("fork_out",)

    class Saved(sf.Saved):
        pass

    def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
        y = x + add_other
        return y, {"fork_out": y}, self.Saved()

    def bwd(self, dy: Tensor, saved: sf.Saved, *, d_fork_out: Tensor) -> Any:
        d = dy + d_fork_out
        return d, {"add.other": d}


class AddReLUForward(sf.ForwardFusion):
    add: ops.Add
    act: ops.ReLU

    def fwd(self, x: Tensor, *, add_other: Tensor) -> Any:
        y = torch.relu(x + add_other)
        return y, {"add": ops.Add.Saved(), "act": ops.ReLU.Saved(y=y)}


class AddReLUBackward(sf.BackwardFusion):
    add: ops.Add
    act: ops.ReLU

    def bwd(self, dy: Tensor, *, add: sf.Saved, act: Any) -> Any:
        d = torch.where(act.y <= 0, 0, dy)
        return d, {"add.other": d}


class AddReLUInference(sf.InferenceFusion):
    add: ops.Add
    act: ops.ReLU

    def fwd(self, x: Tensor, *, add_other: Tensor) -> Tensor:
        return torch.relu(x + add_other)


# A whole residual branch: the fusion contains the producer and the reader of the channel.


class ForkGeLUAddForward(sf.ForwardFusion):
    fork: ops.Fork
    act: ops.GeLU
    add: ops.Add

    def fwd(self, x: Tensor) -> Any:
        y = x + F.gelu(x, approximate=self.act.approximate)
        return y, {"fork": ops.Fork.Saved(), "act": ops.GeLU.Saved(x=x), "add": ops.Add.Saved()}


class ForkGeLUAddBackward(sf.BackwardFusion):
    fork: ops.Fork
    act: ops.GeLU
    add: ops.Add

    def bwd(self, dy: Tensor, *, fork: sf.Saved, act: Any, add: sf.Saved) -> Any:
        return dy + gelu_backward(dy, act.x, approximate=self.act.approximate), {}


class ForkGeLUAddJoint(sf.JointFusion):
    fork: ops.Fork
    act: ops.GeLU
    add: ops.Add

    class Saved(sf.Saved):
        x: Tensor

    def fwd(self, x: Tensor) -> Any:
        return x + F.gelu(x, approximate=self.act.approximate), self.Saved(x=x)

    def bwd(self, dy: Tensor, saved: Any) -> Any:
        return dy + gelu_backward(dy, saved.x, approximate=self.act.approximate), {}


class ForkGeLUAddOutForward(sf.ForwardFusion):
    """The same, for a channel that is read again later."""

    fork: ops.Fork
    act: ops.GeLU
    add: ops.Add
    outputs = ("fork_out",)

    def fwd(self, x: Tensor) -> Any:
        y = x + F.gelu(x, approximate=self.act.approximate)
        return y, {"fork_out": x}, {"fork": ops.Fork.Saved(), "act": ops.GeLU.Saved(x=x), "add": ops.Add.Saved()}


class ForkGeLUAddOutBackward(sf.BackwardFusion):
    fork: ops.Fork
    act: ops.GeLU
    add: ops.Add

    def bwd(self, dy: Tensor, *, fork: sf.Saved, act: Any, add: sf.Saved, d_fork_out: Tensor) -> Any:
        return dy + d_fork_out + gelu_backward(dy, act.x, approximate=self.act.approximate), {}


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


Plain = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """A sequence, its math written out, and the fusions that can replace it in each way."""

    name: str
    make: Callable[[], Sequence[nn.Module]]
    plain: Plain  # (parameters by key, x, **channels)
    forward: tuple[type[sf.FusedOperation], ...] = ()
    backward: tuple[type[sf.FusedOperation], ...] = ()
    joint: tuple[type[sf.FusedOperation], ...] = ()
    inference: tuple[type[sf.FusedOperation], ...] = ()
    channels: tuple[str, ...] = ()

    @property
    def fusions(self) -> tuple[type[sf.FusedOperation], ...]:
        return (*self.forward, *self.backward, *self.joint, *self.inference)


WIDTH = 5
CASES = (
    Case(
        "bias_gelu", lambda: [ops.Bias(5), ops.GeLU()],
        lambda p, x: gelu(x + p["0.bias"]),
        (BiasGeLUForward,), (BiasGeLUBackward,), (BiasGeLUJoint,), (BiasGeLUInference,),
    ),
    Case(
        "recomputed", lambda: [ops.Bias(5), ops.GeLU("tanh")],
        lambda p, x: gelu_tanh(x + p["0.bias"]),
        (BiasGeLURecomputing,), (BiasGeLUBackward,),
    ),
    Case(
        "linear_gelu", lambda: [ops.Linear(5, 3), ops.GeLU("tanh"), ops.Linear(3, 5)],
        lambda p, x: (gelu_tanh(x @ p["0.weight"].mT + p["0.bias"]) @ p["2.weight"].mT + p["2.bias"]),
        (LinearBiasGeLUForward,), (LinearBiasGeLUBackward,), (LinearBiasGeLUJoint,), (LinearBiasGeLUInference,),
    ),
    Case(
        "chain", lambda: [ops.Tanh(), ops.GeLU(), ops.ReLU(), ops.Sigmoid()],
        lambda p, x: torch.sigmoid(torch.relu(gelu(torch.tanh(x)))),
        (ChainForward,), (ChainBackward,), (ChainJoint,),
    ),
    Case(
        "bias_chain", lambda: [ops.Bias(5), ops.Tanh(), ops.GeLU()],
        lambda p, x: gelu(torch.tanh(x + p["0.bias"])),
        (ChainForward,), (ChainBackward,), (ChainJoint,),
    ),
    Case(
        "union", lambda: [ops.Bias(5), ops.Tanh(), ops.Bias(5), ops.ReLU()],
        lambda p, x: torch.relu(torch.tanh(x + p["0.bias"]) + p["2.bias"]),
        (BiasActForward,), (BiasActBackward,),
    ),
    Case(
        "border", lambda: [ops.Scale(-1.5), ops.Add("a"), ops.Fork("b"), ops.Tanh(), ops.Add("b")],
        lambda p, x, a: (a - 1.5 * x) + torch.tanh(a - 1.5 * x),
        (AddForkForward,), (AddForkBackward,), (AddForkJoint,), channels=("a",),
    ),
    Case(
        "extra_input", lambda: [ops.Scale(-1.5), ops.Add("a"), ops.ReLU(), ops.Add("a")],
        lambda p, x, a: torch.relu(a - 1.5 * x) + a,
        (AddReLUForward,), (AddReLUBackward,), inference=(AddReLUInference,), channels=("a",),
    ),
    Case(
        "whole_branch", lambda: [ops.Linear(5, 5), ops.Residual(ops.GeLU())],
        lambda p, x: x @ p["0.weight"].mT + p["0.bias"] + gelu(x @ p["0.weight"].mT + p["0.bias"]),
        (ForkGeLUAddForward,), (ForkGeLUAddBackward,), (ForkGeLUAddJoint,),
    ),
    Case(
        "fan_out", lambda: [ops.Fork("r"), ops.GeLU(), ops.Add("r"), ops.Tanh(), ops.Add("r")],
        lambda p, x: torch.tanh(x + gelu(x)) + x,
        (ForkGeLUAddOutForward,), (ForkGeLUAddOutBackward,),
    ),
    Case(
        "public_output", lambda: [ops.Bias(5), ops.Fork("r"), ops.GeLU(), ops.Add("r"), ops.Fork("s"), ops.Tanh()],
        lambda p, x: (lambda z: (torch.tanh(z + gelu(z)), z + gelu(z)))(x + p["0.bias"]),
        (ForkGeLUAddForward,), (ForkGeLUAddBackward,), (ForkGeLUAddJoint,),
    ),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


def randomized(model: nn.Module, seed: int = 11) -> Any:
    """Gives every parameter signed, asymmetric numbers."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(seeded_randn(tuple(p.shape), seed + i, dtype=p.dtype))
    return model


def values(out: Any) -> tuple[Tensor, ...]:
    return out if isinstance(out, tuple) else (out,)


def outcome(
    fn: Callable[..., Any], wanted: Mapping[str, Tensor], *args: Any, seed: int = 77, **kwargs: Any
) -> dict[str, Tensor | None]:
    """Outputs of a call, and the gradients of `wanted` for random incoming gradients."""
    outs = values(fn(*args, **kwargs))
    dys = [seeded_randn(tuple(y.shape), seed + i, dtype=torch.float64).to(y.dtype) for i, y in enumerate(outs)]
    pairs = [(y, dy) for y, dy in zip(outs, dys, strict=True) if y.requires_grad]
    keys = [key for key, t in wanted.items() if t.requires_grad]
    found: Sequence[Tensor | None] = ()
    if pairs and keys:
        ys, ds = zip(*pairs, strict=True)
        found = torch.autograd.grad(ys, [wanted[k] for k in keys], ds, allow_unused=True)
    results: dict[str, Tensor | None] = {f"y{i}": y.detach().clone() for i, y in enumerate(outs)}
    results |= {f"d_{k}": None if g is None else g.detach().clone() for k, g in zip(keys, found, strict=False)}
    return results


def run(model: nn.Module, x: Tensor, /, **channels: Tensor) -> dict[str, Tensor | None]:
    """Outputs and every gradient of a model's call."""
    return outcome(model, {"x": x, **channels, **dict(model.named_parameters())}, x, **channels)


def run_plain(plain: Plain, model: nn.Module, x: Tensor, /, **channels: Tensor) -> dict[str, Tensor | None]:
    """The same from the math written out, in float64."""

    def wide(t: Tensor) -> Tensor:
        return t.detach().double().requires_grad_(t.requires_grad)

    p = {k: wide(v) for k, v in model.named_parameters()}
    given = {k: wide(v) for k, v in channels.items()}
    inside = wide(x)
    return outcome(lambda: plain(p, inside, **given), {"x": inside, **given, **p})


def assert_same(got: Mapping[str, Any], expected: Mapping[str, Any], truth: Mapping[str, Any]) -> None:
    """The error bound on outputs and all gradients; all three have the same ones."""
    assert got.keys() == expected.keys() == truth.keys()
    assert any(k.startswith("d_") for k in got), "no gradient was compared"
    assert_fused_close(dict(got), dict(expected), dict(truth))


def assert_exact(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Bit for bit, the same names, None where None."""
    assert got.keys() == expected.keys()
    for key, a in got.items():
        b = expected[key]
        assert (a is None) == (b is None), key
        assert a is None or (a.dtype == b.dtype and torch.equal(a, b)), key


def assert_like_torch(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    """Outputs and all gradients equal those of a twin with the same keys, to within rounding. Twice: the first call of
    a plan is interpreted, the second runs generated code."""
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            its.requires_grad_(mine.requires_grad)
    twin = x.detach().clone().requires_grad_(x.requires_grad)
    for call in ("first call", "second call"):
        got, expected = run(model, x), run(plain, twin)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(got[key], value, msg=lambda m, where=f"{call}, {key}": f"{where}: {m}")


def tensor(*shape: int, seed: int = 3, grad: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
    return seeded_randn(shape, seed, dtype=dtype).requires_grad_(grad)


PAIR_AND_GEMM = (*PAIR, LinearBiasGeLUForward, LinearBiasGeLUBackward)


def with_twin() -> tuple[sf.Sequential, nn.Sequential]:
    """A fused sequence and torch modules with equal parameters."""
    mine = randomized(
        sf.Sequential(
            ops.LayerNorm(5), ops.Linear(5, 4), ops.ReLU(), ops.Linear(4, 6), ops.GELU(), ops.Linear(6, 5, bias=False),
            fusions=PAIR_AND_GEMM,
        )
    )  # fmt: skip
    its = nn.Sequential(
        nn.LayerNorm(5), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 5, bias=False)
    )
    its.load_state_dict(mine.state_dict())
    return mine, its


def same_as_twin(mine: nn.Module, its: nn.Module, x: Tensor) -> None:
    """Outputs and the gradients of all parameters, by name; the parameters of both stay unchanged."""
    for _ in range(2):  # interpreted at first, then by generated code
        torch.testing.assert_close(run(mine, x), run(its, x.detach().clone().requires_grad_(x.requires_grad)))


def fused_names(plan: sf.Plan) -> tuple[list[str], list[str]]:
    """Names of the fused steps of both schedules."""
    return [s.name for s in plan.forward if s.fused], [s.name for s in plan.backward if s.fused]

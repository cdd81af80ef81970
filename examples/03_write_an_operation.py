"""Write an activation, an operation with a parameter and a fusion, check all three, and train with them.

The checks compare every output and gradient with the reference, in float32 and bfloat16, over shapes and strides.
"""

import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops, testing

torch.manual_seed(0)
x = torch.randn(6, 8)


class Cube(sf.Pointwise):
    """y = x^3.  x, y: [*, H].  Saved: x.  An activation needs no more than a reference."""

    def reference(self, x: Tensor) -> Tensor:
        return x * x * x


class Gain(sf.UnfusedOperation):
    """y = gain x.

    Backward: dx = gain dy;  dgain = sum of dy x over all rows.
    x, y: [*, H], gain: [H].  Saved: x for dgain, gain for dx.
    """

    class Saved(sf.Saved):
        x: Tensor = sf.field(for_="gain")  # [*, H]
        gain: Tensor = sf.field(for_="x")  # [H], the parameter itself

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(size))

    def reference(self, x: Tensor) -> Tensor:
        return x * self.gain

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        gain = self.gain
        return x * gain, self.Saved(x=x, gain=gain)

    def bwd(self, dy: Tensor, saved: Saved, *, needs: frozenset[str]) -> tuple[Tensor | None, sf.Grads]:
        dx = dy * saved.gain if "x" in needs else None
        dgain = (dy * saved.x).sum_to_size(dy.shape[-1:]) if "gain" in needs else None
        return dx, {"gain": dgain}

    def infer(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if shape[-1:] != self.gain.shape:
            raise ValueError(f"expects last dimension {len(self.gain)}, got {shape[-1] if shape else 'none'}")
        return shape

    @classmethod
    def example(cls, x: Tensor) -> "Gain":
        return cls(x.shape[-1]).to(x.dtype)


class GainBias(sf.ForwardFusion):
    """y = bias + gain x in one call. It saves what the two operations save, so any backward pass can follow."""

    scale: Gain
    bias: ops.Bias

    def fwd(self, x: Tensor) -> tuple[Tensor, dict[str, sf.Saved]]:
        gain = self.scale.gain
        return torch.addcmul(self.bias.bias, gain, x), {"scale": Gain.Saved(x=x, gain=gain), "bias": ops.Bias.Saved()}


class Careless(Cube):
    """Cube with a mistake in its gradient, which the check finds: the factor 3 is missing."""

    def bwd(self, dy: Tensor, saved: sf.Saved) -> tuple[Tensor, sf.Grads]:
        return dy * saved.x * saved.x, {}


testing.check_op(Cube(), x)
testing.check_op(Gain(8), x)
print("Cube and Gain agree with their references in both passes")
print(testing.check_fusion(GainBias, x))

model = sf.Sequential(Gain(8), ops.Bias(8), Cube(), ops.Linear(8, 1), fusions=(GainBias, *sf.fusions.default))
print(f"\n{model.plan(x)}\n")

try:
    testing.check_op(Careless(), x)
except AssertionError as error:
    print("\n".join(str(error).splitlines()[:3]))

optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
target = x.sum(-1, keepdim=True)
for step in range(101):
    loss = (model(x) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step:3}: loss {loss.item():.3f}")

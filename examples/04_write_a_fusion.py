"""Write an activation that the library's kernels fuse, and a fusion made of its kernels; check both, read their plan.

On a CPU the kernels are compiled as C. Run it as  TRITON_INTERPRET=1 python examples/04_write_a_fusion.py  to run the
Triton kernels, in Triton's interpreter. Without a C compiler the fusions are not applied, and the plan says why.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

import seqfuse as sf
from seqfuse import fusions, ops, testing
from seqfuse.kernels.pointwise import Chain, act, dact, pointwise, scale, store


class HardSwish(sf.Pointwise):
    """y = x min(max(x + 3, 0), 6) / 6.  x, y: [*, H].  Saved: x.  Source: Howard et al. 2019, arXiv:1905.02244."""

    @triton.jit
    def value(x):
        return x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0

    @triton.jit
    def derivative(x):
        return tl.where(x < -3.0, 0.0, tl.where(x > 3.0, 1.0, x / 3.0 + 0.5))

    def reference(self, x: Tensor) -> Tensor:
        return x * (x + 3).clamp(0, 6) / 6


class ScaleTanhScale(sf.JointFusion):
    """y = up tanh(down x) in one pass each way, a soft cap of scores; saves the tanh.  x, y: [*, H]."""

    down: ops.Scale
    tanh: ops.Tanh
    up: ops.Scale

    kernels = ("triton", "c")

    class Saved(sf.Saved):
        t: Tensor  # [*, H]
        factors: tuple[float, float]

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        factors = self.down.factor, self.up.factor
        y, t = pointwise(x, chains(*factors)[0])
        return y, self.Saved(t=t, factors=factors)

    def bwd(self, dy: Tensor, saved: Saved) -> tuple[Tensor, sf.Grads]:
        return pointwise(dy, chains(*saved.factors)[1], [saved.t])[0], {}


@functools.cache
def chains(down: float, up: float) -> tuple[Chain, Chain]:
    steps = Chain(scale(down), act(ops.Tanh()), store(), scale(up))
    return steps, Chain(scale(up), dact(ops.Tanh()), scale(down))


def main() -> None:
    torch.manual_seed(0)
    here = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    hopper = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, tokens=8192)
    x = torch.randn(5, 8, device=here)

    print("HardSwish against its reference, then in the fusions of the library:")
    testing.check_op(HardSwish(), x)
    for fusion in (fusions.PointwiseChain, fusions.PointwiseChainBackward):
        print(testing.check_fusion(fusion, x, ops.Bias(8).to(here), HardSwish(), env=hopper))

    print("\nScaleTanhScale in every combination of passes:")
    print(testing.check_fusion(ScaleTanhScale, x, env=hopper))

    model = sf.Sequential(
        ops.Linear(1024, 4096), HardSwish(), ops.Linear(4096, 1024, bias=False), ops.Scale(1 / 30), ops.Tanh(),
        ops.Scale(30.0),
        fusions=(ScaleTanhScale, *fusions.default),
    ).bfloat16()  # fmt: skip
    print(f"\n{str(model.plan(env=hopper)).partition('not applied')[0]}")

    # The last three operations alone: in the whole model the first Scale is fused with the GEMM before it.
    plan = model[3:].plan(torch.randn(16, 1024, device=here, dtype=torch.bfloat16, requires_grad=True))
    print(f"On {plan.env}: {plan.count('ScaleTanhScale')} ScaleTanhScale")
    for reason in dict.fromkeys(refusal.reason for refusal in plan.refused if refusal.fusion == "ScaleTanhScale"):
        print(f"not applied: {reason}")


if __name__ == "__main__":
    main()

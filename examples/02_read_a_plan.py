"""What a plan says: here, on a machine that is not here, and why something is not fused."""

import torch
from torch import nn

import seqfuse as sf
from seqfuse import ops

dim = 64


class Mix(nn.Module):
    """No operation of this library: it runs as it is, and each side of it is planned by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


def block() -> sf.Sequential:
    mlp = ops.Linear(dim, 4 * dim), ops.GeLU(), ops.Linear(4 * dim, dim)
    return sf.Sequential(ops.Residual(ops.LayerNorm(dim), Mix()), ops.Residual(ops.LayerNorm(dim), *mlp))


model = block()
x = torch.randn(8, 16, dim)
plan = model.plan(x)
print("# here, as it will run on x\n")
print(plan)

print("\n# the same as data\n")
print(f"{plan.fused[0]} fused forward, {plan.fused[1]} fused backward")
for step in plan.forward:
    if step.fused:
        print(f"  {step.name} covers positions {step.covers.start} to {step.covers.stop - 1}")
for piece in plan.segments:
    print(f"  one autograd node for positions {piece.start} to {piece.stop - 1}")

print("\n# on an H100 in bfloat16, the model converted as it would be there\n")
print(block().bfloat16().plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)))

print("\n# why not? every refusal has a reason\n")
with sf.fusing(exclude=[fusion.__name__ for fusion in model.fusions]):
    for refusal in model.plan(x).refused[:3]:
        print(f"  {refusal.fusion} at {refusal.at}: {refusal.reason}")
handle = model[1][2].register_forward_hook(lambda module, args, y: None)
for alone in model.plan(x).alone:
    print(f"  {alone.name} at {alone.at} runs eagerly: {alone.reason}")
handle.remove()

print("\n# in evaluation nothing is kept\n")
with torch.no_grad():
    print(f"  backward: {model.plan(x).backward}, saved: {model.plan(x).memory.saved} bytes")

print("\n# a deep stack is cut, so that gradients arrive and memory is freed while backward goes on\n")
deep = sf.Sequential(*(block()[1] for _ in range(6)))
print(f"  {len(deep.plan(x).names)} operations in segments {[(s.start, s.stop) for s in deep.plan(x).segments]}")

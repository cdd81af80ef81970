"""Read a plan: what is fused on this machine, what would be on an H100, and why the rest is not."""

import torch
from torch import nn

import seqfuse as sf
from seqfuse import ops

dim = 64


class Mix(nn.Module):
    """A module that seqfuse does not know runs eagerly; the operations on each side of it are planned by themselves."""

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
print("# on this machine, for this input\n")
print(plan)

print("\n# the same, for a program to read\n")
print(f"{plan.fused[0]} fused forward, {plan.fused[1]} fused backward")
for step in plan.forward:
    if step.fused:
        print(f"  {step.name} runs the operations at positions {step.covers.start} to {step.covers.stop - 1}")
for piece in plan.segments:
    print(f"  the operations at positions {piece.start} to {piece.stop - 1} are one autograd node")

print("\n# on an H100, in bfloat16; no GPU is needed to ask\n")
print(block().bfloat16().plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16)))

print("\n# why something is not fused\n")
with sf.fusing(exclude=[fusion.__name__ for fusion in model.fusions]):
    for refusal in model.plan(x).refused[:3]:
        print(f"  {refusal.fusion} at {refusal.at}: {refusal.reason}")
handle = model[1][2].register_forward_hook(lambda module, args, y: None)
for alone in model.plan(x).eager:
    print(f"  {alone.name} at {alone.at} runs eagerly: {alone.reason}")
handle.remove()

print("\n# without gradients nothing is saved for backward\n")
with torch.no_grad():
    print(f"  backward: {model.plan(x).backward}, saved: {model.plan(x).memory.saved} bytes")

print("\n# a deep model is cut into autograd nodes: gradients arrive, and memory is freed, while backward still runs\n")
deep, x = sf.Sequential(*(block()[1] for _ in range(6))), torch.randn(32, 16, dim)
print(f"  {len(deep.plan(x).names)} operations in segments {[(s.start, s.stop) for s in deep.plan(x).segments]}")

"""Build a block from small operations, use it like `torch.nn.Sequential`, and see what the fuser made of it."""

import torch
from torch import nn

import seqfuse as sf
from seqfuse import ops

torch.manual_seed(0)
dim = 64
mlp = (ops.LayerNorm(dim), ops.Linear(dim, 4 * dim), ops.GeLU(), ops.Linear(4 * dim, dim))
model = sf.Sequential(*mlp)
x = torch.randn(8, 16, dim, requires_grad=True)

# A call, a backward and an optimizer step are those of any torch module.
y = model(x)
y.square().mean().backward()
torch.optim.SGD(model.parameters(), lr=0.1).step()
print(f"y has shape {tuple(y.shape)}; gradients arrived for {[name for name, _ in model.named_parameters()]}")

# It is a torch.nn.Sequential with the same keys, so a checkpoint of a plain one loads strictly.
plain = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
model.load_state_dict(plain.state_dict(), strict=True)
print(f"with the same weights it differs from torch.nn.Sequential by at most {(model(x) - plain(x)).abs().max():.1e}")

# A residual connection is a container; slices and sums are Sequentials again.
block = sf.Sequential(ops.Residual(*model), ops.LayerNorm(dim))
print(f"keys inside a residual: {list(block.state_dict())}")
print(f"the first two operations of the model: {model[:2]}")

# What is fused, in each pass.
print(f"\n{block.plan(x)}\n")

# Without fusing the operations run one by one; the numbers agree to rounding.
fused = block(x)
with sf.fusing(False):
    print(f"fused and unfused differ by at most {(fused - block(x)).abs().max():.1e}")

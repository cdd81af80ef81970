"""Build a model from small operations, load a checkpoint of plain PyTorch, and train it in bfloat16.

The model is written and trained as a `torch.nn.Sequential` would be. What runs as one fused step is decided by seqfuse,
and the plan says so.
"""

import torch
import torch.nn.functional as F
from torch import nn

import seqfuse as sf
from seqfuse import ops

torch.manual_seed(0)
dim, classes = 64, 10

# The same two blocks, once in plain PyTorch and once as operations that can be fused.
plain = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, classes))
model = sf.Sequential(ops.LayerNorm(dim), ops.Linear(dim, 4 * dim), ops.GeLU(), ops.Linear(4 * dim, classes))

# The keys are those of torch.nn, so checkpoints load in both directions.
model.load_state_dict(plain.state_dict(), strict=True)
x, labels = torch.randn(256, dim), torch.randint(classes, (256,))
print(f"with the same weights it differs from torch.nn.Sequential by at most {(model(x) - plain(x)).abs().max():.1e}")

# An ordinary training loop. Under autocast the Linears run in bfloat16; the parameters stay in float32.
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(41):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step:2}: loss {loss.item():.3f}")

# A residual connection is a container. Slices and sums of a Sequential are Sequentials again.
block = sf.Sequential(ops.Residual(ops.LayerNorm(dim), *model[1:3], ops.Linear(4 * dim, dim)), ops.LayerNorm(dim))
print(f"\nkeys inside a residual connection: {list(block.state_dict())}")

# Which operations run as one step, in the forward and in the backward pass, and how many bytes are saved between them.
x = torch.randn(512, dim, dtype=torch.bfloat16, requires_grad=True)
block.bfloat16()
print(f"\n{block.plan(x)}")

# Fewer bytes: what is cheap to compute is computed again in the backward pass.
saved = block.plan(x).memory.saved
block.memory = "lean"
print(f'\nsaved for backward: {saved:,} bytes, with memory="lean" {block.plan(x).memory.saved:,} bytes')

# Without fusing, the operations run one by one. The results agree to rounding.
fused = block(x)
with sf.fusing(False):
    print(f"fused and unfused differ by at most {(fused - block(x)).abs().max():.1e}")

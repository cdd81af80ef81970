"""Dropout of attention weights on a GPU: FlashAttention's, or ours if the mask must be a function of the seed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu.case import NEAR, distance
from torch.nn.attention import SDPBackend, sdpa_kernel

from seqfuse import ops
from seqfuse.testing import seeded_randn

pytestmark = pytest.mark.gpu
B, S, H, D, P = 2, 384, 4, 64, 0.3
X = frozenset({"x"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_weights_are_dropped_as_torch_drops_them(causal: bool, dtype: torch.dtype, device: torch.device) -> None:
    op = ops.Attention(H, causal=causal, dropout=P)
    x, dy = (seeded_randn((B, S, n * H * D), n, dtype=dtype).to(device) for n in (3, 1))
    torch.manual_seed(5)
    y, saved = op.fwd(x, seed=torch.zeros((), dtype=torch.int64, device=device))
    dx, _ = op.bwd(dy, saved, needs=X)
    q, k, v = (t.detach().requires_grad_() for t in op.heads_of(x))
    torch.manual_seed(5)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = F.scaled_dot_product_attention(q, k, v, dropout_p=P, is_causal=causal)
    grads = torch.autograd.grad(theirs, (q, k, v), dy.unflatten(-1, (H, D)).transpose(1, 2))
    assert torch.equal(y, theirs.transpose(1, 2).flatten(2))
    assert distance([dx], [torch.cat([g.transpose(1, 2) for g in grads], 2).flatten(2)]) < NEAR[dtype]


@pytest.mark.usefixtures("deterministic")
def test_the_seed_decides_where_algorithms_are_deterministic(device: torch.device) -> None:
    op = ops.Attention(H, causal=True, dropout=P)
    x = seeded_randn((B, S, 3 * H * D), 3, dtype=torch.bfloat16).to(device)
    seeds = [torch.tensor(n, device=device) for n in (1, 1, 2)]
    one, same, other = (op.fwd(x, seed=seed)[0] for seed in seeds)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)

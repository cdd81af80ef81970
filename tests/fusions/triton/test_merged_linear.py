"""MergedLinear in the plan of a layer."""

from __future__ import annotations

import torch

import seqfuse as sf
from seqfuse import ops


def test_a_layer_is_planned_as_with_one_weight():
    """Gate and up, and queries, keys and values: the same steps as with packed weights, forward and backward."""
    made = {"device": "meta", "dtype": torch.bfloat16}

    def steps(qkv: ops.Linear | ops.MergedLinear, gate_up: ops.Linear | ops.MergedLinear) -> list[int]:
        model = sf.Sequential(
            ops.Residual(
                ops.RMSNorm(512, **made), qkv, ops.RotaryEmbedding(8, 2, style="half", cos="cos", sin="sin"),
                ops.Attention(8, 2, causal=True), ops.Linear(512, 512, False, **made),
            ),
            ops.Residual(ops.RMSNorm(512, **made), gate_up, ops.SwiGLU(), ops.Linear(1024, 512, False, **made)),
        )  # fmt: skip
        plan = model.plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192))
        return [len(plan.forward), len(plan.backward)]

    packed = steps(ops.Linear(512, 768, False, **made), ops.Linear(512, 2048, False, **made))
    merged = steps(
        ops.MergedLinear(512, (512, 128, 128), False, **made), ops.MergedLinear(512, (1024, 1024), False, **made)
    )
    assert merged == packed

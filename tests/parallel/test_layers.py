"""Layers by heads and by features over several processes, each with all tokens or its sequence shard."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

import seqfuse as sf
from seqfuse import nn, ops
from tests import processes
from tests.processes import Facts

from .sharded import assert_same, copy_shares, draw, randomize

rotary = functools.partial(ops.RotaryEmbedding, style="half")
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"dim": 16, "heads": 4},
    "modern": {
        "dim": 16, "heads": 4, "kv_heads": 4, "hidden_dim": 12, "activation": ops.SwiGLU, "norm": ops.RMSNorm,
        "bias": False, "qk_norm": True, "rotary": rotary, "causal": True,
    },
    "shared key heads, post-norm": {
        "dim": 16, "heads": 8, "kv_heads": 4, "pre_norm": False, "qk_norm": True, "window": 3,
        "activation": functools.partial(ops.GEGLU, packing="interleaved"),
    },
}  # fmt: skip


def stack(name: str, group: Any = None, sequence_dim: int | None = None) -> sf.Sequential:
    model = nn.TransformerStack(
        2, **LAYERS[name], group=group, sequence_dim=sequence_dim, dtype=torch.float64, final_norm=True
    )
    if group is None:
        randomize(model)
    else:
        copy_shares(model, stack(name))
    return model


def every_layer_equals_one_process() -> None:
    for name in LAYERS:
        assert_same(stack(name, dist.group.WORLD), stack(name), draw(2, 6, 16))


def layers_unfused() -> None:
    with sf.fusing(False):
        assert_same(stack("modern", dist.group.WORLD), stack("modern"), draw(2, 6, 16))


def shares_of_rows_equal_one_process() -> None:
    for name, dim in (("plain", -2), ("modern", 1), ("shared key heads, post-norm", -2)):
        assert_same(stack(name, dist.group.WORLD, dim), stack(name), draw(2, 8, 16), dim=dim)


BOTH = [every_layer_equals_one_process, shares_of_rows_equal_one_process]
test_in_several_processes = Facts({
    2: [layers_unfused, *(BOTH if processes.FULL else BOTH[1:])],
    4: BOTH if processes.FULL else BOTH[:1],
}).test  # fmt: skip

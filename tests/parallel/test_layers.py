"""Layers by heads and by features over several processes, each of which holds all tokens or its shard of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import seqfuse as sf
from seqfuse import nn, ops
from tests.processes import Facts

from .sharded import assert_same, copy_shares, draw, randomize, results, share_of

rotary = functools.partial(ops.RotaryEmbedding, style="half")
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {"dim": 16, "heads": 4},
    "modern": {
        "dim": 16, "heads": 4, "kv_heads": 4, "hidden_dim": 12, "activation": ops.SwiGLU, "norm": ops.RMSNorm,
        "bias": False, "qk_norm": True, "rotary": rotary, "causal": True,
    },
    "shared key heads, post-norm": {
        "dim": 16, "heads": 8, "kv_heads": 4, "pre_norm": False, "qk_norm": True, "activation": ops.GEGLU, "window": 3,
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


def own(x: Tensor, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def shares_of_rows_equal_one_process() -> None:
    for name, dim in (("plain", -2), ("modern", 1), ("shared key heads, post-norm", -2)):
        whole, model = stack(name), stack(name, dist.group.WORLD, dim)
        x, dy = draw(2, 8, 16), draw(2, 8, 16, seed=7)
        y, grads = results(model, own(x, dim), own(dy, dim))
        expected_y, expected = results(whole, x, dy)
        torch.testing.assert_close(y, own(expected_y, dim))
        assert grads.keys() == expected.keys()
        for key, grad in expected.items():
            wanted = own(grad, dim) if key == "x" else share_of(model, key, grad)
            torch.testing.assert_close(grads[key], wanted, msg=lambda m, k=f"{name} {key}": f"{k}: {m}")


FACTS = Facts(
    {
        2: [every_layer_equals_one_process, layers_unfused, shares_of_rows_equal_one_process],
        4: [every_layer_equals_one_process, shares_of_rows_equal_one_process],
    }
)


test_in_several_processes = FACTS.test

"""Attention with what stands before it: in a step of decoding one kernel less, and no [q; k; v] in between."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..env import Env
from ..fusion import InferenceFusion, Requirements
from ..ops import Attention, Bias, QKNorm, RotaryEmbedding
from ..ops._cache import current
from ._heads import angles, around, kernels_take, parts_of, rotation_of, run


class BiasQKNormRotaryAttention(InferenceFusion):
    """Attention of rope(norm(x + bias)), where nothing needs a gradient.

    In a step of decoding one kernel rotates the new token and writes its key and value into the cache; all else is
    `BiasQKNormRotary` and then the operation. x: [*, S, (H + 2 Hkv) D], y: [*, S, H D].
    """

    bias: Bias | None
    norm: QKNorm | None
    rotary: RotaryEmbedding
    attention: Attention

    kernels = ("triton",)

    def requires(self, env: Env) -> Requirements:
        yield from kernels_take(self.bias, self.norm, self.rotary, env)
        attention, rotary = self.attention, self.rotary
        same = (attention.heads, attention.kv_heads) == (rotary.heads, rotary.kv_heads)
        yield same, "the rotation and attention must be of the same heads"
        yield not attention.random, "dropout of weights is left to the operation"

    def fwd(self, x: Tensor) -> Any:
        from ..kernels.rope import rope_write

        bias, norm, rotary, attention = self.bias, self.norm, self.rotary, self.attention
        cache = current()
        if cache is not None:
            rotation = rotation_of(rotary, x.shape[-1] // parts_of(norm, rotary))

            def write(row: Tensor, **caches: Any) -> Tensor:
                return rope_write(row, rotary.heads, rotary.kv_heads, rotation, **caches, **around(bias, norm))

            y = cache.decode(attention, x, write)
            if y is not None:
                return y
        return attention.fwd(run(bias, norm, rotary, x, angles(None, None, None), store=False).y)[0]

"""Decoding over a cache; and what a call costs where tensors are so small that only the host counts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import plain
import torch
import torch.nn.functional as F

from seqfuse.kernels.decode import decode_attention

from .blocks import Models, drawn, trained, unfused
from .case import Case, Contender, Inputs, Run
from .draw import normal
from .peers import compiled
from .sizes import MAIN, Model, Sizes


def cases(sizes: Sizes) -> Iterator[Case]:
    """One new row per sequence, at each batch and length; and blocks of 4 x 16."""
    shared = [m for m in sizes.models if m.kv_heads != m.heads]
    for model in sorted(shared, key=lambda m: m.name not in MAIN):
        for rank, (batch, length) in enumerate(sizes.decodes):
            yield _decode(sizes, model, batch, length, 3 + (rank > 5) + 2 * (model.name not in MAIN))
    if sizes.device.type == "cuda":
        yield from (_host(sizes, llama) for llama in (False, True))


def _decode(sizes: Sizes, model: Model, batch: int, length: int, priority: int) -> Case:
    """All sequences are as long as the cache, since torch has no kernel for others."""
    heads, kv, size = model.heads, model.kv_heads, model.head_dim

    def make(rows: int, seed: int) -> Inputs:
        shapes = {"q": (rows, heads, size), "k": (rows, kv, length, size), "v": (rows, kv, length, size)}
        drawn = normal(shapes, seed, sizes.device, sizes.dtype)
        return drawn | {"lengths": torch.full((rows,), length, dtype=torch.int32, device=sizes.device)}

    def ours(inputs: Inputs) -> Run:
        return lambda: (decode_attention(**inputs),)

    def eager(inputs: Inputs) -> Run:
        q, k, v = (inputs[name] for name in "qkv")

        def call() -> Any:
            y = F.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)
            return (y.squeeze(2),)

        return call

    return Case(
        "decode attention", f"{model.name} {batch} x {length}", sizes.dtype, make, batch,
        {"seqfuse": Contender(ours), "eager": Contender(eager)}, checked_rows=min(batch, 2), priority=priority,
        anywhere=True, flops=4.0 * batch * heads * length * size,
        shape={"model": model.name, "B": batch, "length": length},
    )  # fmt: skip


def _host(sizes: Sizes, llama: bool) -> Case:
    """The block of the host target; 16 wide, 4 rows."""
    model = Model("llama" if llama else "gpt", 16, 16, 1, 1, 16, 16, llama)
    models = Models("feedforward", plain.Spec(16, 16, 1, 1, 16, llama), sizes)
    contenders = {"seqfuse": trained(lambda: models.ours), "eager": trained(lambda: models.torch)}
    if sizes.compile_modes:
        contenders["compile"] = trained(functools.cache(lambda: compiled(models.torch)))
    return Case(
        "host", f"{model.name} feed-forward block 4 x 16", sizes.dtype, drawn(sizes, model, "x", "dy"), 4, contenders,
        unfused=trained(lambda: models.ours, unfused), exact=trained(lambda: models.exact, unfused),
        as_called=True, priority=2, shape={"M": 4, "H": 16},
    )  # fmt: skip

"""Kernels launched by a forward and a backward pass, counted without data, for the table of docs/dev/kernels.md.

Rewrite the table with  TRITON_INTERPRET=1 .venv/bin/python -m tests.fusions.triton.launches
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import seqfuse as sf
from benchmarks.launch_counts import CONVERTS, FREE, Launches, counting
from seqfuse import env, ops
from seqfuse.fake import faking
from seqfuse.fusions import LinearBiasActOneDNN
from seqfuse.inference import KVCache
from seqfuse.nn import TransformerLayer
from seqfuse.ops import _attention
from tests.fusions.triton.eager import Eager

PAGE = Path(__file__).resolve().parents[3] / "docs" / "dev" / "kernels.md"
TABLE = re.compile(r"(?<=<!-- drawn by tests/fusions/triton/launches.py -->\n).*?(?=<!-- end -->)", re.DOTALL)
LAYER_TABLE = re.compile(
    r"(?<=<!-- layers drawn by tests/fusions/triton/launches.py -->\n).*?(?=<!-- end of layers -->)", re.DOTALL
)
_FREE = FREE | CONVERTS


def launches(model: sf.Sequential, x: torch.Tensor) -> tuple[int, int]:
    """Launches of the forward and of the backward pass."""
    fuser = model._fuser  # which fake tensors pass by otherwise, as all that is not plain does
    with faking() as mode:
        leaf = mode.from_tensor(x).requires_grad_()
        dy = torch.empty_like(leaf)
        with counting(Launches(_FREE)) as ahead:
            y = fuser.run(fuser.op_list(), leaf, {})
        with counting(Launches(_FREE)) as back:
            torch.autograd.grad(y, [leaf, *model.parameters()], dy)
    return len(ahead.found), len(back.found)


def eager_launches(run: Callable[[Eager, torch.Tensor], torch.Tensor], x: torch.Tensor, **how: Any) -> tuple[int, int]:
    """Launches of the forward and of the backward pass of what is written in torch."""
    ahead, back = Launches(_FREE), Launches(_FREE)
    own = Eager(ahead.as_one, back.as_one, **how)
    with faking() as mode:
        leaf = mode.from_tensor(x).requires_grad_()
        run(own, leaf)  # makes the parameters
        ahead.found.clear()
        with ahead:
            y = run(own, leaf)
        with back:
            torch.autograd.grad(y, [leaf, *own.parameters.values()], torch.empty_like(y))
    return len(ahead.found), len(back.found)


def block(act: type[sf.UnfusedOperation]) -> ops.Residual:
    factor = 2 if issubclass(act, sf.Gated) else 1
    return ops.Residual(ops.LayerNorm(1024), ops.Linear(1024, 4096 * factor), act(), ops.Linear(4096, 1024))


def stacked(own: Eager, x: torch.Tensor, blocks: int) -> torch.Tensor:
    for index in range(blocks):
        x = own.feedforward(str(index), x)
    return x


def rows() -> Iterator[tuple[str, tuple[int, int], tuple[int, int], tuple[int, int]]]:
    """Description of a list, launches fused, unfused and of eager torch, with the costs of an sm_90."""
    x = torch.empty(8192, 1024, dtype=torch.bfloat16)
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    with mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]):
        for act in (ops.SwiGLU, ops.GeLU):
            for blocks in (1, 12):
                with torch.device("meta"):
                    planned, model = (sf.Sequential(*(block(act) for _ in range(blocks))).bfloat16() for _ in range(2))
                model.to_empty(device="cpu")  # nothing is run
                here, wanted = (
                    [(s.name, s.covers) for s in (*plan.forward, *plan.backward)]
                    for plan in (
                        model.plan(x.requires_grad_()),
                        planned.plan(x.to("meta").requires_grad_(), env=there),
                    )
                )
                assert here == wanted, (here, wanted)
                fused = launches(model, x)
                with sf.fusing(False):
                    unfused = launches(model, x)
                how = {"width": 1024, "hidden": 4096, "gated": issubclass(act, sf.Gated)}
                plain = eager_launches(lambda own, t, n=blocks: stacked(own, t, n), x, **how)
                name = f"`LayerNorm, Linear, {act.__name__}, Linear`, residual"
                yield f"{name}{f', {blocks} times' if blocks > 1 else ''}", fused, unfused, plain


LLAMA: dict[str, Any] = {
    "kv_heads": 4, "norm": ops.RMSNorm, "activation": ops.SwiGLU, "bias": False, "hidden_dim": 2816,
    "rotary": functools.partial(ops.RotaryEmbedding, style="half"),
}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "GPT": {"activation": functools.partial(ops.GeLU, "tanh")},
    "Llama": LLAMA,
    "GPT, dropout of weights": {"activation": functools.partial(ops.GeLU, "tanh"), "attention_dropout": 0.1},
}


def layer(name: str, width: int = 1024) -> sf.Sequential:
    how = {**LAYERS[name], **({"hidden_dim": 4 * width} if width != 1024 else {})}
    return sf.Sequential(TransformerLayer(width, 16, causal=True, **how)).bfloat16()


def step(name: str) -> int:
    """Launches of a step of decoding; kernels are not run, so what is in the cache is of no matter.

    oneDNN's fusion is left out: a GPU has none, nor has every CPU.
    """
    model, cache = layer(name, 128).eval(), KVCache(2, 64)
    x = torch.randn(2, 1, 128, dtype=torch.bfloat16)
    with sf.fusing(exclude=LinearBiasActOneDNN), contextlib.ExitStack() as stack:
        for _ in range(2):  # the first makes the cache
            counted = stack.enter_context(counting(Launches(_FREE)))
            cache.feed(model, x)
    return len(counted.found)


def eager_of(name: str, width: int) -> dict[str, Any]:
    """The same layer for `Eager`."""
    llama = name == "Llama"
    hidden = LLAMA["hidden_dim"] if llama and width == 1024 else 4 * width
    return {
        "width": width,
        "hidden": hidden,
        "heads": 16,
        "kv_heads": 4 if llama else 16,
        "gated": llama,
        "llama": llama,
    }


def eager_step(name: str) -> int:
    """Launches of a step of decoding in torch, over a cache made before."""
    counted = Launches(_FREE)
    own = Eager(counted.as_one, counted.as_one, **eager_of(name, 128))
    x = torch.empty(2, 1, 128, dtype=torch.bfloat16)
    cache = [torch.empty(2, 64, own.kv_heads, own.size, dtype=torch.bfloat16) for _ in "kv"]
    with torch.no_grad():
        own.layer(x, cache)
        counted.found.clear()
        with counted:
            own.layer(x, cache)
    return len(counted.found)


def layer_rows() -> Iterator[tuple[str, list[int]]]:
    """Launches of a layer forward, backward, and of a step of decoding, each fused, unfused and of eager torch."""
    x = torch.empty(8, 1024, 1024, dtype=torch.bfloat16)
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    with mock.patch.dict(env._COSTS, cpu=env._COSTS["sm_90"]):
        for name in LAYERS:
            with torch.device("meta"):
                planned, model = layer(name), layer(name)
            model.to_empty(device="cpu")
            here, wanted = (
                [(s.name, s.covers) for s in (*plan.forward, *plan.backward)]
                for plan in (model.plan(x.requires_grad_()), planned.plan(x.to("meta").requires_grad_(), env=there))
            )
            assert here == wanted, (here, wanted)
            with mock.patch.object(_attention, "interpreting", "dropout" in name):
                fused = launches(model, x)
                with sf.fusing(False):
                    unfused = launches(model, x)
            with mock.patch.object(_attention, "interpreting", True):
                decoded = step(name)
                with sf.fusing(False):
                    plain = step(name)
            theirs = eager_launches(Eager.layer, x, **eager_of(name, 1024))
            passes = [n for three in zip(fused, unfused, theirs, strict=True) for n in three]
            yield name, [*passes, decoded, plain, eager_step(name)]


def layer_table() -> str:
    """The table of layers as Markdown."""
    lines = ["| layer | | fused | unfused | eager |", "| --- | --- | ---: | ---: | ---: |"]
    for name, numbers in layer_rows():
        for i, run in enumerate(("forward", "backward", "decode step")):
            lines.append(f"| {name} | {run} | {' | '.join(map(str, numbers[3 * i : 3 * i + 3]))} |")
    return "\n".join(lines) + "\n"


def table() -> str:
    """The table as Markdown."""
    head = "op sequence | forward, fused | unfused | eager | backward, fused | unfused | eager"
    lines = [f"| {head} |", f"|{' --- |' * 7}"]
    for name, *sides in rows():
        lines.append(f"| {name} | {' | '.join(str(side[way]) for way in (0, 1) for side in sides)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
    for pattern, drawn in ((TABLE, table()), (LAYER_TABLE, layer_table())):
        PAGE.write_text(pattern.sub(lambda _, drawn=drawn: drawn, PAGE.read_text()))
        print(drawn)

"""Whole transformer layers on this CPU: time against eager torch, bytes kept for backward, launches planned for sm_90.

Layers of Hugging Face's GPT-2 and Llama, from small random configurations, beside the same layers made of operations on
copies of their weights. Times are ratios of interleaved pairs, with their quartiles; a layer whose results do not agree
by the numeric rule reports nothing. Writes `results/layers.json`. Needs transformers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from record import write
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import seqfuse as sf
from seqfuse.integrations.huggingface import from_huggingface
from seqfuse.testing import assert_fused_close, seeded_randn

WIDTH, HEADS = 256, 4
SHAPES = ((1, 64), (4, 256))


def pair(kind: str) -> tuple[nn.Module, sf.Sequential, Callable[[nn.Module, Tensor], Tensor]]:
    """The layer of Hugging Face, ours, and how theirs is called."""
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = GPT2Config(n_embd=WIDTH, n_head=HEADS, n_layer=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        model: Any = GPT2LMHeadModel(sizes)
        theirs, call = model.transformer.h[0], lambda layer, x: _first(layer(x))
    else:
        sizes = LlamaConfig(
            hidden_size=WIDTH, intermediate_size=688, num_attention_heads=HEADS, num_key_value_heads=2,
            num_hidden_layers=1, vocab_size=64,
        )  # fmt: skip
        model = LlamaForCausalLM(sizes)
        theirs, rotary = model.model.layers[0], model.model.rotary_emb

        def call(layer: nn.Module, x: Tensor) -> Tensor:
            ids = torch.arange(x.shape[1]).unsqueeze(0)
            return _first(layer(x, position_embeddings=rotary(x, ids)))

    return theirs, from_huggingface(model).layers[0], call


def _first(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def passes(run: Callable[[Tensor], Tensor], x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    return y.detach(), *torch.autograd.grad(y, x, dy)


def train(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, dy: Tensor) -> None:
    model.zero_grad()
    run(x.detach().requires_grad_()).backward(dy)


def kept(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> int:
    """Bytes kept for backward: storages once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        return found.setdefault(t.untyped_storage().data_ptr(), t)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(x.detach().requires_grad_())
    return sum(t.untyped_storage().nbytes() for place, t in found.items() if place not in own)


def ratios(mine: Callable[[], Any], theirs: Callable[[], Any], pairs: int) -> dict[str, float]:
    for _ in range(5):
        mine()
        theirs()
    found: list[float] = []
    for _ in range(pairs):
        begun = time.perf_counter()
        mine()
        between = time.perf_counter()
        theirs()
        found.append((between - begun) / (time.perf_counter() - between))
    low, middle, high = statistics.quantiles(found, n=4)
    return {"ratio": middle, "low": low, "high": high}


def measure(kind: str, pairs: int) -> list[dict[str, Any]]:
    """The rows of one kind of layer."""
    theirs, mine, call = pair(kind)
    wide = copy.deepcopy(theirs).double()

    def eager(x: Tensor) -> Tensor:
        return call(theirs, x)

    plan = copy.deepcopy(mine).bfloat16().plan(env=sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192))
    steps = {"forward": len(plan.forward), "backward": len(plan.backward), "operations": len(plan.names)}
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        x, dy = seeded_randn((*shape, WIDTH), 0), seeded_randn((*shape, WIDTH), 1)
        exact = passes(lambda x: call(wide, x), x.double(), dy.double())
        try:
            assert_fused_close(passes(mine, x, dy), passes(eager, x, dy), exact)
        except AssertionError as error:
            print(f"{kind} {shape}: {error}")
            continue
        bytes_kept = {
            "seqfuse": kept(mine, mine, x),
            "eager": kept(eager, theirs, x),
            "torch.compile": kept(torch.compile(eager), theirs, x),
        }
        with torch.no_grad():
            forward = ratios(partial(mine, x), partial(eager, x), pairs)
        both = ratios(partial(train, mine, mine, x, dy), partial(train, eager, theirs, x, dy), pairs)
        row = {"layer": kind, "shape": [*shape, WIDTH], "steps for sm_90": steps, "kept": bytes_kept}
        rows.append({**row, "forward": forward, "forward+backward": both})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for kind in ("gpt2", "llama") for row in measure(kind, options.pairs)]
    print(f"wrote {write('layers', {'layers': rows}).name}")


if __name__ == "__main__":
    main()

"""Train a byte-level model for a minute on Python's own standard library, then let it complete Python code.

Shows how fast bytes are made with keys and values kept from step to step, and with everything read again at each.
"""

from __future__ import annotations

import argparse
import functools
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor

import seqfuse as sf
from seqfuse import ops
from seqfuse.inference import generate, stream
from seqfuse.losses import linear_cross_entropy
from seqfuse.nn import TransformerStack

CONTEXT, BATCH, DIM, LAYERS, HEADS = 128, 16, 128, 3, 4


def llama() -> sf.Sequential:
    """Bytes to logits of the next byte; positions are turned into angles, so that no length is the longest."""
    stack = TransformerStack(
        LAYERS, DIM, HEADS, kv_heads=2, hidden_dim=320, activation=ops.SwiGLU, norm=ops.RMSNorm, bias=False,
        causal=True, rotary=functools.partial(ops.RotaryEmbedding, style="half"),
    )  # fmt: skip
    return sf.Sequential(ops.Embedding(256, DIM), stack, ops.Linear(DIM, 256, bias=False))


def sources(folder: Path) -> Tensor:
    skipped = {"site-packages", "dist-packages", "test"}
    files = [p for p in sorted(folder.rglob("*.py")) if not skipped & {*p.relative_to(folder).parts}]
    return torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in files)), dtype=torch.uint8)


def train(model: sf.Sequential, text: Tensor, seconds: float) -> tuple[int, float]:
    """Steps made in that time, and the mean loss of the last of them in nats per byte."""
    body, head = model[:-1], model[-1]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    losses: list[float] = []
    began = time.perf_counter()
    while (gone := time.perf_counter() - began) < seconds:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, len(losses) / 50) * (1 - 0.9 * gone / seconds)
        starts = torch.randint(len(text) - CONTEXT, (BATCH,))
        windows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        loss = linear_cross_entropy(body(windows[:, :-1]), head.weight, windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    last = losses[-20:]
    return len(losses), sum(last) / len(last)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--prompt", default="class Queue:\n    def __init__(self", help="what the model completes")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--bytes", type=int, default=256, help="to complete it with")
    parser.add_argument("--seed", type=int, default=0, help="of weights, data order and draws")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)

    text = sources(Path(sysconfig.get_paths()["stdlib"]))
    model = llama()
    steps, loss = train(model, text, args.seconds)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, {steps} steps on {len(text) / 1e6:.1f} MB, loss {loss:.3f} nats per byte\n")

    model.eval()
    prompt = torch.tensor([list(args.prompt.encode())])
    print(args.prompt, end="")
    generator = torch.Generator().manual_seed(args.seed)
    for byte in stream(model, prompt, args.bytes, temperature=0.6, top_p=0.95, generator=generator):
        print(chr(int(byte)) if int(byte) in (10, *range(32, 127)) else "?", end="", flush=True)
    print("\n")

    made: dict[str, Tensor] = {}
    seconds: dict[str, float] = {}
    for name, use_cache in (("cached", True), ("cache-less", False)):
        began = time.perf_counter()
        made[name] = generate(model, prompt, args.bytes, use_cache=use_cache)
        seconds[name] = time.perf_counter() - began
    same = torch.equal(made["cached"], made["cache-less"])
    rates = ", ".join(f"{name} {args.bytes / took:.0f} tokens/s" for name, took in seconds.items())
    print(f"generate: {rates}, the same tokens: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()

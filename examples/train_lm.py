"""Train a byte-level GPT three times from one seed, on Python's own standard library: what do you gain on this machine?

Once without fusing, once with the default fusions, once with `memory="lean"`, which saves less for the backward pass.
Shows that all three learn the same, tokens per second and bytes of each, and the plan of the same model for an H100.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import statistics
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.losses import LinearCrossEntropy
from seqfuse.nn import TransformerStack

CONTEXT, BATCH, HEAD = 64, 16, 32
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class GPT(nn.Module):
    """Windows of bytes to the cross-entropy of each byte after the first, in nats."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.body = sf.Sequential(
            ops.Embedding(256, dim),
            ops.PositionEmbedding(CONTEXT, dim),
            TransformerStack(layers, dim, dim // HEAD, causal=True, dropout=0.05),
        )
        self.loss = LinearCrossEntropy(dim, 256, bias=True)

    def forward(self, windows: Tensor) -> Tensor:
        return self.loss(self.body(windows[:, :-1]), windows[:, 1:])

    def logits(self, text: Tensor) -> Tensor:
        """Of the byte after each, which training never holds all at once."""
        return F.linear(self.body(text), self.loss.weight, self.loss.bias)


def read_bytes(source: Path) -> tuple[Tensor, Tensor]:
    """Training and validation bytes: every tenth source of a folder is held out, or the last tenth of a file."""
    if source.is_file():
        text = source.read_bytes()
        cut = len(text) * 9 // 10
        parts = text[:cut], text[cut:]
    else:
        skipped = {"site-packages", "dist-packages", "test"}
        files = [p for p in sorted(source.rglob("*.py")) if not skipped & {*p.relative_to(source).parts}]
        texts = [p.read_bytes() for p in files]
        parts = b"".join(t for i, t in enumerate(texts) if i % 10), b"".join(texts[::10])
    if min(map(len, parts)) <= CONTEXT:
        raise SystemExit(f"{source} holds too little text; name a longer file or a folder of sources with --data")
    train, validation = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return train, validation


def windows_at(text: Tensor, starts: Tensor) -> Tensor:
    return text[starts[:, None] + torch.arange(CONTEXT + 1)].long()


def unigram_entropy(text: Tensor) -> float:
    """Nats per byte of the best guess that looks at no context."""
    p = text.bincount(minlength=256).double() / len(text)
    return -float(torch.special.xlogy(p, p).sum())


class Run:
    """One copy of the model in training."""

    def __init__(self, args: argparse.Namespace, name: str, fusing: bool, memory: Literal["save", "lean"]) -> None:
        torch.manual_seed(args.seed)
        self.model, self.name, self.fusing = GPT(args.dim, args.layers).to(HERE), name, fusing
        self.model.body.memory = memory
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.98), fused=True)
        steps = max(args.steps, 2)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=steps, pct_start=0.1)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, windows: Tensor, seed: int) -> None:
        torch.manual_seed(seed)  # what dropout draws from: the same masks in all runs
        began = time.perf_counter()
        with sf.fusing(self.fusing):
            loss = self.model(windows)
            self.optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - began)

    @property
    def speed(self) -> float:
        """Tokens, which are bytes here, per second of a step, the median, without the first, which plan and warm up."""
        return BATCH * CONTEXT / statistics.median(self.seconds[3:] or self.seconds)

    @torch.no_grad()
    def validate(self, text: Tensor) -> float:
        self.model.eval()
        starts = torch.linspace(0, len(text) - CONTEXT - 1, 16 * BATCH, dtype=torch.float64).long()
        with sf.fusing(self.fusing):
            losses = [self.model(windows_at(text, part).to(HERE)).item() for part in starts.split(BATCH)]
        self.model.train()
        return sum(losses) / len(losses)


def train(runs: Sequence[Run], text: Tensor, steps: int, seed: int) -> None:
    """All copies in step: the same batches, by turns, so that whatever else the machine does slows all of them."""
    batches = torch.Generator().manual_seed(seed)
    with progress(steps) as show:
        for step in range(steps):
            windows = windows_at(text, torch.randint(len(text) - CONTEXT, (BATCH,), generator=batches)).to(HERE)
            first = step % len(runs)
            for run in (*runs[first:], *runs[:first]):
                run.step(windows, seed + step)
            show(runs)


@contextlib.contextmanager
def progress(steps: int) -> Generator[Callable[[Sequence[Run]], None]]:
    """A bar in a terminal where rich is installed, else a line now and then."""

    def measured(runs: Sequence[Run]) -> str:
        return f"loss {runs[0].losses[-1]:.3f}; tokens/s: " + ", ".join(f"{r.name} {r.speed:,.0f}" for r in runs)

    # Anywhere else the bar would show nothing before the end.
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:

        def line(runs: Sequence[Run]) -> None:
            step = len(runs[0].losses)
            if step % max(steps // 10, 1) == 0 or step == steps:
                print(f"{step:5}/{steps} {measured(runs)}", flush=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.fields[text]}")
    with Progress(BarColumn(12), MofNCompleteColumn(), text, TimeRemainingColumn(compact=True)) as bars:
        bar = bars.add_task("training", total=steps, text="")
        yield lambda runs: bars.update(bar, completed=len(runs[0].losses), text=measured(runs))


def saved_for_backward(run: Run, windows: Tensor) -> int:
    """Bytes that one forward pass keeps for its backward pass: storages counted once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    kept: dict[int, Tensor] = {}  # holding the tensors keeps addresses from being used again

    def pack(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with sf.fusing(run.fusing), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run.model(windows)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


def on_an_h100(args: argparse.Namespace, tokens: int = 8192) -> str:
    """What the plan of the same model for an H100 says, made here on tensors without data."""
    with torch.device("meta"):
        body = GPT(args.dim, args.layers).body.bfloat16()
        text = torch.empty(tokens // CONTEXT, CONTEXT, dtype=torch.long)
    body.memory = "lean"
    there = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, tokens=tokens)
    plan = body.plan(text, env=there)
    with sf.fusing(False):
        unfused = body.plan(text, env=there)
    lines = [f"the same model on an H100, {tokens:,} tokens in bfloat16, as planned here and not run:"]
    for name, steps, before in (
        ("forward", plan.forward, unfused.forward), ("backward", plan.backward, unfused.backward),
    ):  # fmt: skip
        lines.append(f"  {launching(steps)} steps that launch kernels {name}, unfused {launching(before)}")
    if plan.memory is not None:
        kept, all_kept = plan.memory.saved, plan.memory.saved_unfused
        share = f"{kept / all_kept:.2f} of unfused"
        lines.append(f'  {kept / 1e6:.0f} MB saved for backward with memory="lean", {share}')
    return "\n".join(lines)


def launching(steps: Sequence[Any]) -> int:
    """How many steps do more than to look at a tensor in another way."""
    return sum(step.fused or not all(node.operation.is_view for node in step.nodes) for step in steps)


@torch.no_grad()
def continued(model: GPT, prompt: Tensor, length: int) -> str:
    """`length` bytes after `prompt`, each drawn from what the model expects."""
    model.eval()
    text = prompt.long().to(HERE)
    for _ in range(length):
        expected = model.logits(text[None, -CONTEXT:])[0, -1].div(0.7).softmax(-1)
        text = torch.cat((text, expected.multinomial(1)))
    return readable(text[len(prompt) :])


def readable(text: Tensor) -> str:
    """Bytes as indented lines, without what a terminal would act on."""
    decoded = bytes(text.tolist()).decode(errors="replace")
    lines = "".join(c if " " <= c <= "~" or c == "\n" else "?" for c in decoded).split("\n")
    short = [part for line in lines for part in textwrap.wrap(line, 76, drop_whitespace=False) or [""]]
    return textwrap.indent("\n".join(short), "    ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--data", type=Path, default=stdlib, help="a text file, or a folder of Python sources")
    parser.add_argument("--steps", type=int, default=240, help="of training; 240 take about two minutes")
    parser.add_argument("--dim", type=int, default=128, help=f"width of the model, a multiple of {HEAD}")
    parser.add_argument("--layers", type=int, default=2, help="blocks of attention and MLP")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and data order")
    parser.add_argument("--plan", type=Path, default=Path("build", "demo_plan.html"), help="where the plan is drawn")
    args = parser.parse_args()
    if min(args.steps, args.layers, args.dim) < 1 or args.dim % HEAD:
        parser.error(f"steps and layers must be positive, dim a positive multiple of {HEAD}")
    if not args.data.exists():
        parser.error(f"there is no {args.data}")
    # A model of this size gains little from a second thread, and loses much where another process holds that core.
    torch.set_num_threads(1)

    text, held_out = read_bytes(args.data)
    entropy = unigram_entropy(held_out)
    print(f"data: {args.data}\n      {len(text) / 1e6:.1f} MB to train on, {len(held_out) / 1e6:.1f} MB held out")

    kinds: tuple[tuple[str, bool, Literal["save", "lean"]], ...] = (
        ("unfused", False, "save"), ("default", True, "save"), ('memory="lean"', True, "lean"),
    )  # fmt: skip
    runs = unfused, default, lean = [Run(args, *kind) for kind in kinds]
    windows = windows_at(text, torch.arange(BATCH) * CONTEXT).to(HERE)
    x = windows[:, :-1]
    plan = lean.model.body.plan(x)
    forward, backward = plan.fused
    kept = [saved_for_backward(run, windows) for run in runs]
    count = sum(p.numel() for p in lean.model.parameters())
    print(f"model: {count:,} parameters, {len(plan.names)} operations; the default plan of its first block:\n")
    print(f"{default.model.body[2][0].plan(default.model.body[:2](x))}\n", flush=True)

    before = lean.validate(held_out)
    train(runs, text, args.steps, args.seed)
    after, after_unfused = lean.validate(held_out), unfused.validate(held_out)

    gaps = [max(abs(a - c), abs(b - c)) for a, b, c in zip(default.losses, lean.losses, unfused.losses, strict=True)]
    print(f"\ntraining loss, at six of {args.steps} steps\n{'step':>6}", *(f"{run.name:>13}" for run in runs))
    for i in sorted({round(k * (args.steps - 1) / 5) for k in range(6)}):
        print(f"{i + 1:>6}", *(f"{run.losses[i]:>13.6f}" for run in runs))
    prompt = held_out[:CONTEXT]
    print(f"\nprompt:\n{readable(prompt)}\nthe model goes on:\n{continued(lean.model, prompt, 160)}")
    print(f"\nvalidation loss {after:.4f} nats per byte (unfused {after_unfused:.4f})")
    print(f"unigram entropy {entropy:.4f} nats per byte: the loss of guessing without context")
    if after >= entropy:
        print("the model is not better than that yet: give it more steps")

    print(f"\non this machine ({HERE.type}, float32)\n{'':>13} {'tokens/s':>10} {'saved for backward':>20}")
    for run, size in zip(runs, kept, strict=True):
        print(f"{run.name:>13} {run.speed:>10,.0f} {size / 1e6:>17.2f} MB  {size / kept[0]:.2f} of unfused")
    print(f"\n{on_an_h100(args)}")
    args.plan.parent.mkdir(parents=True, exist_ok=True)
    args.plan.write_text(plan.html())
    print(f'\nthe plan of the model with memory="lean" on this machine is drawn in {args.plan}: open it in a browser')
    print(
        f"demo: loss {before:.4f} -> {after:.4f} in {args.steps} steps, "
        f"max |fused - unfused| loss gap {max(gaps):.2g}, "
        f"saved for backward {kept[2] / 1e6:.2f} MB (unfused {kept[0] / 1e6:.2f} MB), "
        f"fused operations {forward} forward {backward} backward"
    )


if __name__ == "__main__":
    main()

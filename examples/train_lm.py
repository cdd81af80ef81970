"""Train a byte-level GPT twice from one seed, with fusing and without it, on Python's own standard library.

Shows that both runs learn the same thing, what was fused, what each keeps in memory for its backward pass, and what
`memory="lean"` makes of that.
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
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqfuse as sf
from seqfuse import ops
from seqfuse.losses import LinearCrossEntropy
from seqfuse.nn import TransformerStack

CONTEXT, BATCH, HEAD = 64, 16, 32


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
    """One copy of the model in training, with fusing or without."""

    def __init__(self, args: argparse.Namespace, fusing: bool, memory: Literal["save", "lean"] = "save") -> None:
        torch.manual_seed(args.seed)
        self.model, self.fusing = GPT(args.dim, args.layers), fusing
        self.model.body.memory = memory
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.98), fused=True)
        steps = max(args.steps, 2)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=steps, pct_start=0.1)
        self.losses: list[float] = []
        self.seconds = 0.0

    def step(self, windows: Tensor, seed: int) -> None:
        torch.manual_seed(seed)  # what dropout draws from: the same masks in both runs
        began = time.perf_counter()
        with sf.fusing(self.fusing):
            loss = self.model(windows)
            self.optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        self.seconds += time.perf_counter() - began

    @property
    def speed(self) -> float:
        """Tokens, which are bytes here, per second of training."""
        return len(self.losses) * BATCH * CONTEXT / self.seconds

    @torch.no_grad()
    def validate(self, text: Tensor) -> float:
        self.model.eval()
        starts = torch.linspace(0, len(text) - CONTEXT - 1, 16 * BATCH, dtype=torch.float64).long()
        with sf.fusing(self.fusing):
            losses = [self.model(windows_at(text, part)).item() for part in starts.split(BATCH)]
        self.model.train()
        return sum(losses) / len(losses)


def train(fused: Run, unfused: Run, text: Tensor, steps: int, seed: int) -> None:
    """Both copies in step: the same batches, and whatever else the machine does slows both."""
    batches = torch.Generator().manual_seed(seed)
    with progress(steps) as show:
        for step in range(steps):
            windows = windows_at(text, torch.randint(len(text) - CONTEXT, (BATCH,), generator=batches))
            fused.step(windows, seed + step)
            unfused.step(windows, seed + step)
            show(fused, unfused)


@contextlib.contextmanager
def progress(steps: int) -> Generator[Callable[[Run, Run], None]]:
    """A bar in a terminal where rich is installed, else a line now and then."""

    def measured(fused: Run, unfused: Run) -> str:
        a, b = (f"{run.losses[-1]:.3f} {run.speed:7,.0f} tokens/s" for run in (fused, unfused))
        return f"loss {a}, unfused {b}"

    # Anywhere else the bar would show nothing before the end.
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None:

        def line(fused: Run, unfused: Run) -> None:
            step = len(fused.losses)
            if step % max(steps // 10, 1) == 0 or step == steps:
                print(f"{step:5}/{steps} {measured(fused, unfused)}", flush=True)

        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    text = TextColumn("{task.fields[text]}")
    with Progress(BarColumn(12), MofNCompleteColumn(), text, TimeRemainingColumn(compact=True)) as bars:
        bar = bars.add_task("training", total=steps, text="")
        yield lambda fused, unfused: bars.update(bar, completed=len(fused.losses), text=measured(fused, unfused))


def saved_for_backward(run: Run, windows: Tensor) -> int:
    """Bytes that one forward pass keeps for its backward pass: storages counted once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in run.model.parameters()}
    kept: dict[int, Tensor] = {}  # holding the tensors keeps addresses from being used again

    def pack(tensor: Tensor) -> Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with sf.fusing(run.fusing), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run.model(windows)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)


def lean_against(args: argparse.Namespace, windows: Tensor, kept_unfused: int) -> str:
    """What `memory="lean"` keeps and how long it takes: steps by turns with a run that saves what is fastest."""
    args = argparse.Namespace(**{**vars(args), "steps": 13})
    lean, fast = Run(args, fusing=True, memory="lean"), Run(args, fusing=True)
    kept, ratios = saved_for_backward(lean, windows), list[float]()
    for seed in range(args.steps):
        before = lean.seconds, fast.seconds
        lean.step(windows, seed)
        fast.step(windows, seed)
        ratios.append((lean.seconds - before[0]) / (fast.seconds - before[1]))
    gap = max(abs(a - b) for a, b in zip(lean.losses, fast.losses, strict=True))
    ratio = statistics.median(ratios[3:])  # the first steps plan, and warm up
    return (
        f'memory="lean" keeps {kept / 1e6:.2f} MB, {kept / kept_unfused:.2f} of unfused, in {ratio:.2f} times the time '
        f"of a step; loss gap {gap:.1g}"
    )


@torch.no_grad()
def continued(model: GPT, prompt: Tensor, length: int) -> str:
    """`length` bytes after `prompt`, each drawn from what the model expects."""
    model.eval()
    text = prompt.long()
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
    parser.add_argument("--steps", type=int, default=600, help="of training; 600 take about two minutes")
    parser.add_argument("--dim", type=int, default=128, help=f"width of the model, a multiple of {HEAD}")
    parser.add_argument("--layers", type=int, default=2, help="blocks of attention and MLP")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and data order")
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

    fused, unfused = Run(args, fusing=True), Run(args, fusing=False)
    windows = windows_at(text, torch.arange(BATCH) * CONTEXT)
    x = windows[:, :-1]
    plan = fused.model.body.plan(x)
    forward, backward = plan.fused
    kept = saved_for_backward(fused, windows)
    kept_unfused = saved_for_backward(unfused, windows)
    count = sum(p.numel() for p in fused.model.parameters())
    print(
        f"model: {count:,} parameters, {len(plan.names)} operations in {len(plan.segments)} segments,\n"
        f"       {forward} fused forward, {backward} fused backward, {len(plan.alone)} alone; its first block:\n"
    )
    print(f"{fused.model.body[2][0].plan(fused.model.body[:2](x))}\n", flush=True)

    before = fused.validate(held_out)
    train(fused, unfused, text, args.steps, args.seed)
    after, after_unfused = fused.validate(held_out), unfused.validate(held_out)

    gaps = [abs(a - b) for a, b in zip(fused.losses, unfused.losses, strict=True)]
    print(f"\ntraining loss, at six of {args.steps} steps\n{'step':>6} {'fused':>10} {'unfused':>10} {'gap':>10}")
    for i in sorted({round(k * (args.steps - 1) / 5) for k in range(6)}):
        print(f"{i + 1:>6} {fused.losses[i]:>10.6f} {unfused.losses[i]:>10.6f} {gaps[i]:>10.1e}")
    prompt = held_out[:CONTEXT]
    print(f"\nprompt:\n{readable(prompt)}\nthe model goes on:\n{continued(fused.model, prompt, 160)}")
    print(f"\nvalidation loss {after:.4f} nats per byte (unfused {after_unfused:.4f})")
    print(f"unigram entropy {entropy:.4f} nats per byte: the loss of guessing without context")
    if after >= entropy:
        print("the model is not better than that yet: give it more steps")
    print(lean_against(args, windows, kept_unfused))
    print(
        f"demo: loss {before:.4f} -> {after:.4f} in {args.steps} steps, "
        f"max |fused - unfused| loss gap {max(gaps):.2g}, "
        f"saved for backward {kept / 1e6:.2f} MB (unfused {kept_unfused / 1e6:.2f} MB), "
        f"fused operations {forward} forward {backward} backward"
    )


if __name__ == "__main__":
    main()

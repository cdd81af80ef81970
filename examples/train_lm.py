"""Train one byte-level GPT four ways, on Python's own standard library: what is gained on this machine, at what cost?

As written in plain `torch.nn`; converted by `sf.convert`; converted with `memory="lean"`, which saves less for the
backward pass; and built of `seqfuse.nn`. All start from the same weights and read the same batches, by turns.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import json
import math
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import seqfuse as sf
from seqfuse import ops
from seqfuse.losses import LinearCrossEntropy
from seqfuse.nn import TransformerStack

CONTEXT, BATCH, HEAD, DROPOUT = 64, 16, 32, 0.05
WARM = 3  # steps that are not timed: the first one captures, plans and compiles
NAMES = {"eager": "eager torch", "convert": "sf.convert", "lean": 'memory="lean"', "nn": "seqfuse.nn"}
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention_norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp_norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in self.qkv(self.attention_norm(x)).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(heads.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class GPT(nn.Module):
    """Windows of bytes to the cross-entropy of each byte after the first, in nats."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, dim), nn.Embedding(CONTEXT, dim)
        self.blocks = nn.Sequential(*(Block(dim) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, windows: Tensor) -> Tensor:
        x = self.bytes(windows[:, :-1]) + self.positions.weight
        logits = self.head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class Built(nn.Module):
    """The same model of `seqfuse.nn`, which never holds all logits at once."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.body = sf.Sequential(
            ops.Embedding(256, dim),
            ops.PositionEmbedding(CONTEXT, dim),
            TransformerStack(layers, dim, dim // HEAD, causal=True, dropout=DROPOUT),
        )
        self.loss = LinearCrossEntropy(dim, 256, bias=True)

    def forward(self, windows: Tensor) -> Tensor:
        return self.loss(self.body(windows[:, :-1]), windows[:, 1:])

    @torch.no_grad()
    def load(self, model: GPT) -> None:
        """Take the weights of `model`, whose parameters are in the same order."""
        for own, other in zip(self.parameters(), model.parameters(), strict=True):
            own.copy_(other)


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


def seconds() -> float:
    """CPU time of this process, which a busy machine disturbs the least; wall time where a GPU computes."""
    return time.process_time() if HERE.type == "cpu" else time.perf_counter()


def rate(step: int, steps: int) -> float:
    """The learning rate of a step, of its largest value: it rises for a tenth of the steps, and ends at 0."""
    return min((step + 1) / max(steps // 10, 1), 0.5 + 0.5 * math.cos(math.pi * step / steps))


class Run:
    """One copy of the model in training."""

    def __init__(self, name: str, model: nn.Module, steps: int, fusing: bool = True) -> None:
        self.name, self.model, self.fusing = name, model, fusing
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: rate(step, steps))
        self.losses: list[float] = []
        self.times: list[float] = []
        self.first = 0.0

    def step(self, windows: Tensor, seed: int) -> float:
        torch.manual_seed(seed)  # what dropout draws from
        self.optimizer.zero_grad()
        with sf.fusing(self.fusing):
            loss = self.model(windows)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def train(self, windows: Tensor, seed: int) -> None:
        """One step, timed."""
        wall, began = time.perf_counter(), seconds()
        self.losses.append(self.step(windows, seed))
        self.times.append(seconds() - began)
        self.first = self.first or time.perf_counter() - wall
        self.schedule.step()

    @property
    def time(self) -> float:
        """Seconds of a step, the median."""
        return statistics.median(self.times[WARM:] or self.times)

    def time_beside(self, other: Run) -> float:
        """Time of a step relative to that of `other`, the median over pairs of the same step."""
        pairs = [own / its for own, its in zip(self.times, other.times, strict=True)]
        return statistics.median(pairs[WARM:] or pairs)

    @torch.no_grad()
    def validate(self, text: Tensor) -> float:
        self.model.eval()
        starts = torch.linspace(0, len(text) - CONTEXT - 1, 16 * BATCH, dtype=torch.float64).long()
        losses = [self.model(windows_at(text, part).to(HERE)).item() for part in starts.split(BATCH)]
        self.model.train()
        return sum(losses) / len(losses)

    def saved(self, windows: Tensor) -> int:
        """Bytes that a forward pass saves for its backward pass: storages counted once, parameters left out."""
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        kept: dict[int, Tensor] = {}  # holding the tensors keeps addresses from being used again

        def pack(tensor: Tensor) -> Tensor:
            return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

        with sf.fusing(self.fusing), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            self.model(windows)
        return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in own)

    def peak(self, windows: Tensor) -> int:
        """Bytes that a training step adds at its peak, gradients among them, as torch's allocator counts them."""
        self.optimizer.zero_grad()
        if HERE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self.step(windows, 0)
            return torch.cuda.max_memory_allocated() - before
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints when it starts and stops
        # `acc_events`, without which torch 2.11 warns.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as traced:
            self.step(windows, 0)
        with tempfile.TemporaryDirectory() as folder:
            traced.export_chrome_trace(f"{folder}/trace.json")
            events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
        allocated = peak = 0
        for event in sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"]):
            allocated += event["args"]["Bytes"]  # negative where memory is freed
            peak = max(peak, allocated)
        return peak


def train(runs: Sequence[Run], text: Tensor, steps: int, seed: int) -> None:
    """All copies in step: the same batches, by turns, so that whatever else the machine does slows all of them."""
    batches = torch.Generator().manual_seed(seed)
    with progress(steps) as show:
        for step in range(steps):
            windows = windows_at(text, torch.randint(len(text) - CONTEXT, (BATCH,), generator=batches)).to(HERE)
            first = step % len(runs)
            for run in (*runs[first:], *runs[:first]):
                run.train(windows, seed + step)
            show(runs)


@contextlib.contextmanager
def progress(steps: int) -> Generator[Callable[[Sequence[Run]], None]]:
    """A bar in a terminal where rich is installed, else a line now and then."""

    def measured(runs: Sequence[Run]) -> str:
        times = ", ".join(f"{run.name} {run.time * 1e3:.0f}" for run in runs if run.fusing)
        return f"loss {runs[0].losses[-1]:.3f}; ms: {times}"

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
        bar = bars.add_task("training", total=steps, text="the first step captures, plans and compiles")
        yield lambda runs: bars.update(bar, completed=len(runs[0].losses), text=measured(runs))


def verdict(name: str, ratios: Mapping[str, float]) -> str:
    """What `name` gives and what it costs, from its time and bytes as ratios to those of eager torch."""
    percent = {what: round(100 * (ratio - 1)) for what, ratio in ratios.items()}
    less, more = ([f"{abs(p)}% {word} {what}" for what, p in percent.items() if p * sign > 0]
                  for word, sign in (("less", -1), ("more", 1)))  # fmt: skip
    return f"{name} gives {', '.join(less) or 'nothing'}, and costs {', '.join(more) or 'nothing'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--data", type=Path, default=stdlib, help="a text file, or a folder of Python sources")
    parser.add_argument("--steps", type=int, default=240, help="of training")
    parser.add_argument("--dim", type=int, default=128, help=f"width of the model, a multiple of {HEAD}")
    parser.add_argument("--layers", type=int, default=2, help="blocks of attention and MLP")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and data order")
    parser.add_argument("--plan", type=Path, default=Path("build", "demo_plan.svg"), help="where the plan is drawn")
    args = parser.parse_args()
    if min(args.steps, args.layers, args.dim) < 1 or args.dim % HEAD:
        parser.error(f"steps and layers must be positive, dim a positive multiple of {HEAD}")
    if not args.data.exists():
        parser.error(f"there is no {args.data}")
    # A model of this size gains little from a second thread, and loses much where another process holds that core.
    torch.set_num_threads(1)

    text, held_out = read_bytes(args.data)
    entropy = unigram_entropy(held_out)
    print(f"data: {args.data}, {len(text) / 1e6:.1f} MB to train on, {len(held_out) / 1e6:.1f} MB held out")

    torch.manual_seed(args.seed)
    model = GPT(args.dim, args.layers).to(HERE)
    copies = [copy.deepcopy(model) for _ in range(3)]
    conversions = sf.convert(copies[0]), sf.convert(copies[1], memory="lean"), sf.convert(copies[2])
    built = Built(args.dim, args.layers).to(HERE)
    built.load(model)
    models = {
        "eager": model, "convert": copies[0], "lean": copies[1], "nn": built,
        # What the fused copies are compared with, step by step, since it draws the same dropout masks as they do.
        "unfused": copies[2],
    }  # fmt: skip
    runs = [Run(name, one, args.steps, fusing=name != "unfused") for name, one in models.items()]
    *four, unfused = runs
    eager, default, lean, _ = four
    print(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, trained from the same weights each way")
    before = eager.validate(held_out)
    train(runs, text, args.steps, args.seed)

    windows = windows_at(text, torch.arange(BATCH) * CONTEXT).to(HERE)
    saved = {run.name: run.saved(windows) for run in runs}
    peaks = {run.name: run.peak(windows) for run in four}
    print(f'\nwhat sf.convert(model, memory="lean") did:\n{conversions[1]}')
    plans = [region.plan for graph in conversions[1].graphs for region in graph.regions if region.plan is not None]
    args.plan.parent.mkdir(parents=True, exist_ok=True)
    args.plan.write_text(max(plans, key=lambda plan: len(plan.names)).svg())
    print(f"its plan is drawn in {args.plan}: open it in a browser\n")
    for conversion in conversions:
        conversion.undo()  # from here on torch runs the trained weights
    after = {run.name: run.validate(held_out) for run in four}

    ratios = {
        run.name: {
            "time": run.time_beside(eager),
            "memory saved for backward": saved[run.name] / saved[eager.name],
            "memory at the peak of a step": peaks[run.name] / peaks[eager.name],
        }
        for run in four
    }
    kind = "CPU time on one thread" if HERE.type == "cpu" else "time"
    print(f"on this machine ({HERE.type}, float32); {kind}, the median of {len(eager.times[WARM:])} steps by turns;")
    print("in brackets relative to eager torch\n")
    heads = "a step", "saved for backward", "added by a step", "first step", "validation loss"
    print(f"{'':>13}", *(f"{head:>18}" for head in heads))
    for run in four:
        time_of, saved_of, peak_of = ratios[run.name].values()
        cells = (
            f"{run.time * 1e3:.1f} ms ({time_of:.2f})", f"{saved[run.name] / 1e6:.2f} MB ({saved_of:.2f})",
            f"{peaks[run.name] / 1e6:.2f} MB ({peak_of:.2f})", f"{run.first:.1f} s", f"{after[run.name]:.4f}",
        )  # fmt: skip
        print(f"{NAMES[run.name]:>13}", *(f"{cell:>18}" for cell in cells))
    other = f"eager torch {after[eager.name]:.4f}, by other dropout masks"
    print(f"\nvalidation loss {after[lean.name]:.4f} nats per byte ({other})")
    print(f"unigram entropy {entropy:.4f} nats per byte: the loss of guessing without context")
    if after[lean.name] >= entropy:
        print("the model is not better than that yet: give it more steps")
    verdicts = (verdict(NAMES[run.name], ratios[run.name]) for run in (default, lean))
    print(f"\ncompared with eager torch, {'; '.join(verdicts)}")

    gaps = [abs(a - b) for run in four[1:] for a, b in zip(run.losses, unfused.losses, strict=True)]
    forward, backward = (sum(plan.fused[i] for plan in plans) for i in range(2))
    print(
        f"demo: loss {before:.4f} -> {after[lean.name]:.4f} in {args.steps} steps, "
        f"max |fused - unfused| loss gap {max(gaps):.2g}, "
        f"saved for backward {saved[lean.name] / 1e6:.2f} MB (unfused {saved[unfused.name] / 1e6:.2f} MB), "
        f"fused operations {forward} forward {backward} backward"
    )
    print(f"demo: time {default.time_beside(eager):.2f} of eager, lean {lean.time_beside(eager):.2f}")


if __name__ == "__main__":
    main()

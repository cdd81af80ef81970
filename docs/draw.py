"""The pictures of README.md and docs/, as SVG for light and dark. To draw them anew, run  python -m docs.draw

Their numbers are those of plans that are made here, and of what benchmarks wrote.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import seqfuse as sf
from docs.picture import Picture
from seqfuse import ops
from seqfuse.pictures.svg import FULL

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"

# The columns of the picture of a layer: an operation, the modules of Hugging Face's Llama that do it, and the positions
# of it in ours.
COLUMNS: tuple[tuple[str, tuple[str, ...], range], ...] = (
    ("RMSNorm", ("input_layernorm",), range(2)),
    ("q, k, v", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), range(2, 3)),
    ("RoPE", ("self_attn",), range(3, 4)),
    ("attention", ("attention",), range(4, 5)),
    ("out", ("self_attn.o_proj",), range(5, 6)),
    ("add", ("add",), range(6, 7)),
    ("RMSNorm", ("post_attention_layernorm",), range(7, 9)),
    ("gate, up", ("mlp.gate_proj", "mlp.up_proj"), range(9, 10)),
    ("SwiGLU", ("mlp", "mlp.act_fn"), range(10, 11)),
    ("down", ("mlp.down_proj",), range(11, 12)),
    ("add", ("last add",), range(12, 13)),
)
SAID = {
    "BlockBoundary": "add + RMSNorm", "BlockBoundaryBackward": "add + RMSNorm", "BiasGated": "SwiGLU",
    "BiasGatedBackward": "SwiGLU", "BiasQKNormRotary": "RoPE", "BiasQKNormRotaryBackward": "RoPE",
    "LinearBiasAdd": "GEMM + add", "NormBackward": "RMSNorm", "MergedLinear": "GEMMs", "Linear": "GEMM",
    "Attention": "attention",
}  # fmt: skip
"""What a step does, in words that need no explanation; an operation whose name is one stands for itself."""


def counts(make: str) -> dict[str, Any]:
    """Launches and bytes of a layer, as benchmarks/bench_layer_counts.py wrote them."""
    rows = json.loads((RESULTS / "layer_counts.json").read_text())["rows"]
    (row,) = (row for row in rows if row["make"] == make)
    return row


def eager_columns(launches: Sequence[str], attention_at: int) -> list[int]:
    """How many of the launches of Hugging Face's layer belong to each column.

    Attention is one of those of `self_attn` itself, and sums are made by the layer itself.
    """
    own = [i for i, name in enumerate(launches) if name == "self_attn"]
    sums = [i for i, name in enumerate(launches) if name == ""]
    named = [*launches]
    named[own[attention_at]] = "attention"
    for i, name in zip(sums, ("add", "last add"), strict=False):
        named[i] = name
    found = Counter(named)
    columns = [sum(found.pop(name, 0) for name in names) for _, names, _ in COLUMNS]
    assert not found, found
    return columns


def layer() -> str:
    """One layer of Llama 3 8B: launches of eager torch, the planned steps, and the bytes that each saves."""
    row = counts("llama3_8b")
    eager, planned = row["eager"], row["planned"]
    before, after = (len(side["forward"]) + len(side["backward"]) for side in (eager, planned))
    saved = {"eager": eager["saved"], **planned["saved"]}
    mib = {name: f"{value / 2**20:,.0f} MiB" for name, value in saved.items()}
    gain = f"{before} kernel launches become {after},", f"{mib['eager']} saved for backward become {mib['save']}"
    p = Picture(964, 408, f"One Llama layer: {' '.join(gain)}")
    p.text(20, 34, f"One Llama layer: {gain[0]}", "big")
    p.text(20, 56, gain[1], "big")
    tokens = f"{row['x'][0] * row['x'][1]:,} tokens in bfloat16"
    about = f"Llama 3 8B, {tokens}, forward and backward. Counted from the plan for an H100, not measured."
    p.text(20, 77, about, "small soft")
    left, step, right = 84.0, 66.0, 824.0
    for i, (name, _, _) in enumerate(COLUMNS):
        p.text(left + step * i + 31, 104, name, "small soft middle")
    for name, top, side, high in (
        ("Hugging Face, eager PyTorch", 122.0, eager, 128),
        ("built of seqfuse.nn", 256.0, planned, 144),
    ):
        p.box(8, top - 8, 948, high, "band")
        p.text(20, top + 8, name, "small bold")
        for i, pass_ in enumerate(("forward", "backward")):
            y = top + 18 + (48 if side is eager else 58) * i
            p.text(20, y + 20, pass_, "small soft")
            way = y + (33 if side is eager else 49)
            ends = (left, right - 12) if pass_ == "forward" else (right - 12, left)
            p.arrow(ends[0], way, ends[1], way)
            if side is eager:
                for k, count in enumerate(eager_columns(side[pass_], i - 1)):
                    p.ticks(left + step * k, y, count, "plain")
            else:
                _steps(p, side, pass_, left, step, y)
        p.text(right, top + 10, f"{len(side['forward'])} + {len(side['backward'])}", "word bold")
        p.text(right, top + 26, "kernel launches", "small soft")
        bars = (("eager", "torch", ""),)
        if side is planned:
            bars = (("save", "save", ""), ("lean", "lean", 'with memory="lean"'))
        for i, (choice, color, how) in enumerate(bars):
            y = top + 42 + 38 * i
            p.box(right, y, 122 * saved[choice] / saved["eager"], 9, color)
            p.text(right, y + 22, f"{mib[choice]} saved", "small")
            p.text(right, y + 36, how, "small soft")
    return p.svg()


def _steps(p: Picture, side: Any, pass_: str, left: float, step: float, y: float) -> None:
    """The steps of a pass that launch something, each over the columns that it runs."""
    launched = Counter(side[pass_])
    place = {at: i for i, (_, _, positions) in enumerate(COLUMNS) for at in positions}
    for name, start, stop in side["steps"][pass_]:
        if launched[start]:
            first, last = place[start], place[stop - 1]
            size = step * (last - first) + 62
            p.box(left + step * first, y, size, 40, pass_, SAID.get(name, name), drop=-8)
            count = launched[start]
            p.ticks(left + step * first + size / 2 - 4.5 * count + 1, y + 25, count, pass_, count)


def contract() -> str:
    """Passes of one sequence, fused and not, and the saved tensors between them."""
    p = Picture(840, 338, "Fused or not, a pass saves and reads the same tensors: any forward goes with any backward")
    p.text(20, 34, "Add, swap or switch off a fusion: nothing else changes", "big")
    said = "Fused or not, each operation saves the same tensors for backward, so any forward goes with any backward."
    p.text(20, 56, said, "small soft")
    p.text(20, 72, "The test kit runs all four combinations.", "small soft")
    left, step, wide = 140.0, 137.0, 129.0
    names = ("Linear", "Bias", "GeLU", "Linear", "Bias")
    saved = ("x, weight", "", "x", "x, weight", "")
    rows = (
        ("forward, fused", 92, "forward", ((0, 3, "LinearBiasGeLU"), (3, 5, "LinearBias"))),
        ("forward, unfused", 134, "plain", tuple((i, i + 1, name) for i, name in enumerate(names))),
        ("backward, unfused", 240, "plain", tuple((i, i + 1, name) for i, name in enumerate(names))),
        ("backward, fused", 282, "backward", ((0, 1, "Linear"), (1, 3, "BiasGeLU"), (3, 5, "LinearBiasBackward"))),
    )
    for label, y, kind, steps in rows:
        p.text(20, y + 20, label, "small soft")
        ends = (left - 8, left + 5 * step + 2)
        start, end = ends if "forward" in label else ends[::-1]
        p.arrow(start, y + 16, end, y + 16)
        for start, stop, name in steps:
            p.box(left + step * start, y, step * (stop - start) - 8, 32, "plain" if stop - start == 1 else kind, name)
    p.text(20, 206, "saved tensors", "small soft")
    for i, fields in enumerate(saved):
        if fields:
            x = left + step * i
            p.arrow(x + wide / 2, 168, x + wide / 2, 186)
            p.box(x, 188, wide, 28, "kept", fields)
            p.arrow(x + wide / 2, 218, x + wide / 2, 238)
    return p.svg()


def segments() -> str:
    """Three segments in time: when their saved tensors are freed, and when their gradients are sent."""
    p = Picture(840, 300, "Gradients of late layers are sent, and saved tensors freed, while backward still runs")
    p.text(20, 34, "Gradients leave, and memory is freed, while backward still runs", "big")
    said = "A sequence is cut into segments, each one autograd node. DDP and FSDP2 send its gradients once it is done."
    p.text(20, 56, said, "small soft")
    left, unit = 136.0, 78.0
    starts = [0, 1, 2, 3, 4.5, 6]
    for i in range(3):
        p.box(left + unit * i, 78, unit - 6, 34, "forward", f"segment {i + 1}")
        p.box(left + unit * starts[5 - i], 78, unit * 1.5 - 6, 34, "backward", f"segment {i + 1}")
    for label, y in (("forward, backward", 99), ("saved tensors", 154), ("gradients sent", 244)):
        p.text(20, y, label, "small soft")
    for i in range(3):
        y = 124 + 28 * i
        p.box(left + unit * i, y, unit * (starts[5 - i] + 1.5 - i) - 6, 22, "kept", f"of segment {i + 1}")
        p.box(left + unit * (starts[5 - i] + 1.5), 222, unit * 1.2, 34, "joint", f"segment {i + 1}")
    p.arrow(left, 276, left + unit * 8.7, 276)
    p.text(left + unit * 4, 292, "time", "small soft middle")
    return p.svg()


def memory() -> str:
    """Bytes saved by feed-forward blocks: eager torch and the choices, as benchmarks/bench_memory.py counted them."""
    rows = json.loads((RESULTS / "memory.json").read_text())["memory"]
    shown = {"llama3-8b": "Llama 3 8B", "gpt2-xl": "GPT-2 XL"}
    names = {"eager": ("PyTorch, eager", "torch")}
    for name, choice, kind in (("", "fast", "save"), (" balanced", "balanced", "balanced"), (" lean", "lean", "lean")):
        names[f"seqfuse{name}"] = f'memory="{choice}"', kind
    least = {row["model"]: row["kept"]["seqfuse lean"] / row["kept"]["eager"] for row in rows}
    p = Picture(840, 336, "Bytes that a feed-forward block saves for backward: PyTorch and three choices of memory")
    low, high = (f"{f(least[model] for model in shown):.0%}" for f in (min, max))
    p.text(20, 34, f'memory="lean" saves {low} to {high} of the bytes that eager PyTorch saves', "big")
    about = "A feed-forward block in bfloat16, 8,192 tokens, dropout 0.1. Counted from plans for an H100, not measured."
    p.text(20, 56, about, "small soft")
    for k, (model, title) in enumerate(shown.items()):
        (row,) = (row for row in rows if row["model"] == model)
        top = 84 + 124 * k
        p.text(20, top + 12, title, "word bold")
        for i, (name, (label, kind)) in enumerate(names.items()):
            y, size = top + 26 * i, row["kept"][name]
            p.text(250, y + 13, label, "small right")
            p.box(260, y, 400 * size / row["kept"]["eager"], 19, kind)
            said = f"{size / 2**20:,.0f} MiB"
            if name != "eager":
                said += f", {size / row['kept']['eager']:.0%}"
            if row["cost"].get(name):
                said += f", +{row['cost'][name]:.1%} time (est.)"
            p.text(268 + 400 * size / row["kept"]["eager"], y + 13, said, "small")
    return p.svg()


def front() -> str:
    """Time over peak of a step of Llama: ours, checkpointing, torch.compile, as benchmarks/bench_front.py measured."""
    found = json.loads((RESULTS / "front.json").read_text())
    rows = {row["side"]: row for row in found["rows"] if row["model"] == "Llama"}
    eager = rows["eager"]["peak"]
    p = Picture(840, 400, "Time over peak memory of a training step: budgets of seqfuse and other ways to save memory")
    p.text(20, 34, "At every peak, less time than checkpointing and torch.compile", "big")
    length = "{} x {:,}".format(*found["tokens"])
    about = f"Forward and backward of a Llama of {found['layers']} layers of width {found['width']} on {length} tokens"
    p.text(20, 56, f"{about}, one thread of a CPU. Relative to eager PyTorch.", "small soft")
    low, high = 0.2, max(row["peak"] / eager for row in rows.values()) + 0.05
    slow = max(row["step"]["ratio"] for row in rows.values()) + 0.05
    for tick in (0.2, 0.4, 0.6, 0.8, 1.0):
        p.text(80 + 700 * (tick - low) / (high - low), 368, f"{tick:.1f}", "small middle")
    for tick in (0.0, 0.5, 1.0, 1.5):
        if tick < slow:
            p.text(66, 352 - 266 * tick / slow, f"{tick:.1f}", "small right")
    p.text(430, 388, "peak memory that the step adds", "small middle")
    p.text(20, 80, "CPU time", "small")
    said = {"eager": "eager", "checkpointed": "layers checkpointed", "selective": "selective checkpointing"}
    said |= {name: f'"{name}"' for name in ("fast", "balanced", "lean", "least")}
    said |= {name: f"torch.compile, budget {name.split()[1]}" for name in rows if name.startswith("compile")}
    for name, row in rows.items():
        ours = name[0].isdigit() or name in ("fast", "balanced", "lean", "least")
        x, y = 80 + 700 * (row["peak"] / eager - low) / (high - low), 348 - 266 * row["step"]["ratio"] / slow
        p.ticks(x - 3.5, y - 3.5, 1, "forward" if ours else "plain")
        if name in said and ours:
            p.text(x, y + 18, said[name], "small middle")
        elif name in said:
            p.text(*((x - 8, y + 4, said[name], "small right") if x > 640 else (x + 8, y + 4, said[name], "small")))
    return p.svg()


def plan(width: int = FULL) -> str:
    """The plan of a feed-forward block for an H100, as the library draws it."""
    operations = ops.LayerNorm(1024), ops.Linear(1024, 4096), ops.GeLU(), ops.Linear(4096, 1024), ops.Dropout(0.1)
    x = torch.empty(8192, 1024, dtype=torch.bfloat16, device="meta")
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=8192)
    return sf.Sequential(ops.Residual(*operations)).to("meta", torch.bfloat16).plan(x, env=env).svg(width)


def whole(make: str) -> str:
    """The plan of all layers of a model of examples/models.py for an H100."""
    sys.path[:0] = [str(HERE.parent / "examples")]
    import models

    x = torch.empty(counts(make)["x"], dtype=torch.bfloat16, device="meta")  # as that of the command beside it
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, rows=x.shape[0] * x.shape[1])
    return getattr(models, make)().bfloat16().plan(x, env=env).svg()


PICTURES: dict[str, Callable[[], str]] = {
    "layer": layer, "contract": contract, "segments": segments, "memory": memory, "front": front,
    "plan": plan, "plan_narrow": functools.partial(plan, 430),
}  # fmt: skip
MODELS: dict[str, Callable[[], str]] = {
    make: functools.partial(whole, make)
    for make in ("gpt2", "llama3_8b", "bert_base", "vit_b16", "qwen3_06b", "gemma3_1b")
}

if __name__ == "__main__":
    for name, draw in (PICTURES | MODELS).items():
        if sys.argv[1:] in ([], [name]):
            (HERE / "pictures" / f"{name}.svg").write_text(draw())

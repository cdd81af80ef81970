"""The pictures of README.md and docs/, as SVG for light and dark. To draw them anew, run  python -m docs.draw

Their numbers are those of plans that are made here, and of what benchmarks wrote.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

os.environ.setdefault("SEQFUSE_CPU_GEMMS", "torch")  # pictures are the same on each processor

import seqfuse as sf
from docs.picture import Picture
from seqfuse import ops
from seqfuse.pictures.svg import FULL

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
NARROW = 430
"""The width of a phone, for which each picture has a second drawing."""

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
    "LinearBiasAdd": "GEMM + add", "NormBackward": "RMSNorm", "NormForward": "RMSNorm", "MergedLinear": "GEMMs",
    "Linear": "GEMM", "Attention": "attention",
}  # fmt: skip
"""What a step does, in words that need no explanation; an operation whose name is one stands for itself."""


def counts(make: str) -> dict[str, Any]:
    """Launches and bytes of a layer, as benchmarks/bench_counts.py wrote them."""
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


def layer(narrow: bool = False) -> str:
    """One layer of Llama 3 8B: launches of eager torch, the planned steps, and the bytes that each saves."""
    row = counts("llama3_8b")
    eager, planned = row["eager"], row["planned"]
    before, after = (len(side["forward"]) + len(side["backward"]) for side in (eager, planned))
    saved = {"eager": eager["saved"], **planned["saved"]}
    mib = {name: f"{value / 2**20:,.0f} MiB" for name, value in saved.items()}
    titles = (
        f"One Llama layer: {before} kernel launches become {after},",
        (f"{mib['eager']} saved for backward become {mib['save']}"),
    )
    tokens = f"{row['x'][0] * row['x'][1]:,} tokens in bfloat16"
    about = f"Llama 3 8B, {tokens}, forward and backward. Counted from the plan for an H100, not measured."
    p = Picture(*((NARROW, 724) if narrow else (964, 408)), " ".join(titles))
    y = p.head([" ".join(titles)] if narrow else titles, [about])
    bars = [(f"{mib['eager']} saved", "", saved["eager"], "torch"), (f"{mib['save']} saved", "", saved["save"], "save")]
    bars += [(f"{mib['lean']} saved", 'with memory="lean"', saved["lean"], "lean")]
    if narrow:
        _layer_down(p, y + 26, eager, planned)
        for i, (what, how, size, color) in enumerate(bars):
            y = 612 + 36 * i
            p.text(20, y, f"{what} {how or ('by eager PyTorch', 'by seqfuse.nn')[i]}", "small")
            p.box(20, y + 6, 390 * size / saved["eager"], 9, color)
        return p.svg()
    left, step, right = 84.0, 66.0, 824.0
    for i, (name, _, _) in enumerate(COLUMNS):
        p.text(left + step * i + 31, y + 26, name, "small soft middle")
    for name, top, side, high, below in (
        ("Hugging Face, eager PyTorch", 122.0, eager, 128, bars[:1]),
        ("built of seqfuse.nn", 256.0, planned, 144, bars[1:]),
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
            for name, first, last, count in _steps(side, pass_) if side is planned else ():
                size = step * (last - first) + 62
                p.box(left + step * first, y, size, 40, pass_, name, drop=-8)
                p.ticks(left + step * first + size / 2 - 4.5 * count + 1, y + 25, count, pass_, count)
        p.text(right, top + 10, f"{len(side['forward'])} + {len(side['backward'])}", "word bold")
        p.text(right, top + 26, "kernel launches", "small soft")
        for i, (what, how, size, color) in enumerate(below):
            y = top + 42 + 38 * i
            p.box(right, y, 122 * size / saved["eager"], 9, color)
            p.text(right, y + 22, what, "small")
            p.text(right, y + 36, how, "small soft")
    return p.svg()


def _layer_down(p: Picture, top: float, eager: Any, planned: Any) -> None:
    """The same from top to bottom: a row for each operation."""
    step, places = 36.0, {"eager": (90.0, 152.0), "planned": (218.0, 319.0)}
    for name, side, left, wide in (
        ("eager PyTorch", eager, 84.0, 126.0),
        ("built of seqfuse.nn", planned, 214.0, 206.0),
    ):
        p.box(left, top - 14, wide, step * len(COLUMNS) + 56, "band")
        p.text(left + 6, top, name, "small bold")
        total = f"{len(side['forward'])} + {len(side['backward'])} launches"
        p.text(left + 6, top + step * len(COLUMNS) + 36, total, "small bold")
    for i, pass_ in enumerate(("forward", "backward")):
        for place in places.values():
            p.text(place[i], top + 16, pass_, "small soft")
        for k, count in enumerate(eager_columns(eager[pass_], i - 1)):
            p.ticks(places["eager"][i], top + 26 + step * k, count, "plain")
        for name, first, last, count in _steps(planned, pass_):
            y, high = top + 22 + step * first, step * (last - first) + 32
            p.box(places["planned"][i], y, 97, high, pass_, name, drop=-8)
            p.ticks(places["planned"][i] + 49.5 - 4.5 * count, y + high / 2 + 4, count, pass_, count)
    for k, (name, _, _) in enumerate(COLUMNS):
        p.text(20, top + 42 + step * k, name, "small soft")


def _steps(side: Any, pass_: str) -> Iterator[tuple[str, int, int, int]]:
    """The steps of a pass that launch something: name, first and last column, launches."""
    launched = Counter(side[pass_])
    place = {at: i for i, (_, _, positions) in enumerate(COLUMNS) for at in positions}
    for name, start, stop in side["steps"][pass_]:
        if launched[start]:
            yield SAID.get(name, name), place[start], place[stop - 1], launched[start]


def contract(narrow: bool = False) -> str:
    """Passes of one sequence, fused and not, and the saved tensors between them."""
    title = "Fused or not, a pass saves and reads the same tensors: any forward goes with any backward"
    p = Picture(*((NARROW, 446) if narrow else (840, 338)), title)
    said = "Fused or not, each operation saves the same tensors for backward, so any forward goes with any backward."
    top = p.head(
        ["Add, swap or switch off a fusion: nothing else changes"], [said, "The test kit runs all four combinations."]
    )
    left, step = (20.0, 78.0) if narrow else (140.0, 137.0)
    wide, under = step - 8, 18 if narrow else 0  # a narrow picture has the name of a row above it
    names = ("Linear", "Bias", "GeLU", "Linear", "Bias")
    saved = ("x, weight", "", "x", "x, weight", "")
    rows = (
        ("forward, fused", 20, "forward", ((0, 3, "LinearBiasPointwise"), (3, 5, "LinearBias"))),
        ("forward, unfused", 62, "plain", tuple((i, i + 1, name) for i, name in enumerate(names))),
        ("backward, unfused", 168, "plain", tuple((i, i + 1, name) for i, name in enumerate(names))),
        (
            "backward, fused",
            210,
            "backward",
            ((0, 1, "Linear"), (1, 3, "PointwiseChainBackward"), (3, 5, "LinearBiasBackward")),
        ),
    )
    for i, (label, down, kind, steps) in enumerate(rows):
        y = top + down + under * (i + 1)
        p.text(*((402, y - 6, label, "small soft right") if narrow else (20, y + 20, label, "small soft")))
        ends = (left - 8, left + 5 * step + 2)
        start, end = ends if "forward" in label else ends[::-1]
        p.arrow(start, y + 16, end, y + 16)
        for start, stop, name in steps:
            p.box(left + step * start, y, step * (stop - start) - 8, 32, "plain" if stop - start == 1 else kind, name)
    y = top + 116 + 2 * under
    p.text(*((95, y + 18) if narrow else (20, y + 18)), "saved tensors", "small soft")
    for i, fields in enumerate(saved):
        if fields:
            x = left + step * i
            p.arrow(x + wide / 2, y - 20, x + wide / 2, y - 2)
            p.box(x, y, wide, 28, "kept", fields)
            p.arrow(x + wide / 2, y + 30, x + wide / 2, y + 50 + under)
    return p.svg()


def segments(narrow: bool = False) -> str:
    """Three segments in time: when their saved tensors are freed, and when their gradients are sent."""
    title = "Gradients of late layers are sent, and saved tensors freed, while backward still runs"
    p = Picture(*((NARROW, 408) if narrow else (840, 300)), title)
    said = "A sequence is cut into segments, each one autograd node. DDP and FSDP2 send its gradients once it is done."
    top = p.head(["Gradients leave, and memory is freed, while backward still runs"], [said])
    left, unit = (20.0, 44.0) if narrow else (136.0, 78.0)
    under = 22 if narrow else 0  # a narrow picture has the name of a row above it
    one, few = ("", "{}") if narrow else ("of segment ", "segment {}")
    starts = [0, 1, 2, 3, 4.5, 6]
    rows = [("forward, backward", 22, 21), ("saved tensors", 68, 30), ("gradients sent", 166, 22)]
    y = {label: top + down + under * (i + 1) for i, (label, down, _) in enumerate(rows)}
    for label, _, middle in rows:
        name = f"{label}, by segment" if narrow else label
        p.text(20, y[label] - 7 if narrow else y[label] + middle, name, "small soft")
    for i in range(3):
        p.box(left + unit * i, y["forward, backward"], unit - 6, 34, "forward", few.format(i + 1))
        p.box(left + unit * starts[5 - i], y["forward, backward"], unit * 1.5 - 6, 34, "backward", few.format(i + 1))
        freed = starts[5 - i] + 1.5
        p.box(left + unit * i, y["saved tensors"] + 28 * i, unit * (freed - i) - 6, 22, "kept", f"{one}{i + 1}")
        p.box(left + unit * freed, y["gradients sent"], unit * 1.2, 34, "joint", few.format(i + 1))
    p.arrow(left, y["gradients sent"] + 54, left + unit * 8.7, y["gradients sent"] + 54)
    p.text(left + unit * 4, y["gradients sent"] + 70, "time", "small soft middle")
    return p.svg()


def memory(narrow: bool = False) -> str:
    """Bytes saved by feed-forward blocks: eager torch and the choices, as benchmarks/bench_counts.py counted them."""
    rows = json.loads((RESULTS / "memory.json").read_text())["memory"]
    shown = {"llama3-8b": "Llama 3 8B", "gpt2-xl": "GPT-2 XL"}
    names = {"eager": ("PyTorch, eager", "torch")}
    for name, choice, kind in (("", "fast", "save"), (" balanced", "balanced", "balanced"), (" lean", "lean", "lean")):
        names[f"seqfuse{name}"] = f'memory="{choice}"', kind
    least = {row["model"]: row["kept"]["seqfuse lean"] / row["kept"]["eager"] for row in rows}
    title = "Bytes that a feed-forward block saves for backward: PyTorch and three choices of memory"
    p = Picture(*((NARROW, 504) if narrow else (840, 336)), title)
    low, high = (f"{f(least[model] for model in shown):.0%}" for f in (min, max))
    about = "A feed-forward block in bfloat16, 8,192 tokens, dropout 0.1. Counted from plans for an H100, not measured."
    y = p.head([f'memory="lean": {low} to {high} of the bytes that eager PyTorch saves'], [about]) + 28
    left, long = (20, 390) if narrow else (260, 400)
    for model, title in shown.items():
        (row,) = (row for row in rows if row["model"] == model)
        p.text(20, y + (0 if narrow else 12), title, "word bold")
        y += 6 if narrow else 0
        for name, (label, kind) in names.items():
            size = row["kept"][name]
            said = f"{size / 2**20:,.0f} MiB"
            if name != "eager":
                said += f", {size / row['kept']['eager']:.0%}"
            if row["cost"].get(name):
                said += f", +{row['cost'][name]:.1%} time (est.)"
            part = long * size / row["kept"]["eager"]
            if narrow:
                p.text(left, y + 12, f"{label}: {said}", "small")
                p.box(left, y + 18, part, 14, kind)
            else:
                p.text(left - 10, y + 13, label, "small right")
                p.box(left, y, part, 19, kind)
                p.text(left + 8 + part, y + 13, said, "small")
            y += 42 if narrow else 26
        y += 28 if narrow else 20
    return p.svg()


def front(narrow: bool = False) -> str:
    """Time over peak of a step of Llama: ours, checkpointing, torch.compile, as benchmarks/bench_peak.py measured."""
    found = json.loads((RESULTS / "front.json").read_text())
    rows = {row["side"]: row for row in found["rows"] if row["model"] == "Llama"}
    eager = rows["eager"]["peak"]
    title = "Time over peak memory of a training step: budgets of seqfuse and other ways to save memory"
    p = Picture(*((NARROW, 470) if narrow else (840, 400)), title)
    length = "{} x {:,}".format(*found["tokens"])
    about = (
        f"Forward and backward of a Llama of {found['layers']} layers of width {found['width']} on {length} tokens, one"
    )
    capability = found["about"]["capability"].replace("AVX512", "AVX-512")
    about += f" thread of a CPU with {capability}. Relative to eager PyTorch."
    y = p.head(["At every peak, less time than checkpointing and torch.compile"], [about])
    p.text(20, y + 24, "CPU time", "small")
    low, high = 0.2, max(row["peak"] / eager for row in rows.values()) + 0.05
    slow = max(row["step"]["ratio"] for row in rows.values()) + 0.05
    left, right, top, bottom = (40, 424, y + 40, 418) if narrow else (80, 780, y + 30, 352)

    def across(peak: float) -> float:
        return left + (right - left) * (peak - low) / (high - low)

    def up(ratio: float) -> float:
        return bottom - (bottom - top) * ratio / slow

    for tick in (0.2, 0.4, 0.6, 0.8, 1.0):
        p.text(across(tick), bottom + 16, f"{tick:.1f}", "small middle")
    for tick in (0.0, 0.5, 1.0, 1.5):
        if tick < slow:
            p.text(left - 14, up(tick), f"{tick:.1f}", "small right")
    p.text((left + right) / 2, bottom + 36, "peak memory that the step adds", "small middle")
    said = {"eager": "eager", "checkpointed": "layers checkpointed", "selective": "selective checkpointing"}
    said |= {name: f'"{name}"' for name in ("fast", "balanced", "lean", "least")}
    said |= {name: f"torch.compile, budget {name.split()[1]}" for name in rows if name.startswith("compile")}
    for name, row in rows.items():
        ours = name[0].isdigit() or name in ("fast", "balanced", "lean", "least")
        x, y = across(row["peak"] / eager), up(row["step"]["ratio"]) - 4
        p.ticks(x - 3.5, y - 3.5, 1, "forward" if ours else "plain")
        if name in said and ours:
            p.text(x, y + 18, said[name], "small middle")
        elif name in said:
            before = x > right * (0.62 if narrow else 0.8)
            p.text(x - 8 if before else x + 8, y + 4, said[name], "small right" if before else "small")
    return p.svg()


def plan(width: int = FULL) -> str:
    """The plan of a feed-forward block for an H100, as the library draws it."""
    operations = ops.LayerNorm(1024), ops.Linear(1024, 4096), ops.GeLU(), ops.Linear(4096, 1024), ops.Dropout(0.1)
    x = torch.empty(8192, 1024, dtype=torch.bfloat16, device="meta")
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, tokens=8192)
    return sf.Sequential(ops.Residual(*operations)).to("meta", torch.bfloat16).plan(x, env=env).svg(width)


@functools.cache
def whole(make: str) -> sf.Plan:
    """The plan of all layers of a model of examples/models.py for an H100."""
    sys.path[:0] = [str(HERE.parent / "examples")]
    import models

    x = torch.empty(counts(make)["x"], dtype=torch.bfloat16, device="meta")  # as that of the command beside it
    env = sf.Env.of("cuda:sm_90", dtype=torch.bfloat16, tokens=x.shape[0] * x.shape[1])
    return getattr(models, make)().bfloat16().plan(x, env=env)


BOTH = (layer, contract, segments, memory, front)
PICTURES: dict[str, Callable[[], str]] = {
    **{draw.__name__: draw for draw in BOTH},
    **{f"{draw.__name__}_narrow": functools.partial(draw, narrow=True) for draw in BOTH},
    "plan": plan, "plan_narrow": functools.partial(plan, NARROW),
}  # fmt: skip
MODELS: dict[str, Callable[[], str]] = {
    make + end: lambda make=make, width=width: whole(make).svg(width)
    for make in ("gpt2", "llama3_8b", "bert_base", "vit_b16", "qwen3_06b", "gemma3_1b")
    for end, width in (("", FULL), ("_narrow", NARROW))
}

if __name__ == "__main__":
    for name, draw in (PICTURES | MODELS).items():
        if sys.argv[1:] in ([], [name]):
            (HERE / "pictures" / f"{name}.svg").write_text(draw())

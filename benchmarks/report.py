"""Tables of what was measured, for README.md and docs/: losses as plainly as wins, and what was never run.

Tables are Markdown, drawn from `results/*.json` between marks of the pages. As a script this draws them and prints the
targets.
"""

from __future__ import annotations

import ast
import importlib
import math
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of a script it has this folder alone
sys.path.insert(0, str(Path(__file__).resolve().parent))

import targets
from tables import (
    DRAWN,
    MIB,
    Lines,
    Results,
    Rows,
    between,
    drawn,
    of_another_run,
    read,
    relative,
    starred,
    table,
    where,
    wrapped,
)

for module in ("losses", "model_tables", "gpu_tables"):  # which register their tables
    importlib.import_module(module)
ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/dev").glob("*.md")),
    ROOT / "docs/reference/convert.md",
]
FIGURES = re.compile(
    r"(<!-- figures: (?:benchmarks/results/)?(\w+)(?:\.json)? -->\n).*?(?=<!-- end of figures -->)", re.DOTALL
)


@drawn("host", "host", "planning")
def host(found: Results, planned: Results) -> Lines:
    """Host cost and planning time."""
    kinds = ("forward", "forward+backward", "no grad")
    ratios = {(row["operations"], row["what"]): row["ratio"] for row in found["host"]}
    counts = dict.fromkeys(count for count, _ in ratios)
    cells = [(str(n), *(f"{ratios[n, kind]:.2f}" for kind in kinds)) for n in counts]
    rows = [
        (f"{r['operations']:,}", f"{r['plan_seconds'] * 1e3:.1f} ms", f"{r['lookup_microseconds']:,.0f} µs")
        for r in planned["planning"]
    ]
    return [
        where(found), "",
        "CPU overhead per call relative to `torch.nn.Sequential` (1.0 = equal, lower is better), in instructions, on",
        "4 x 16 tensors so that overhead dominates:", "", *table(("operations", *kinds), cells, left=0), "",
        "Time to read and plan an op sequence, and of a plan-cache hit:", "",
        *table(("operations", "plan", "plan-cache hit"), rows, left=0),
    ]  # fmt: skip


@drawn("cpu", "cpu")
def cpu(found: Results) -> Lines:
    """CPU time of steps beside eager torch: default and lean plans, then what else was timed in some of the rows."""
    said = f"""{where(found)} Measured when the default of `sf.convert` was `memory="{found["about"]["converted"]}"`; it
        is `"balanced"` now."""
    plans = {"default": "seqfuse / eager", "lean": "seqfuse, lean / eager"}
    others = {
        "default, GEMMs of MKL": "seqfuse, without oneDNN / eager",
        "Dynamo alone": "Dynamo, eager backend / eager",
        "torch.compile": "torch.compile / eager",
    }
    rows = found["rows"]
    cells = [(row["name"], f"{row['eager']:,.0f}", *_times(row, plans)) for row in rows]
    rest = [(row["name"], *_times(row, others)) for row in rows if not row["sides"].keys().isdisjoint(others)]
    tables = [*table(("step", "eager, us", *plans.values()), cells), "", *table(("step", *others.values()), rest)]
    return [wrapped(said), "", *tables]


def _times(row: dict[str, Any], sides: Iterable[str]) -> Lines:
    return [between(row["sides"][side]) if side in row["sides"] else "-" for side in sides]


@drawn("cpu_experts", "cpu_experts", "cpu_experts_avx512")
def cpu_experts(found: Results, with_avx512: Results) -> Lines:
    """The same of experts, and what the default takes where the processor has AVX-512."""
    there = {row["name"]: between(row["sides"]["default"]) for row in with_avx512["rows"]}
    head = ("step", "Hugging Face, us", "seqfuse", "seqfuse, lean", "loop over experts", "seqfuse, with AVX-512")
    sides = ("default", "lean", "loop over experts")
    cells = [(r["name"], f"{r['eager']:,.0f}", *_times(r, sides), there[r["name"]]) for r in found["rows"]]
    return [where(found), "", *table(head, cells)]


@drawn("traffic", "traffic")
def traffic(found: Results) -> Lines:
    """The kernels that move more than the fewest bytes."""
    moved: dict[tuple[str, ...], list[float]] = {}
    for row in found["traffic"]:
        kind = "backward" if "backward" in row["what"] else "forward"
        kernel = "decode" if row["kernel"] == "decode" else f"{row['kernel']} {kind}"
        if (ratio := row["moved"] / row["fewest"]) >= 1.0005:
            moved.setdefault((kernel, " x ".join(f"{n:,}" for n in row["shape"])), []).append(ratio)
    cells = [(*of, str(len(ratios)), f"{min(ratios):.2f} to {max(ratios):.2f}") for of, ratios in moved.items()]
    return table(("kernel", "rows x columns", "cases", "moved / fewest"), cells, left=2)


@drawn("kernels", "kernels")
def kernels(found: Results) -> Lines:
    """What every configuration compiles to: the worst of each kernel module on each target."""
    rows = found["kernels"]
    nvidia = [row for row in rows if row["target"].startswith("sm_")]
    counts = {what: sum(row[what] for row in nvidia) for what in ("spilled", "over_shared", "without_wgmma")}
    amd = sum(row["spilled"] for row in rows if row["target"] == "gfx942")
    said = "With Triton {}: {:,} configurations; {} spilled on {}; {} on gfx942; {} over shared memory; {} lack wgmma."
    names = list(dict.fromkeys(row["target"] for row in rows))
    cells: list[tuple[str, ...]] = []
    for module in dict.fromkeys(row["module"] for row in rows):
        of = [row for name in names for row in rows if (row["module"], row["target"]) == (module, name)]
        registers = " / ".join(f"{row['registers']:,}" for row in of)
        shared = " / ".join(f"{row['shared'] // 1024:,}" for row in of)
        spilled = str(sum(row["spilled"] for row in of if row["target"].startswith("gfx")))
        cells.append((module.removeprefix("_"), f"{of[0]['configurations']:,}", registers, shared, spilled))
    head = ("module", "configurations", "most registers", "most shared memory, KiB", "spilled on gfx942")
    on = ", ".join(dict.fromkeys(row["target"] for row in nvidia))
    of_all = sum(row["configurations"] for row in rows), counts["spilled"], on, amd
    first = said.format(found["triton"], *of_all, counts["over_shared"], counts["without_wgmma"])
    told = f"Four numbers in a cell are for {', '.join(names)}. *columns* is "
    told += "`column_sums` of `kernels/_device.py`; *layernorm* and *rmsnorm* are `kernels/norm.py`."
    return [wrapped(first), "", *table(head, cells), "", wrapped(told)]


@drawn("memory", "memory", "gpu")
def memory(found: Results, run: Results) -> Lines:
    """Bytes kept for backward by feed-forward blocks, and what lean costs: estimated, and measured where it was."""
    names = ("seqfuse", "seqfuse balanced", "seqfuse lean")
    took = {
        row["shape"]["model"]: row["times"]["seqfuse lean"]["median"] / row["times"]["seqfuse"]["median"] - 1
        for row in _measured(run, "MLP block forward + backward")
        if "seqfuse lean" in row["times"]
    }
    rows: list[tuple[str, ...]] = []
    for row in found["memory"]:
        kept = row["kept"]
        of = (f"{kept[name] / kept['eager']:.2f}" for name in names)
        costs = (f"+{cost:.1%}" if cost else "-" for cost in (row["cost"]["seqfuse lean"], took.get(row["model"])))
        rows.append((row["model"], f"{kept['eager'] / MIB:,.0f}", *of, *costs))
    times = "time of lean, estimated", "measured"
    return table(("MLP block of", "eager PyTorch, MiB", "fast", "balanced", "lean", *times), rows)


@drawn("convert", "convert")
def converted(found: Results) -> Lines:
    """Models that were converted: bytes that a layer saves, and the cost of a training step, of the model's own."""
    steps = {"step": "CPU time, 32 tokens", "long": "CPU time, 1,024 tokens"}
    if not any("long" in row for row in found["rows"]):
        del steps["long"]
    rows = [
        (row["model"], *(between(row[name]) if name in row else "-" for name in steps),
         *(f"{kept / row['eager']:.2f}" for kept in row["kept"].values()))
        for row in found["rows"]
    ]  # fmt: skip
    choices = ("fast" if choice == "save" else choice for choice in found["rows"][0]["kept"])
    return [where(found), "", *table(("model", *steps.values(), *(f"saved, `{choice}`" for choice in choices)), rows)]


_SIDES = {
    "eager": "eager PyTorch",
    "eager, checkpointed": "eager PyTorch, each layer checkpointed",
    "save": '`sf.convert(model, memory="fast")`',
    "balanced": "`sf.convert(model)`",
    "lean": '`sf.convert(model, memory="lean")`',
    "least": '`sf.convert(model, memory="least")`',
    "lean, checkpointed": '`memory="lean"`, each layer checkpointed',
}


def _trained(found: Results) -> str:
    count, length = found["tokens"]
    return (
        f"Hugging Face's `LlamaModel` (no output layer, no loss) with {found['layers']} layers of width "
        f"{found['width']}, on {count} x {length:,} tokens in float32, with AdamW."
    )


def _added(found: Results) -> dict[str, float]:
    """What a training step adds to memory at its peak, of each side, as a part of eager's."""
    added = {row["side"]: row["peak"] - row["before"] for row in found["rows"]}
    return {side: bytes_ / added["eager"] for side, bytes_ in added.items()}


@drawn("peak", "peak")
def peak(found: Results) -> Lines:
    """A training step as it is, converted, and checkpointed: what it saves, adds to memory at its peak, and takes."""
    eager, added = found["rows"][0], _added(found)
    rows: list[tuple[str, ...]] = []
    for row in found["rows"]:
        cells = [(row["saved"], row["saved"] / eager["saved"]), (row["peak"] - row["before"], added[row["side"]])]
        sizes = (f"{size / MIB:,.0f} MiB ({of:.2f})" for size, of in cells)
        step = row["step"]
        spread = "" if row is eager else f", {step['low']:.2f} to {step['high']:.2f}"
        rows.append((_SIDES[row["side"]], *sizes, f"{step['seconds']:.2f} s ({step['ratio']:.2f}{spread})"))
    about = f"""{_trained(found)} Its parameters take {eager["parameters"] / MIB:,.0f} MiB, their gradients as much,
        and AdamW's state twice as much. In brackets: relative to eager PyTorch; of the time, the median of
        {found["rounds"]} rounds and its quartiles."""
    head = ("model", "saved for backward", "peak memory added by a step", "CPU time of a training step")
    return [where(found), "", wrapped(about), "", *table(head, rows)]


@drawn("training", "peak", "peak_avx512", "front")
def training(found: Results, with_avx512: Results, drawn_beside: Results) -> Lines:
    """What README.md shows of the same run: ratios alone, of one way to save less at a time."""
    added, saved = _added(found), found["rows"][0]["saved"]
    there = {row["side"]: f"{row['step']['ratio']:.2f}" for row in with_avx512["rows"]}
    rows: list[tuple[str, ...]] = []
    for row in found["rows"]:
        if (side := row["side"]) != "lean, checkpointed":
            numbers = row["saved"] / saved, added[side], row["step"]["ratio"]
            rows.append((_SIDES[side], *(f"{n:.2f}" for n in numbers), there.get(side, "-")))
    count, length = drawn_beside["tokens"]
    capability = drawn_beside["about"]["capability"].replace("AVX512", "AVX-512")
    note = f"""{found["about"]["device"]}, one thread, torch {found["about"]["torch"]}. {_trained(found)}
        Picture: {count} x {length:,}, {capability}, without AdamW."""
    head = ("relative to eager PyTorch", "saved for backward", "peak memory added", "CPU time, AVX2", "with AVX-512")
    return [*table(head, rows), "", wrapped(note)]


@drawn("layer_counts", "layer_counts")
def layer_counts(found: Results) -> Lines:
    """Launches and bytes of one layer of each known model, of Hugging Face's in eager torch and planned."""
    head = ("layer of", "forward launches", "backward launches", "MiB saved, `fast`", "MiB saved, `lean`")
    rows: list[tuple[str, ...]] = []
    for row in found["rows"]:
        eager, planned = row["eager"], row["planned"]
        cells = [f"{len(eager[pass_])} → {len(planned[pass_])}" for pass_ in ("forward", "backward")]
        saved = [planned["saved"][choice] for choice in ("save", "lean")]
        kept = (f"{eager['saved'] / MIB:,.0f} → {size / MIB:,.0f} ({size / eager['saved']:.2f})" for size in saved)
        rows.append((row["title"], *cells, *kept))
    return table(head, rows)


def families() -> int:
    """How many models the tests convert, which need more than this to be imported."""
    tree = ast.parse((ROOT / "tests" / "convert" / "families.py").read_text())
    (found,) = (
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "FAMILIES"
    )
    assert isinstance(found, ast.Dict)
    return len(found.keys)


@drawn("claims", "memory", "cpu", "layer_counts", "convert", "peak")
def claims(bytes_of: Results, beside: Results, counted: Results, models: Results, steps: Results) -> Lines:
    """What is claimed, each with how it is known."""

    def of_block(model: str) -> str:
        (kept,) = (row["kept"] for row in bytes_of["memory"] if row["model"] == model)
        fast, balanced = (f"{kept[choice] / kept['eager']:.2f}x" for choice in ("seqfuse", "seqfuse balanced"))
        return f"{fast}; balanced {balanced}"

    def kept_by(choice: str) -> str:
        return ", ".join(f"{row['model']} {row['kept'][choice] / row['eager']:.2f}x" for row in models["rows"])

    def slowest(side: str) -> str:
        times = sorted((row["sides"][side]["ratio"], row["name"]) for row in beside["rows"] if side in row["sides"])
        return f"{times[0][0]:.2f} to {times[-1][0]:.2f}x (slowest: {times[-1][1]})"

    def step(side: str) -> str:
        (took,) = (row["step"]["ratio"] for row in steps["rows"] if row["side"] == side)
        return f"CPU time {took:.2f}x, added peak memory {_added(steps)[side]:.2f}x"

    (layer,) = (row for row in counted["rows"] if row["make"] == "llama3_8b")
    ours, theirs = (len(layer[side]["forward"]) + len(layer[side]["backward"]) for side in ("planned", "eager"))
    fast, balanced, lean = (
        f"{layer['planned']['saved'][choice] / layer['eager']['saved']:.2f}x" for choice in ("save", "balanced", "lean")
    )
    small = "training step of a small Llama, "
    cpu, plans = "measured on a CPU", "counted, planned for an H100"
    interpreted = "tested in Triton's interpreter, and as C"
    rows = [
        (f'{small}`memory="lean"`', step("lean"), cpu),
        (f"{small}activation checkpointing", step("eager, checkpointed"), cpu),
        ('activation memory of a converted layer, `memory="balanced"` (default)', kept_by("balanced"), cpu),
        ('the same, `memory="lean"`', kept_by("lean"), cpu),
        ('CPU time of [models and blocks](cpu.md#what-it-gains), `memory="fast"`', slowest("default"), cpu),
        ('the same, `memory="lean"`', slowest("lean"), cpu),
        ("kernel launches, a layer of Llama 3 8B built of `seqfuse.nn`", f"{ours} instead of {theirs}", plans),
        ("activation memory of that layer", f"{fast}; balanced {balanced}, lean {lean}", plans),
        ("activation memory of an MLP block of Llama 3 8B", of_block("llama3-8b"), plans),
        ("activation memory of an MLP block of GPT-2 XL", of_block("gpt2-xl"), plans),
        ("outputs and gradients of converted models", f"equal within rounding in {families()} small models",
         "tested on a CPU"),
        ("values and gradients of fused kernels", "within the error bound", interpreted),
        ("all kernels compile", "sm_80, sm_90, sm_100, gfx942", "compiled without a GPU"),
    ]  # fmt: skip
    return table(("what", "result, relative to eager PyTorch", "how it is known"), rows, left=3)


def verdicts() -> list[targets.Verdict]:
    """Every target by what there is."""
    found: dict[str, Any] = {"gpu": (read("gpu") or {}).get("rows", {}).values()}
    for name in ("memory", "host", "planning"):
        found[name] = (read(name) or {}).get(name, ())
    return targets.judged(found)


@drawn("targets")
def goals() -> Lines:
    """The targets: met, missed or not run, and the worst row of each."""
    rows: list[tuple[str, ...]] = []
    for verdict in verdicts():
        cells = ["", ""]
        if verdict.values:
            name, value = verdict.worst
            told = f"{value:.2f} ({name})" if math.isfinite(value) else f"no result: {name}"
            cells = [f"{verdict.reached} of {len(verdict.values)}", told]
        rows.append((verdict.target.what, verdict.target.wanted, verdict.status, *cells))
    return table(("what", "target", "status", "rows that meet it", "worst row"), rows, left=1)


@drawn("score", "gpu")
def scored(_: Results) -> Lines:
    """How many targets are met: of time on a GPU, and of what is counted or timed without one."""
    parts: Lines = []
    for what, chosen in (("GPU time", False), ("saved bytes, planning and CPU overhead", True)):
        found = [
            v.status
            for v in verdicts()
            if v.values and bool(re.search("bytes|planning|plan-cache|CPU overhead", v.target.what)) is chosen
        ]
        parts.append(f"{found.count('met')} of {len(found)} for {what}")
    judged = [v for v in verdicts() if v.values]
    reached, count = sum(v.reached for v in judged), sum(len(v.values) for v in judged)
    return [
        wrapped(f"""[Targets](dev/benchmarks.md#targets): {reached} of {count} results reach theirs. All results of a
        target do in {" and ".join(parts)}.""")
    ]


@drawn("gpu_tune", "gpu_tune")
def tuned(found: Results) -> Lines:
    """What `sf.tune` measured on a GPU, by fusion."""
    rows: dict[str, list[Any]] = {}
    for row in found["tune"]:
        rows.setdefault(row["fusion"], []).append(row["fused_us"] / row["unfused_us"])
    cells: list[Lines] = []
    for name, of in sorted(rows.items()):
        span = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(of), max(of)))
        cells.append([name, str(len(of)), " to ".join(span)])
    layers = sorted({row["model"] for row in found["tune"]})
    tokens = " and ".join(sorted({f"{row['tokens']:,}" for row in found["tune"]}))
    said = f"{found['about']['device']}, {tokens} tokens, layers of {', '.join(layers)}; training and inference."
    return [*table(("fusion", "positions", "time fused / unfused"), cells), "", said]


_PEERS = {"eager": "eager PyTorch", "compile": "`torch.compile`", "liger": "Liger"}
_STEPS = ("MLP block forward + backward", "attention block forward + backward", "layer forward + backward")
_CONVERTED = "converted: forward + backward"


@drawn("steps", "gpu")
def steps(found: Results) -> Lines:
    """Blocks and layers of some models: time as it is called, with what the host takes, and on the device alone."""
    cells = [
        [row["group"].partition(" forward")[0], *_step(row), relative(row["times"], "seqfuse", "eager")]
        for row in _measured(found, *_STEPS)
    ]
    converted = [
        ["model of Hugging Face", *_step(row), relative(row["times"], "seqfuse", "eager")]
        for row in _measured(found, _CONVERTED)
    ]
    head = ("forward + backward of", "model", *(f"time / {name}" for name in _PEERS.values()), "GPU time / eager")
    return [*table(head, [*sorted(cells), *converted], left=2), "", _how_steps(found, *_STEPS)]


@drawn("layer_steps", "gpu")
def layer_steps(found: Results) -> Lines:
    """What README.md shows of `steps`: whole layers of the last run, as they are called."""
    head = ("forward + backward of a layer of", *(f"time / {name}" for name in _PEERS.values()))
    layers, converted = (
        sorted(_step(row) for row in _measured(found, group) if "commit" not in row)
        for group in (_STEPS[-1], _CONVERTED)
    )
    return [*table(head, [*layers, *converted]), "", _how_steps(found)]


def _measured(found: Results, *groups: str) -> Iterator[dict[str, Any]]:
    for row in found["rows"].values():
        if row["group"] in groups and row["status"] == "ok" and row["shape"]["M"] == 8192:
            yield row


def _step(row: dict[str, Any]) -> Lines:
    name = starred(row, row["shape"]["model"])
    if row["group"] == _CONVERTED:
        name += f", {row['shape']['layers']} layers of Hugging Face, converted"
    return [name, *(relative(row["as_called"], "seqfuse", peer) for peer in _PEERS)]


def _how_steps(found: Results, *groups: str) -> str:
    return wrapped(f"""{found["about"]["device"]}, torch {found["about"]["torch"]}, bfloat16, 8,192 tokens, dropout 0.1
        in the layers of GPTs, random data; medians of interleaved runs. Below 1.0 seqfuse is faster. A dash: no valid
        result from that library. {of_another_run(_measured(found, *groups))}""")


def _of(found: Results, group: str) -> Rows:
    return [row for row in found["rows"].values() if row["status"] == "ok" and group in row["group"]]


def _model(row: dict[str, Any]) -> str:
    shape = row["shape"]
    return f"{shape['layers']} layers of `seqfuse.nn` with the sizes of {shape['model']}, {shape['M']:,} tokens"


_CHOICES = {
    "eager": "eager PyTorch",
    "checkpointed": "eager PyTorch, each layer checkpointed",
    "seqfuse": '`memory="fast"`',
    "seqfuse balanced": '`memory="balanced"`',
    "seqfuse lean": '`memory="lean"`',
    "seqfuse 0.5": "`sf.Budget(part=0.5)`",
    "seqfuse 0.3": "`sf.Budget(part=0.3)`",
    "seqfuse least": '`memory="least"`',
}


@drawn("gpu_memory", "gpu")
def front(found: Results) -> Lines:
    """Time against peak of layers, for each choice of memory: what torch counted, and what the plan says."""
    rows = _of(found, "memory")
    lines = [where(found), ""] if rows else []
    for row in rows:
        cells: list[Lines] = []
        for side, name in _CHOICES.items():
            if side in row["times"]:
                peak, time = row["memory"][side]["peak"], row["times"][side]["median"] / 1000
                added = f"{peak / MIB:,.0f} MiB ({peak / row['memory']['eager']['peak']:.2f})"
                held = f"{row['said'][side]['peak'] / MIB:,.0f} MiB" if side in row["said"] else ""
                cells.append([name, f"{time:.1f} ms ({relative(row['times'], side, 'eager')})", added, held])
        head = ("", "GPU time", "peak memory added by a step", "the plan's peak")
        lines += [f"{_model(row)}; their parameters have {row['gradients'] / MIB:,.0f} MiB of gradients:", ""]
        lines += [*table(head, cells), ""]
    if not rows:
        return []
    saving = [(row, side) for row in rows for side in ("seqfuse balanced", "seqfuse lean") if side in row["said"]]
    off = max(abs(row["said"][side]["peak"] / row["memory"][side]["peak"] - 1) for row, side in saving)
    note = f"""bfloat16, forward and backward, as `torch.cuda.max_memory_allocated` counts; in brackets relative to
        eager PyTorch. The planned peak excludes outputs and parameter gradients. Most parameter gradients arrive late
        in the backward pass, when few activations are still allocated: with `"balanced"` and `"lean"` the planned peak
        is within {100 * off:.1f} % of the measured one."""
    return [*lines, wrapped(note)]


@drawn("gpu_memory_summary", "gpu")
def summary(found: Results) -> Lines:
    """What README.md shows of `gpu_memory`: ratios alone."""
    lines: Lines = []
    for row in _of(found, "memory"):
        eager = row["memory"]["eager"]["peak"]
        cells = [
            [_CHOICES[side], relative(row["times"], side, "eager"), f"{row['memory'][side]['peak'] / eager:.2f}"]
            for side in ("eager", "checkpointed", "seqfuse lean", "seqfuse 0.5")
        ]
        head = f"{_model(row)}, same GPU, forward + backward", "GPU time", "peak added, with parameter gradients"
        lines += [*table(head, cells), ""]
    return lines[:-1]


_RECIPES = {
    "bfloat16": "eager PyTorch, bfloat16",
    "bfloat16, compiled": "`torch.compile`, bfloat16",
    "seqfuse": "seqfuse, bfloat16",
    "current": "`Float8CurrentScaling`",
    "delayed": "`Float8DelayedScaling`",
    "row": "`Float8RowScaling`",
    "block": "`Float8BlockScaling`",
    "by hand": "FP8 module of torch calls (current scaling), eager",
    "by hand, compiled": "the same FP8 module, compiled",
    "GEMMs alone": "only the three 8-bit GEMMs",
}


@drawn("gpu_low_precision", "gpu_low_precision")
def low_precision(found: Results) -> Lines:
    """Milliseconds of a forward and backward pass of feed-forward blocks by each recipe."""
    return _recipes(found, "feed-forward")


@drawn("gpu_low_precision_linear", "gpu_low_precision")
def low_precision_linear(found: Results) -> Lines:
    """The same of a `Linear`."""
    return _recipes(found, "Linear")


def _recipes(found: Results, of: str) -> Lines:
    rows = {name: row["times"] for name, row in found["rows"].items() if of in name}
    cells = [
        [name, *(f"{times[side]['median'] / 1000:.2f}" if side in times else "" for times in rows.values())]
        for side, name in _RECIPES.items()
        if any(side in times for times in rows.values())
    ]
    names = (n.replace(" feed-forward block, 8192", "").replace("compiled by hand", "in another run") for n in rows)
    of = [found["rows"][name] for name in rows]
    another = of_another_run(of)
    head = (starred(row, name) for row, name in zip(of, names, strict=True))
    return [where(found), "", *table(("", *head), cells), *(["", another] if another else [])]


_SCALES = {
    "copy": "a copy, for comparison",
    "kernel given rows and columns": "a given scale (`Float8DelayedScaling`)",
    "kernel tensor rows and columns": "one scale of the tensor (`Float8CurrentScaling`)",
    "kernel 128x128 rows and columns": "one of 128 x 128 (weights of `Float8BlockScaling`)",
    "kernel row rows and columns": "one of a row or column (`Float8RowScaling`)",
    "kernel 1x128 rows and columns": "one of 128 numbers (`Float8BlockScaling`)",
    "kernel 1x32 rows and columns": "one of 32 numbers (`MXFP8`)",
    "ATen current rows": "ATen, one scale of the tensor, along rows only",
}


@drawn("gpu_quantize", "gpu_low_precision")
def quantizing(found: Results) -> Lines:
    """Microseconds of quantizing a tensor of each size, by what has a scale."""
    rows = {n.removeprefix("quantize "): row["times"] for n, row in found["rows"].items() if n.startswith("quantize")}
    cells = [[name, *(f"{times[how]['median']:,.0f}" for times in rows.values())] for how, name in _SCALES.items()]
    return table(("scales", *rows), cells)


def redrawn(page: str) -> str:
    """A page with the tables as they are to be drawn now."""

    def replaced(figures: re.Match[str]) -> str:
        made = DRAWN[figures[2]]()
        return figures[0] if made is None else figures[1] + made

    return FIGURES.sub(replaced, page)


def main() -> None:
    print(goals())
    for page in PAGES:
        old = page.read_text()
        if (new := redrawn(old)) != old:
            page.write_text(new)
            print(f"rewrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""Draws the tables of results in README.md and docs/: losses as well as gains, and what was not run.

Tables are drawn from `results/*.json`, between marks in the pages. As a script it draws them and prints the targets.
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a script has only its own folder in its path
sys.path.insert(0, str(Path(__file__).resolve().parent))

import targets
from gpu_tables import EQUAL, measured
from tables import DRAWN, MIB, Lines, Results, between, choice, drawn, read, relative, span, table, where, wrapped

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIGURES = re.compile(
    r"(?s)(<!-- figures: (?:benchmarks/results/)?(\w+)(?:\.json)? -->\n).*?(?=<!-- end of figures -->)"
)


@drawn("host", "host", "planning")
def host(found: Results, planned: Results) -> Lines:
    """CPU overhead and planning time."""
    kinds = ("forward", "forward+backward", "no grad")
    ratios = {(row["operations"], row["what"]): row["ratio"] for row in found["host"]}
    cells = [(n, *(float(ratios[n, kind]) for kind in kinds)) for n in dict.fromkeys(count for count, _ in ratios)]
    rows = [
        (r["operations"], f"{r['plan_seconds'] * 1e3:.1f} ms", f"{r['lookup_microseconds']:,.0f} µs")
        for r in planned["planning"]
    ]
    return [
        where(found), "",
        "CPU overhead per call relative to `torch.nn.Sequential` (1.0 = equal, lower is better), in instructions, on",
        "4 x 16 tensors so that overhead dominates:", "", *table(("operations", *kinds), cells, left=0), "",
        "Time to read and plan an op sequence, and of a plan-cache hit:", "",
        *table(("operations", "plan", "plan-cache hit"), rows, left=0),
    ]  # fmt: skip


@drawn("cpu", "cpu", "cpu_avx512")
def cpu(found: Results, with_avx512: Results) -> Lines:
    """CPU time of steps against eager torch: default and lean plans, then other sides of some rows."""
    said = f"{where(found)} The last column was measured on an {with_avx512['about']['device']} with AVX-512."
    there = {row["name"]: between(row["sides"]["default"]) for row in with_avx512["rows"]}
    plans = {"default": "seqfuse / eager", "lean": "seqfuse, lean / eager"}
    others = {
        "default, GEMMs of MKL": "seqfuse, without oneDNN / eager",
        "Dynamo alone": "Dynamo, eager backend / eager",
        "torch.compile": "torch.compile / eager",
    }
    rows = found["rows"]
    cells = [(row["name"], round(row["eager"]), *_times(row, *plans), there.get(row["name"])) for row in rows]
    rest = [(row["name"], *_times(row, *others)) for row in rows if not row["sides"].keys().isdisjoint(others)]
    head = ("step", "eager, us", *plans.values(), "seqfuse / eager, with AVX-512")
    return [wrapped(said), "", *table(head, cells), "", *table(("step", *others.values()), rest)]


def _times(row: dict[str, Any], *sides: str) -> Iterator[str | None]:
    return (between(row["sides"].get(side)) for side in sides)


@drawn("cpu_experts", "cpu_experts", "cpu_experts_avx512")
def cpu_experts(found: Results, with_avx512: Results) -> Lines:
    """Experts, with the same columns, and the default on a processor with AVX-512."""
    there = {row["name"]: between(row["sides"]["default"]) for row in with_avx512["rows"]}
    head = ("step", "Hugging Face, us", "seqfuse", "seqfuse, lean", "loop over experts", "seqfuse, with AVX-512")
    sides = ("default", "lean", "loop over experts")
    cells = [(row["name"], round(row["eager"]), *_times(row, *sides), there[row["name"]]) for row in found["rows"]]
    return [where(found), "", *table(head, cells)]


@drawn("slower_cpu", "cpu", "cpu_experts", "convert")
def slower_cpu(*results: Results) -> Lines:
    """Steps that take longer than in eager torch, the slowest first."""
    *steps, models = results
    sides = {row["name"]: row["sides"] for found in steps for row in found["rows"]}
    ratios = {name: of["default"]["ratio"] for name, of in sides.items() if "default" in of}
    for row in models["rows"]:
        for name, tokens in (("step", "32"), ("long", "1,024")):
            if name in row:
                ratios[f"HF {row['model']}, 2 layers of 16, {tokens} tokens"] = row[name]["ratio"]
    lost = [(name, ratio) for name, ratio in ratios.items() if ratio > EQUAL]
    return table(("step", "CPU time / eager PyTorch"), sorted(lost, key=lambda entry: entry[1], reverse=True))


@drawn("traffic", "traffic")
def traffic(found: Results) -> Lines:
    """The kernels that move more than the minimum number of bytes."""
    moved: dict[tuple[str, ...], list[float]] = {}
    for row in found["traffic"]:
        kind = "backward" if "backward" in row["what"] else "forward"
        kernel = "decode" if row["kernel"] == "decode" else f"{row['kernel']} {kind}"
        if (ratio := row["moved"] / row["fewest"]) >= 1.0005:
            moved.setdefault((kernel, " x ".join(f"{n:,}" for n in row["shape"])), []).append(ratio)
    cells = [(*of, len(ratios), f"{min(ratios):.2f} to {max(ratios):.2f}") for of, ratios in moved.items()]
    return table(("kernel", "rows x columns", "cases", "moved / fewest"), cells, left=2)


@drawn("kernels", "kernels")
def kernels(found: Results) -> Lines:
    """Compiler results: the worst of each kernel module on each target."""
    rows = found["kernels"]
    nvidia, amd = ([row for row in rows if row["target"].startswith(kind)] for kind in ("sm_", "gfx"))
    spilled, over, missing = (sum(r[what] for r in nvidia) for what in ("spilled", "over_shared", "without_wgmma"))
    names = list(dict.fromkeys(row["target"] for row in rows))
    cells: list[tuple[Any, ...]] = []
    for module in dict.fromkeys(row["module"] for row in rows):
        of = sorted((row for row in rows if row["module"] == module), key=lambda row: names.index(row["target"]))
        registers = " / ".join(f"{row['registers']:,}" for row in of)
        shared = " / ".join(f"{row['shared'] // 1024:,}" for row in of)
        elsewhere = sum(row["spilled"] for row in amd if row["module"] == module)
        cells.append((module.removeprefix("_"), of[0]["configurations"], registers, shared, elsewhere))
    head = ("module", "configurations", "most registers", "most shared memory, KiB", "spilled on gfx942")
    on = ", ".join(dict.fromkeys(row["target"] for row in nvidia))
    said = f"""With Triton {found["triton"]}: {sum(row["configurations"] for row in rows):,} configurations; {spilled}
        spilled on {on}; {sum(row["spilled"] for row in amd)} on gfx942; {over} over shared memory; {missing} lack
        wgmma."""
    told = f"""Four numbers in a cell are for {", ".join(names)}. *columns* is `column_sums` of `kernels/_device.py`;
        *layernorm* and *rmsnorm* are `kernels/norm.py`."""
    return [wrapped(said), "", *table(head, cells), "", wrapped(told)]


@drawn("memory", "memory", "gpu")
def memory(found: Results, run: Results) -> Lines:
    """Bytes saved for backward by feed-forward blocks, and the cost of lean, estimated and, if measured, measured."""
    blocks = measured(run, "MLP block forward + backward")
    took = {row["shape"]["model"]: relative(row["times"], "seqfuse lean", "seqfuse") for row in blocks}
    cells: list[tuple[Any, ...]] = []
    for row in found["memory"]:
        kept, lean = row["kept"], took.get(row["model"])
        of = (kept[name] / kept["eager"] for name in ("seqfuse", "seqfuse balanced", "seqfuse lean"))
        costs = (f"+{cost:.1%}" if cost else None for cost in (row["cost"]["seqfuse lean"], lean and lean - 1))
        cells.append((row["model"], round(kept["eager"] / MIB), *of, *costs))
    times = "time of lean, estimated", "measured"
    return table(("MLP block of", "eager PyTorch, MiB", "fast", "balanced", "lean", *times), cells)


@drawn("convert", "convert")
def converted(found: Results) -> Lines:
    """Converted models: saved bytes of a layer and time of a training step, relative to the unconverted model."""
    rows, steps = found["rows"], {"step": "CPU time, 32 tokens", "long": "CPU time, 1,024 tokens"}
    cells = [
        (r["model"], *(between(r.get(name)) for name in steps), *(kept / r["eager"] for kept in r["kept"].values()))
        for r in rows
    ]
    choices = (f"saved, `{'fast' if choice == 'save' else choice}`" for choice in rows[0]["kept"])
    return [where(found), "", *table(("model", *steps.values(), *choices), cells)]


SIDES = {
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
    return f"""Hugging Face's `LlamaModel` (no output layer, no loss) with {found["layers"]} layers of width
        {found["width"]}, on {count} x {length:,} tokens in float32, with AdamW."""


def _of_eager(found: Results, side: str) -> tuple[float, float, float]:
    """Saved bytes, added peak memory and time of a side's step, relative to eager."""
    rows = {row["side"]: row for row in found["rows"]}
    (saved, added), (all_saved, all_added) = (
        (row["saved"], row["peak"] - row["before"]) for row in (rows[side], rows["eager"])
    )
    return saved / all_saved, added / all_added, rows[side]["step"]["ratio"]


@drawn("peak", "peak")
def peak(found: Results) -> Lines:
    """A training step, eager, converted and checkpointed: saved bytes, added peak memory and time."""
    cells: list[tuple[str, ...]] = []
    for row in found["rows"]:
        sizes, step = (row["saved"], row["peak"] - row["before"]), row["step"]
        of = (f"{size / MIB:,.0f} MiB ({n:.2f})" for size, n in zip(sizes, _of_eager(found, row["side"]), strict=False))
        spread = "" if row["side"] == "eager" else f", {step['low']:.2f} to {step['high']:.2f}"
        cells.append((SIDES[row["side"]], *of, f"{step['seconds']:.2f} s ({step['ratio']:.2f}{spread})"))
    about = f"""{_trained(found)} Its parameters take {found["rows"][0]["parameters"] / MIB:,.0f} MiB, their gradients
        as much, and AdamW's state twice as much. In brackets: relative to eager PyTorch; of the time, the median of
        {found["rounds"]} rounds and its quartiles."""
    head = ("model", "saved for backward", "peak memory added by a step", "CPU time of a training step")
    return [where(found), "", wrapped(about), "", *table(head, cells)]


@drawn("training", "peak", "peak_avx512", "front")
def training(found: Results, with_avx512: Results, drawn_beside: Results) -> Lines:
    """The part of `peak` in README.md: only ratios, without combinations of checkpointing and seqfuse."""
    there = {row["side"]: row["step"]["ratio"] for row in with_avx512["rows"]}
    sides = [row["side"] for row in found["rows"] if row["side"] != "lean, checkpointed"]
    count, length = drawn_beside["tokens"]
    capability = drawn_beside["about"]["capability"].replace("AVX512", "AVX-512")
    note = f"""{found["about"]["device"]}, one thread, torch {found["about"]["torch"]}. {_trained(found)}
        Picture: {count} x {length:,}, {capability}, without AdamW."""
    head = ("relative to eager PyTorch", "saved for backward", "peak memory added", "CPU time, AVX2", "with AVX-512")
    cells = ((SIDES[side], *_of_eager(found, side), there.get(side)) for side in sides)
    return [*table(head, cells), "", wrapped(note)]


@drawn("front", "front")
def budgets(found: Results) -> Lines:
    """Time and peak of a step on a CPU for each memory choice, against checkpointing and torch.compile."""
    rows = {(row["model"], row["side"]): row for row in found["rows"]}
    models, sides = (list(dict.fromkeys(key[i] for key in rows)) for i in range(2))
    named = {"checkpointed": "each layer checkpointed", "selective": "selective checkpointing"}
    cells: list[Lines] = []
    for side in sides:
        compiled = f"`torch.compile`, `activation_memory_budget = {side.rpartition(' ')[2]}`"
        cells.append([named.get(side) or (compiled if side.startswith("compile") else choice(side))])
        for model in models:
            row, eager = rows[model, side], rows[model, "eager"]
            cells[-1] += [row["peak"] / eager["peak"], between(row["step"])]
    head = "", *(cell for model in models for cell in (f"{model}, peak", "CPU time"))
    count, length = found["tokens"]
    said = f"""{found["layers"]} layers of width {found["width"]}, {count} x {length:,} tokens, one thread; medians of
        {found["rounds"]} rounds and quartiles, relative to eager PyTorch; the GPT has dropout 0.1."""
    return [where(found), "", *table(head, cells), "", wrapped(said)]


@drawn("layer_counts", "layer_counts")
def layer_counts(found: Results) -> Lines:
    """Launches and saved bytes of one layer of each known model, Hugging Face's in eager torch and planned."""
    head = ("layer of", "forward launches", "backward launches", "MiB saved, `fast`", "MiB saved, `lean`")
    rows: list[tuple[str, ...]] = []
    for row in found["rows"]:
        eager, planned = row["eager"], row["planned"]
        cells = [f"{len(eager[pass_])} → {len(planned[pass_])}" for pass_ in ("forward", "backward")]
        saved = [planned["saved"][choice] for choice in ("save", "lean")]
        kept = (f"{eager['saved'] / MIB:,.0f} → {size / MIB:,.0f} ({size / eager['saved']:.2f})" for size in saved)
        rows.append((row["title"], *cells, *kept))
    return table(head, rows)


@drawn("foreign", "foreign")
def foreign(found: Results) -> Lines:
    """Results of converting models of other packages."""
    rows = found["rows"]
    right, packages = sum(row["state"] == "right" for row in rows), len({row["package"] for row in rows})
    inside = {kind: sum(row["inside"][kind] for row in rows) for kind in rows[0]["inside"]}
    every = {kind: n + sum(row["outside"][kind] for row in rows) for kind, n in inside.items()}
    gemms, norms, activations = (f"{n / every[kind]:.0%}" for kind, n in inside.items())
    of = {"balanced": 'the default, `memory="balanced"`', "lean": '`"lean"`'}
    saved = (f"{statistics.median(r['kept'][key] for r in rows if r['kept']):.2f} with {n}" for key, n in of.items())
    all_right, times = f"{right} of them" if right < len(rows) else "All", (row["time"] for row in rows if row["time"])
    return [wrapped(
        f"""`make test-models` converts {len(rows)} small models from {packages} packages. {all_right} gave the same
        outputs and gradients within the error bound. {gemms} of their GEMMs, {norms} of their norms and {activations}
        of their activations were converted. In the median they save for backward, relative to eager PyTorch,
        {" and ".join(saved)}, and a step takes {statistics.median(times):.2f} of its CPU time. """ + where(found)
    )]  # fmt: skip


@drawn("trained", "trained")
def trained(found: Results) -> Lines:
    """Losses after training with each recipe, and their differences from bfloat16 with the same seeds."""
    (name, plain), *others = found["losses"].items()
    cells = [[name, f"{statistics.mean(plain):.4f}", "", ", ".join(f"{loss:.4f}" for loss in plain)]]
    for name, losses in others:
        apart = [loss - base for loss, base in zip(losses, plain, strict=True)]
        means = f"{statistics.mean(losses):.4f}", f"{statistics.mean(apart):+.4f}"
        cells.append([f"`{name}`", *means, ", ".join(f"{one:+.4f}" for one in apart)])
    spread = f"bfloat16 spans {min(plain):.4f} to {max(plain):.4f}. Emulated on a CPU: {where(found)}"
    head = "", "mean loss", "beside bfloat16", f"{len(plain)} seeds: loss, or difference to bfloat16 of the same seed"
    return [*table(head, cells), "", wrapped(spread)]


def families() -> int:
    """The number of models in the conversion tests, counted in the source, since importing it needs more packages."""
    text = (ROOT / "tests" / "convert" / "families.py").read_text()
    (entries,) = re.findall(r"^FAMILIES\b.*?^}", text, re.DOTALL | re.MULTILINE)
    return len(re.findall(r'^    "\w', entries, re.MULTILINE))


@drawn("claims", "memory", "cpu", "layer_counts", "convert", "peak")
def claims(bytes_of: Results, beside: Results, counted: Results, models: Results, steps: Results) -> Lines:
    """The claims, each with its result and evidence."""

    def of_block(model: str) -> str:
        (kept,) = (row["kept"] for row in bytes_of["memory"] if row["model"] == model)
        return f"{kept['seqfuse'] / kept['eager']:.2f}x; balanced {kept['seqfuse balanced'] / kept['eager']:.2f}x"

    def kept_by(choice: str) -> str:
        return ", ".join(f"{row['model']} {row['kept'][choice] / row['eager']:.2f}x" for row in models["rows"])

    def slowest(side: str) -> str:
        times = {row["name"]: row["sides"][side]["ratio"] for row in beside["rows"] if side in row["sides"]}
        return f"{span(times.values())}x (slowest: {max(times, key=times.__getitem__)})"

    def step(side: str) -> str:
        _, added, took = _of_eager(steps, side)
        return f"CPU time {took:.2f}x, added peak memory {added:.2f}x"

    (layer,) = (row for row in counted["rows"] if row["make"] == "llama3_8b")
    ours, theirs = (len(layer[side]["forward"]) + len(layer[side]["backward"]) for side in ("planned", "eager"))
    saved = [layer["planned"]["saved"][choice] / layer["eager"]["saved"] for choice in ("save", "balanced", "lean")]
    small = "training step of a small Llama, "
    cpu, plans = "measured on a CPU", "counted, planned for an H100"
    interpreted = "tested in Triton's interpreter, and as C"
    rows = [
        (f'{small}`memory="lean"`', step("lean"), cpu),
        (f"{small}activation checkpointing", step("eager, checkpointed"), cpu),
        ('activation memory of a converted layer, `memory="balanced"` (default)', kept_by("balanced"), cpu),
        ('the same, `memory="lean"`', kept_by("lean"), cpu),
        ('CPU time of [models and blocks](cpu.md#what-it-gains), by default', slowest("default"), cpu),
        ('the same, `memory="lean"`', slowest("lean"), cpu),
        ("kernel launches, a layer of Llama 3 8B built of `seqfuse.nn`", f"{ours} instead of {theirs}", plans),
        ("activation memory of that layer", "{:.2f}x; balanced {:.2f}x, lean {:.2f}x".format(*saved), plans),
        ("activation memory of an MLP block of Llama 3 8B", of_block("llama3-8b"), plans),
        ("activation memory of an MLP block of GPT-2 XL", of_block("gpt2-xl"), plans),
        ("outputs and gradients of converted models", f"equal within rounding in {families()} small models",
         "tested on a CPU"),
        ("values and gradients of fused kernels", "within the error bound", interpreted),
        ("all kernels compile", "sm_80, sm_90, sm_100, gfx942", "compiled without a GPU"),
    ]  # fmt: skip
    return table(("what", "result, relative to eager PyTorch", "how it is known"), rows, left=3)


def verdicts() -> list[targets.Verdict]:
    """Verdicts on all targets from the available results."""
    found: dict[str, Any] = {name: (read(name) or {}).get(name, ()) for name in ("memory", "host", "planning")}
    return targets.judged({**found, "gpu": (read("gpu") or {}).get("rows", {}).values()})


@drawn("targets")
def goals() -> Lines:
    """The targets: met, missed or not run, and the worst row of each."""
    rows: list[tuple[str, ...]] = []
    for verdict in verdicts():
        name, value = verdict.worst if verdict.values else ("", 0.0)
        told = f"{value:.2f} ({name})" if math.isfinite(value) else f"no result: {name}"
        cells = (f"{verdict.reached} of {len(verdict.values)}", told) if verdict.values else ("", "")
        rows.append((verdict.target.what, verdict.target.wanted, verdict.status, *cells))
    return table(("what", "target", "status", "rows that meet it", "worst row"), rows, left=1)


@drawn("score", "gpu")
def scored(_: Results) -> Lines:
    """The number of targets met, for GPU time, and for counts and times without a GPU."""
    judged = [v for v in verdicts() if v.values]
    kinds: dict[bool, Lines] = {False: [], True: []}
    for v in judged:
        kinds[bool(re.search("bytes|planning|plan-cache|CPU overhead", v.target.what))].append(v.status)
    on_gpu, others = (f"{of.count('met')} of {len(of)}" for of in kinds.values())
    reached, count = sum(v.reached for v in judged), sum(len(v.values) for v in judged)
    said = f"""[Targets](dev/benchmarks.md#targets): {reached} of {count} results reach theirs. All results of a
        target do in {on_gpu} for GPU time and {others} for saved bytes, planning and CPU overhead."""
    return [wrapped(said)]


def redrawn(page: str) -> str:
    """A page with its tables drawn from the current results."""

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

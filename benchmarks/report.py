"""Tables and plots of what was measured, for README.md and docs/: losses as plainly as wins, and what was never run.

Tables are Markdown, drawn from `results/*.json` between marks of the pages. As a script this draws them, and the plots
of a GPU in `docs/figures/`, and prints the targets.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_models
import plots
from gpu_report import goals, gpu, layer_steps, speed, steps, tiles, tuned
from tables import ROOT, paragraphs, read, table, text, where

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/dev").glob("*.md"))]
FIGURES = re.compile(
    r"(<!-- figures: (?:benchmarks/results/)?(\w+)(?:\.json)? -->\n).*?(?=<!-- end of figures -->)", re.DOTALL
)


def host() -> str | None:
    """Host cost and planning time."""
    found, planned = read("host"), read("planning")
    if found is None or planned is None:
        return None
    kinds = ("forward", "forward+backward", "no grad")
    ratios = {(row["operations"], row["what"]): row["ratio"] for row in found["host"]}
    lines = [
        where(found["about"]),
        "",
        "CPU overhead per call relative to `torch.nn.Sequential` (1.0 = equal, lower is better), in instructions, on",
        "4 x 16 tensors so that overhead dominates:",
        "",
    ]
    counts = dict.fromkeys(count for count, _ in ratios)
    lines += table(
        ("operations", *kinds), [(str(n), *(f"{ratios[n, kind]:.2f}" for kind in kinds)) for n in counts], left=0
    )
    lines += ["", "Time to read and plan an op sequence, and of a plan-cache hit:", ""]
    rows = [
        (f"{r['operations']:,}", f"{r['plan_seconds'] * 1e3:.1f} ms", f"{r['lookup_microseconds']:,.0f} µs")
        for r in planned["planning"]
    ]
    return text(lines + table(("operations", "plan", "plan-cache hit"), rows, left=0))


def cpu() -> str | None:
    """CPU time of steps beside eager torch, and where that of converted models goes."""
    found = read("cpu")
    if found is None:
        return None
    sides = list(dict.fromkeys(side for row in found["rows"] for side in row["sides"]))
    lines = [where(found["about"]), "", *table(["step", "eager, us", *sides], map(_beside_eager(sides), found["rows"]))]
    return text(lines)


def _beside_eager(sides: list[str]) -> Callable[[dict[str, Any]], list[str]]:
    def cells(row: dict[str, Any]) -> list[str]:
        known = [row["sides"].get(side) for side in sides]
        ratios = ["" if m is None else f"{m['ratio']:.2f} ({m['low']:.2f} to {m['high']:.2f})" for m in known]
        return [row["name"], f"{row['eager']:,.0f}", *ratios]

    return cells


def cpu_parts() -> str | None:
    """Where the CPU time of a converted training step goes."""
    found = read("cpu_parts")
    if found is None:
        return None
    names = [f"{row['model']}, {row['memory']}" for row in found["rows"]]
    whole = ["whole step, with timers", *(f"{row['step']:,.0f}" for row in found["rows"])]
    parts = [[part, *(f"{row['parts'][part]:,.0f}" for row in found["rows"])] for part in found["rows"][0]["parts"]]
    lines = [where(found["about"]), "", *table(["part of a step, us", *names], [whole, *parts])]
    lines += ["", *table(["operation, us each", *names], _each(found["rows"]))]
    return text(lines)


def _each(rows: list[dict[str, Any]]) -> list[list[str]]:
    names = sorted({name for row in rows for name in row["operations"]}, key=lambda name: (name.split()[1], name))
    each = [[row["operations"].get(name) for row in rows] for name in names]
    return [
        [f"`{name}`", *("" if t is None else f"{t['each']:.0f} x {t['calls']:.0f}" for t in of_name)]
        for name, of_name in zip(names, each, strict=True)
    ]


def compiling() -> str | None:
    """What compiling C kernels takes."""
    found = read("compile")
    if found is None:
        return None
    rows = [
        (r["model"], str(r["kernels"]), f"{r['compilers']:.1f} s", f"{r['compilers'] / r['kernels']:.2f} s",
         f"{r['loading'] * 1e3 / r['kernels']:.2f} ms")
        for r in found["rows"]
    ]  # fmt: skip
    lines = [where(found["about"]).rstrip(".") + f", {found['compiler']}.", ""]
    lines += table(("a training step of", "kernels", "to compile them", "each", "to load one from the cache"), rows)
    return text(lines)


def traffic() -> str | None:
    """The kernels that move more than the fewest bytes."""
    found = read("traffic")
    if found is None:
        return None
    moved: dict[tuple[str, ...], list[float]] = {}
    for row in found["traffic"]:
        kind = "backward" if "backward" in row["what"] else "forward"
        kernel = "decode" if row["kernel"] == "decode" else f"{row['kernel']} {kind}"
        if (ratio := row["moved"] / row["fewest"]) >= 1.0005:
            moved.setdefault((kernel, " x ".join(f"{n:,}" for n in row["shape"])), []).append(ratio)
    cells = [(*of, str(len(ratios)), f"{min(ratios):.2f} to {max(ratios):.2f}") for of, ratios in moved.items()]
    return text(table(("kernel", "rows x columns", "cases", "moved / fewest"), cells, left=2))


def kernels() -> str | None:
    """What every configuration compiles to: the worst of each kernel module on each target."""
    found = read("kernels")
    if found is None:
        return None
    rows = found["kernels"]
    nvidia = [row for row in rows if row["target"].startswith("sm_")]
    counts = [sum(row["configurations"] for row in rows)]
    counts += [sum(row[what] for row in nvidia) for what in ("spilled", "over_shared", "without_wgmma")]
    said = "With Triton {}, `kernels: {} variants, {} spilled, {} over shared memory, {} dots without wgmma on sm_90`:"
    targets = list(dict.fromkeys(row["target"] for row in rows))
    cells: list[tuple[str, ...]] = []
    for module in dict.fromkeys(row["module"] for row in rows):
        of = {row["target"]: row for row in rows if row["module"] == module}
        each = [
            " / ".join(f"{of[target][what] // unit:,}" for target in targets)
            for what, unit in (("registers", 1), ("shared", 1024))
        ]
        spilled = str(sum(of[target]["spilled"] for target in targets if target.startswith("gfx")))
        cells.append((module.removeprefix("_"), f"{of[targets[0]]['configurations']:,}", *each, spilled))
    names = ", ".join(targets)
    head = ("module", "configurations", "most registers", "most shared memory, KiB", "spilled on gfx942")
    told = f"Four numbers in a cell are for {names}."
    return text([said.format(found["triton"], *counts), "", *table(head, cells), "", told])


def memory() -> str | None:
    """Bytes kept for backward by feed-forward blocks."""
    found = read("memory")
    if found is None:
        return None
    rows = []
    for row in found["memory"]:
        kept = row["kept"]
        of = (f"{kept[name] / kept['eager']:.2f}" for name in ("seqfuse", "seqfuse balanced", "seqfuse lean"))
        rows.append((row["model"], f"{kept['eager'] / 2**20:,.0f}", *of, f"+{row['cost']['seqfuse lean']:.1%}"))
    head = ("MLP block of", "eager, MiB", "fast", "balanced", "lean", "time of lean (est.)")
    return text(table(head, rows))


def converted() -> str | None:
    """Models that were converted: bytes that a layer saves, and the cost of a training step, of the model's own."""
    found = read("convert")
    if found is None:
        return None
    rows = []
    more = {"long": "CPU time, 1,024 tokens"} if any("long" in row for row in found["rows"]) else {}
    steps = {"step": "CPU time, 32 tokens"} | more
    for row in found["rows"]:
        kept = row["kept"]
        times = (row.get(name) for name in steps)
        cells = ["-" if t is None else f"{t['ratio']:.2f} ({t['low']:.2f} to {t['high']:.2f})" for t in times]
        rows.append((row["model"], *cells, *(f"{kept[choice] / row['eager']:.2f}" for choice in kept)))
    choices = ("fast" if choice == "save" else choice for choice in found["rows"][0]["kept"])
    head = ("model", *steps.values(), *(f"saved, `{choice}`" for choice in choices))
    return text([where(found["about"]), "", *table(head, rows)])


def peak() -> str | None:
    """A training step as it is, converted, and checkpointed: what it saves, adds to memory at its peak, and takes."""
    found = read("peak")
    if found is None:
        return None
    eager = found["rows"][0]
    rows = []
    for row in found["rows"]:
        cells = [(row["saved"], eager["saved"]), (row["peak"] - row["before"], eager["peak"] - eager["before"])]
        sizes = (f"{size / 2**20:,.0f} MiB ({size / of:.2f})" for size, of in cells)
        step = row["step"]
        between = "" if row is eager else f", {step['low']:.2f} to {step['high']:.2f}"
        taken = f"{step['seconds']:.2f} s ({step['ratio']:.2f}{between})"
        rows.append((_SIDES[row["side"]], *sizes, taken))
    about = f"""{_trained(found)} Its parameters take {eager["parameters"] / 2**20:,.0f} MiB, their gradients as much,
        and AdamW's state twice as much. In brackets: relative to eager PyTorch; of the time, the median of
        {found["rounds"]} rounds and its quartiles."""
    lines = [where(found["about"]), "", paragraphs(about)]
    head = ("model", "saved for backward", "added by a training step, at its peak", "CPU time of a training step")
    return text([*lines, *table(head, rows)])


def training() -> str | None:
    """What README.md shows of the same run: ratios alone, of one way to save less at a time."""
    found = read("peak")
    if found is None:
        return None
    added, eager = _added(), found["rows"][0]
    assert added is not None
    rows = [
        (
            _SIDES[row["side"]],
            *(f"{ratio:.2f}" for ratio in (row["saved"] / eager["saved"], added[row["side"]], row["step"]["ratio"])),
        )
        for row in found["rows"]
        if row["side"] != "lean, checkpointed"
    ]
    head = ("a training step", "saved for backward", "added to memory at its peak", "CPU time")
    note = f"""Relative to eager PyTorch, measured in one run on a CPU ({found["about"]["device"]}, one thread, torch
        {found["about"]["torch"]}). {_trained(found)}"""
    return text([*table(head, rows), "", paragraphs(note).rstrip()])


def _trained(found: dict[str, Any]) -> str:
    count, length = found["tokens"]
    return (
        f"Hugging Face's Llama with {found['layers']} layers of width {found['width']}, on {count} x {length:,} tokens "
        "in float32, with AdamW."
    )


_SIDES = {
    "eager": "eager PyTorch",
    "eager, checkpointed": "eager PyTorch, each layer checkpointed",
    "save": "`sf.convert(model)`",
    "lean": '`sf.convert(model, memory="lean")`',
    "least": '`sf.convert(model, memory="least")`',
    "lean, checkpointed": '`memory="lean"`, each layer checkpointed',
}


def parallel() -> str | None:
    """What a divided stack holds and sends."""
    found = read("parallel")
    if found is None:
        return None
    shape = found["stack"]
    lines = [
        where(found["about"]),
        "",
        f"A stack of {shape['layers']} layers of width {shape['width']} on {shape['rows']} x {shape['length']} tokens",
        "in float32. Errors are those of the worst gradient, relative to its largest number. What is sent in a step is",
        "counted at the operators, as a ring sends it; the formula is that of four sums of the hidden states a layer.",
        "",
    ]
    head = ("processes", "tokens", "error", "error in float64", "parameters", "saved", "sent", "formula")
    rows = [
        (
            str(row["processes"]),
            "sharded" if row["shares_of_rows"] else "all",
            f"{row['error_float32']:.0e}",
            f"{row['error_float64']:.0e}",
            *(f"{row[key] / 1e6:.2f} MB" for key in ("parameter_bytes", "kept_bytes", "ring_bytes", "formula_bytes")),
        )
        for row in found["parallel"]
    ]
    return text([*lines, *table(head, rows, left=2)])


def layer_counts() -> str | None:
    """Launches and bytes of one layer of each model of the gallery, of Hugging Face's in eager torch and planned."""
    found = read("layer_counts")
    if found is None:
        return None
    head = ("layer of", "launches forward, eager", "planned", "backward, eager", "planned", "saved, eager, MiB",
            "planned", '`memory="lean"`')  # fmt: skip
    rows = []
    for row in found["rows"]:
        eager, planned = row["eager"], row["planned"]
        cells = [str(len(side[pass_])) for pass_ in ("forward", "backward") for side in (eager, planned)]
        cells.append(f"{eager['saved'] / 2**20:,.0f}")
        for choice in ("save", "lean"):
            kept = planned["saved"][choice]
            cells.append(f"{kept / 2**20:,.0f} ({kept / eager['saved']:.2f})")
        rows.append((row["title"], *cells))
    return text(table(head, rows))


def families() -> int:
    """How many models the tests convert, which need more than this to be imported."""
    tree = ast.parse((ROOT / "tests" / "convert" / "families.py").read_text())
    (table,) = (
        statement.value
        for statement in tree.body
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.target) == "FAMILIES"
    )
    assert isinstance(table, ast.Dict)
    return len(table.keys)


def _added() -> dict[str, float] | None:
    """What a training step adds to memory at its peak, of each side, as a part of eager's."""
    found = read("peak")
    if found is None:
        return None
    added = {row["side"]: row["peak"] - row["before"] for row in found["rows"]}
    return {side: bytes_ / added["eager"] for side, bytes_ in added.items()}


def _llama(counted: dict[str, Any]) -> tuple[int, int, str, str, str]:
    """Launches of both passes, planned and eager, and bytes saved by each choice, as a part of eager's."""
    (layer,) = (row for row in counted["rows"] if row["make"] == "llama3_8b")
    ours, theirs = (len(layer[side]["forward"]) + len(layer[side]["backward"]) for side in ("planned", "eager"))
    saved, eager = layer["planned"]["saved"], layer["eager"]["saved"]
    kept, between, least = (f"{saved[choice] / eager:.2f}" for choice in ("save", "balanced", "lean"))
    return ours, theirs, kept, between, least


def claims() -> str | None:
    """What is claimed, each with how it is known."""
    bytes_of, beside, counted = read("memory"), read("cpu"), read("layer_counts")
    models, steps = read("convert"), _added()
    if bytes_of is None or beside is None or counted is None or models is None or steps is None:
        return None

    def saved(model: str, choice: str) -> str:
        (kept,) = (row["kept"] for row in bytes_of["memory"] if row["model"] == model)
        return f"{kept[choice] / kept['eager']:.2f}"

    def between(ratios: Iterable[float]) -> str:
        found = sorted(ratios)
        return f"{found[0]:.2f} to {found[-1]:.2f}"

    choices = "seqfuse", "seqfuse balanced"
    llama, gpt = ([saved(model, choice) for choice in choices] for model in ("llama3-8b", "gpt2-xl"))

    def kept_by(choice: str) -> str:
        return ", ".join(f"{row['model']} {row['kept'][choice] / row['eager']:.2f}x" for row in models["rows"])

    took = {row["side"]: row["step"]["ratio"] for row in (read("peak") or {})["rows"]}
    step_times = {
        side: [(row["sides"][side]["ratio"], row["name"]) for row in beside["rows"] if side in row["sides"]]
        for side in ("default", "lean")
    }
    default, lean = (f"{between(t for t, _ in of)}x (slowest: {max(of)[1]})" for of in step_times.values())
    ours, theirs, kept, balanced, least = _llama(counted)
    measured, plans = "measured on a CPU", "counted, planned for an H100"
    rows = [
        (
            f"training step of a small Llama, {how}",
            f"CPU time {took[side]:.2f}x, added peak memory {steps[side]:.2f}x",
            measured,
        )
        for how, side in (('`memory="lean"`', "lean"), ("activation checkpointing", "eager, checkpointed"))
    ]
    rows += [
        ("activation memory of a converted layer", kept_by("save"), measured),
        ('the same, `memory="lean"`', kept_by("lean"), measured),
        ("CPU time of [models and blocks](cpu.md#what-it-gains)", default, measured),
        ('the same, `memory="lean"`', lean, measured),
        ("kernel launches, a layer of Llama 3 8B built of `seqfuse.nn`", f"{ours} instead of {theirs}", plans),
        ("activation memory of that layer", f"{kept}x; balanced {balanced}x, lean {least}x", plans),
        ("activation memory of an MLP block of Llama 3 8B", f"{llama[0]}x; balanced {llama[1]}x", plans),
        ("activation memory of an MLP block of GPT-2 XL", f"{gpt[0]}x; balanced {gpt[1]}x", plans),
        (
            "outputs and gradients of converted models",
            f"equal within rounding in {families()} small models",
            "tested on a CPU",
        ),
        ("values and gradients of fused kernels", "within the error bound", "tested in Triton's interpreter, and as C"),
        ("all kernels compile", "sm_80, sm_90, sm_100, gfx942", "compiled without a GPU"),
    ]
    return text(table(("what", "result, relative to eager PyTorch", "how it is known"), rows, left=3))


DRAWN: dict[str, Callable[[], str | None]] = {
    "cpu": cpu,
    "cpu_parts": cpu_parts,
    "compile": compiling,
    "host": host,
    "kernels": kernels,
    "traffic": traffic,
    "memory": memory,
    "convert": converted,
    "peak": peak,
    "training": training,
    "layer_counts": layer_counts,
    "parallel": parallel,
    "targets": goals,
    "gpu": gpu,
    "speed": speed,
    "steps": steps,
    "layer_steps": layer_steps,
    "gpu_tiles": tiles,
    "gpu_tune": tuned,
    "gpu_models": gpu_models.models,
    "gpu_memory": gpu_models.front,
    "gpu_memory_summary": gpu_models.summary,
    "gpu_low_precision": gpu_models.low_precision,
    "claims": claims,
}


def redrawn(page: str) -> str:
    """A page with the tables as they are to be drawn now."""

    def drawn(figures: re.Match[str]) -> str:
        table = DRAWN[figures[2]]()
        return figures[0] if table is None else figures[1] + table

    return FIGURES.sub(drawn, page)


def main() -> None:
    print(goals())
    for page in PAGES:
        old = page.read_text()
        if (new := redrawn(old)) != old:
            page.write_text(new)
            print(f"rewrote {page.relative_to(ROOT)}")
    figures = ROOT / "docs" / "figures"
    drawn = plots.draw({"gpu": read("gpu")}, figures)
    print(f"drew {', '.join(drawn)}" if drawn else "no plots: nothing was measured on a GPU")


if __name__ == "__main__":
    main()

"""Tables of GPU results."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tables import MIB, Lines, Results, asterisk, choice, drawn, read, relative, span, starred, table, where, wrapped

PEERS = {"eager": "eager PyTorch", "compile": "`torch.compile`", "liger": "Liger", "quack": "quack"}
PEERS_OF_ROWS = {"eager": "torch eager", "compile": "torch.compile", "liger": "Liger-Kernel", "quack": "quack"}
OF_KERNELS = ("eager", "liger", "quack")
OF_LAYERS = ("eager", "compile", "liger")
STEPS = ("MLP block forward + backward", "attention block forward + backward", "layer forward + backward")
CONVERTED = "converted: forward + backward"
EQUAL = 1.005
ELSEWHERE = ("memory", "converted", "recipes")  # groups with their own tables


@drawn("gpu")
def gpu() -> Lines:
    """All GPU rows by group; then the wrong ones, and those that were not run for lack of time."""
    found = read("gpu")
    if found is None:
        return ["Not run yet: no GPU was at hand."]
    ceilings, rows = found["ceilings"], found["rows"]
    rates = ", ".join(f"{rate:.0f} TFLOP/s in {dtype}" for dtype, rate in ceilings["cublas_TFLOP_per_s"].items())
    absent = [f" {name} was not installed." for name, said in found["peers"].items() if "not installed" in said]
    there = [f"{name} {said}" for name, said in found["peers"].items() if "not installed" not in said]
    lines = [f"{where(found)} Peers: {', '.join(there).replace('liger', 'Liger-Kernel')}.{''.join(absent)}", ""]
    lines += [f"Measured in the same run: a copy of {ceilings['copy_TB_per_s']:.2f} TB/s; cuBLAS {rates}.", ""]
    good = [row for row in rows.values() if row["status"] == "ok" and not row["group"].startswith(ELSEWHERE)]
    if another := asterisk(good):
        lines += [wrapped(f"{another} Its ratios and its roofline are of that GPU."), ""]
    by_group = {group: [row for row in good if row["group"] == group] for group in sorted(r["group"] for r in good)}
    for group, members in by_group.items():
        if "as_called" in members[0]:
            title = "tiny blocks, which wait for the CPU" if group == "host" else group
            lines += [f"**{title[0].upper()}{title[1:]}**", "", *_group(members), ""]
    cells = [_kernel(of, members) for of, members in by_group.items() if "as_called" not in members[0]]
    head = ("kernel", "rows", "of roofline", *(f"time / {PEERS_OF_ROWS[peer]}" for peer in OF_KERNELS))
    lines += ["**Kernels**", "", *table(head, cells), ""]
    bad: dict[str, Lines] = {}
    for row in rows.values():
        if row["status"] in ("red", "failed"):
            why = " ".join(row["why"].split()).partition(". ")[0].replace("|", "\\|")[:200]
            status = "wrong" if row["status"] == "red" else "failed"
            bad.setdefault(f"{row['group']}: {status}, {why}", []).append(row["name"])
    if bad:
        lines += ["No speed, because the result was wrong or the run failed:", ""]
        lines += [*(f"- {', '.join(of)}, {why}" for why, of in bad.items()), ""]
    late = Counter(key.partition(":")[0] for key in found.get("planned", ()) if key not in rows)
    if late:
        told = "; ".join(f"{group}: {count}" for group, count in late.items())
        lines += [wrapped(f"Rows for which there was no time, {sum(late.values())}: {told}."), ""]
    return lines[:-1]


def _group(rows: list[Results]) -> Lines:
    """Blocks of a group: times relative to peers, fractions of the roofline, and saved bytes."""
    cells: list[list[Any]] = []
    # By name, with numbers in numeric order.
    for row in sorted(rows, key=lambda row: re.sub(r"\d+", lambda number: number[0].zfill(9), row["name"])):
        kept = {of: counted["kept"] for of, counted in row.get("memory", {}).items() if counted["kept"]}
        saved = kept["seqfuse"] / kept["eager"] if {"seqfuse", "eager"} <= kept.keys() else None
        ratios = [_as_called(row, "seqfuse", peer) for peer in PEERS_OF_ROWS]
        numbers = f"{row['times']['seqfuse']['median']:,.0f}", *ratios, round(row["fraction"]["seqfuse"], 2) or None
        cells.append([starred(row, row["name"]), *numbers, saved, _as_called(row, "seqfuse lean", "seqfuse")])
    peers = (f"/ {name}" for name in PEERS_OF_ROWS.values())
    head = ["", "GPU time, µs", *peers, "of roofline", "saved / torch eager", "`lean` / `fast`"]
    # Without columns that have no number.
    there = [i for i in range(len(head)) if any(row[i] is not None for row in cells)]
    return table([head[i] for i in there], [[row[i] for i in there] for row in cells])


def _as_called(row: dict[str, Any], side: str, than: str) -> str | None:
    """The ratio of device times, and in brackets that of the calls."""
    ratios = [relative(row[times], side, than) for times in ("times", "as_called")]
    return None if None in ratios else "{:.2f} ({:.2f})".format(*ratios)


def _kernel(group: str, rows: list[Results]) -> list[Any]:
    """The rows of a kernel in one line: the range of each number, and the name of the slowest row."""
    other = sum("commit" in row for row in rows)
    count = f"{len(rows)}, {other}*" if 0 < other < len(rows) else f"{len(rows)}{'*' * (other > 0)}"
    cells = [group, count, span(row["fraction"]["seqfuse"] for row in rows)]
    for peer in OF_KERNELS:
        measured = [row for row in rows if peer in row["times"]]
        found = {starred(r, r["name"]): round(relative(r["times"], "seqfuse", peer) or 0, 2) for r in measured}
        said = span(found.values()) if found else "-"
        slowest = max(found.items(), key=lambda entry: entry[::-1])[0] if found else ""
        cells.append(f"{said} ({slowest})" if " to " in said else said)
    return cells


@drawn("gpu_profile", "gpu_profile")
def profile(found: Results) -> Lines:
    """Kernel times of a layer, in eager torch and here, and the fraction of eager's time in GEMMs and attention."""
    kinds = ("GEMMs", "attention", "other")
    times = {(row["model"], row["of"]): [row[kind] for kind in kinds] for row in found["profile"]}
    cells: list[list[Any]] = []
    for (model, of), parts in times.items():
        *_, all_else = eager = times[model, "eager"]
        numbers = [part / 1000 for part in (*parts, sum(parts))]
        left = 1 - all_else / sum(eager) if of == "eager" else ""
        cells.append([model, PEERS_OF_ROWS.get(of, of), *numbers, sum(parts) / sum(eager), left])
    head = ("layer of", "", "GEMMs", "attention", "all else", "sum, ms", "/ torch eager", "without all else")
    return [where(found), "", *table(head, sorted(cells, key=lambda row: row[:2]), left=2)]


EXPERTS = {
    "eager": "Hugging Face, a loop over experts",
    "grouped_mm": "Hugging Face, grouped GEMMs",
    "loop": "a loop written by hand",
    "seqfuse": "seqfuse",
    "seqfuse lean": 'seqfuse, `memory="lean"`',
}


@drawn("gpu_experts", "gpu")
def experts(found: Results) -> Lines:
    """Milliseconds of a mixture's experts for each implementation, on the device and as called."""
    lines: Lines = [where(found)]
    for row in _of(found, "experts"):
        shape, clocks = row["shape"], (row["times"], row["as_called"])
        sizes = f"{shape['experts']} experts of {shape['H']:,} x {shape['F']:,}, {shape['M']:,} tokens, bfloat16"
        head = [f"{row['name'].split()[0]}, {sizes}"]
        head += ["GPU, ms", "/ grouped GEMMs", "as called, ms", "/ grouped GEMMs"]
        cells = [
            [name, *(c for t in clocks for c in (f"{t[side]['median'] / 1000:.1f}", relative(t, side, "grouped_mm")))]
            for side, name in EXPERTS.items()
        ]
        lines += ["", *table(head, cells)]
    return lines


@drawn("slower_gpu", "gpu")
def slower_gpu(found: Results) -> Lines:
    """The number of slower rows, and the slowest, by group of rows and peer."""
    ratios: dict[tuple[str, str], dict[str, float]] = {}
    for row in found["rows"].values():
        times = row.get("as_called") or row.get("times") or {}
        for peer, name in PEERS.items():
            if row["status"] == "ok" and (ratio := relative(times, "seqfuse", peer)) and "recipes" not in row["group"]:
                group = "a call of a tiny block" if row["group"] == "host" else row["group"]
                ratios.setdefault((group, name), {})[starred(row, row["name"])] = ratio
    cells: list[tuple[str, ...]] = []
    for (group, name), of in ratios.items():
        worst = max(of, key=of.__getitem__)
        if of[worst] > EQUAL:
            lost = sum(ratio > EQUAL for ratio in of.values())
            cells.append((group, name, f"{lost} of {len(of)}", f"{of[worst]:.2f} ({worst})"))
    lost = table(("what", "slower than", "rows", "worst: time / peer"), sorted(cells), left=2)
    another = asterisk(found["rows"].values())
    return [*lost, *(["", another] if another else [])]


@drawn("gpu_tune", "gpu_tune")
def tuned(found: Results) -> Lines:
    """Measurements of `sf.tune` on a GPU, by fusion."""
    rows: dict[str, list[float]] = {}
    for row in found["tune"]:
        rows.setdefault(row["fusion"], []).append(row["fused_us"] / row["unfused_us"])
    layers = sorted({row["model"] for row in found["tune"]})
    tokens = " and ".join(sorted({f"{row['tokens']:,}" for row in found["tune"]}))
    said = f"{found['about']['device']}, {tokens} tokens, layers of {', '.join(layers)}; training and inference."
    cells = ((name, len(of), span(of)) for name, of in sorted(rows.items()))
    return [*table(("fusion", "positions", "time fused / unfused"), cells), "", said]


@drawn("steps", "gpu")
def steps(found: Results) -> Lines:
    """Blocks and layers of some models: time as called, with CPU overhead, and on the device only."""
    rows = [(row["group"].partition(" forward")[0], row) for row in measured(found, *STEPS)]
    converted = [("model of Hugging Face", row) for row in measured(found, CONVERTED)]
    rows = sorted(rows, key=lambda entry: (entry[0], _step(entry[1])[0])) + converted
    cells = [[group, *_step(row), relative(row["times"], "seqfuse", "eager")] for group, row in rows]
    head = ("forward + backward of", "model", *(f"time / {PEERS[name]}" for name in OF_LAYERS), "GPU time / eager")
    return [*table(head, cells, left=2), "", _how_steps(found, *STEPS)]


@drawn("layer_steps", "gpu")
def layer_steps(found: Results) -> Lines:
    """The part of `steps` in README.md: whole layers of the last run, as called."""
    head = ("forward + backward of a layer of", *(f"time / {PEERS[name]}" for name in OF_LAYERS))
    layers, converted = (
        sorted((_step(row) for row in measured(found, group) if "commit" not in row), key=lambda cells: cells[0])
        for group in (STEPS[-1], CONVERTED)
    )
    return [*table(head, [*layers, *converted]), "", _how_steps(found)]


def measured(found: Results, *groups: str) -> Iterator[dict[str, Any]]:
    """The rows of some groups with 8,192 tokens."""
    for row in found["rows"].values():
        if row["group"] in groups and row["status"] == "ok" and row["shape"]["M"] == 8192:
            yield row


def _step(row: dict[str, Any]) -> list[Any]:
    name = starred(row, row["shape"]["model"])
    if row["group"] == CONVERTED:
        name += f", {row['shape']['layers']} layers of Hugging Face, converted"
    return [name, *(relative(row["as_called"], "seqfuse", peer) for peer in OF_LAYERS)]


def _how_steps(found: Results, *groups: str) -> str:
    return wrapped(f"""{found["about"]["device"]}, torch {found["about"]["torch"]}, bfloat16, 8,192 tokens, dropout 0.1
        in the layers of GPTs, random data; medians of interleaved runs. Below 1.0 seqfuse is faster. A dash: no valid
        result from that library. {asterisk(measured(found, *groups))}""")


def _of(found: Results, group: str) -> list[Results]:
    return [row for row in found["rows"].values() if row["status"] == "ok" and group in row["group"]]


def _model(row: dict[str, Any]) -> str:
    shape = row["shape"]
    return f"{shape['layers']} layers of `seqfuse.nn` with the sizes of {shape['model']}, {shape['M']:,} tokens"


def _choice(side: str) -> str:
    checkpointed = "eager PyTorch, each layer checkpointed"
    return {"checkpointed": checkpointed, "seqfuse": choice("fast")}.get(side) or choice(side.removeprefix("seqfuse "))


@drawn("gpu_memory", "gpu")
def front(found: Results) -> Lines:
    """Time against peak memory of layers, for each memory choice, measured by torch and planned."""
    rows, lines = _of(found, "memory"), [where(found), ""]
    for row in rows:
        peak, times = {side: of["peak"] for side, of in row["memory"].items()}, row["times"]
        head = ("", "GPU time", "peak memory added by a step", "the plan's peak")
        cells = [
            [_choice(side), f"{times[side]['median'] / 1000:.1f} ms ({relative(times, side, 'eager'):.2f})",
             f"{peak[side] / MIB:,.0f} MiB ({peak[side] / peak['eager']:.2f})",
             f"{row['said'][side]['peak'] / MIB:,.0f} MiB" if side in row["said"] else ""]
            for side in sorted(times, key=lambda side: side.startswith("seqfuse"))
        ]  # fmt: skip
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
    """The part of `gpu_memory` in README.md: only ratios."""
    lines: Lines = []
    for row in _of(found, "memory"):
        peak = {side: of["peak"] for side, of in row["memory"].items()}
        sides = ("eager", "checkpointed", "seqfuse lean", "seqfuse 0.5")
        cells = [[_choice(s), relative(row["times"], s, "eager"), peak[s] / peak["eager"]] for s in sides]
        head = f"{_model(row)}, same GPU, forward + backward", "GPU time", "peak added, with parameter gradients"
        lines += [*table(head, cells), ""]
    return lines[:-1]


RECIPES = {
    "eager": "eager PyTorch, bfloat16",
    "compile": "`torch.compile`, bfloat16",
    "seqfuse": "seqfuse, bfloat16",
    "current": "`Float8CurrentScaling`",
    "delayed": "`Float8DelayedScaling`",
    "row": "`Float8RowScaling`",
    "block": "`Float8BlockScaling`",
    "by hand": "FP8 module of torch calls (current scaling), eager",
    "by hand, compiled": "the same FP8 module, compiled",
    "GEMMs alone": "only the three 8-bit GEMMs",
}


def recipes(of: str, found: Results) -> Lines:
    """Milliseconds of forward and backward passes of feed-forward blocks, or of a `Linear`, with each recipe."""
    rows = {name.rpartition("backward: ")[2]: row for name, row in found["rows"].items() if of in name}
    cells = [
        [name, *(r["times"][side]["median"] / 1000 if side in r["times"] else "" for r in rows.values())]
        for side, name in RECIPES.items()
        if any(side in row["times"] for row in rows.values())
    ]
    names = (n.replace(" feed-forward block, 8192", "").replace("compiled by hand", "in another run") for n in rows)
    another = asterisk(rows.values())
    head = (starred(row, name) for row, name in zip(rows.values(), names, strict=True))
    return [where(found), "", *table(("", *head), cells), *(["", another] if another else [])]


for table_name, rows_of in (("gpu_low_precision", "feed-forward"), ("gpu_low_precision_linear", "Linear")):
    drawn(table_name, "gpu_low_precision")(functools.partial(recipes, rows_of))


SCALES = {
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
    """Microseconds to quantize a tensor of each size, by granularity of the scales."""
    rows = {n.removeprefix("quantize "): row["times"] for n, row in found["rows"].items() if n.startswith("quantize")}
    cells = [[name, *(round(times[how]["median"]) for times in rows.values())] for how, name in SCALES.items()]
    return table(("scales", *rows), cells)

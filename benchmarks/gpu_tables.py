"""All rows that a GPU measured, for docs/dev/benchmarks.md: blocks by row, kernels as a line each."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tables import Lines, Results, Rows, drawn, of_another_run, read, relative, starred, table, where, wrapped


@drawn("gpu")
def gpu() -> Lines:
    """All rows that a GPU measured, by group; then those that were wrong, and those there was no time for."""
    found = read("gpu")
    if found is None:
        return ["Not run yet: no GPU was at hand."]
    ceilings, rows = found["ceilings"], found["rows"]
    rates = ", ".join(f"{rate:.0f} TFLOP/s in {dtype}" for dtype, rate in ceilings["cublas_TFLOP_per_s"].items())
    absent = [f" {name} was not installed." for name, said in found["peers"].items() if "not installed" in said]
    there = [f"{name} {said}" for name, said in found["peers"].items() if "not installed" not in said]
    lines = [f"{where(found)} Peers: {', '.join(there).replace('liger', 'Liger-Kernel')}.{''.join(absent)}", ""]
    lines += [f"Measured in the same run: a copy of {ceilings['copy_TB_per_s']:.2f} TB/s; cuBLAS {rates}.", ""]
    # docs/memory.md and docs/convert.md have tables of the other groups.
    elsewhere = ("memory", "converted")
    good = [row for row in rows.values() if row["status"] == "ok" and not row["group"].startswith(elsewhere)]
    if another := of_another_run(good):
        lines += [wrapped(f"{another} Its ratios and its roofline are of that GPU."), ""]
    by_group = {group: [row for row in good if row["group"] == group] for group in (r["group"] for r in good)}
    for group, members in sorted(by_group.items()):
        if "as_called" in members[0]:
            title = "tiny blocks, which wait for the CPU" if group == "host" else group
            lines += [f"**{title[0].upper()}{title[1:]}**", "", *_group(sorted(members, key=_by_size))]
    cells = [_range(of, members) for of, members in sorted(by_group.items()) if "as_called" not in members[0]]
    head = ("kernel", "rows", "of roofline", *(f"time / {_NAMES[peer]}" for peer in _OF_KERNELS))
    lines += ["**Kernels**", "", *table(head, cells), ""]
    bad: dict[str, Lines] = {}
    for row in rows.values():
        if row["status"] in ("red", "failed"):
            why = " ".join(row["why"].split()).partition(". ")[0].replace("|", "\\|")[:200]
            for said, plainly in _WHY.items():
                why = re.sub(said, plainly, why)
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


@drawn("gpu_profile", "gpu_profile")
def profile(found: Results) -> Lines:
    """What the kernels of a layer take, in eager torch and here, and what would be left of eager's time."""
    cells: list[Lines] = []
    times = {
        (row["model"], row["of"]): [row[kind] for kind in ("GEMMs", "attention", "other")] for row in found["profile"]
    }
    for (model, of), parts in times.items():
        whole, all_else = sum(times[model, "eager"]), times[model, "eager"][-1]
        numbers = [f"{part / 1000:.2f}" for part in (*parts, sum(parts))]
        left = f"{1 - all_else / whole:.2f}" if of == "eager" else ""
        cells.append([model, _NAMES.get(of) or of, *numbers, f"{sum(parts) / whole:.2f}", left])
    head = ("layer of", "", "GEMMs", "attention", "all else", "sum, ms", "/ torch eager", "without all else")
    return [where(found), "", *table(head, sorted(cells), left=2)]


_WHY = {  # what a row wrote, and how a reader is told
    r"fused differs from unfused out\[(\d+)\]: element: \\\|e_f\\\| ([\d.]+) > ([\d.]+) at .*": (
        r"output \1 differs from the unfused result by \2 at one element, where \3 is allowed"
    ),
    r"results are ([\d.]+) from what they should be": r"results differ from the reference by \1",
    "OutOfMemoryError: CUDA out of memory": "out of memory",
}


def _by_size(row: dict[str, Any]) -> list[tuple[int, str]]:
    """Its name with numbers in their order."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", row["name"])]


_NAMES = {"eager": "torch eager", "compile": "torch.compile", "liger": "Liger-Kernel", "quack": "quack"}
_OF_KERNELS = ("eager", "liger", "quack")


def _group(rows: Rows) -> Lines:
    """Blocks of a group: their times relative to peers, how near they are to the roofline, and what they save."""
    cells: list[Lines] = []
    for row in rows:
        sides = row["times"], row["as_called"]
        ratios = [[relative(side, "seqfuse", peer) for side in sides] for peer in _NAMES]
        lean = [relative(side, "seqfuse lean", "seqfuse") for side in sides]
        bytes_of = {of: counted["kept"] for of, counted in row.get("memory", {}).items() if counted["kept"]}
        both = {"seqfuse", "eager"} <= bytes_of.keys()
        saved = f"{bytes_of['seqfuse'] / bytes_of['eager']:.2f}" if both else "-"
        numbers = f"{row['times']['seqfuse']['median']:,.0f}", *map(_as_called, ratios)
        cells.append(
            [
                starred(row, row["name"]),
                *numbers,
                f"{row['fraction']['seqfuse']:.2f}",
                saved,
                _as_called(lean),
            ]
        )
    peers = [f"/ {name}" for name in _NAMES.values()]
    head = ("", "GPU time, µs", *peers, "of roofline", "saved / torch eager", "`lean` / `fast`")
    return [*table(*_filled(head, cells)), ""]


def _filled(head: tuple[str, ...], rows: list[Lines]) -> tuple[Lines, list[Lines]]:
    """A table without the columns that have no number."""
    at = [i for i in range(len(head)) if {row[i] for row in rows} - {"-", "0.00"}]
    return [head[i] for i in at], [[row[i] for i in at] for row in rows]


def _as_called(ratios: Lines) -> str:
    """The ratio on the device, and in brackets that of the calls."""
    return ratios[0] if ratios[0] == "-" else f"{ratios[0]} ({ratios[1]})"


def _range(group: str, rows: Rows) -> Lines:
    """The rows of a kernel in one line: the range of each number, and the slowest row by name."""
    reached = [f"{edge(row['fraction']['seqfuse'] for row in rows):.2f}" for edge in (min, max)]
    other = sum("commit" in row for row in rows)
    count = f"{len(rows)}, {other}*" if 0 < other < len(rows) else f"{len(rows)}{'*' * (other > 0)}"
    cells = [group, count, " to ".join(dict.fromkeys(reached))]
    for peer in _OF_KERNELS:
        measured = [row for row in rows if peer in row["times"]]
        found = sorted((float(relative(r["times"], "seqfuse", peer)), starred(r, r["name"])) for r in measured)
        span = [*dict.fromkeys(f"{ratio:.2f}" for ratio, _ in found[:: max(1, len(found) - 1)])]
        cells.append(f"{' to '.join(span)} ({found[-1][1]})" if len(span) > 1 else "".join(span) or "-")
    return cells


_EXPERTS = {
    "eager": "Hugging Face, a loop over experts",
    "grouped_mm": "Hugging Face, grouped GEMMs",
    "loop": "a loop written by hand",
    "seqfuse": "seqfuse",
    "seqfuse lean": 'seqfuse, `memory="lean"`',
}


@drawn("gpu_experts", "gpu")
def experts(found: Results) -> Lines:
    """Milliseconds of the experts of a mixture by each implementation, on the device and as called."""
    lines: Lines = [where(found)]
    for row in found["rows"].values():
        if row["group"] == "experts" and row["status"] == "ok":
            shape, called = row["shape"], row["as_called"]
            sizes = f"{shape['experts']} experts of {shape['H']:,} x {shape['F']:,}, {shape['M']:,} tokens, bfloat16"
            cells = [
                [name, f"{row['times'][side]['median'] / 1000:.1f}", relative(row["times"], side, "grouped_mm"),
                 f"{called[side]['median'] / 1000:.1f}", relative(called, side, "grouped_mm")]
                for side, name in _EXPERTS.items()
            ]  # fmt: skip
            head = (
                f"{row['name'].split()[0]}, {sizes}",
                "GPU, ms",
                "/ grouped GEMMs",
                "as called, ms",
                "/ grouped GEMMs",
            )
            lines += ["", *table(head, cells)]
    return lines

"""Tables of what a GPU measured: every row of it, blocks, tiles, fusions, and which targets are met."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import targets
from tables import paragraphs, read, table, text, where

ELSEWHERE = ("memory", "converted")  # rows that docs/memory.md and docs/convert.md have tables of


def verdicts() -> list[targets.Verdict]:
    """Every target by what there is."""
    found: dict[str, Any] = {"gpu": (read("gpu") or {}).get("rows", {}).values()}
    for name in ("memory", "host", "planning"):
        found[name] = (read(name) or {}).get(name, ())
    return targets.judged(found)


def goals() -> str:
    """The targets: met, missed or not run, and the worst row of each."""
    rows = []
    for verdict in verdicts():
        cells = ["", ""]
        if verdict.values:
            name, value = verdict.worst
            told = f"{value:.2f} ({name})" if math.isfinite(value) else f"wrong: {name}"
            cells = [f"{verdict.reached} of {len(verdict.values)}", told]
        rows.append((verdict.target.what, verdict.target.wanted, verdict.status, *cells))
    return text(table(("what", "target", "", "rows", "worst"), rows, left=1))


def gpu() -> str:
    """All rows that a GPU measured, by group; then those that were wrong, and those there was no time for."""
    found = read("gpu")
    if found is None:
        return "Not run yet: no GPU was at hand.\n"
    ceilings, rows = found["ceilings"], found["rows"]
    rates = ", ".join(f"{rate:.0f} TFLOP/s in {dtype}" for dtype, rate in ceilings["cublas_TFLOP_per_s"].items())
    peers = ", ".join(f"{name} {number}" for name, number in found["peers"].items())
    lines = [f"{where(found['about'])} Peers: {peers}.", ""]
    lines += [f"Measured in the same run: a copy of {ceilings['copy_TB_per_s']:.2f} TB/s; cuBLAS {rates}.", ""]
    good = [row for row in rows.values() if row["status"] == "ok"]
    earlier = {row["commit"] for row in good if "commit" in row}
    lines += [f"Rows marked with an asterisk are of another run, of commit {commit}.\n" for commit in sorted(earlier)]
    for group in dict.fromkeys(row["group"] for row in good if not row["group"].startswith(ELSEWHERE)):
        lines += [f"**{group[0].upper()}{group[1:]}**", "", *_group([r for r in good if r["group"] == group]), ""]
    bad = [(key, row) for key, row in rows.items() if row["status"] in ("red", "failed")]
    if bad:
        lines += ["Wrong or failed, so without a speed:", ""]
        lines += [*(f"- {key}: {row['status']}, {_one_line(row['why'])}" for key, row in bad), ""]
    late = Counter(key.partition(":")[0] for key in found.get("planned", ()) if key not in rows)
    if late:
        told = "; ".join(f"{group}: {count}" for group, count in late.items())
        lines += [paragraphs(f"Rows for which there was no time, {sum(late.values())}: {told}.").rstrip(), ""]
    return text(lines[:-1])


def tiles() -> str | None:
    """What norms and decoding take by the tile that is launched now, where that was measured, and by the one before."""
    found = [each for each in (read("gpu_tiles"), read("gpu_wide")) if each is not None]
    if not found:
        return None
    cells: list[list[str]] = []
    every = [(name, swept, each["about"]["device"]) for each in found for name, swept in each["tiles"].items()]
    for name, swept, device in sorted(every, key=lambda one: one[0]):
        times, told = swept["us"], _launched_now(name)
        now = times["default"] if told == "as before" else times.get(told)
        if now is None:  # another run has it
            continue
        rows = "" if swept["rows"] is None else f", {swept['rows']:,} rows"
        sdpa = f"{times['sdpa']:,.1f}" if "sdpa" in times else ""
        cells.append([name + rows, device.split()[1], f"{times['default']:,.1f}", f"{now:,.1f}", sdpa])
    return text(table(("what", "GPU", "tile before, us", "tile now, us", "SDPA, us"), cells, left=2))


def tuned() -> str | None:
    """What `sf.tune` measured on a GPU, by fusion."""
    found = read("gpu_tune")
    if found is None:
        return None
    rows: dict[str, list[Any]] = {}
    for row in found["tune"]:
        rows.setdefault(row["fusion"], []).append(row)
    cells: list[list[str]] = []
    for fusion, measured in sorted(rows.items()):
        shares = [row["fused_us"] / row["unfused_us"] for row in measured]
        cells.append([fusion, str(len(measured)), f"{min(shares):.2f} to {max(shares):.2f}"])
    layers = sorted({f"{row['model']} of {row['tokens']:,} tokens" for row in found["tune"]})
    said = f"{found['about']['device']}, layers of {', '.join(layers)}; training and inference."
    return text([*table(("fusion", "places", "time fused / unfused"), cells), "", said])


def _launched_now(name: str) -> str:
    """The tile of a swept kernel, as the sweep has it; `as before` where it is the same."""
    from tile_sweep import named

    from seqfuse.kernels import norm

    kind, width, *what = name.split()
    if kind == "decode":
        return f"sp{max(1, 132 // (8 * int(width)))} bn128 st3 w4"
    behind, added = "behind" in what, len(what) > 1
    ahead = norm.hopper_forward_tile(int(width), kind == "LayerNorm", behind)
    tile = (
        ahead
        if what[0] == "forward"
        else norm.hopper_backward_tile(int(width), (2 if kind == "LayerNorm" else 1) + behind, added)
    )
    if tile is None or (int(width) > 8192 and behind):
        return "as before"
    return named(tile) + ", sums apart" * (not tile.sums)


_STEPS = ("MLP block forward + backward", "attention block forward + backward", "layer forward + backward")


def layer_steps() -> str | None:
    """What README.md shows of `steps`: whole layers, as they are called."""
    return steps(_STEPS[-1:])


def steps(groups: Sequence[str] = _STEPS) -> str | None:
    """Blocks and layers of some models: time as it is called, with what the host takes, and on the device alone."""
    found = read("gpu")
    if found is None:
        return None
    peers = {"eager": "eager PyTorch", "compile": "`torch.compile`", "liger": "Liger"}
    cells: list[list[str]] = []
    for row in found["rows"].values():
        if row["group"] in groups and row["status"] == "ok" and row["shape"]["M"] == 8192:
            kinds = [(row["as_called"], peer) for peer in peers] + [(row["times"], "eager")]
            ratios = [f"{t['seqfuse']['median'] / t[p]['median']:.2f}" if p in t else "-" for t, p in kinds]
            cells.append([row["group"].partition(" forward")[0], row["shape"]["model"], *ratios])
    head = ("forward + backward of", "model", *(f"time / {name}" for name in peers.values()), "GPU time / eager")
    if len(groups) == 1:
        head, cells = ("forward + backward of a layer of", *head[2:-1]), [cell[1:-1] for cell in cells]
    note = f"""{found["about"]["device"]}, torch {found["about"]["torch"]}, bfloat16, 8,192 tokens, dropout 0.1 in the
        layers of GPTs, random data; medians of calls that take turns. Below 1.0 seqfuse is faster."""
    return text([*table(head, sorted(cells), left=min(len(groups), 2)), "", paragraphs(note).rstrip()])


def speed() -> str:
    """The plots of a GPU, and how many targets are met."""
    found = read("gpu")
    if found is None:
        return "No plot of speeds stands here: no GPU has run the kernels yet.\n"
    lines = [where(found["about"]), "", "![Speed against others](figures/peers.svg)", ""]
    lines += ["![Fraction of what the device can do](figures/roofline.svg)", ""]
    return text([*lines, f"Met: {' and '.join(scored())}."])


def scored() -> list[str]:
    """How many targets are met: of time on a GPU, and of what is counted or timed without one."""
    measured = [verdict for verdict in verdicts() if verdict.values]
    parts: list[str] = []
    for what, chosen in (("times on a GPU", False), ("saved bytes, planning and CPU overhead", True)):
        found = [
            v.status
            for v in measured
            if bool(re.search("bytes|planning|plan-cache|CPU overhead", v.target.what)) is chosen
        ]
        parts.append(f"{found.count('met')} of {len(found)} targets of {what}")
    return parts


def _group(rows: list[dict[str, Any]]) -> list[str]:
    called = "as_called" in rows[0]
    peers = list(dict.fromkeys(name for row in rows for name in row["times"] if name != "seqfuse"))
    cells = []
    for row in rows:
        times, own = row["times"], row["times"]["seqfuse"]
        line = [
            row["name"] + "*" * ("commit" in row),
            f"{own['median']:,.1f} ({own['low']:,.1f} to {own['high']:,.1f})",
        ]
        line += [f"{row['fraction']['seqfuse']:.2f}"]
        line += [f"{times[p]['median'] / own['median']:.2f}" if p in times else "-" for p in peers]
        if called:
            by_host = row["as_called"]
            line += [
                f"{by_host[p]['median'] / by_host['seqfuse']['median']:.2f}" if p in by_host else "-" for p in peers
            ]
            kept = {name: found["kept"] for name, found in row["memory"].items() if found["kept"]}
            line += [f"{kept['seqfuse'] / kept['eager']:.2f}" if {"seqfuse", "eager"} <= kept.keys() else "-"]
        cells.append(line)
    head = ["", "µs", "of the floor", *(f"x {peer}" for peer in peers)]
    head += [*(f"x {peer}, as called" for peer in peers), "kept / eager's"] if called else []
    return table(head, cells)


def _one_line(words: str) -> str:
    return " ".join(words.split()).replace("|", "\\|")[:200]

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
            told = f"{value:.2f} ({name})" if math.isfinite(value) else f"no result: {name}"
            cells = [f"{verdict.reached} of {len(verdict.values)}", told]
        rows.append((verdict.target.what, verdict.target.wanted, verdict.status, *cells))
    return text(table(("what", "target", "", "rows that meet it", "worst row"), rows, left=1))


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
    good = [row for row in rows.values() if row["status"] == "ok" and not row["group"].startswith(ELSEWHERE)]
    earlier = {row["commit"] for row in good if "commit" in row}
    lines += [f"Rows marked with an asterisk are of another run, of commit {commit}.\n" for commit in sorted(earlier)]
    by_group = {group: [row for row in good if row["group"] == group] for group in (r["group"] for r in good)}
    for group, members in sorted(by_group.items(), key=lambda one: ("as_called" not in one[1][0], one[0])):
        title = "tiny blocks, which wait for the host" if group == "host" else group
        lines += [f"**{title[0].upper()}{title[1:]}**", "", *_group(sorted(members, key=_by_size)), ""]
    bad: dict[str, list[str]] = {}
    for row in rows.values():
        if row["status"] in ("red", "failed"):
            bad.setdefault(f"{row['group']}: {_BAD[row['status']]}, {_one_line(row['why'])}", []).append(row["name"])
    if bad:
        lines += [
            "Wrong or failed, so without a speed:",
            "",
            *(f"- {', '.join(of)}, {why}" for why, of in bad.items()),
            "",
        ]
    late = Counter(key.partition(":")[0] for key in found.get("planned", ()) if key not in rows)
    if late:
        told = "; ".join(f"{group}: {count}" for group, count in late.items())
        lines += [paragraphs(f"Rows for which there was no time, {sum(late.values())}: {told}.").rstrip(), ""]
    return text(lines[:-1])


_BAD = {"red": "wrong", "failed": "failed"}


def _by_size(row: dict[str, Any]) -> list[tuple[int, str]]:
    """Its name with numbers in their order."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", row["name"])]


def tiles() -> str | None:
    """What norms and decoding take by the tile that is launched now, where that was measured, and by the one before."""
    found = [each for each in (read("gpu_tiles"), read("gpu_wide")) if each is not None]
    if not found:
        return None
    shares: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    every = [(name, swept, each["about"]["device"]) for each in found for name, swept in each["tiles"].items()]
    for name, swept, device in every:
        times, told = swept["us"], _launched_now(name)
        now = times["default"] if told == "as before" else times.get(told)
        if now is not None:  # otherwise another run has it
            kind, size, *what = name.split()
            behind = {"behind": "behind bias, dropout and residual", "with": "with the gradient of the residual"}
            passes = ["attention"] if kind == "decode" else [what[0], *(behind[w] for w in what[1:2])]
            shares.setdefault((f"{kind} {' '.join(passes)}", device.split()[1]), []).append(
                (int(size), now / times["default"])
            )
    cells: list[list[str]] = []
    for of, measured in sorted(shares.items()):
        sizes, ratios = zip(*measured, strict=True)
        unit = "sequences" if of[0].startswith("decode") else "columns"
        cells.append([*of, f"{_span(sizes, ',')} {unit}", _span(ratios, ".2f")])
    return text(table(("kernel", "GPU", "sizes", "time now / before"), cells, left=3))


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
        cells.append([fusion, str(len(measured)), _span(shares, ".2f")])
    layers = sorted({row["model"] for row in found["tune"]})
    tokens = " and ".join(sorted({f"{row['tokens']:,}" for row in found["tune"]}))
    said = f"{found['about']['device']}, {tokens} tokens, layers of {', '.join(layers)}; training and inference."
    return text([*table(("fusion", "positions", "time fused / unfused"), cells), "", said])


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
        return "There are no plots yet: no GPU has run the kernels.\n"
    lines = [where(found["about"]), "", "![Speed against others](figures/peers.svg)", ""]
    lines += ["![Fraction of what the device can do](figures/roofline.svg)", ""]
    return text([*lines, f"[Targets](dev/benchmarks.md#targets): met {' and '.join(scored())}."])


def scored() -> list[str]:
    """How many targets are met: of time on a GPU, and of what is counted or timed without one."""
    measured = [verdict for verdict in verdicts() if verdict.values]
    parts: list[str] = []
    for what, chosen in (("GPU time", False), ("saved bytes, planning and CPU overhead", True)):
        found = [
            v.status
            for v in measured
            if bool(re.search("bytes|planning|plan-cache|CPU overhead", v.target.what)) is chosen
        ]
        parts.append(f"{found.count('met')} of {len(found)} for {what}")
    return parts


def _group(rows: list[dict[str, Any]]) -> list[str]:
    called = "as_called" in rows[0]
    names = {"eager": "eager", "compile": "torch.compile", "liger": "Liger"}
    found = dict.fromkeys(name for row in rows for name in row["times"] if name != "seqfuse")
    peers = sorted(found, key=lambda name: [*names, name].index(name))
    cells = []
    for row in rows:
        times, by_host = row["times"], row.get("as_called", {})
        line = [row["name"] + "*" * ("commit" in row), f"{times['seqfuse']['median']:,.1f}"]
        line += [f"{row['fraction']['seqfuse']:.2f}"]
        for peer in peers:
            sides = [side for side in (times, by_host) if peer in side]
            ratios = [f"{side[peer]['median'] / side['seqfuse']['median']:.2f}" for side in sides]
            line.append(f"{ratios[0]} ({ratios[1]})" if len(ratios) > 1 else ratios[0] if ratios else "-")
        if called:
            kept = {name: found["kept"] for name, found in row["memory"].items() if found["kept"]}
            line += [f"{kept['seqfuse'] / kept['eager']:.2f}" if {"seqfuse", "eager"} <= kept.keys() else "-"]
        cells.append(line)
    of = (names.get(peer, peer.replace("seqfuse", "seqfuse,")) for peer in peers)
    head = ["", "GPU time, µs", "of roofline", *(f"{name} / seqfuse" for name in of)]
    return table([*head, "saved / eager"] if called else head, cells)


def _span(numbers: Sequence[float], form: str) -> str:
    """The least and the largest, or the one there is."""
    return " to ".join(dict.fromkeys(format(number, form) for number in (min(numbers), max(numbers))))


def _one_line(words: str) -> str:
    return " ".join(words.split()).partition(". ")[0].replace("|", "\\|")[:200]

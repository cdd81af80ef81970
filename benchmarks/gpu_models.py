"""Tables of what a GPU measured of converted models, of choices of memory and of low precision."""

from __future__ import annotations

from typing import Any

from tables import paragraphs, read, table, text, where

MIB = 2**20
_PEERS = {"eager": "eager PyTorch", "compile": "`torch.compile`", "liger": "Liger"}
_SIDES = {
    "eager": "eager PyTorch",
    "checkpointed": "eager PyTorch, each layer checkpointed",
    "seqfuse": '`memory="fast"`',
    "seqfuse balanced": '`"balanced"`',
    "seqfuse lean": '`"lean"`',
    "seqfuse 0.5": "`sf.Budget(part=0.5)`",
    "seqfuse 0.3": "`sf.Budget(part=0.3)`",
    "seqfuse least": '`"least"`',
}


def _rows(group: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    found = read("gpu")
    rows = [] if found is None else [r for r in found["rows"].values() if r["status"] == "ok" and group in r["group"]]
    return (found, rows) if found is not None and rows else None


def models() -> str | None:
    """Converted models beside eager ones and peers: time as they are called, of the device alone, and bytes."""
    known = _rows("converted")
    if known is None:
        return None
    found, rows = known
    cells: list[list[str]] = []
    for row in rows:
        for side, name in (("seqfuse", "`sf.convert(model)`"), ("seqfuse lean", '`memory="lean"`')):
            if side in row["times"]:
                times, called, memory = row["times"], row["as_called"], row["memory"]
                ratios = [f"{called[side]['median'] / called[p]['median']:.2f}" if p in called else "-" for p in _PEERS]
                bytes_of = [
                    f"{memory[side][what] / memory['eager'][what]:.2f}" if memory[side][what] else "-"
                    for what in ("kept", "peak")
                ]
                device = f"{times[side]['median'] / times['eager']['median']:.2f}"
                cells.append([_model(row), name, *ratios, device, *bytes_of])
    head = (
        "forward + backward of", "", *(f"time / {name}" for name in _PEERS.values()), "GPU time / eager",
        "saved / eager", "peak / eager",
    )  # fmt: skip
    note = """bfloat16, dropout 0, random data; medians of calls that take turns, with the time of the host but for the
        column of GPU time. Below 1.0 seqfuse is faster, or takes less memory."""
    return text([where(found["about"]), "", *table(head, cells, left=2), "", paragraphs(note).rstrip()])


def front() -> str | None:
    """Time against peak of layers, for each choice of memory: what torch counted, and what the plan says."""
    known = _rows("memory")
    if known is None:
        return None
    found, rows = known
    lines = [where(found["about"]), ""]
    for row in rows:
        eager, gradients = row["memory"]["eager"]["peak"], row["gradients"]
        cells: list[list[str]] = []
        for side, name in _SIDES.items():
            if side not in row["times"]:
                continue
            peak, time = row["memory"][side]["peak"], row["times"][side]["median"]
            said = row["said"].get(side)
            held = f"{said['peak'] / MIB:,.0f} MiB" if said else ""
            ratio = f"{time / row['times']['eager']['median']:.2f}"
            cells.append([name, f"{time / 1000:.1f} ms ({ratio})", f"{peak / MIB:,.0f} MiB ({peak / eager:.2f})", held])
        head = ("", "GPU time", "added by a step, at its peak", "the plan's peak")
        lines += [f"{_model(row)}; their parameters have {gradients / MIB:,.0f} MiB of gradients:", ""]
        lines += [*table(head, cells), ""]
    note = """bfloat16, forward and backward, as `torch.cuda.max_memory_allocated` counts; in brackets relative to eager
        PyTorch. The plan's peak leaves out the results and parameters' gradients, most of which come when little else
        is held any more."""
    return text([*lines, paragraphs(note).rstrip()])


def summary() -> str | None:
    """What README.md says of choices of memory on a GPU, in a sentence for each model."""
    known = _rows("memory")
    if known is None:
        return None
    lines: list[str] = []
    for row in known[1]:
        times = {side: t["median"] / row["times"]["eager"]["median"] for side, t in row["times"].items()}
        peaks = {side: m["peak"] / row["memory"]["eager"]["peak"] for side, m in row["memory"].items()}
        lean, half, again = (
            f"{times[side]:.2f} of eager's time at {peaks[side]:.2f} of its peak"
            for side in ("seqfuse lean", "seqfuse 0.5", "checkpointed")
        )
        lines.append(
            f'{_model(row)}, forward and backward: with `memory="lean"` {lean}, with `sf.Budget(part=0.5)` {half}, '
            f"and with each layer of eager PyTorch checkpointed {again}."
        )
    return text([paragraphs(*lines).rstrip()])


def _model(row: dict[str, Any]) -> str:
    shape = row["shape"]
    return f"{shape['layers']} layers of {shape['model']}, {shape['M']:,} tokens"


_RECIPES = {
    "bfloat16": "eager PyTorch, bfloat16",
    "bfloat16, compiled": "the same by `torch.compile`",
    "seqfuse": "Seqfuse, bfloat16",
    "current": "`Float8CurrentScaling`",
    "delayed": "`Float8DelayedScaling`",
    "row": "`Float8RowScaling`",
    "block": "`Float8BlockScaling`",
    "by hand": "current scaling in a module of torch calls, eager",
    "by hand, compiled": "that by `torch.compile`",
    "GEMMs alone": "the three 8-bit GEMMs alone",
}


def low_precision() -> str | None:
    """Milliseconds of a forward and backward pass by each recipe."""
    found = read("gpu_low_precision")
    if found is None:
        return None
    rows = {name: row["times"] for name, row in found["rows"].items() if not name.startswith("quantize")}
    cells = [
        [name, *(f"{times[side]['median'] / 1000:.2f}" if side in times else "" for times in rows.values())]
        for side, name in _RECIPES.items()
    ]
    return text(table(("", *rows), cells, left=1))
